"""Base classes of products at stations: reading of the stations and collection of the time series.

Shape suffixes: L lead times, N members or quantiles (1 for a single field), S stations.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from credit.data.formats.cf import is_vector_component
from credit.forecast.io.schema import MEMBER
from credit.products.base import Product, ProductCase, ProductContext, ProductOutput
from credit.products.description import FieldInfo
from credit.products.points.height_correction import compute_corrections, read_surface_height
from credit.products.points.interpolation import PointInterpolator
from credit.products.points.stations import load_stations
from credit.products.section import PointsSection


class StationProduct(Product):
    """Base class of products at stations. It reads the list of stations and finds the fields.

    Args:
        section: config section of the product.
        context: description of the forecasts and the products that are listed earlier.

    Attributes:
        stations: stations of the CSV file.
        infos: descriptions of the fields; the titles of corrected fields say so.
        interpolator: interpolator from the grid of the forecasts to the stations.
        corrections: name of a field -> (S,) corrections for the height of the stations, which are added to its values.
    """

    def __init__(self, section: PointsSection, context: ProductContext) -> None:
        super().__init__(section, context)
        self.inputs = tuple(section.of)
        self.infos = [context.find_field(name) for name in section.of]
        correction = section.height_correction
        self.stations = load_stations(Path(section.stations), f"{context.key}.stations", correction is not None)
        lat_S = np.array([station.latitude for station in self.stations])
        lon_S = np.array([station.longitude for station in self.stations])
        self.interpolator = PointInterpolator(context.forecasts.grid, lat_S, lon_S, section.method)
        self.corrections: dict[str, np.ndarray] = {}
        if correction is not None:
            key = f"{context.key}.height_correction"
            height_HW = read_surface_height(Path(correction.orography), context.forecasts.grid, f"{key}.orography")
            self.corrections = compute_corrections(
                correction, self.infos, self.stations, self.interpolator, height_HW, key
            )
            self.infos = [self._mark_if_corrected(info) for info in self.infos]

    def _mark_if_corrected(self, info: FieldInfo) -> FieldInfo:
        """Return the description of a field; if the field is corrected, its title says so."""
        if info.name not in self.corrections:
            return info
        return replace(info, long_name=f"{info.title}, corrected to the height of the station")

    def settings(self) -> dict[str, Any]:
        """Return the settings of the section and a checksum of the stations and corrections, whose files may change."""
        corrections = {name: correction_S.tolist() for name, correction_S in self.corrections.items()}
        checksum = hashlib.sha256(repr((self.stations, corrections)).encode()).hexdigest()[:16]
        return {**super().settings(), "station_checksum": checksum}


class StationSeries(ProductOutput):
    """Base class of writers that collect the values at the stations; a subclass writes the values in `finish`.

    Args:
        product: the product.
        case: the forecast.

    Attributes:
        values: name of a field -> list with an array (N, S) for each lead time.
    """

    def __init__(self, product: StationProduct, case: ProductCase) -> None:
        self.product = product
        self.case = case
        self.values: dict[str, list[np.ndarray]] = {name: [] for name in product.inputs}

    def add(self, lead_index: int) -> None:
        """Interpolate the fields at a lead time to the stations, and store the values."""
        for info in self.product.infos:
            fields_NHW = self.case.fields.read(info.name, lead_index)
            is_vector = is_wind_component(info)
            values_NS = self.product.interpolator.apply(fields_NHW, is_vector)
            if info.name in self.product.corrections:
                values_NS = values_NS + self.product.corrections[info.name]
            self.values[info.name].append(values_NS)

    def stack_series(self) -> dict[str, np.ndarray]:
        """Return a mapping from the name of each field to its values at all lead times, (L, N, S)."""
        return {name: np.stack(values) for name, values in self.values.items()}


def is_wind_component(info: FieldInfo) -> bool:
    """Return True if a field is a vector component, whose direction changes with longitude near the poles.

    The mean of a component over the members is also a component. Spread, extremes and quantiles are not components,
    although they have the same standard name.
    """
    is_linear = info.dim in (None, MEMBER) and info.statistic in ("", "mean")
    return is_linear and is_vector_component("auto", info.standard_name)
