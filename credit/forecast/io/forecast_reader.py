"""Functions that open forecasts in files and stores, written by this package or by other programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from credit.config.sections.verification import OtherForecastsConfig
from credit.data.formats.remote import is_remote
from credit.errors import DataError
from credit.forecast.io.archive.base import ForecastArchive
from credit.forecast.io.archive.netcdf_archive import NetcdfArchive
from credit.forecast.io.archive.zarr_archive import ZarrArchive
from credit.forecast.io.netcdf_names import PREFIX
from credit.forecast.io.zarr_store import STORE


def open_other_forecasts(name: str, conf: OtherForecastsConfig, level_units: str) -> ForecastArchive:
    """Open the forecasts of ``verification.other_forecasts.NAME``.

    Args:
        name: name of the entry, for messages.
        conf: config section of the entry.
        level_units: ``data.level_units``, the units to which the levels are converted.

    Raises:
        DataError: naming the key, if there are no forecasts or they cannot be read.
    """
    try:
        return open_forecasts(conf.path, conf.rename, level_units, conf.storage_options)
    except DataError as error:
        raise DataError(f"verification.other_forecasts.{name}: {error}") from error


def open_forecasts(
    path: str | os.PathLike,
    rename: Mapping[str, str] | None = None,
    level_units: str | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> ForecastArchive:
    """Open a folder of netCDF files, a folder with ``forecasts.zarr``, or a zarr store (zarr format 2 or 3).

    Args:
        path: folder, store, or URL of a store.
        rename: name of a variable in this package -> its name in the files; None to keep all names.
        level_units: units to which the levels are converted; None to keep those of the files.
        storage_options: options of the remote file system, such as credentials; unused for a local path.

    Raises:
        DataError: if there are no complete forecasts, or forecasts of different runs.
    """
    rename = rename or {}
    if is_remote(path):
        stores = [path]
        files = []
    else:
        stores, files = _find_forecasts(Path(path))
    if stores:
        archive = ZarrArchive(stores[0], rename, level_units, storage_options or {})
    else:
        archive = NetcdfArchive(Path(path), files, rename, level_units)
    if not len(archive.initial_minutes):
        raise DataError(f"{path}: no forecast is complete; run credit rollout again")
    return archive


def _find_forecasts(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the zarr stores and the netCDF files at a path; one of the two lists is empty.

    Raises:
        DataError: if there are both zarr stores and netCDF files, or neither.
    """
    stores = []
    for store in (path, path / STORE):
        if (store / "zarr.json").exists() or (store / ".zgroup").exists():
            stores.append(store)
    files = []
    if path.is_dir():
        files = sorted(path.glob(f"{PREFIX}*.nc"))
    if stores and files:
        raise DataError(f"{path}: holds netCDF files and a zarr store; remove one of them")
    if not stores and not files:
        raise DataError(f"{path}: there are no forecasts; run credit rollout first, or name a folder with forecasts")
    return stores, files
