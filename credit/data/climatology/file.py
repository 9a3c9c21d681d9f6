"""A climatology in a file or a zarr store, laid out as WeatherBench 2 publishes its own.

Each variable has the dimensions ``dayofyear`` (1, 2, ... to the end of the longest year), latitude and longitude, and
may have ``hour`` and a level, in any order. What else the file has, such as standard deviations, is not looked at. A
time has the values of its day of the year and hour, as in WeatherBench 2's evaluation: nothing is interpolated, and the
first of March is day 60 or, in a leap year, 61.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.config.schema_data import DataConfig
from credit.config.schema_source import SourceConfig
from credit.config.schema_verification import ClimatologyConfig
from credit.data.climatology.climatology import KEPT_BYTES, Climatology, LazyFields
from credit.data.formats.cf import Coordinates, level_values, match_levels
from credit.data.formats.files import expand_path, open_file
from credit.data.formats.units import Conversion, find_conversion
from credit.errors import DataError, did_you_mean
from credit.grid import AxisOrder, LatLonGrid

if TYPE_CHECKING:
    from credit.channels import Channel

logger = logging.getLogger(__name__)

_KEY = "verification.climatology"
_DAY, _HOUR = "dayofyear", "hour"
_LONGEST_YEAR = {"360_day": 360, "noleap": 365}
_MOST_DAYS_A_CHUNK = 31


def load_climatology(
    conf: ClimatologyConfig,
    data: DataConfig,
    channels: Sequence[Channel],
    calendar: Calendar,
    attributes: Mapping[str, Mapping[str, str]],
    grid: LatLonGrid | None,
) -> tuple[Climatology, LatLonGrid]:
    """Open the climatology of ``verification.climatology.path``; its fields are read when they are asked for.

    Args:
        conf: path, and names in the file where they are not those of the data.
        data: names in the sources, which the file may share; units of levels.
        channels: the channels that are wanted; levels must be there exactly.
        calendar: calendar of the times it will be asked for.
        attributes: variable -> attributes of the data, to whose units the file's are converted.
        grid: the grid that it must be on, up to orientation; None where its fields will be brought to another.

    Returns:
        The climatology and the grid that its fields are on.

    Raises:
        DataError: naming the file and what it lacks.
    """
    paths = expand_path(conf.path, f"{_KEY}.path")
    if len(paths) > 1:
        raise DataError(f"{_KEY}.path: {conf.path} stands for {len(paths)} files; name one that has every variable")
    path = paths[0]
    dataset = open_file(path, SourceConfig(path=str(path), storage_options=conf.storage_options))
    file = _File(dataset, str(path), conf, data, attributes)
    days, hours = file.days(calendar.name), file.hours()
    by_variable: dict[str, list[int]] = {}
    for place, channel in enumerate(channels):
        by_variable.setdefault(channel.variable, []).append(place)
    found = [file.find(name, places, channels) for name, places in by_variable.items()]
    own = found[0].grid
    for each in found:
        if difference := own.describe_mismatch(each.grid):
            raise DataError(f"{path}: its variables are on different grids: {difference}")
    difference = grid.describe_mismatch(own) if grid is not None else None
    if difference:
        raise DataError(
            f"{path}: its grid is not that of the data: {difference}; verification.grid brings both to one, or take a "
            f"file on the data's grid ({_KEY}.path)"
        )
    fields = _lazy((max(1, len(hours)), days, len(channels), *own.shape), found, str(path))
    described = f"file {Path(str(path)).name}"
    names = tuple(channel.name for channel in channels)
    return Climatology(names, calendar.name, "days", fields, hours, described, float("nan")), own


@dataclass(frozen=True)
class _Found:
    """A variable of the file.

    Attributes:
        variable: nothing of it read.
        order: its dimensions level (where it has one), latitude, longitude.
        rows: of its levels that are wanted; None without levels.
        places: of its channels among those that are wanted, in the order of `rows`.
        grid: of the file.
        orientation: brings its fields into the grid's order.
        conversion: to the data's units; None where they are those.
    """

    variable: xr.Variable
    order: tuple[str, ...]
    rows: np.ndarray | None
    places: list[int]
    grid: LatLonGrid
    orientation: AxisOrder
    conversion: Conversion | None

    def read(self, hour: int, day: int | slice) -> np.ndarray:
        """Return the wanted levels of one hour and day, (levels, H, W) float32; of a slice of days with them before."""
        index: dict[str, object] = {_DAY: day} | ({_HOUR: hour} if _HOUR in self.variable.dims else {})
        if self.rows is not None:
            index[self.order[0]] = self.rows
        days = [_DAY] if isinstance(day, slice) else []
        values = self.variable.isel(index).transpose(*days, *self.order).values
        values = self.orientation.apply(values if self.rows is not None else values[..., None, :, :])
        return np.float32(values) if self.conversion is None else self.conversion.apply(values)


class _File:
    """Finds what is wanted in the file."""

    def __init__(
        self, dataset: xr.Dataset, path: str, conf: ClimatologyConfig, data: DataConfig,
        attributes: Mapping[str, Mapping[str, str]],
    ) -> None:  # fmt: skip
        self._dataset, self._path, self._conf, self._data = dataset, path, conf, data
        self._attributes = attributes
        self._coordinates = Coordinates(dataset)

    def days(self, calendar: str) -> int:
        """Return how many days of the year there are."""
        longest = _LONGEST_YEAR.get(calendar, 366)
        values = self._values(_DAY)
        if values is None or not np.array_equal(values, np.arange(1, len(values) + 1)):
            have = "no such coordinate" if values is None else f"{values[0]:g} to {values[-1]:g}, {len(values)} values"
            raise DataError(
                f"{self._path}: a climatology needs the coordinate {_DAY}, 1, 2, ... {longest}, but has {have}; in a "
                "file with times, group them: dataset.groupby('time.dayofyear').mean() of xarray"
            )
        # that of leap years serves a calendar without them; other years have other days
        if len(values) != longest and (len(values) < longest or longest == 360):
            raise DataError(
                f"{self._path}: {_DAY} has {len(values)} days, but the longest year of the data's calendar, "
                f"{calendar}, has {longest}; take a climatology of that calendar ({_KEY}.path)"
            )
        return len(values)

    def hours(self) -> np.ndarray:
        """Return the minutes of the day of its hours, int64; empty where it has none."""
        values = self._values(_HOUR)
        return np.empty(0, dtype=np.int64) if values is None else np.rint(values * 60.0).astype(np.int64)

    def find(self, name: str, places: list[int], channels: Sequence[Channel]) -> _Found:
        """Return where a variable is, with the levels of its channels, which are those at `places`."""
        theirs = self._name(name)
        variable, where = self._dataset.variables[theirs], self._path
        role_of_dim = {dim: self._coordinates.of_dim.get(dim, (None,))[0] for dim in variable.dims}
        dims = {role: dim for dim, role in role_of_dim.items() if role is not None}
        unknown = [dim for dim, role in role_of_dim.items() if role in (None, "time") and dim not in (_DAY, _HOUR)]
        if unknown or not {"lat", "lon"} <= set(dims) or _DAY not in variable.dims:
            raise DataError(
                f"{where}: {theirs} has the dimensions {', '.join(map(str, variable.dims))}; a climatology needs "
                f"{_DAY}, latitude and longitude, and may have {_HOUR} and a level; take a mean, or cut the file to "
                "one position along others"
            )
        if _HOUR in variable.dims and self._values(_HOUR) is None:
            raise DataError(
                f"{where}: {theirs} has the dimension {_HOUR}, but there is no coordinate that says which hours; "
                f"add it, in hours of the day, UTC: dataset.assign_coords({_HOUR}=[0, 6, 12, 18]) of xarray"
            )
        levels, rows = [channels[place].level for place in places], None
        if "level" in dims and levels[0] is not None:
            coordinate = self._coordinates.of_dim[dims["level"]][1]
            have = level_values(self._dataset.variables[coordinate], coordinate, self._data.level_units, where)
            rows = match_levels(have, levels, name, self._data.level_units, where)
            # file access wants increasing rows
            places = [places[number] for number in np.argsort(rows)]
        elif "level" in dims:
            raise DataError(f"{where}: {theirs} lies on levels, but {name} has none; {_KEY}.rename: another variable")
        elif levels[0] is not None:
            raise DataError(f"{where}: {theirs} has no levels, but {channels[places[0]].name} needs one of them")
        grid, orientation = self._coordinates.grid(dims["lat"], dims["lon"], where)
        order = tuple(dims[role] for role in ("level", "lat", "lon") if role in dims)
        rows = None if rows is None else np.sort(rows)
        return _Found(variable, order, rows, places, grid, orientation, self._conversion(name, theirs))

    def _values(self, name: str) -> np.ndarray | None:
        variable = self._dataset.variables.get(name)
        known = variable is not None and variable.dims == (name,) and variable.size > 0
        return np.asarray(variable.values, dtype=np.float64) if known else None

    def _name(self, name: str) -> str:
        """Return what a variable is called here: as the config says, as the data, or as one of their sources."""
        names = [name]
        for source in self._data.sources:
            names += source.names_of(name) if name in source.rename else []
        if name in self._conf.rename:
            names = [self._conf.rename[name]]
        found = next((own for own in names if own in self._dataset.data_vars), None)
        if found is None:
            hint = did_you_mean(names[-1], [str(own) for own in self._dataset.data_vars])
            raise DataError(
                f"{self._path}: has no variable {' or '.join(dict.fromkeys(names))}{hint}; {_KEY}.rename maps {name} "
                "to its name there"
            )
        return found

    def _conversion(self, name: str, theirs: str) -> Conversion | None:
        have = str(self._dataset.variables[theirs].attrs.get("units", ""))
        wanted = str(self._attributes.get(name, {}).get("units", ""))
        if not have.strip():
            logger.warning("%s: %s has no units and is taken to be in %s, as the data", self._path, theirs, wanted)
            return None
        return find_conversion(have, wanted, name, self._path, f"the units of {name} in the data") if wanted else None


def _lazy(shape: tuple[int, int, int, int, int], found: Sequence[_Found], path: str) -> LazyFields:
    """Return the fields: read whole, hour by hour, when they are small, else day by day."""

    def read(hour: int, day: int | slice) -> np.ndarray:
        before = (shape[1],) if isinstance(day, slice) else ()
        fields = np.empty((*before, *shape[2:]), dtype=np.float32)
        try:
            for own in found:
                fields[..., own.places, :, :] = own.read(hour, day)
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"{path}: cannot be read ({error}); copy it again") from error
        return fields

    if 4 * math.prod(shape) <= KEPT_BYTES:
        whole = lru_cache(maxsize=None)(lambda hour: read(hour, slice(None)))
        return LazyFields(shape, lambda hour, day: whole(hour)[day])
    chunk = max(own.variable.encoding.get("preferred_chunks", {}).get(_DAY, 1) for own in found)
    if chunk > _MOST_DAYS_A_CHUNK:
        logger.warning(
            "%s: a chunk has %d days of the year, all of which are read for each; chunks of one day are faster", path,
            chunk,
        )  # fmt: skip
    return LazyFields(shape, read)
