"""What the metadata of a forecast's file or store say: its fields, levels, members, lead times and grid."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import netCDF4
import numpy as np
import xarray as xr

from credit.data.formats.cf import level_values, role_of
from credit.errors import DataError, did_you_mean
from credit.forecast.io.schema import HISTORY, run_attributes
from credit.grid import LatLonGrid

_LAT_NAMES, _LON_NAMES = ("latitude", "lat"), ("longitude", "lon")
_MEMBER_NAMES = ("member", "number", "realization")
_NO_LEVEL = (
    "is no level: the coordinate of a level has the standard_name air_pressure, axis: Z or positive: down, in units of "
    "pressure, or a name such as level, plev or isobaricInhPa; give it one of these"
)
_MINUTES = {
    **dict.fromkeys(("d", "day", "days"), 1440.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 60.0),
    **dict.fromkeys(("min", "minute", "minutes"), 1.0),
    **dict.fromkeys(("s", "second", "seconds"), 1 / 60),
    **dict.fromkeys(("ms", "milliseconds"), 1 / 60e3),
    **dict.fromkeys(("us", "microseconds"), 1 / 60e6),
    **dict.fromkeys(("ns", "nanoseconds"), 1 / 60e9),
}

logger = logging.getLogger(__name__)


class ForecastMetadata:
    """What the metadata of one file or store say.

    Fields are the variables with the dimensions `leading`, latitude and longitude, and perhaps a member and a level, in
    any order. In an ensemble those that have no member are none: taken for all members alike, a mean or a control run
    would be scored as an ensemble without spread.

    Args:
        source: the file or store.
        leading: the dimensions of initial and lead time.
        lead: the lead times.
        rename: our name of a variable -> its name there.
        level_units: of the levels in the names of channels; None for those of the file.
        warn: of variables that are left out; said once is enough where a forecast is in many files.
    """

    def __init__(
        self, source: Source, leading: tuple[str, ...], lead: str, rename: Mapping[str, str],
        level_units: str | None = None, warn: bool = True,
    ) -> None:  # fmt: skip
        origin = source.origin
        lat, lon = (source.first_of(names) for names in (_LAT_NAMES, _LON_NAMES))
        self.grid, self.orientation = LatLonGrid.from_coords(source.values(lat), source.values(lon), origin=str(origin))
        self.lead_minutes = _lead_minutes(source, lead)
        self.attributes = {name: value for name, value in source.attributes.items() if name != HISTORY}
        ours = _our_names(source, rename)
        needed = {*leading, lat, lon}
        others = _OtherDims(source, needed, level_units)
        wanted = f"{', '.join((*leading, lat, lon))} and perhaps a member ({' or '.join(_MEMBER_NAMES)}) and a level"
        self.variables: dict[str, tuple[str, ...]] = {}  # name there -> dimensions
        for name in ours:
            dims = source.dims(name)
            why = others.unfit([dim for dim in dims if dim not in needed]) if needed <= set(dims) else ""
            if why is None:
                self.variables[name] = dims
            elif why or name in rename.values():
                problem = f"{origin}: {name} has the dimensions {', '.join(dims)}, but a forecast has {wanted}{why}"
                if name in rename.values():
                    raise DataError(f"{problem}; cut the store to one position along the others, or rename another")
                if warn:
                    logger.warning("%s; it is left out", problem)
        if not self.variables:
            raise DataError(
                f"{origin}: no variable has the dimensions {wanted}; there are {', '.join(source.all_dims)}{others.why}"
            )
        self._leave_out_memberless(origin, rename, warn)
        used = sorted({dim for dims in self.variables.values() for dim in dims} - needed)
        members, levels = ([dim for dim in used if (dim in others.levels) == is_level] for is_level in (False, True))
        self.order = (*members, *levels, lat, lon)
        self.members = source.length(members[0]) if members else None
        self.units = {ours[n]: u for n in self.variables if (u := source.variable_attributes(n).get("units"))}
        dims_of = {ours[name]: dims for name, dims in self.variables.items()}
        self.flat_names = frozenset(name for name, dims in dims_of.items() if not {*dims} & others.levels.keys())
        self.channel_names = _channel_names(dims_of, self.flat_names, others.levels)

    def _leave_out_memberless(self, origin: Path | str, rename: Mapping[str, str], warn: bool) -> None:
        """Leave out the variables of an ensemble that lack its dimension."""
        has = {dim: [name for name, dims in self.variables.items() if dim in dims] for dim in _MEMBER_NAMES}
        member = max(has, key=lambda dim: len(has[dim]))
        without = [name for name in self.variables if name not in has[member]] if has[member] else []
        for name in without:
            problem = (
                f"{origin}: {name} has no dimension {member}, unlike {has[member][0]}: it may be a mean or a control"
            )
            if name in rename.values():
                raise DataError(f"{problem}; rename another, or repeat it along {member} if it is of every member")
            if warn:
                logger.warning("%s; it is left out", problem)
            del self.variables[name]

    def difference(self, other: ForecastMetadata) -> str | None:
        """Return in words how another file differs but for its lead times, None where it fits."""
        if self.members != other.members:
            return "has another number of members"
        if self.channel_names != other.channel_names:
            return "has other variables or levels"
        # a run that a new version of the package continued, or whose files a tool has looked at, is one run
        own, others = run_attributes(self.attributes), run_attributes(other.attributes)
        if own != others:
            changed = {k for k in {*own, *others} if own.get(k) != others.get(k)}
            return f"is of another run (global attributes {', '.join(sorted(changed))})"
        return self.grid.describe_mismatch(other.grid)


class Source:
    """The few things that are asked of a netCDF file or a zarr store."""

    def __init__(
        self, origin: Path | str, variables: Mapping[str, netCDF4.Variable] | Mapping[str, xr.Variable],
        attributes: Mapping[str, object],
    ) -> None:  # fmt: skip
        self.origin = origin
        self.names = list(variables)
        # arrays as lists, which are equal or not
        self.attributes = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in attributes.items()}
        self._variables = variables

    @property
    def all_dims(self) -> list[str]:
        """Names of all dimensions."""
        return sorted({dim for name in self.names for dim in self.dims(name)})

    def values(self, name: str) -> np.ndarray:
        """Return a variable.

        Raises:
            DataError: if it cannot be read.
        """
        try:
            return np.asarray(self._variables[name][...])
        except Exception as error:
            # each file system's library has its own errors
            raise DataError(f"{self.origin}: {name} cannot be read ({error}); copy or forecast it again") from error

    def dims(self, name: str) -> tuple[str, ...]:
        """Return its dimensions."""
        variable = self._variables[name]
        return variable.dims if isinstance(variable, xr.Variable) else variable.dimensions

    def length(self, dim: str) -> int:
        """Return how many positions a dimension has."""
        name = next(name for name in self.names if dim in self.dims(name))
        return self._variables[name].shape[self.dims(name).index(dim)]

    def variable_attributes(self, name: str) -> dict:
        """Return its attributes."""
        variable = self._variables[name]
        return variable.attrs if isinstance(variable, xr.Variable) else variable.__dict__

    def coordinate(self, dim: str) -> xr.Variable | None:
        """Return the coordinate of a dimension, None where it has none."""
        if dim not in self.names or self.dims(dim) != (dim,):
            return None
        return xr.Variable((dim,), self.values(dim), self.variable_attributes(dim))

    def first_of(self, names: Iterable[str]) -> str:
        """Return the first of `names` that there is."""
        for name in names:
            if name in self.names:
                return name
        raise DataError(f"{self.origin}: has no coordinate {' or '.join(names)}")


class _OtherDims:
    """The dimensions beside times, latitude and longitude.

    Attributes:
        levels: level dimension -> level values and units, as in names of channels.
        why: why others are no levels, in words that go on a sentence; empty where there are none.
    """

    def __init__(self, source: Source, needed: set[str], level_units: str | None) -> None:
        self.levels: dict[str, tuple[np.ndarray, str]] = {}
        reasons = {}
        for dim in sorted({*source.all_dims} - {*needed, *_MEMBER_NAMES}):
            coordinate = source.coordinate(dim)
            if coordinate is None:
                reasons[dim] = "has no coordinate"
            elif not dim.startswith("level") and role_of(dim, coordinate) != "level":
                reasons[dim] = _NO_LEVEL
            else:
                try:
                    self.levels[dim] = _levels(coordinate, dim, level_units, source.origin)
                except DataError as error:
                    reasons[dim] = f"is no level of the data ({error})"
        self._reasons = reasons
        self.why = "".join(f"; {dim} {reason}" for dim, reason in reasons.items())

    def unfit(self, dims: Sequence[str]) -> str | None:
        """Return why a variable with these dimensions is no field, None where it is one."""
        bad = [f"; {dim} {self._reasons[dim]}" for dim in dims if dim in self._reasons]
        if bad:
            return "".join(bad)
        levels = [dim for dim in dims if dim in self.levels]
        return None if len(levels) < 2 and len(dims) - len(levels) < 2 else "; one of each"


def _levels(coordinate: xr.Variable, dim: str, wanted: str | None, origin: Path | str) -> tuple[np.ndarray, str]:
    """Return level values and their units: as they are, or in `wanted`."""
    if wanted is not None:
        return level_values(coordinate, dim, wanted, str(origin)), wanted
    units = str(coordinate.attrs.get("units", "hPa"))
    return coordinate.values, "model_level" if units == "1" else units


def _our_names(source: Source, rename: Mapping[str, str]) -> dict[str, str]:
    """Return name there -> our name, of all variables but those whose name another one is given."""
    for ours, theirs in rename.items():
        if theirs not in source.names:
            raise DataError(
                f"{source.origin}: has no variable {theirs} (rename: {ours}){did_you_mean(theirs, source.names)}"
            )
    renamed = {theirs: ours for ours, theirs in rename.items()}
    return {name: renamed.get(name, name) for name in source.names if name in renamed or name not in rename}


def _lead_minutes(source: Source, name: str) -> np.ndarray:
    if name not in source.names:
        raise DataError(f"{source.origin}: has no lead times ({name})")
    values = source.values(name)
    if values.dtype.kind == "m":
        return values.astype("timedelta64[m]").astype(np.int64)
    units = str(source.variable_attributes(name).get("units", "hours"))
    if units not in _MINUTES:
        raise DataError(f'{source.origin}: {name} is in "{units}", needs one of {", ".join(_MINUTES)}')
    return np.rint(values.astype(np.float64) * _MINUTES[units]).astype(np.int64)


def _channel_names(
    variables: Mapping[str, tuple[str, ...]], flat: Collection[str], levels: Mapping[str, tuple[np.ndarray, str]]
) -> list[str]:
    """Return names made as `credit.channels.ChannelMap` makes them, of name -> dimensions; `flat` lack levels."""
    names = []
    for name, dims in variables.items():
        if name in flat:
            names.append(name)
            continue
        values, units = next(levels[dim] for dim in dims if dim in levels)
        for level in values:
            short = f"{name}{level:g}"
            names.append(f"{short}{units}" if short in flat else short)
    return names
