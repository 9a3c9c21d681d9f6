"""Lazily read fields of a plugin's source, which are checked when they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cftime
import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from credit.calendar import TIME_UNITS

if TYPE_CHECKING:
    from credit.data.formats.plugin.source import SourceFactory

_MINUTE = np.timedelta64(1, "m")
# Epoch of times in minutes, the same as in `credit.calendar.TIME_UNITS`.
_EPOCH = np.datetime64(TIME_UNITS.removeprefix("minutes since ").replace(" ", "T"), "us")


def encode_times(times: np.ndarray) -> tuple[np.ndarray, str]:
    """Convert dates to minutes since 1900.

    Args:
        times: (N,) dates as datetime64, datetime or cftime objects.

    Returns:
        (N,) float64 minutes since 1900, with NaN for missing dates; and the name of the CF calendar of the dates.

    Raises:
        TypeError: if `times` are not dates.
    """
    if times.ndim == 1 and times.size and isinstance(times[0], cftime.datetime):
        calendar = times[0].calendar
        minutes = np.asarray(cftime.date2num(times, TIME_UNITS, calendar), dtype=np.float64)
        return minutes, calendar
    if times.ndim != 1 or (times.size and times.dtype.kind not in "MO"):
        raise TypeError(f"must be a list of dates, but has type {times.dtype} and shape {times.shape}")
    # datetime64 and datetime use the proleptic Gregorian calendar.
    minutes = (times.astype("datetime64[us]") - _EPOCH) / _MINUTE
    return minutes, "proleptic_gregorian"


class PluginFields(BackendArray):
    """Lazily read values of one variable of a plugin's source, float32 of the shape ([N,] [L,] rows, columns).

    A static variable does not have the axis of N times, and a 2-D variable does not have the axis of L levels. Reading
    raises DataError if the plugin fails or returns values of a wrong type or shape.

    Args:
        factory: factory that creates the source in the process that reads.
        name: name of the variable.
        levels: (L,) values of the levels, as the plugin defines them; None for a variable without levels.
        times: (N,) dates, as the plugin defines them; None for a static variable.
        grid_shape: numbers of rows and columns.
    """

    def __init__(
        self,
        factory: SourceFactory,
        name: str,
        levels: tuple[float, ...] | None,
        times: np.ndarray | None,
        grid_shape: tuple[int, int],
    ) -> None:
        self._factory = factory
        self._name = name
        self._times = times
        self._grid_shape = grid_shape
        self._levels = None if levels is None else np.array(levels)
        axes = [axis for axis in (times, self._levels) if axis is not None]
        axis_lengths = [len(axis) for axis in axes]
        self.shape = (*axis_lengths, *grid_shape)
        self.dtype = np.dtype(np.float32)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> np.ndarray:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[int | slice | np.ndarray, ...]) -> np.ndarray:
        """Return float32 values, with missing values as NaN.

        Args:
            key: a separate index for each axis (orthogonal indexing): times and levels, if the variable has them, then
                rows and columns.
        """
        # The first axes are those of times and levels, if the variable has them.
        *leading, rows, columns = key
        level_index = None
        requested_levels = None
        if self._levels is not None:
            level_index = leading[-1]
            requested_levels = tuple(np.atleast_1d(self._levels[level_index]).tolist())
        if self._times is None:
            fields = self._read_fields_at(None, requested_levels)
        elif isinstance(leading[0], int | np.integer):
            fields = self._read_fields_at(self._times[leading[0]], requested_levels)
        else:
            requested_times = self._times[leading[0]]
            fields = np.stack([self._read_fields_at(time, requested_levels) for time in requested_times])
        # A single index drops the axis of levels.
        if self._levels is not None and np.ndim(self._levels[level_index]) == 0:
            fields = fields[..., 0, :, :]
        # Index rows and columns one after the other, because two index arrays together would select single points.
        return fields[..., rows, :][..., columns]

    def _read_fields_at(self, time: Any, levels: tuple[float, ...] | None) -> np.ndarray:
        """Read the fields of one time from the plugin, and check them.

        Args:
            time: the date, as it appears in ``times`` of the plugin; None for a static variable.
            levels: values of the levels to read; None for a variable without levels.

        Returns:
            ([levels,] rows, columns) float32, with missing values as NaN.

        Raises:
            DataError: if the plugin fails, or does not return numbers of this shape.
        """
        call = f"read({self._name!r}, {time}, {levels})"
        source = self._factory.get()
        with self._factory.translating_errors(call):
            result = source.read(self._name, time, levels)
            if isinstance(result, xr.DataArray):
                # If a DataArray contains its time, check that it is the requested time.
                result_time = None
                if time is not None:
                    result_time = result.coords.get("time")
                if result_time is not None:
                    result_minutes, _ = encode_times(result_time.values.reshape(-1))
                    requested_minutes, _ = encode_times(np.array([time]))
                    if result_minutes.tolist() != requested_minutes.tolist():
                        raise ValueError(f"it returns the field of {result_time.values}")
                result = result.values
            values = np.ma.asarray(result)
        shape = self._grid_shape if levels is None else (len(levels), *self._grid_shape)
        is_numeric = values.dtype.kind in "fiub"
        if values.shape != shape or not is_numeric:
            returned = f"{values.dtype} of shape {values.shape}"
            raise self._factory.build_error(f"{call} must return numbers of shape {shape}; it returned {returned}")
        # A value beyond the range of float32 becomes infinite, which the reader reports.
        with np.errstate(over="ignore"):
            return values.astype(np.float32).filled(np.nan)
