"""Climatology: the state that the time of the year alone lets one expect.

Whatever the method, a climatology is a few fields and, for any time, their weights: harmonics of the year, a table of
equal parts of the year between which it interpolates linearly, or days of the year, each by itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from credit.calendar import Calendar
from credit.errors import DataError
from credit.utils.threads import thread_map

_SHORT_YEARS = 5.0
# of fields that are kept when they are read as they are asked for, if that is not less than two parts of the year
KEPT_BYTES = 2**30


class LazyFields:
    """Fields that are read when they are asked for; those of the last parts of the year are kept.

    Args:
        shape: (T, K, C, H, W), of float32.
        read: (time of the day, part of the year) -> (C, H, W).
    """

    ndim = 5

    def __init__(self, shape: tuple[int, int, int, int, int], read: Callable[[int, int], np.ndarray]) -> None:
        self.shape = shape
        self._read = lru_cache(maxsize=max(2, KEPT_BYTES // (4 * math.prod(shape[2:]))))(read)

    def __getitem__(self, key: int | tuple[int, int]) -> np.ndarray:
        """Return the fields of one time of the day, (K, C, H, W), or those of one part of the year, (C, H, W)."""
        if isinstance(key, tuple):
            return self._read(*key)
        return np.stack([self._read(key, part) for part in range(self.shape[1])])


class LazyWeightedSum:
    """A weighted sum of fields of which each channel is made when it is asked for; as an array, all are.

    Attributes:
        weights: (K,) float32.
        parts: K times (C, H, W) float32.
    """

    def __init__(self, weights: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        self.weights, self.parts = weights, parts
        self.shape, self.dtype = parts[0].shape, parts[0].dtype
        self.ndim = len(self.shape)

    def __getitem__(self, key: int | slice | list[int]) -> np.ndarray | LazyWeightedSum:
        """Return a channel, (H, W), or the weighted sum of some."""
        if isinstance(key, slice | list):
            return LazyWeightedSum(self.weights, [part[key] for part in self.parts])
        total = self.weights[0] * self.parts[0][key]
        for weight, part in zip(self.weights[1:], self.parts[1:], strict=True):
            total += weight * part[key]
        return total

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """Return (C, H, W), a new array."""
        if copy is False:
            raise ValueError("a weighted sum of fields is no array yet; copy=False cannot be had")
        fields = np.empty(self.shape, self.dtype)

        def fill(channel: int) -> None:
            fields[channel] = self[channel]

        thread_map(fill, len(fields), len(self.parts) * fields[0].size)
        return fields if dtype is None else fields.astype(dtype, copy=False)


Fields = np.ndarray | LazyWeightedSum


@dataclass(frozen=True)
class Climatology:
    """Expected fields by time of the year.

    Attributes:
        names: the channels, C of them.
        calendar: CF calendar of the times it is asked for.
        kind: ``harmonic`` (1, cos, sin, cos 2, ... of the year's fraction), ``table`` (K equal parts of the year) or
            ``days`` (K days of the year, the first of January the first; K is at least the length of a year).
        fields: (T, K, C, H, W) float32, in memory or read when they are asked for; T is the number of times of the day,
            1 where they are not told apart.
        day_minutes: (T,) minutes of the UTC day, or empty where they are not told apart.
        description: method and period in words, for reports.
        years: length of the period in years, NaN where unknown.
        centres: (T,) fraction of the year at which the first part of a table is centred, the others following at equal
            distances; None unless it is a table.
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

    def at(self, minutes: int) -> np.ndarray:
        """Return the fields expected at `minutes`, (C, H, W) float32; see `sum_at`."""
        return np.asarray(self.sum_at(minutes))

    def sum_at(self, minutes: int) -> Fields:
        """Return the same fields, each of which may be made when it is asked for.

        Raises:
            DataError: if times of the day are told apart and this one was not in the data.
        """
        member, parts = self._time_of_day(minutes), self.fields.shape[1]
        if self.kind == "days":
            return self.fields[member, self._calendar.datetime(minutes).dayofyr - 1]
        fraction = float(self._calendar.year_fraction(np.array(minutes)))
        if self.kind == "harmonic":
            return LazyWeightedSum(evaluate_harmonics(fraction, parts).astype(np.float32), self.fields[member])
        position = (fraction - self.centres[member]) * parts
        below = int(np.floor(position))
        share = np.float32(position - below)
        around = [self.fields[member, number % parts] for number in (below, below + 1)]
        return LazyWeightedSum(np.array([1 - share, share]), around)

    def _time_of_day(self, minutes: int) -> int:
        if not len(self.day_minutes):
            return 0
        of_day = int(minutes) % 1440
        match = np.flatnonzero(self.day_minutes == of_day)
        if not len(match):
            known = ", ".join(f"{m // 60:02d}:{m % 60:02d}" for m in self.day_minutes)
            way_out = "verification.climatology.path needs a file with that hour, or one without hours"
            if self.kind != "days":
                way_out = "set verification.climatology.by_hour: false"
            raise DataError(
                f"climatology: {self._calendar.format(minutes)} is at none of its times of the day ({known}); {way_out}"
            )
        return int(match[0])

    @property
    def notice(self) -> str | None:
        """Return a sentence for readers of scores where the period is short, else None."""
        # as they are shown
        if round(self.years, 1) < _SHORT_YEARS:
            return f"The climatology is from {self.years:.1f} years of data, less than {_SHORT_YEARS:g}."
        return None

    def to_dict(self) -> dict[str, np.ndarray]:
        """Return numeric arrays alone, as checkpoints hold them; ``attributes`` is JSON as bytes."""
        attributes = {key: getattr(self, key) for key in ("names", "calendar", "kind", "description", "years")}
        if self.centres is not None:
            attributes["centres"] = self.centres
        text = np.frombuffer(json.dumps(attributes).encode(), dtype=np.uint8)
        return {"fields": self.fields, "day_minutes": self.day_minutes, "attributes": text}

    @classmethod
    def from_dict(cls, data: Mapping[str, np.ndarray]) -> Climatology:
        """Inverse of `to_dict`."""
        attributes = json.loads(np.asarray(data["attributes"]).tobytes())
        for key in {"names", "centres"} & set(attributes):
            attributes[key] = tuple(attributes[key])
        return cls(fields=data["fields"], day_minutes=np.asarray(data["day_minutes"]), **attributes)


def evaluate_harmonics(fraction: np.ndarray | float, count: int) -> np.ndarray:
    """Return 1, cos, sin, cos 2, sin 2, ... of the year's fraction, (..., count) float64."""
    angle = 2.0 * np.pi * np.asarray(fraction, dtype=np.float64)
    columns = [np.ones_like(angle)]
    for wave in range(1, (count + 1) // 2):
        columns += [np.cos(wave * angle), np.sin(wave * angle)]
    return np.stack(columns, axis=-1)
