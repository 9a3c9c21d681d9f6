"""Climatology: the expected state for a time of the year.

The expected state at a time is a weighted sum of stored fields. The fields belong to harmonics of the year, to equal
parts of the year between which is interpolated linearly, or to the single days of the year.

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

# Scores against a climatology of fewer years than this get a warning.
_SHORT_YEARS = 5.0
# Size in bytes of the cache of lazily read fields. The cache holds at least two parts of the year, between which a
# table interpolates.
CACHE_BYTES = 2**30


class LazyFields:
    """Array-like climatology fields that are read when they are accessed; the most recently used ones are cached.

    Args:
        shape: (T, K, C, H, W): numbers of times of the day, parts of the year, channels, rows and columns.
        read_part: function that takes the index of a time of the day and the index of a part of the year, and reads
            their fields, (C, H, W) float32.

    Attributes:
        shape: (T, K, C, H, W), like the shape of an array.
        ndim: 5, the number of dimensions.
    """

    ndim = 5

    def __init__(self, shape: tuple[int, int, int, int, int], read_part: Callable[[int, int], np.ndarray]) -> None:
        self.shape = shape
        bytes_per_part = 4 * math.prod(shape[2:])
        self._read_part = lru_cache(maxsize=max(2, CACHE_BYTES // bytes_per_part))(read_part)

    def __getitem__(self, key: int | tuple[int, int]) -> np.ndarray:
        """Return fields, float32.

        Args:
            key: index of a time of the day, for the fields of all parts of the year, (K, C, H, W); or indices of a
                time of the day and a part of the year, for the fields of this part, (C, H, W).
        """
        if isinstance(key, tuple):
            return self._read_part(*key)
        return np.stack([self._read_part(key, part) for part in range(self.shape[1])])


class LazyWeightedSum:
    """Array-like weighted sum of K fields that is evaluated when a channel, or the whole array, is accessed.

    Scores use one channel after the other, so the sum of all channels need not be in memory at once.

    Attributes:
        weights: (K,) float32 weights of the fields.
        parts: K arrays (C, H, W) float32, the fields to be added.
        shape: (C, H, W), the shape of the sum.
        dtype: float32.
        ndim: 3, the number of dimensions.
    """

    def __init__(self, weights: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        self.weights = weights
        self.parts = parts
        self.shape = parts[0].shape
        self.dtype = parts[0].dtype
        self.ndim = len(self.shape)

    def __getitem__(self, key: int | slice | list[int]) -> np.ndarray | LazyWeightedSum:
        """Return the values of one channel, or the sum of several channels that is not evaluated yet.

        Args:
            key: index of a channel, for its values (H, W) float32; or a slice or list of indices, for a
                `LazyWeightedSum` of these channels.
        """
        # A selection of channels stays lazy: the sum of each channel is evaluated only when it is accessed.
        if isinstance(key, slice | list):
            return LazyWeightedSum(self.weights, [part[key] for part in self.parts])
        # The first product is a new array, to which the others are added in place.
        total = self.weights[0] * self.parts[0][key]
        for weight, part in zip(self.weights[1:], self.parts[1:], strict=True):
            total += weight * part[key]
        return total

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """Return the evaluated sum, a new array (C, H, W); numpy calls this in ``np.asarray``.

        Args:
            dtype: type of the values; None for float32.
            copy: as in numpy; False is refused, because the sum is always a new array.

        Raises:
            ValueError: if `copy` is False.
        """
        if copy is False:
            raise ValueError("a weighted sum of fields is not evaluated yet, so copy=False is not possible")
        fields_CHW = np.empty(self.shape, self.dtype)

        def evaluate_channel(channel: int) -> None:
            fields_CHW[channel] = self[channel]

        cells_per_channel = len(self.parts) * fields_CHW[0].size
        thread_map(evaluate_channel, len(fields_CHW), cells_per_channel)
        if dtype is None:
            return fields_CHW
        return fields_CHW.astype(dtype, copy=False)


Fields = np.ndarray | LazyWeightedSum


@dataclass(frozen=True)
class Climatology:
    """Expected fields by time of the year.

    Attributes:
        names: (C,) names of the channels.
        calendar: name of the CF calendar of the times.
        kind: meaning of the K fields. ``harmonic``: coefficients of 1, cos, sin, cos 2, ... of the fraction of the
            year. ``table``: means over K equal parts of the year. ``days``: K days of the year from the first of
            January on; K is at least the length of the longest year.
        fields: (T, K, C, H, W) float32, in memory or read when they are accessed; T is 1 if the climatology does not
            depend on the time of the day.
        day_minutes: (T,) times of the day in minutes after 0 UTC; empty if the climatology does not depend on the
            time of the day.
        description: method and period as text, for reports.
        years: length of the fitted period in years, NaN if unknown.
        centres: (T,) fraction of the year at which the first part of a ``table`` is centred. The centres of the other
            parts follow at equal distances. None for the other kinds.
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
        """Return the climatology of some rows and columns.

        Args:
            rows: latitude rows, with a start and a stop.
            columns: longitude columns.
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
        """Return the expected fields at a time like `evaluate`, but evaluated only when a channel is accessed.

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
        # Linear interpolation between the two nearest parts; the last part is followed by the first. Before the centre
        # of the first part the position is negative, and the remainder of -1 is the index of the last part.
        position = (fraction - self.centres[time_of_day]) * num_parts
        part = int(np.floor(position))
        weight = np.float32(position - part)
        earlier_fields = self.fields[time_of_day, part % num_parts]
        later_fields = self.fields[time_of_day, (part + 1) % num_parts]
        return LazyWeightedSum(np.array([1 - weight, weight]), [earlier_fields, later_fields])

    def _find_time_of_day(self, minutes: int) -> int:
        """Return the index in `day_minutes` of the time of the day of a time; 0 if `day_minutes` is empty.

        Args:
            minutes: the time in minutes since 1900.

        Raises:
            DataError: if the climatology does not have this time of the day.
        """
        if not len(self.day_minutes):
            return 0
        matches = np.flatnonzero(self.day_minutes == int(minutes) % 1440)
        if not len(matches):
            times_of_day = ", ".join(f"{minute // 60:02d}:{minute % 60:02d}" for minute in self.day_minutes)
            if self.kind == "days":
                advice = "verification.climatology.path needs a file with that hour, or one without hours"
            else:
                advice = "set verification.climatology.by_hour: false"
            raise DataError(
                f"climatology: {self._calendar.format(minutes)} is at none of its times of the day ({times_of_day}); "
                f"{advice}"
            )
        return int(matches[0])

    @property
    def short_period_warning(self) -> str | None:
        """Warning for readers of scores if the fitted period is shorter than 5 years, else None."""
        # The length is rounded as in the warning, so 4.96 years count as 5.0. A comparison with NaN (unknown) is false.
        if round(self.years, 1) < _SHORT_YEARS:
            return f"The climatology is from {self.years:.1f} years of data, less than {_SHORT_YEARS:g}."
        return None

    def to_dict(self) -> dict[str, np.ndarray]:
        """Return the climatology as arrays for a checkpoint.

        Returns:
            ``fields`` and ``day_minutes`` as in this class, and ``attributes``: all other attributes as the bytes of
            a JSON text, a 1-D uint8 array. Fields of the class `LazyFields` are not read by this call.
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
        # JSON has lists instead of tuples.
        for key in {"names", "centres"} & set(attributes):
            attributes[key] = tuple(attributes[key])
        return cls(fields=data["fields"], day_minutes=np.asarray(data["day_minutes"]), **attributes)


def evaluate_harmonics(fraction: np.ndarray | float, count: int) -> np.ndarray:
    """Return the harmonics 1, cos(a), sin(a), cos(2a), sin(2a), ... of the year, (..., count) float64.

    The angle a is 2 pi times the fraction of the year.

    Args:
        fraction: fractions of the year in [0, 1), of any shape (...).
        count: number of functions; odd, because each wave has a cosine and a sine.
    """
    angle = 2.0 * np.pi * np.asarray(fraction, dtype=np.float64)
    # The constant, then a cosine and a sine for each wave.
    columns = [np.ones_like(angle)]
    for wave in range(1, (count + 1) // 2):
        columns += [np.cos(wave * angle), np.sin(wave * angle)]
    return np.stack(columns, axis=-1)
