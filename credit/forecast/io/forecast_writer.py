"""ForecastWriter: forecasts on disk as CF netCDF files or as one zarr store, lead time by lead time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.errors import ConfigError
from credit.forecast.io.netcdf_files import PREFIX, NetcdfFiles, split_of
from credit.forecast.io.schema import build_layout
from credit.forecast.io.zarr_store import STORE, ZarrStore
from credit.grid import LatLonGrid


class ForecastWriter:
    """Writes forecasts, each of them whole or not at all.

    Args:
        folder: where the forecasts go; made if needed. netCDF: one file an initial time; zarr: ``forecasts.zarr``.
        channels: the model's channels; the outputs are written.
        grid: their grid.
        calendar: their calendar.
        attributes: variable -> ``units``, ``standard_name``, ``long_name``, ``temporal`` (instant, mean, accumulate).
        step_minutes: the model's step, over which means and accumulations are taken that `windows` does not name.
        lead_minutes: lead times of the fields that `write` gets.
        initial_minutes: every initial time of the run; a zarr store has its full size from the start.
        level_units: hPa, Pa or model_level.
        format: ``netcdf`` or ``zarr``.
        layout: ``cf`` or, for zarr, ``weatherbench2`` (dimensions ``time`` and ``prediction_timedelta``).
        variables: write only these; default: every output.
        levels: of variables with levels, write only these, in `level_units`; default: all.
        members: number of an ensemble's members; None for a single forecast.
        split: netCDF files by ``day`` or ``month`` of the valid time, by ``lead``, or of ensembles by ``member``;
            default: one an initial time.
        keep_bits: bits of the mantissa (1 to 23) that values are rounded to; default: all.
        compression: 0 (none) to 9, lossless: zlib in netCDF, zstd in zarr.
        masks: variable -> (H, W) bool, True where it is always missing; written as missing.
        global_attributes: the files' attributes. They tell runs apart: a forecast with others is not taken as done. So
            name the checkpoint in them.
        windows: variable -> minutes of its mean or sum where they are not `step_minutes`, 0 since the initial time.
        started_from: initial time -> checksum of the fields that the forecast starts from, written with it; a forecast
            with another is not taken as done.

    Raises:
        ConfigError: if `variables` names something that is no output, or the folder holds other forecasts that these
            cannot replace (a store of others, files of another `format` or `split`), or cannot be made.
        CreditError: if the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        channels: ChannelMap,
        grid: LatLonGrid,
        calendar: Calendar,
        attributes: Mapping[str, Mapping[str, str]],
        step_minutes: int,
        *,
        lead_minutes: Sequence[int],
        initial_minutes: Sequence[int],
        level_units: str = "hPa",
        format: str = "netcdf",
        layout: str = "cf",
        variables: Sequence[str] | None = None,
        levels: Sequence[float] | None = None,
        members: int | None = None,
        split: str | None = None,
        keep_bits: int | None = None,
        compression: int = 0,
        masks: Mapping[str, np.ndarray] | None = None,
        global_attributes: Mapping[str, str | int] | None = None,
        windows: Mapping[str, int] | None = None,
        started_from: Callable[[int], str] | None = None,
    ) -> None:
        self.layout = build_layout(
            channels, grid, calendar, attributes, step_minutes, lead_minutes, level_units, variables, levels,
            members, keep_bits, compression, masks, global_attributes, windows,
        )  # fmt: skip
        self._shape = (len(channels.output), *grid.shape)
        require_same_format(Path(folder), format, split)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"inference.folder: {folder} cannot be made ({error.strerror}); choose another, or another save_loc"
            ) from error
        if format == "netcdf":
            self._backend: NetcdfFiles | ZarrStore = NetcdfFiles(Path(folder), self.layout, split, started_from)
        else:
            self._backend = ZarrStore(Path(folder) / STORE, self.layout, initial_minutes, layout, started_from)

    def is_complete(self, initial_minutes: int) -> bool:
        """Return whether the same run's forecast from this initial time is already on disk."""
        return self._backend.is_complete(int(initial_minutes))

    def put(self, initial_minutes: int, number: int, fields: np.ndarray, member: int = 0) -> None:
        """Write one lead time; a forecast is done with the last of all its lead times and members, in any order.

        Args:
            initial_minutes: its initial time.
            number: which of `lead_minutes`.
            fields: (C_out, H, W) float32 in physical units, NaN where missing.
            member: of the ensemble.

        Raises:
            CreditError: naming the file, if it cannot be written (a full disk); nothing half-written is left.
        """
        assert fields.shape == self._shape, (fields.shape, self._shape)
        self._backend.put(int(initial_minutes), member, number, fields)

    def write(self, initial_minutes: int, fields: np.ndarray) -> Path:
        """Write a whole single forecast, (L, C_out, H, W) as in `put`, and return its first file or the store."""
        for number, field in enumerate(fields):
            self.put(initial_minutes, number, field)
        return self._backend.place(int(initial_minutes))

    def discard(self, initial_minutes: int) -> None:
        """Remove a forecast that is half written."""
        self._backend.discard(int(initial_minutes))

    def close(self) -> None:
        """Finish; what is half written is removed, and nothing can be written afterwards."""
        self._backend.close()


def require_same_format(folder: Path, format: str, split: str | None) -> None:
    """Refuse a folder whose forecasts are in another format or cut otherwise, which nobody could read beside these.

    Args:
        folder: where forecasts are to be written; need not be there.
        format: ``netcdf`` or ``zarr``.
        split: of netCDF files, as in `ForecastWriter`.

    Raises:
        ConfigError: naming the key and the file that is there, or for a folder that cannot be looked into.
    """
    way_out = "choose another inference.folder, or remove what is there"
    try:
        store, files = folder / STORE, sorted(folder.glob(f"{PREFIX}*.nc"))
        found = files[:1] if format == "zarr" else [store] if store.exists() else []
    except OSError as error:
        raise ConfigError(
            f"inference.folder: {folder} cannot be looked into ({error.strerror}); choose another, or another save_loc"
        ) from error
    if found:
        raise ConfigError(
            f"inference.format: {format} is asked for, and {found[0]} is there of a run with "
            f"{'netcdf' if format == 'zarr' else 'zarr'}; {way_out}"
        )
    for path in files:
        theirs = split_of(path)
        if theirs not in (split, "other"):
            raise ConfigError(
                f"inference.split: {split or 'none'} is asked for, and {path} is there of a run with "
                f"{theirs or 'none'}; {way_out}"
            )
