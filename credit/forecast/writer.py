"""ForecastWriter: forecasts on disk as CF netCDF files or as one zarr store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from credit.channels import ChannelMap
from credit.forecast.layout import build_layout
from credit.forecast.netcdf_files import NetcdfFiles
from credit.forecast.zarr_store import ZarrStore
from credit.grid import LatLonGrid
from credit.times import Clock


class ForecastWriter:
    """Writes forecasts, each of them whole or not at all.

    Args:
        folder: where the forecasts go; made if needed. netCDF: one file an initial time; zarr: ``forecasts.zarr``.
        channels: the model's channels; the outputs are written.
        grid: their grid.
        clock: their calendar.
        attributes: variable -> ``units``, ``standard_name``, ``long_name``, ``temporal`` (instant, mean, accumulate).
        step_minutes: the model's step, over which means and accumulations are taken.
        lead_minutes: lead times of the fields that `write` gets.
        initial_minutes: every initial time of the run; a zarr store has its full size from the start.
        level_units: hPa, Pa or model_level.
        format: ``netcdf`` or ``zarr``.
        layout: ``cf`` or, for zarr, ``weatherbench2`` (dimensions ``time`` and ``prediction_timedelta``).
        variables: write only these; default: every output.
        masks: variable -> (H, W) bool, True where it is always missing; written as missing.
        global_attributes: the files' attributes. They tell runs apart: a forecast with others is not taken as done. So
            name the checkpoint in them.

    Raises:
        ConfigError: if `variables` names something that is no output, or a store holds other forecasts.
        CreditError: if the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        channels: ChannelMap,
        grid: LatLonGrid,
        clock: Clock,
        attributes: Mapping[str, Mapping[str, str]],
        step_minutes: int,
        *,
        lead_minutes: Sequence[int],
        initial_minutes: Sequence[int],
        level_units: str = "hPa",
        format: str = "netcdf",
        layout: str = "cf",
        variables: Sequence[str] | None = None,
        masks: Mapping[str, np.ndarray] | None = None,
        global_attributes: Mapping[str, str | int] | None = None,
    ) -> None:
        self.layout = build_layout(
            channels, grid, clock, attributes, step_minutes, lead_minutes, level_units, variables, masks,
            global_attributes,
        )  # fmt: skip
        self._shape = (len(lead_minutes), len(channels.output), *grid.shape)
        if format == "netcdf":
            self._backend: NetcdfFiles | ZarrStore = NetcdfFiles(Path(folder), self.layout)
        else:
            self._backend = ZarrStore(Path(folder) / "forecasts.zarr", self.layout, initial_minutes, layout)

    def is_complete(self, initial_minutes: int) -> bool:
        """Return whether the same run's forecast from this initial time is already on disk."""
        return self._backend.is_complete(int(initial_minutes))

    def write(self, initial_minutes: int, fields: np.ndarray) -> Path:
        """Write one forecast.

        Args:
            initial_minutes: its initial time.
            fields: (L, C_out, H, W) float32 in physical units, NaN where missing.

        Returns:
            The file or store.

        Raises:
            CreditError: naming the file, if it cannot be written (a full disk); nothing half-written is left.
        """
        assert fields.shape == self._shape, (fields.shape, self._shape)
        return self._backend.write(int(initial_minutes), fields)

    def close(self) -> None:
        """Finish; nothing can be written afterwards."""
        self._backend.close()
