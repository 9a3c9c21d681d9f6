"""Writer of forecasts: CF netCDF files or one zarr store, lead time by lead time.

Shapes: N lead times, C output channels, H rows, W columns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from credit.errors import ConfigError
from credit.forecast.io.netcdf_files import NetcdfForecastWriter
from credit.forecast.io.netcdf_names import PREFIX, split_of
from credit.forecast.io.schema import OutputFields, OutputOptions, build_schema
from credit.forecast.io.zarr_store import STORE, ZarrStore


class ForecastWriter:
    """Writes forecasts; a forecast on disk is either complete or absent.

    Args:
        folder: folder of the forecasts, created if needed. It gets netCDF files, or the zarr store ``forecasts.zarr``.
        fields: description of the fields that `put` gets.
        lead_minutes: lead times of the fields that `put` gets, in minutes.
        initial_minutes: all initial times of the run; a zarr store has its full size from the start.
        options: selection of the fields, and their form on disk.
        members: number of ensemble members; None for single forecasts.
        global_attributes: attributes of the files. A forecast with other attributes is of another run and not taken as
            complete, so the attributes must identify the checkpoint.
        started_from: initial time -> checksum of the fields that the forecast starts from. It is written with the
            forecast; a forecast with another checksum is not taken as complete.

    Raises:
        ConfigError: if `options` selects variables or levels that are not outputs, if the folder cannot be created, or
            if it holds forecasts that these cannot replace: a store of another run, or files of another format or
            split.
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
        started_from: Callable[[int], str] | None = None,
    ) -> None:
        folder = Path(folder)
        options = options or OutputOptions()
        self.layout = build_schema(fields, lead_minutes, options, members, global_attributes)
        self._shape = (len(fields.channels.output), *fields.grid.shape)
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
            self._backend = NetcdfForecastWriter(folder, self.layout, options.split, started_from)
        else:
            self._backend = ZarrStore(folder / STORE, self.layout, initial_minutes, options.layout, started_from)

    def is_complete(self, initial_minutes: int) -> bool:
        """Return whether the same run's forecast from this initial time is already on disk."""
        return self._backend.is_complete(int(initial_minutes))

    def put(self, initial_minutes: int, number: int, fields: np.ndarray, member: int = 0) -> None:
        """Write one lead time of one member, in any order; the last of them completes the forecast.

        Args:
            initial_minutes: initial time of the forecast.
            number: index of the lead time in `lead_minutes`.
            fields: (C, H, W) float32 in physical units, NaN where missing.
            member: number of the ensemble member.

        Raises:
            CreditError: naming the file, if it cannot be written (a full disk); the incomplete forecast is removed.
        """
        assert fields.shape == self._shape, (fields.shape, self._shape)
        self._backend.put(int(initial_minutes), member, number, fields)

    def write(self, initial_minutes: int, fields: np.ndarray) -> Path:
        """Write all lead times of a single forecast, and return its first file or the store.

        Args:
            initial_minutes: initial time of the forecast.
            fields: (N, C, H, W), as in `put`.
        """
        for number, fields_CHW in enumerate(fields):
            self.put(initial_minutes, number, fields_CHW)
        return self._backend.path_of(int(initial_minutes))

    def discard(self, initial_minutes: int) -> None:
        """Remove an incomplete forecast."""
        self._backend.discard(int(initial_minutes))

    def close(self) -> None:
        """Remove incomplete forecasts; nothing can be written afterwards."""
        self._backend.close()


def require_same_format(folder: Path, format: str, split: str | None) -> None:
    """Refuse a folder with forecasts of another format or split, which cannot be read together with new ones.

    Args:
        folder: folder of the forecasts; need not exist.
        format: ``netcdf`` or ``zarr``.
        split: split of netCDF files, as in `credit.forecast.io.schema.OutputOptions`.

    Raises:
        ConfigError: naming the key and the existing file, or for a folder that cannot be read.
    """
    way_out = "choose another inference.folder, or remove what is there"
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
        file_split = split_of(path)
        # Files that this package did not name are not of a run of its own.
        if file_split not in (split, "other"):
            raise ConfigError(
                f"inference.split: {split or 'none'} is asked for, and {path} is there of a run with "
                f"{file_split or 'none'}; {way_out}"
            )
