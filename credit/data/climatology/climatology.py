"""Climatology: the expected state as a function of the time of the year.

The expected state at a time is a weighted sum of stored fields. There is one field for each annual harmonic, for each
equal part of the year (with linear interpolation between parts), or for each day of the year.

Letters of shapes: T times of the day, K stored fields for each of them (harmonics, parts of the year or days of the
year), C channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from credit.calendar import Calendar
from credit.errors import DataError
from credit.utils.threads import thread_map

# A warning is added to scores if the climatology is based on fewer years than this.
_SHORT_YEARS = 5.0
# Size in bytes of the cache of lazily read fields. The cache always contains at least two parts of the year, because a
# table interpolates between two parts.
CACHE_BYTES = 2**30


class LazyFields:
    """Array-like climatology fields that are read when they are accessed; the most recently used fields are cached.

    Args:
        shape: (T, K, C, H, W): numbers of times of the day, parts of the year, channels, rows and columns.
        read_part: function of the index of a time of the day and the index of a part of the year, which reads the
            fields (C, H, W) float32.

    Attributes:
        shape: shape of the fields, (T, K, C, H, W).
        ndim: number of dimensions, 5.
    """

    ndim = 5

    def __init__(self, shape: tuple[int, int, int, int, int], read_part: Callable[[int, int], np.ndarray]) -> None:
        self.shape = shape
        bytes_per_part = 4 * math.prod(shape[2:])
        self._read_part = lru_cache(maxsize=max(2, CACHE_BYTES // bytes_per_part))(read_part)

    def __getitem__(self, key: int | tuple[int, int]) -> np.ndarray:
        """Return float32 fields at a time of the day.

        Args:
            key: index of a time of the day, to return all parts of the year, (K, C, H, W); or indices of a time of the
                day and a part of the year, to return this part, (C, H, W).
        """
        if isinstance(key, tuple):
            return self._read_part(*key)
        return np.stack([self._read_part(key, part) for part in range(self.shape[1])])


class LazyWeightedSum:
    """Array-like weighted sum of K fields, which is evaluated when a channel or the complete array is accessed.

    Scores use the channels one by one, so the sum of all channels need not be in memory at once.

    Attributes:
        weights: (K,) float32 weights of the fields.
        fields: K fields (C, H, W) float32 to add.
        shape: shape of the sum, (C, H, W).
        dtype: data type of the sum, float32.
        ndim: number of dimensions, 3.
    """

    def __init__(self, weights: np.ndarray, fields: Sequence[np.ndarray]) -> None:
        self.weights = weights
        self.fields = fields
        self.shape = fields[0].shape
        self.dtype = fields[0].dtype
        self.ndim = len(self.shape)

    def __getitem__(self, key: int | slice | list[int]) -> np.ndarray | LazyWeightedSum:
        """Return the evaluated sum of one channel, or a lazy sum of several channels.

        Args:
            key: index of a channel, to return its values (H, W) float32; or a slice or list of indices, to return a
                `LazyWeightedSum` of these channels.
        """
        # A selection of channels is also lazy.
        if isinstance(key, slice | list):
            return LazyWeightedSum(self.weights, [addend[key] for addend in self.fields])
        # The first product creates a new array, to which the other products are added in place.
        total = self.weights[0] * self.fields[0][key]
        for weight, addend in zip(self.weights[1:], self.fields[1:], strict=True):
            total += weight * addend[key]
        return total

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """Return the evaluated sum as a new array (C, H, W); numpy calls this method in ``np.asarray``.

        Args:
            dtype: type of the values; None for float32.
            copy: as in numpy; must not be False, because the sum is always a new array.

        Raises:
            ValueError: if `copy` is False.
        """
        if copy is False:
            raise ValueError("a weighted sum of fields is not evaluated yet, so copy=False is not possible")
        fields_CHW = np.empty(self.shape, self.dtype)

        def evaluate_channel(channel: int) -> None:
            fields_CHW[channel] = self[channel]

        cells_per_channel = len(self.fields) * fields_CHW[0].size
        thread_map(evaluate_channel, len(fields_CHW), cells_per_channel)
        if dtype is None:
            return fields_CHW
        return fields_CHW.astype(dtype, copy=False)


Fields = np.ndarray | LazyWeightedSum


@dataclass(frozen=True)
class Climatology:
    """Climatology: expected fields as a function of the time of the year.

    Attributes:
        names: (C,) names of the channels.
        calendar: name of the CF calendar of the times.
        kind: meaning of the K fields. ``harmonic``: coefficients of 1, cos, sin, cos 2, ... of the fraction of the
            year. ``table``: means over K equal parts of the year. ``days``: K days of the year, beginning with
            the first of January; K is at least the length of the longest year.
        fields: (T, K, C, H, W) float32, in memory or read when they are accessed; T is 1 if the climatology does not
            depend on the time of the day.
        day_minutes: (T,) times of the day in minutes after 0 UTC; empty if the climatology does not depend on the
            time of the day.
        description: method and period in words, for reports.
        years: length of the fitted period in years; NaN if unknown.
        centres: (T,) fraction of the year at which the first part of a ``table`` is centred. The centres of all parts
            are equally spaced. None for the kinds ``harmonic`` and ``days``.
    """

    names: tuple[str, ...]
    calendar: str
    kind: str
    fields: np.ndarray | LazyFields
    day_minutes: np.ndarray
    description: str
    years: float
    centres: tuple[float, ...] | None = None
    _calendar: Calendar = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.kind in ("harmonic", "table", "days") and self.fields.ndim == 5
        assert (self.centres is not None) == (self.kind == "table")
        object.__setattr__(self, "_calendar", Calendar(self.calendar))

    def select(self, rows: slice, columns: slice) -> Climatology:
        """Return the climatology on a rectangle of the grid.

        Args:
            rows: slice of latitude rows, with a start and a stop.
            columns: slice of longitude columns, with a start and a stop.
        """
        fields = self.fields
        if isinstance(fields, np.ndarray):
            return replace(self, fields=np.ascontiguousarray(fields[..., rows, columns]))

        def read_part(time_of_day: int, part: int) -> np.ndarray:
            return fields[time_of_day, part][..., rows, columns]

        shape = (*fields.shape[:3], rows.stop - rows.start, columns.stop - columns.start)
        return replace(self, fields=LazyFields(shape, read_part))

    def evaluate(self, minutes: int) -> np.ndarray:
        """Return the expected fields at a time, (C, H, W) float32 in physical units.

        Args:
            minutes: the time in minutes since 1900.

        Raises:
            DataError: if the climatology has fields for some times of the day, and not for this one.
        """
        return np.asarray(self.evaluate_lazily(minutes))

    def evaluate_lazily(self, minutes: int) -> Fields:
        """Return the expected fields at a time, as `evaluate` does, but evaluate a channel only when it is accessed.

        Args:
            minutes: the time in minutes since 1900.

        Raises:
            DataError: if the climatology has fields for some times of the day, and not for this one.
        """
        time_of_day = self._find_time_of_day(minutes)
        num_parts = self.fields.shape[1]
        if self.kind == "days":
            # cftime counts the days of the year from 1.
            day = self._calendar.datetime(minutes).dayofyr - 1
            return self.fields[time_of_day, day]
        fraction = float(self._calendar.year_fraction(np.array(minutes)))
        if self.kind == "harmonic":
            weights = evaluate_harmonics(fraction, num_parts).astype(np.float32)
            return LazyWeightedSum(weights, self.fields[time_of_day])
        # Interpolate linearly between the two nearest parts; the first part follows the last part. Before the centre of
        # the first part, the position is negative, and the remainder of -1 is the index of the last part.
        position = (fraction - self.centres[time_of_day]) * num_parts
        part = int(np.floor(position))
        weight = np.float32(position - part)
        earlier_fields = self.fields[time_of_day, part % num_parts]
        later_fields = self.fields[time_of_day, (part + 1) % num_parts]
        return LazyWeightedSum(np.array([1 - weight, weight]), [earlier_fields, later_fields])

    def _find_time_of_day(self, minutes: int) -> int:
        """Return the index in `day_minutes` of the hour and minute of a time; 0 if `day_minutes` is empty.

        Args:
            minutes: the time in minutes since 1900.

        Raises:
            DataError: if the climatology does not contain this time of the day.
        """
        if not len(self.day_minutes):
            return 0
        matches = np.flatnonzero(self.day_minutes == int(minutes) % 1440)
        if not len(matches):
            times_of_day = ", ".join(f"{minute // 60:02d}:{minute % 60:02d}" for minute in self.day_minutes)
            if self.kind == "days":
                advice = "verification.climatology.path needs a file with that hour, or a file without hours"
            else:
                advice = "set verification.climatology.by_hour: false"
            raise DataError(
                f"climatology: {self._calendar.format(minutes)} is at none of its times of the day ({times_of_day}); "
                f"{advice}"
            )
        return int(matches[0])

    @property
    def short_period_warning(self) -> str | None:
        """Warning for the report of scores if the fitted period is shorter than 5 years, else None."""
        # Round the length as in the warning, so that 4.96 years become 5.0. A comparison with NaN (unknown) is false.
        if round(self.years, 1) < _SHORT_YEARS:
            return f"The climatology is from {self.years:.1f} years of data, less than {_SHORT_YEARS:g}."
        return None

    def to_dict(self) -> dict[str, np.ndarray]:
        """Return the climatology as a dictionary of arrays for a checkpoint.

        Returns:
            ``fields`` and ``day_minutes``: the attributes with these names. ``attributes``: all other attributes as a
            JSON string, in the bytes of a 1-D uint8 array. Lazy fields (`LazyFields`) are returned without reading.
        """
        attributes = {key: getattr(self, key) for key in ("names", "calendar", "kind", "description", "years")}
        if self.centres is not None:
            attributes["centres"] = self.centres
        attribute_bytes = np.frombuffer(json.dumps(attributes).encode(), dtype=np.uint8)
        return {"fields": self.fields, "day_minutes": self.day_minutes, "attributes": attribute_bytes}

    @classmethod
    def from_dict(cls, data: Mapping[str, np.ndarray]) -> Climatology:
        """Build a climatology from the arrays that `to_dict` returned."""
        attributes = json.loads(np.asarray(data["attributes"]).tobytes())
        # JSON contains lists instead of tuples.
        for key in {"names", "centres"} & set(attributes):
            attributes[key] = tuple(attributes[key])
        return cls(fields=data["fields"], day_minutes=np.asarray(data["day_minutes"]), **attributes)


def evaluate_harmonics(fraction: np.ndarray | float, count: int) -> np.ndarray:
    """Return the annual harmonics 1, cos(a), sin(a), cos(2a), sin(2a), ..., (..., count) float64.

    The angle a is 2 pi times the fraction of the year.

    Args:
        fraction: fractions of the year in [0, 1), of any shape (...).
        count: number of functions; it is odd, because each wave has a cosine and a sine.
    """
    angle = 2.0 * np.pi * np.asarray(fraction, dtype=np.float64)
    # The constant function, then a cosine and a sine for each wave.
    columns = [np.ones_like(angle)]
    for wave in range(1, (count + 1) // 2):
        columns += [np.cos(wave * angle), np.sin(wave * angle)]
    return np.stack(columns, axis=-1)
