"""FieldReader whose fields are computed by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.data.store.chunk_reader import scatter_fields
from credit.grid import LatLonGrid

ATTRIBUTES = {
    "t": {"units": "K", "standard_name": "air_temperature", "long_name": "Temperature"},
    "u": {"units": "m s-1", "standard_name": "eastward_wind", "long_name": "U component of wind"},
    "v": {"units": "m s-1", "standard_name": "northward_wind", "long_name": "V component of wind"},
    "z": {"units": "m2 s-2", "standard_name": "geopotential", "long_name": "Geopotential"},
    "t2m": {"units": "K", "standard_name": "air_temperature", "long_name": "2 metre temperature"},
    "u10": {"units": "m s-1", "standard_name": "eastward_wind", "long_name": "10 metre eastward wind"},
    "v10": {"units": "m s-1", "standard_name": "northward_wind", "long_name": "10 metre northward wind"},
    "sst": {"units": "K", "standard_name": "sea_surface_temperature", "long_name": "Sea surface temperature"},
    "tp": {"units": "mm", "long_name": "Total precipitation", "temporal": "accumulate"},
}


def make_grid(rows: int = 12, columns: int = 24, poles: bool = False) -> LatLonGrid:
    """Return an equiangular grid with or without pole points."""
    edge = 90.0 if poles else 90.0 - 90.0 / rows
    return LatLonGrid.from_coords(np.linspace(edge, -edge, rows), np.arange(columns) * 360.0 / columns)[0]


class AnalyticReader:
    """Reader of fields of a function ``(minutes, channel index) -> (H, W)``.

    It follows the protocol `credit.data.reader.FieldReader`.
    """

    def __init__(
        self,
        channels: ChannelMap,
        grid: LatLonGrid,
        calendar: Calendar,
        times: np.ndarray,
        function: Callable[[int, int], np.ndarray],
        masks: dict[str, np.ndarray] | None = None,
    ) -> None:
        self.channels, self.grid, self.calendar = channels, grid, calendar
        self.times = np.asarray(times, dtype=np.int64)
        self.attributes = {
            c.variable: ATTRIBUTES.get(c.variable, {"units": "1"})
            for c in channels.time_varying_stored + channels.static_stored
        }
        self.masks = masks or {}
        self.is_thread_safe = False
        self.reads = 0
        self._function = function

    def read(self, index: int) -> np.ndarray:
        """Return the fields of one time, (C, H, W) float32, NaN where masked."""
        self.reads += 1
        fields = [self._function(int(self.times[index]), c) for c in range(len(self.channels.time_varying_stored))]
        stack = np.stack([np.broadcast_to(field, self.grid.shape) for field in fields]).astype(np.float32)
        for number, channel in enumerate(self.channels.time_varying_stored):
            if channel.variable in self.masks:
                stack[number][self.masks[channel.variable]] = np.nan
        return stack

    def read_each(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the fields of several times."""
        return map(self.read, indices)

    def read_into(self, index: int, targets: Sequence[np.ndarray | None]) -> None:
        """Read the fields of one time into the arrays `targets`."""
        scatter_fields(self.read(index), targets)

    def static(self) -> np.ndarray:
        """Return the static fields: zeros."""
        return np.zeros((len(self.channels.static_stored), *self.grid.shape), dtype=np.float32)

    def index_of(self, minutes: int) -> int | None:
        """Return the index of a time, or None if the reader does not have it."""
        match = np.flatnonzero(self.times == minutes)
        return int(match[0]) if len(match) else None
