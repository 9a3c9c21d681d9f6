"""Functions that open forecasts in files and stores, written by this package or by other programs."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from credit.config.sections.verification import OtherForecastsConfig
from credit.data.formats.zarr.remote import is_remote
from credit.errors import DataError
from credit.forecast.io.archive.base import ForecastArchive
from credit.forecast.io.archive.file_archive import FileArchive
from credit.forecast.io.archive.zarr_archive import ZarrArchive
from credit.forecast.io.files.names import EXTENSIONS, PREFIX
from credit.forecast.io.zarr_store import STORE


def open_other_forecasts(name: str, conf: OtherForecastsConfig, level_units: str) -> ForecastArchive:
    """Open the forecasts of ``verification.other_forecasts.NAME``.

    Args:
        name: name of the entry, for messages.
        conf: config section of the entry.
        level_units: ``data.level_units``, the units to which the levels are converted.

    Raises:
        DataError: if there are no forecasts or they cannot be read; the message names the key.
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
    stems: Collection[str] | None = None,
) -> ForecastArchive:
    """Open a folder of netCDF or GRIB2 files, a folder with ``forecasts.zarr``, or a zarr store (zarr format 2 or 3).

    Args:
        path: folder, store, or URL of a store.
        rename: name of a variable in this package -> its name in the files; None to keep all names.
        level_units: units to which the levels are converted; None to keep the units of the files.
        storage_options: options of the remote file system, such as credentials; unused for a local path.
        stems: beginnings of the names of the files to read, up to a dot or an underscore, such as
            ``forecast_2001-04-01T00``; None to read all files. Set `stems` if other processes are still writing files
            to the folder.

    Raises:
        DataError: if there are no complete forecasts, or if forecasts belong to different runs.
    """
    rename = rename or {}
    if is_remote(path):
        stores = [path]
        files = []
    else:
        stores, files = _find_forecasts(Path(path))
    if stems is not None:
        files = [path for path in files if any(re.match(rf"{re.escape(stem)}[._]", path.name) for stem in stems)]
    if stores:
        archive = ZarrArchive(stores[0], rename, level_units, storage_options or {})
    elif not files:
        raise DataError(f"{path}: contains no files of {', '.join(stems or ())}; run credit rollout again")
    else:
        archive = FileArchive(Path(path), files, rename, level_units)
    if not len(archive.initial_minutes):
        raise DataError(f"{path}: no forecast is complete; run credit rollout again")
    return archive


def _find_forecasts(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the zarr stores and the forecast files at a path. One list is empty, and all files have the same format.

    Raises:
        DataError: if there are no forecasts, or forecasts in several formats.
    """
    stores = []
    for store in (path, path / STORE):
        if (store / "zarr.json").exists() or (store / ".zgroup").exists():
            stores.append(store)
    files = {}
    if path.is_dir():
        for file_format, extension in EXTENSIONS.items():
            files[file_format] = sorted(path.glob(f"{PREFIX}*{extension}"))
    formats = [file_format for file_format, paths in files.items() if paths]
    if len(stores) + len(formats) > 1:
        names = [f"{file_format} files" for file_format in formats]
        if stores:
            names.append("a zarr store")
        raise DataError(f"{path}: contains {' and '.join(names)}; remove the forecasts in one of these formats")
    if not stores and not formats:
        problem = "contains no forecasts" if path.exists() else "does not exist"
        raise DataError(f"{path}: {problem}; run credit rollout first, or name a folder with forecasts")
    return stores, files[formats[0]] if formats else []
