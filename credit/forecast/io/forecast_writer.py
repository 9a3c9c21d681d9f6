"""Writer of forecasts to files (netCDF with CF metadata, or GRIB2) or to a zarr store, one lead time after another.

Shape suffixes: N lead times, C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from credit.errors import ConfigError
from credit.forecast.io.files.base import FileFormat
from credit.forecast.io.files.names import EXTENSIONS, PREFIX, infer_split
from credit.forecast.io.files.netcdf import NetcdfFormat
from credit.forecast.io.files.writer import FileForecastWriter
from credit.forecast.io.grib.grib_format import GribFormat
from credit.forecast.io.schema import ForecastSchema, OutputFields, OutputOptions, build_schema
from credit.forecast.io.zarr_store import STORE, ZarrStore


class ForecastWriter:
    """Writer of forecasts to files or a zarr store; readers do not find a forecast until it is complete.

    Args:
        folder: folder for the files or the zarr store ``forecasts.zarr``; it is created if needed.
        fields: description of the fields that are passed to `put`.
        lead_minutes: lead times that are passed to `put`, in minutes.
        initial_minutes: all initial times of the run, in minutes. A zarr store is created for all of them.
        options: selection of the fields, and their format on disk; None for the defaults.
        members: number of ensemble members; None for single forecasts.
        global_attributes: attributes of the files. An existing forecast with different attributes belongs to a
            different run, so it is treated as missing. The attributes must therefore identify the checkpoint.
        initial_state_checksum: function that takes an initial time in minutes and returns the checksum of the initial
            fields of the forecast, 16 hexadecimal digits. The checksum is written with the forecast. An existing
            forecast with a different checksum is treated as missing. None to use no checksums.

    Attributes:
        schema: content of each forecast.

    Raises:
        ConfigError: if `options` selects variables or levels that are not outputs, or variables that GRIB2 cannot
            represent; if the folder cannot be created; or if the folder contains forecasts that new forecasts cannot
            replace: a store of a different run, or files with a different format or split.
        CreditError: if the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        fields: OutputFields,
        lead_minutes: Sequence[int],
        initial_minutes: Sequence[int],
        options: OutputOptions | None = None,
        *,
        members: int | None = None,
        global_attributes: Mapping[str, str | int] | None = None,
        initial_state_checksum: Callable[[int], str] | None = None,
    ) -> None:
        folder = Path(folder)
        options = options or OutputOptions()
        self.schema = build_schema(fields, lead_minutes, options, members, global_attributes)
        grid_shape = fields.grid.shape if options.part is None else options.part.part.shape
        self._shape = (len(fields.channels.output), *grid_shape)
        # Before anything is written, check that existing and new forecasts can be read together.
        require_same_format(folder, options.format, options.split)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"inference.folder: {folder} cannot be created ({error.strerror}); choose a different folder, or a "
                "different save_loc"
            ) from error
        self._backend: FileForecastWriter | ZarrStore
        if options.format == "zarr":
            self._backend = ZarrStore(
                folder / STORE, self.schema, initial_minutes, options.layout, initial_state_checksum, options.part
            )
        else:
            assert options.part is None, "a single process writes each file"
            file_format = build_file_format(self.schema, options)
            self._backend = FileForecastWriter(folder, self.schema, file_format, options.split, initial_state_checksum)

    def is_complete(self, initial_minutes: int) -> bool:
        """Return True if the complete forecast of this run from an initial time (in minutes) is already on disk."""
        return self._backend.is_complete(int(initial_minutes))

    def put(self, initial_minutes: int, lead_index: int, fields_CHW: np.ndarray, member: int = 0) -> None:
        """Write one lead time of one member; a forecast is complete when all lead times of all members are written.

        The lead times and members may be written in any order.

        Args:
            initial_minutes: initial time of the forecast in minutes.
            lead_index: index of the lead time in `lead_minutes`.
            fields_CHW: float32 in physical units, NaN where missing; only the rows and columns of ``options.part``, if
                there is a part.
            member: number of the ensemble member; 0 for a single forecast.

        Raises:
            CreditError: if the file cannot be written, for example because the disk is full. The message names the
                file, and the incomplete forecast is removed.
        """
        assert fields_CHW.shape == self._shape, (fields_CHW.shape, self._shape)
        self._backend.put(int(initial_minutes), member, lead_index, fields_CHW)

    def mark_complete(self, initial_minutes: int) -> None:
        """Mark a forecast in a zarr store as complete, after several processes have written its members or parts.

        Do not call this method if a single process writes all fields of a forecast.

        Args:
            initial_minutes: initial time in minutes. Every process must have written its last field of this forecast.

        Raises:
            CreditError: if the store cannot be written, or if another run has meanwhile changed its initial times.
        """
        assert isinstance(self._backend, ZarrStore), "a single process writes each file"
        self._backend.mark_complete(int(initial_minutes))

    def write(self, initial_minutes: int, fields_NCHW: np.ndarray) -> Path:
        """Write all lead times of a single forecast, and return the path of its first file or of the store.

        Args:
            initial_minutes: initial time of the forecast in minutes.
            fields_NCHW: float32 in physical units, NaN where missing, with all lead times in order.

        Raises:
            CreditError: if the file cannot be written, see `put`.
        """
        for lead_index, fields_CHW in enumerate(fields_NCHW):
            self.put(initial_minutes, lead_index, fields_CHW)
        return self._backend.find_path(int(initial_minutes))

    def discard(self, initial_minutes: int) -> None:
        """Remove the incomplete forecast that starts at an initial time (in minutes)."""
        self._backend.discard(int(initial_minutes))

    def close(self) -> None:
        """Remove all incomplete forecasts; after this call, nothing more can be written."""
        self._backend.close()


def build_file_format(schema: ForecastSchema, options: OutputOptions) -> FileFormat:
    """Build the object that creates forecast files in the format of the options.

    Args:
        schema: content of each forecast.
        options: options of the output; the format is ``netcdf`` or ``grib2``.

    Raises:
        ConfigError: if GRIB2 cannot represent a variable, the grid or the calendar, or if a key of ``inference.grib``
            is wrong.
        DataError: if the format is ``grib2`` and ecCodes is not installed.
    """
    if options.format == "netcdf":
        return NetcdfFormat(schema)
    assert options.grib is not None, "GRIB2 files need their settings"
    return GribFormat(schema, options.grib)


def require_same_format(folder: Path, format: str, split: str | None) -> None:
    """Raise ConfigError if a folder contains forecasts of a different format or split from the new forecasts.

    Forecasts of different formats or splits cannot be read together.

    Args:
        folder: folder of the forecasts; it need not exist.
        format: ``netcdf``, ``grib2`` or ``zarr``.
        split: split of files, as in `credit.forecast.io.schema.OutputOptions`.

    Raises:
        ConfigError: if the folder contains these forecasts (the message names the config key and the existing file), or
            if the folder cannot be read.
    """
    advice = "choose a different inference.folder, or remove the existing forecasts"
    # Format -> its forecasts in the folder.
    existing: dict[str, list[Path]] = {}
    try:
        for file_format, extension in EXTENSIONS.items():
            existing[file_format] = sorted(folder.glob(f"{PREFIX}*{extension}"))
        existing["zarr"] = [folder / STORE] if (folder / STORE).exists() else []
    except OSError as error:
        raise ConfigError(
            f"inference.folder: {folder} cannot be read ({error.strerror}); choose a different folder, or a different "
            "save_loc"
        ) from error
    for other_format, paths in existing.items():
        if other_format != format and paths:
            raise ConfigError(
                f"inference.format: {format} does not match {paths[0]}, which a run with {other_format} has written; "
                f"{advice}"
            )
    if format == "zarr":
        return
    for path in existing[format]:
        file_split = infer_split(path)
        # Files whose names have an unknown suffix were not written by this package, and are ignored.
        if file_split not in (split, "other"):
            raise ConfigError(
                f"inference.split: {split or 'none'} does not match {path}, which a run with {file_split or 'none'} "
                f"has written; {advice}"
            )
