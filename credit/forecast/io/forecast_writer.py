"""Writer of forecasts to files (netCDF with CF metadata, GRIB2) or to one zarr store, one lead time at a time.

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
    """Writer of forecasts, which become visible to readers only when they are complete.

    Args:
        folder: folder for the files or the zarr store ``forecasts.zarr``; created if needed.
        fields: description of the fields that are passed to `put`.
        lead_minutes: lead times that are passed to `put`, in minutes.
        initial_minutes: all initial times of the run, in minutes. A zarr store is created for all of them.
        options: selection of the fields, and their format on disk; None for the defaults.
        members: number of ensemble members; None for single forecasts.
        global_attributes: attributes of the files. An existing forecast with other attributes does not count as
            complete, because it belongs to another run. So the attributes must identify the checkpoint.
        initial_state_checksum: function that takes an initial time in minutes and returns the checksum of the initial
            fields of the forecast, 16 hexadecimal digits. The checksum is written with the forecast. An existing
            forecast with another checksum does not count as complete. None to use no checksums.

    Attributes:
        schema: content of each forecast.

    Raises:
        ConfigError: if `options` selects variables or levels that are not outputs, or variables that GRIB2 cannot
            represent; if the folder cannot be created; or if the folder has forecasts that new forecasts cannot
            replace: a store of another run, or files with another format or split.
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
        # Refuse a folder whose forecasts could not be read together with these, before anything is written.
        require_same_format(folder, options.format, options.split)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"inference.folder: {folder} cannot be created ({error.strerror}); choose another folder, or another "
                "save_loc"
            ) from error
        self._backend: FileForecastWriter | ZarrStore
        if options.format == "zarr":
            self._backend = ZarrStore(
                folder / STORE, self.schema, initial_minutes, options.layout, initial_state_checksum, options.part
            )
        else:
            assert options.part is None, "one process writes the whole of a file"
            file_format = build_file_format(self.schema, options)
            self._backend = FileForecastWriter(folder, self.schema, file_format, options.split, initial_state_checksum)

    def is_complete(self, initial_minutes: int) -> bool:
        """Return True if the complete forecast of the same run from an initial time (in minutes) is on disk."""
        return self._backend.is_complete(int(initial_minutes))

    def put(self, initial_minutes: int, lead_index: int, fields_CHW: np.ndarray, member: int = 0) -> None:
        """Write one lead time of one member, in any order; a forecast is complete when all fields are written.

        Args:
            initial_minutes: initial time of the forecast in minutes.
            lead_index: index of the lead time in `lead_minutes`.
            fields_CHW: float32 in physical units, NaN where missing; only the rows and columns of ``options.part``, if
                there is a part.
            member: number of the ensemble member; 0 for a single forecast.

        Raises:
            CreditError: if the file cannot be written, for example because the disk is full; the message names it, and
                the incomplete forecast is removed.
        """
        assert fields_CHW.shape == self._shape, (fields_CHW.shape, self._shape)
        self._backend.put(int(initial_minutes), member, lead_index, fields_CHW)

    def mark_complete(self, initial_minutes: int) -> None:
        """Mark a forecast in a zarr store as complete, after several processes have written its members or parts.

        This is not needed if one process writes all fields of a forecast.

        Args:
            initial_minutes: initial time in minutes. Every process must have written its last field of this forecast.

        Raises:
            CreditError: if the store cannot be written, or if another run has meanwhile changed its initial times.
        """
        assert isinstance(self._backend, ZarrStore), "one process writes the whole of a file"
        self._backend.mark_complete(int(initial_minutes))

    def write(self, initial_minutes: int, fields_NCHW: np.ndarray) -> Path:
        """Write all lead times of a single forecast, and return the path of its first file or of the store.

        Args:
            initial_minutes: initial time of the forecast in minutes.
            fields_NCHW: float32 in physical units, NaN where missing, with all lead times in order.

        Raises:
            CreditError: as in `put`.
        """
        for lead_index, fields_CHW in enumerate(fields_NCHW):
            self.put(initial_minutes, lead_index, fields_CHW)
        return self._backend.find_path(int(initial_minutes))

    def discard(self, initial_minutes: int) -> None:
        """Remove the incomplete forecast from an initial time, in minutes."""
        self._backend.discard(int(initial_minutes))

    def close(self) -> None:
        """Remove incomplete forecasts; nothing can be written afterwards."""
        self._backend.close()


def build_file_format(schema: ForecastSchema, options: OutputOptions) -> FileFormat:
    """Build the format of forecast files.

    Args:
        schema: content of each forecast.
        options: options of the output; the format is ``netcdf`` or ``grib2``.

    Raises:
        ConfigError: if GRIB2 cannot represent a variable, the grid or the calendar, or if a key of ``inference.grib``
            is wrong.
        DataError: if ecCodes is needed and not installed.
    """
    if options.format == "netcdf":
        return NetcdfFormat(schema)
    assert options.grib is not None, "GRIB2 files need their settings"
    return GribFormat(schema, options.grib)


def require_same_format(folder: Path, format: str, split: str | None) -> None:
    """Refuse a folder with forecasts of another format or split, which cannot be read together with new forecasts.

    Args:
        folder: folder of the forecasts; it need not exist.
        format: ``netcdf``, ``grib2`` or ``zarr``.
        split: split of files, as in `credit.forecast.io.schema.OutputOptions`.

    Raises:
        ConfigError: if there are such forecasts (the message names the config key and the existing file), or if the
            folder cannot be read.
    """
    way_out = "choose another inference.folder, or remove the existing forecasts"
    # Format -> its forecasts in the folder.
    existing: dict[str, list[Path]] = {}
    try:
        for file_format, extension in EXTENSIONS.items():
            existing[file_format] = sorted(folder.glob(f"{PREFIX}*{extension}"))
        existing["zarr"] = [folder / STORE] if (folder / STORE).exists() else []
    except OSError as error:
        raise ConfigError(
            f"inference.folder: {folder} cannot be read ({error.strerror}); choose another folder, or another save_loc"
        ) from error
    for other_format, paths in existing.items():
        if other_format != format and paths:
            raise ConfigError(
                f"inference.format: {format} does not match {paths[0]}, which a run with {other_format} has written; "
                f"{way_out}"
            )
    if format == "zarr":
        return
    for path in existing[format]:
        file_split = infer_split(path)
        # Files with other names were not written by this package, and are ignored.
        if file_split not in (split, "other"):
            raise ConfigError(
                f"inference.split: {split or 'none'} does not match {path}, which a run with {file_split or 'none'} "
                f"has written; {way_out}"
            )
