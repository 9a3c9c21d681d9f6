"""Writer of forecasts to netCDF files with CF metadata or to one zarr store, one lead time at a time.

Shape suffixes: N lead times, C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from credit.errors import ConfigError
from credit.forecast.io.netcdf_files import NetcdfForecastWriter
from credit.forecast.io.netcdf_names import PREFIX, infer_split
from credit.forecast.io.schema import OutputFields, OutputOptions, build_schema
from credit.forecast.io.zarr_store import STORE, ZarrStore


class ForecastWriter:
    """Writer of forecasts. Readers see a forecast only when it is complete.

    Args:
        folder: folder of the forecasts, created if needed. It gets netCDF files, or the zarr store ``forecasts.zarr``.
        fields: description of the fields that are passed to `put`.
        lead_minutes: lead times that are passed to `put`, in minutes.
        initial_minutes: all initial times of the run, in minutes. A zarr store is created for all of them.
        options: selection of the fields, and their format on disk; None for the defaults.
        members: number of ensemble members; None for single forecasts.
        global_attributes: attributes of the files. An existing forecast with other attributes does not count as
            complete, because it is of another run. The attributes must therefore identify the checkpoint.
        initial_state_checksum: function that takes an initial time in minutes and returns the checksum of the fields
            that the forecast starts from, 16 hexadecimal digits. The checksum is written with the forecast. An existing
            forecast with another checksum does not count as complete. None to use no checksums.

    Attributes:
        schema: content of each forecast.

    Raises:
        ConfigError: if `options` selects variables or levels that are not outputs, if the folder cannot be created, or
            if it holds forecasts that the new ones cannot replace: a store of another run, or files of another format
            or split.
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
        self._backend: NetcdfForecastWriter | ZarrStore
        if options.format == "netcdf":
            assert options.part is None, "one process writes the whole of a netCDF file"
            self._backend = NetcdfForecastWriter(folder, self.schema, options.split, initial_state_checksum)
        else:
            self._backend = ZarrStore(
                folder / STORE, self.schema, initial_minutes, options.layout, initial_state_checksum, options.part
            )

    def is_complete(self, initial_minutes: int) -> bool:
        """Return True if the complete forecast of the same run from an initial time (in minutes) is on disk."""
        return self._backend.is_complete(int(initial_minutes))

    def put(self, initial_minutes: int, lead_index: int, fields_CHW: np.ndarray, member: int = 0) -> None:
        """Write one lead time of one member, in any order; the forecast is complete when all of them are written.

        Args:
            initial_minutes: initial time of the forecast in minutes.
            lead_index: index of the lead time in `lead_minutes`.
            fields_CHW: float32 in physical units, NaN where missing; if `options` has a part, its rows and columns.
            member: number of the ensemble member, 0 for a single forecast.

        Raises:
            CreditError: naming the file, if it cannot be written, for example because the disk is full. The incomplete
                forecast is removed.
        """
        assert fields_CHW.shape == self._shape, (fields_CHW.shape, self._shape)
        self._backend.put(int(initial_minutes), member, lead_index, fields_CHW)

    def mark_complete(self, initial_minutes: int) -> None:
        """Mark a forecast in a zarr store as complete, of which several processes have written members or parts.

        A process that writes all fields of a forecast need not call it.

        Args:
            initial_minutes: initial time in minutes. Every process must have written its last field of this forecast.

        Raises:
            CreditError: if the store cannot be written, or another run has changed its initial times meanwhile.
        """
        assert isinstance(self._backend, ZarrStore), "one process writes the whole of a netCDF file"
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


def require_same_format(folder: Path, format: str, split: str | None) -> None:
    """Refuse a folder with forecasts of another format or split, which cannot be read together with new forecasts.

    Args:
        folder: folder of the forecasts; need not exist.
        format: ``netcdf`` or ``zarr``.
        split: split of netCDF files, as in `credit.forecast.io.schema.OutputOptions`.

    Raises:
        ConfigError: naming the config key and the existing file, or if the folder cannot be read.
    """
    way_out = "choose another inference.folder, or remove the existing forecasts"
    store = folder / STORE
    try:
        files = sorted(folder.glob(f"{PREFIX}*.nc"))
        has_store = store.exists()
    except OSError as error:
        raise ConfigError(
            f"inference.folder: {folder} cannot be read ({error.strerror}); choose another folder, or another save_loc"
        ) from error
    if format == "zarr" and files:
        raise ConfigError(
            f"inference.format: zarr is asked for, and {files[0]} is there of a run with netcdf; {way_out}"
        )
    if format == "netcdf" and has_store:
        raise ConfigError(f"inference.format: netcdf is asked for, and {store} is there of a run with zarr; {way_out}")
    for path in files:
        file_split = infer_split(path)
        # Files with other names were not written by this package, and are ignored.
        if file_split not in (split, "other"):
            raise ConfigError(
                f"inference.split: {split or 'none'} is asked for, and {path} is there of a run with "
                f"{file_split or 'none'}; {way_out}"
            )
