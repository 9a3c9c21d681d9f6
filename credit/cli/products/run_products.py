"""Products that ``credit rollout`` makes after the forecasts of a rank, and the land fraction for maps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from credit.config import Config
from credit.drawing.maps import LAND_STANDARD_NAMES, find_land_fraction
from credit.errors import CheckpointError, ConfigError, DataError
from credit.forecast.io.files.names import build_file_stem
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.schema import ForecastSchema
from credit.grid import LatLonGrid
from credit.products.description import describe_archive, describe_schema
from credit.products.make import PRODUCTS_FOLDER, ProductCount, make_products, plan_products
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
    import xarray as xr

    try:
        dataset = xr.open_dataset(path, decode_times=False)
    except (OSError, ValueError) as error:
        raise DataError(f"land: {path} cannot be read ({error}); give a netCDF file") from error
    with dataset:
        for field in dataset.data_vars.values():
            if field.attrs.get("standard_name") not in LAND_STANDARD_NAMES:
                continue
            field = field.squeeze()
            names = {str(field[dim].attrs.get("standard_name", dim)): dim for dim in field.dims}
            if set(names) != {"latitude", "longitude"}:
                raise DataError(f"land: {path}: the dimensions of {field.name} are not latitude and longitude")
            field = field.transpose(names["latitude"], names["longitude"])
            lat, lon = (field[names[name]].values for name in ("latitude", "longitude"))
            file_grid, order = LatLonGrid.from_coords(lat, lon, origin=str(path))
            mismatch = file_grid.describe_mismatch(grid)
            if mismatch:
                raise DataError(f"land: {path} {mismatch}; it must be on the grid of the forecasts")
            return order.apply(field.values)
    raise DataError(f"land: {path} has no field with the standard name {' or '.join(LAND_STANDARD_NAMES)}")
