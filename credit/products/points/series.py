"""Time series of fields at stations: the common part of the products at stations.

Shape suffixes: L lead times, N members or quantiles (1 for a single field), S stations.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from credit.data.formats.cf import is_vector_component
from credit.forecast.io.schema import MEMBER
from credit.products.base import Product, ProductCase, ProductContext, ProductOutput
from credit.products.description import FieldInfo
from credit.products.points.interpolation import PointInterpolator
from credit.products.points.stations import load_stations
from credit.products.section import PointsSection


class StationProduct(Product):
    """Base class of products at stations: it reads the stations and finds the fields.

    Args:
        section: config section of the product.
        context: the forecasts and the earlier products.

    Attributes:
        stations: the stations.
        infos: descriptions of the fields.
        interpolator: interpolation from the grid of the forecasts to the stations.
    """

    def __init__(self, section: PointsSection, context: ProductContext) -> None:
        super().__init__(section, context)
        self.inputs = tuple(section.of)
        self.infos = [context.find_field(name) for name in section.of]
        self.stations = load_stations(Path(section.stations), f"{context.key}.stations")
        lat_S = np.array([station.latitude for station in self.stations])
        lon_S = np.array([station.longitude for station in self.stations])
        self.interpolator = PointInterpolator(context.forecasts.grid, lat_S, lon_S, section.method)

    def settings(self) -> dict[str, Any]:
        """Return the section, and a checksum of the stations, because the file may change."""
        checksum = hashlib.sha256(repr(self.stations).encode()).hexdigest()[:16]
        return {**super().settings(), "station_checksum": checksum}


class StationSeries(ProductOutput):
    """Base class that collects the values at the stations; a subclass writes them in `finish`.

    Args:
        product: the product.
        case: the forecast.

    Attributes:
        values: name of a field -> list with (N, S) for each lead time.
    """

    def __init__(self, product: StationProduct, case: ProductCase) -> None:
        self.product = product
        self.case = case
        self.values: dict[str, list[np.ndarray]] = {name: [] for name in product.inputs}

    def add(self, lead_index: int) -> None:
        """Interpolate the fields to the stations."""
        for info in self.product.infos:
            fields_NHW = self.case.fields.read(info.name, lead_index)
            is_vector = is_wind_component(info)
            self.values[info.name].append(self.product.interpolator.apply(fields_NHW, is_vector))

    def stack_series(self) -> dict[str, np.ndarray]:
        """Return name of a field -> its values at all lead times, (L, N, S)."""
        return {name: np.stack(values) for name, values in self.values.items()}


def is_wind_component(info: FieldInfo) -> bool:
    """Return True if a field is a component of a vector, which turns with longitude near the poles.

    The mean over members of a component is a component too. Spread, extremes and quantiles are not, although they
    keep the standard name.
    """
    is_linear = info.dim in (None, MEMBER) and info.statistic in ("", "mean")
    return is_linear and is_vector_component("auto", info.standard_name)
