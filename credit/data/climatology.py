"""Climatology: the state that the time of the year alone lets one expect, fitted on training data or read from a file.

Whatever the method, a climatology is a few fields and, for any time, their weights: harmonics of the year, or a table
of days of the year between which it interpolates linearly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from tqdm import tqdm

from credit.errors import ConfigError, DataError
from credit.grid import LatLonGrid
from credit.times import Clock

if TYPE_CHECKING:
    from credit.channels import Channel
    from credit.data.reader import FieldReader

_MINUTES_A_YEAR = 365.2422 * 1440
_UNSMOOTHED_YEARS = 10.0  # fewer leave so much weather in a day's mean that it is too weak a baseline
_SHORT_YEARS = 5.0
# the largest ratio of the normal equations' eigenvalues; a whole year has 1, half a year about 60, a quarter 3000
_WORST_CONDITION = 1000.0


@dataclass(frozen=True)
class Climatology:
    """Expected fields by time of the year.

    Attributes:
        names: the channels, C of them.
        calendar: CF calendar of the times it is asked for.
        kind: ``harmonic`` (1, cos, sin, cos 2, ... of the year's fraction) or ``table`` (K equal parts of the year).
        fields: (T, K, C, H, W) float32; T is the number of times of the day, 1 where they are not told apart.
        day_minutes: (T,) minutes of the UTC day, or empty where they are not told apart.
        description: method and period in words, for reports.
        years: length of the period in years, NaN where unknown.
    """

    names: tuple[str, ...]
    calendar: str
    kind: str
    fields: np.ndarray
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
        table = self.fields[self._time_of_day(minutes)]
        fraction = float(self._clock.year_fraction(np.array(minutes)))
        if self.kind == "harmonic":
            return np.tensordot(_harmonics(fraction, len(table)).astype(np.float32), table, axes=1)
        position = fraction * len(table) - 0.5
        below = int(np.floor(position))
        share = np.float32(position - below)
        return (1 - share) * table[below % len(table)] + share * table[(below + 1) % len(table)]

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

    def select(self, names: Sequence[str]) -> Climatology:
        """Return the climatology of some channels, in the order of `names`."""
        index = [self.names.index(name) for name in names]
        return Climatology(
            tuple(names), self.calendar, self.kind, self.fields[:, :, index], self.day_minutes, self.description,
            self.years,
        )  # fmt: skip

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


def fit_climatology(
    reader: FieldReader,
    channel_names: Sequence[str],
    first_minutes: int,
    last_minutes: int,
    method: str = "harmonic",
    harmonics: int = 1,
    window_days: int = 61,
    by_hour: bool = False,
) -> Climatology:
    """Fit a climatology in one pass over a period.

    Args:
        reader: the data.
        channel_names: stored channels to fit.
        first_minutes: first time of the period.
        last_minutes: last time of the period.
        method: ``harmonic``, least squares of the mean and `harmonics` waves of the year in every cell; or ``window``,
            means over `window_days` around each day of the year.
        harmonics: number of waves.
        window_days: width of the window; 1 is the unsmoothed mean of each day.
        by_hour: fit each time of the UTC day by itself.

    Raises:
        ConfigError: if the period cannot carry the method.
    """
    inside = np.flatnonzero((reader.times >= first_minutes) & (reader.times <= last_minutes))
    if not len(inside):
        raise ConfigError("data.splits.train: the data have no time in it, so there is no climatology")
    times = reader.times[inside]
    years = (times[-1] - times[0]) / _MINUTES_A_YEAR
    fractions = reader.clock.year_fraction(times)
    if method == "harmonic":
        kind, weights = "harmonic", _harmonics(fractions, 2 * harmonics + 1)
        what = f"{harmonics} annual harmonic{'s' if harmonics != 1 else ''}" if harmonics else "mean"
    else:
        assert method == "window", method
        kind, weights = "table", _window_weights(fractions, window_days, years)
        what = f"moving mean of {window_days} days" if window_days > 1 else "mean of each day of the year"
    day_minutes = np.unique(times % 1440) if by_hour else np.empty(0, dtype=np.int64)
    group = np.searchsorted(day_minutes, times % 1440) if by_hour else np.zeros(len(times), dtype=np.int64)
    sums = _accumulate(reader, channel_names, inside, weights, group)
    solve = _solve_harmonics if method == "harmonic" else _divide_counts
    fields = np.stack([solve(sums[g], weights[group == g], reader, times) for g in range(len(sums))])
    period = f"{reader.clock.format(times[0])[:10]} to {reader.clock.format(times[-1])[:10]}"
    description = f"{what}{', by time of the day' if by_hour else ''}, {period}"
    return Climatology(
        tuple(channel_names), reader.clock.calendar, kind, fields.astype(np.float32), day_minutes, description,
        float(years),
    )  # fmt: skip


def _harmonics(fraction: np.ndarray | float, count: int) -> np.ndarray:
    """Return 1, cos, sin, cos 2, sin 2, ... of the year's fraction, (..., count) float64."""
    angle = 2.0 * np.pi * np.asarray(fraction, dtype=np.float64)
    columns = [np.ones_like(angle)]
    for wave in range(1, (count + 1) // 2):
        columns += [np.cos(wave * angle), np.sin(wave * angle)]
    return np.stack(columns, axis=-1)


def _window_weights(fractions: np.ndarray, window_days: int, years: float) -> np.ndarray:
    """Return which times each part of the year averages, (N, K) of 0 and 1."""
    if window_days == 1 and years < _UNSMOOTHED_YEARS - 0.1:
        raise ConfigError(
            f"verification.climatology.window_days: 1 (unsmoothed) needs at least {_UNSMOOTHED_YEARS:g} years of "
            f"training data, there are {years:.1f}; take method: harmonic or a window of about 61 days"
        )
    # parts a twelfth of the window long lose nothing that the window has left
    parts = round(365.2422 / max(1.0, window_days / 12.0))
    centres = (np.arange(parts) + 0.5) / parts
    distance = np.abs(np.mod(fractions[:, None] - centres + 0.5, 1.0) - 0.5)
    return (distance <= 0.5 * window_days / 365.2422).astype(np.float64)


def _accumulate(
    reader: FieldReader, names: Sequence[str], inside: np.ndarray, weights: np.ndarray, group: np.ndarray
) -> np.ndarray:
    """Return the weighted sums of the fields, (T, K, C, H, W) float64, from one read of each time."""
    stored = [channel.name for channel in reader.channels.stored]
    index = [stored.index(name) for name in names]
    sums = np.zeros((group.max() + 1, weights.shape[1], len(names), *reader.grid.shape))
    for position, row, member in zip(tqdm(inside, "climatology", disable=None), weights, group, strict=True):
        values = reader.read(int(position))[index].astype(np.float64)
        for part in np.flatnonzero(row):
            sums[member, part] += row[part] * values
    return sums


def _solve_harmonics(sums: np.ndarray, weights: np.ndarray, reader: FieldReader, times: np.ndarray) -> np.ndarray:
    gram = weights.T @ weights
    scale = np.sqrt(np.diag(gram))
    if len(weights) < weights.shape[1] or np.linalg.cond(gram / np.outer(scale, scale)) > _WORST_CONDITION:
        clock = reader.clock
        raise ConfigError(
            f"verification.climatology.harmonics: {(weights.shape[1] - 1) // 2} cannot be fitted to {len(weights)} "
            f"times from {clock.format(times[0])} to {clock.format(times[-1])}, too small a part of the year; "
            "set it to 0 (the mean) or train on a longer period"
        )
    return np.tensordot(np.linalg.inv(gram), sums, axes=1)


def _divide_counts(sums: np.ndarray, weights: np.ndarray, reader: FieldReader, times: np.ndarray) -> np.ndarray:
    counts = weights.sum(axis=0)
    if (counts == 0).any():
        missing = int(np.flatnonzero(counts == 0)[0] / len(counts) * 365) + 1
        raise ConfigError(
            f"verification.climatology: the training period has no time around day {missing} of the year; "
            "take method: harmonic or a wider window"
        )
    return sums / counts[:, None, None, None]


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
