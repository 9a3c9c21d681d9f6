"""Small forecasts on disk with random fields, and functions that compute products of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.load import build_section
from credit.forecast.io.archive.base import ForecastArchive
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.io.schema import OutputFields, OutputOptions
from credit.grid import LatLonGrid
from credit.products.base import FieldReader, Product
from credit.products.description import ForecastDescription, describe_archive
from credit.products.make import ProductCount, make_products, plan_products
from credit.products.section import ProductsFileConfig

GRID = LatLonGrid.equiangular(10, 20, poles=False)
CALENDAR = Calendar()
INITIAL = CALENDAR.parse("2001-04-01")
STEP = 360
LEADS = [STEP * number for number in range(1, 7)]
MEMBERS = 5
LEVELS = [1000.0, 850.0, 500.0]
CHANNELS = ChannelMap.build(
    {
        "prognostic": {"vars_3D": ["z", "u", "v"], "vars_2D": ["t2m", "msl", "u10", "v10", "u100", "v100"]},
        "diagnostic": {"vars_3D": [], "vars_2D": ["tp", "total"]},
    },
    LEVELS,
)
NAMES = [channel.name for channel in CHANNELS.output]
ATTRIBUTES = {
    "z": {"units": "m2 s-2", "standard_name": "geopotential"},
    "u": {"units": "m s-1", "standard_name": "eastward_wind"},
    "v": {"units": "m s-1", "standard_name": "northward_wind"},
    "t2m": {"units": "K", "standard_name": "air_temperature", "long_name": "temperature at 2 m"},
    "msl": {"units": "Pa", "standard_name": "air_pressure_at_mean_sea_level"},
    "u10": {"units": "m s-1", "standard_name": "eastward_wind"},
    "v10": {"units": "m s-1", "standard_name": "northward_wind"},
    "u100": {"units": "m s-1", "standard_name": "eastward_wind"},
    "v100": {"units": "m s-1", "standard_name": "northward_wind"},
    "tp": {"units": "mm", "standard_name": "lwe_thickness_of_precipitation_amount", "temporal": "accumulate"},
    "total": {"units": "mm", "standard_name": "lwe_thickness_of_precipitation_amount", "temporal": "accumulate"},
}


def random_ensemble(seed: int = 0, members: int = MEMBERS) -> np.ndarray:
    """Return fields (L, M, C, H, W) float32 of all lead times, members and channels."""
    rng = np.random.default_rng(seed)
    fields = rng.normal(0.0, 8.0, (len(LEADS), members, len(NAMES), *GRID.shape))
    for name, mean in {"t2m": 285.0, "msl": 1e5, "z1000": 1000.0, "z850": 14000.0, "z500": 54000.0}.items():
        fields[:, :, NAMES.index(name)] += mean
    rain = np.abs(fields[:, :, NAMES.index("tp")])
    fields[:, :, NAMES.index("tp")] = rain
    fields[:, :, NAMES.index("total")] = rain.cumsum(axis=0)
    return fields.astype(np.float32)


def write_forecasts(
    folder: Path, fields: np.ndarray, initial: int = INITIAL, members: int | None = MEMBERS, **options: Any
) -> ForecastArchive:
    """Write one forecast and return the reader of the folder.

    Args:
        folder: folder of the files.
        fields: (L, M, C, H, W); M is 1 for a single forecast.
        initial: initial time in minutes.
        members: number of members; None for a single forecast.
        options: options of `OutputOptions`.
    """
    description = OutputFields(CHANNELS, GRID, CALENDAR, ATTRIBUTES, STEP, windows={"tp": STEP, "total": 0})
    attributes = {"checkpoint_step": 7, "weights": "0123"}
    writer = ForecastWriter(
        folder, description, LEADS, [initial], OutputOptions(**options), members=members, global_attributes=attributes
    )
    for lead_index in range(len(LEADS)):
        for member in range(fields.shape[1]):
            writer.put(initial, lead_index, fields[lead_index, member], member)
    writer.close()
    return open_forecasts(folder)


def plan_entries(archive: ForecastArchive | ForecastDescription, *entries: Mapping[str, Any]) -> list[Product]:
    """Return the products of a list of config entries."""
    raw = {"forecasts": "forecasts", "products": [dict(entry) for entry in entries]}
    sections = build_section(ProductsFileConfig, raw, "products").products
    forecasts = archive if isinstance(archive, ForecastDescription) else describe_archive(archive)
    return plan_products(sections, forecasts, "products")


def compute_product(archive: ForecastArchive, name: str, *entries: Mapping[str, Any]) -> np.ndarray:
    """Return the fields of a product at all lead times, (L, N, H, W)."""
    products = {item.name: item for item in plan_entries(archive, *entries)}
    reader = FieldReader(archive, int(archive.initial_minutes[0]), products)
    return np.stack([reader.read(name, lead_index) for lead_index in range(len(archive.lead_minutes))])


def write_product_files(
    archive: ForecastArchive, folder: Path, *entries: Mapping[str, Any], overwrite: bool = False
) -> ProductCount:
    """Write the products of all forecasts of an archive into a folder."""
    products = plan_entries(archive, *entries)
    times = archive.initial_minutes.tolist()
    return make_products(products, archive, describe_archive(archive), folder, times, overwrite)
