"""Climatology: the state that the time of the year alone lets one expect; one may be read from a file.

Whatever the method, a climatology is a few fields and, for any time, their weights: harmonics of the year, or a table
of days of the year between which it interpolates linearly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import xarray as xr

from credit.errors import DataError
from credit.grid import LatLonGrid
from credit.times import Clock

if TYPE_CHECKING:
    from credit.channels import Channel

_SHORT_YEARS = 5.0


class LazyFields(Protocol):
    """Fields (T, K, C, H, W) float32 that are read when they are asked for."""

    shape: tuple[int, int, int, int, int]
    ndim: int

    def __getitem__(self, key: int | tuple[int, int]) -> np.ndarray:
        """Return the fields of one time of the day, (K, C, H, W), or those of one part of the year, (C, H, W)."""
        ...


@dataclass(frozen=True)
class Climatology:
    """Expected fields by time of the year.

    Attributes:
        names: the channels, C of them.
        calendar: CF calendar of the times it is asked for.
        kind: ``harmonic`` (1, cos, sin, cos 2, ... of the year's fraction) or ``table`` (K equal parts of the year).
        fields: (T, K, C, H, W) float32, in memory or read when they are asked for; T is the number of times of the day,
            1 where they are not told apart.
        day_minutes: (T,) minutes of the UTC day, or empty where they are not told apart.
        description: method and period in words, for reports.
        years: length of the period in years, NaN where unknown.
    """

    names: tuple[str, ...]
    calendar: str
    kind: str
    fields: np.ndarray | LazyFields
    day_minutes: np.ndarray
    description: str
    years: float
    _clock: Clock = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.kind in ("harmonic", "table") and self.fields.ndim == 5
        object.__setattr__(self, "_clock", Clock(self.calendar))

    def at(self, minutes: int) -> np.ndarray:
        """Return the fields expected at `minutes`, (C, H, W) float32.

        Raises:
            DataError: if times of the day are told apart and this one was not in the data.
        """
        member, parts = self._time_of_day(minutes), self.fields.shape[1]
        fraction = float(self._clock.year_fraction(np.array(minutes)))
        if self.kind == "harmonic":
            waves = evaluate_harmonics(fraction, parts).astype(np.float32)
            return np.tensordot(waves, self.fields[member], axes=1)
        position = fraction * parts - 0.5
        below = int(np.floor(position))
        share = np.float32(position - below)
        return (1 - share) * self.fields[member, below % parts] + share * self.fields[member, (below + 1) % parts]

    def _time_of_day(self, minutes: int) -> int:
        if not len(self.day_minutes):
            return 0
        of_day = int(minutes) % 1440
        match = np.flatnonzero(self.day_minutes == of_day)
        if not len(match):
            known = ", ".join(f"{m // 60:02d}:{m % 60:02d}" for m in self.day_minutes)
            raise DataError(
                f"climatology: {self._clock.format(minutes)} is at none of its times of the day ({known}); "
                "set verification.climatology.by_hour: false"
            )
        return int(match[0])

    @property
    def notice(self) -> str | None:
        """Return a sentence for readers of scores where the period is short, else None."""
        if self.years < _SHORT_YEARS:
            return f"The climatology is from {self.years:.1f} years of data, less than {_SHORT_YEARS:g}."
        return None

    def to_dict(self) -> dict[str, np.ndarray]:
        """Return numeric arrays alone, as checkpoints hold them; ``attributes`` is JSON as bytes."""
        attributes = {key: getattr(self, key) for key in ("names", "calendar", "kind", "description", "years")}
        text = np.frombuffer(json.dumps(attributes).encode(), dtype=np.uint8)
        return {"fields": self.fields, "day_minutes": self.day_minutes, "attributes": text}

    @classmethod
    def from_dict(cls, data: Mapping[str, np.ndarray]) -> Climatology:
        """Inverse of `to_dict`."""
        attributes = json.loads(np.asarray(data["attributes"]).tobytes())
        names = tuple(attributes.pop("names"))
        return cls(names, fields=data["fields"], day_minutes=np.asarray(data["day_minutes"]), **attributes)


def evaluate_harmonics(fraction: np.ndarray | float, count: int) -> np.ndarray:
    """Return 1, cos, sin, cos 2, sin 2, ... of the year's fraction, (..., count) float64."""
    angle = 2.0 * np.pi * np.asarray(fraction, dtype=np.float64)
    columns = [np.ones_like(angle)]
    for wave in range(1, (count + 1) // 2):
        columns += [np.cos(wave * angle), np.sin(wave * angle)]
    return np.stack(columns, axis=-1)


def load_climatology(
    path: str | os.PathLike, channels: Sequence[Channel], grid: LatLonGrid, clock: Clock, attributes: dict[str, dict]
) -> Climatology:
    """Read a climatology from a netCDF file.

    Its variables carry the data's names and the dimensions ``dayofyear``, optionally ``hour`` and ``level``, latitude
    and longitude, in any order.

    Args:
        path: the file.
        channels: the channels that are wanted; levels must be there exactly.
        grid: the grid that it must be on, up to orientation.
        clock: calendar of the times it will be asked for.
        attributes: variable -> attributes of the data; the file's units must be the same where it states them.

    Raises:
        DataError: naming the file and what it lacks.
    """
    if not os.path.exists(path):
        raise DataError(f"verification.climatology.path: there is no file {path}")
    try:
        dataset = xr.open_dataset(path, decode_times=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as netCDF ({error})") from error
    with dataset:
        lat, lon = (_coordinate(dataset, names, path) for names in (("latitude", "lat"), ("longitude", "lon")))
        own, orientation = LatLonGrid.from_coords(dataset[lat].values, dataset[lon].values, origin=str(path))
        difference = grid.difference(own)
        if difference:
            raise DataError(f"{path}: its grid is not that of the data: {difference}")
        hours = dataset["hour"].values if "hour" in dataset else np.empty(0)
        fields = [
            orientation.apply(_read_channel(dataset, channel, lat, lon, path, attributes)) for channel in channels
        ]
    return Climatology(
        tuple(channel.name for channel in channels),
        clock.calendar,
        "table",
        np.stack(fields, axis=2).astype(np.float32),
        np.rint(hours * 60.0).astype(np.int64),
        f"file {os.path.basename(path)}",
        float("nan"),
    )


def _coordinate(dataset: xr.Dataset, names: tuple[str, ...], path: str | os.PathLike) -> str:
    found = [name for name in names if name in dataset.coords]
    if not found:
        raise DataError(f"{path}: has no coordinate {' or '.join(names)}")
    return found[0]


def _read_channel(
    dataset: xr.Dataset, channel: Channel, lat: str, lon: str, path: str | os.PathLike, attributes: dict[str, dict]
) -> np.ndarray:
    """Return one channel in the file's orientation, (T, K, H, W)."""
    if channel.variable not in dataset:
        raise DataError(f"{path}: has no variable {channel.variable} (channel {channel.name})")
    values = dataset[channel.variable]
    theirs, ours = values.attrs.get("units"), attributes.get(channel.variable, {}).get("units")
    if theirs and ours and theirs != ours:
        raise DataError(f"{path}: {channel.variable} is in {theirs}, the data in {ours}")
    if channel.level is not None:
        levels = dataset["level"].values if "level" in dataset.coords else np.empty(0)
        match = np.flatnonzero(levels == channel.level)
        if not len(match):
            raise DataError(f"{path}: {channel.variable} has no level {channel.level:g}, only {levels.tolist()}")
        values = values.isel(level=int(match[0]))
    if "hour" not in values.dims:
        values = values.expand_dims("hour")
    expected = ("hour", "dayofyear", lat, lon)
    if set(values.dims) != set(expected):
        raise DataError(f"{path}: {channel.variable} has dimensions {values.dims}, needs {expected}")
    return values.transpose(*expected).values
