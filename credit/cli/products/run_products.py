"""Products that ``credit rollout`` makes after the forecasts of a rank, and the land fraction for maps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from credit.config import Config
from credit.drawing.maps import LAND_STANDARD_NAMES, find_land_fraction
from credit.errors import CheckpointError, ConfigError
from credit.forecast.io.files.names import build_file_stem
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.schema import ForecastSchema
from credit.grid import LatLonGrid
from credit.products.description import describe_archive, describe_schema
from credit.products.make import PRODUCTS_FOLDER, ProductCount, make_products, plan_products
from credit.products.static_field import read_static_field
from credit.train.build.assets import ModelAssets
from credit.train.checkpoint import checkpoint

logger = logging.getLogger(__name__)


def check_products(config: Config, schema: ForecastSchema) -> None:
    """Check ``inference.products`` against the forecasts that will be written.

    Args:
        config: config of the run.
        schema: content of the forecasts.

    Raises:
        ConfigError, DataError: if a product cannot be made from the forecasts; several errors are reported together.
    """
    plan_products(config.inference.products, describe_schema(schema))


def make_run_products(
    config: Config, schema: ForecastSchema, initial_times: Sequence[int], assets: ModelAssets
) -> ProductCount:
    """Make the products of the complete forecasts of a run.

    Args:
        config: config of the run.
        schema: content of the forecasts.
        initial_times: initial times of this rank in minutes.
        assets: assets of the model; their static fields contain the land fraction for the coastline of maps.
    """
    folder = Path(config.save_loc) / config.inference.folder
    # Other ranks may still be writing the files of other initial times.
    stems = [build_file_stem(schema, minutes) for minutes in initial_times]
    archive = open_forecasts(folder, stems=stems)
    forecasts = describe_archive(archive)
    land_HW = find_land_fraction(assets.channels.static_stored, assets.attributes, assets.static_from_data_CHW)
    products = plan_products(config.inference.products, forecasts, land_HW=land_HW)
    return make_products(products, archive, forecasts, folder / PRODUCTS_FOLDER, initial_times)


def load_land_fraction(config: Config, grid: LatLonGrid) -> np.ndarray | None:
    """Return the land fraction (H, W) in the checkpoint of a run; None if no map needs it or the checkpoint has none.

    Args:
        config: config of the run.
        grid: grid of the forecasts.
    """
    if all(section.kind != "map" for section in config.inference.products):
        return None
    folder = Path(config.save_loc) / "checkpoints"
    try:
        path = checkpoint.resolve_checkpoint(folder, config.inference.checkpoint, "inference.checkpoint")
        meta = checkpoint.load_meta(path)
        assets = ModelAssets.from_stored(meta, checkpoint.load_tensors(path, "assets"))
    except (CheckpointError, ConfigError) as error:
        # An error is not needed here: without the checkpoint, only the coastline is missing.
        logger.warning("maps without a coastline: %s", error)
        return None
    if assets.grid.describe_mismatch(grid):
        logger.warning("maps without a coastline: the grids of the checkpoint and of the forecasts differ")
        return None
    return find_land_fraction(assets.channels.static_stored, assets.attributes, assets.static_from_data_CHW)


def read_land_file(path: Path, grid: LatLonGrid) -> np.ndarray:
    """Return the land fraction (H, W) in a netCDF file.

    Args:
        path: the file.
        grid: grid of the forecasts.

    Raises:
        DataError: if the file cannot be read, has no land fraction, or has a different grid.
    """
    land_HW, _ = read_static_field(path, LAND_STANDARD_NAMES, grid, "land")
    return land_HW
