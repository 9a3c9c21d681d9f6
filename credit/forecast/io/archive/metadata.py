"""Metadata of a file or store of forecasts: fields, levels, members, lead times and grid."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import xarray as xr

from credit.data.formats.cf import find_role, read_level_values
from credit.errors import DataError, did_you_mean
from credit.forecast.io.archive.stored_variables import StoredVariables
from credit.forecast.io.archive.time_windows import read_windows
from credit.forecast.io.schema import HISTORY, select_run_attributes
from credit.grid import LatLonGrid

_LAT_NAMES = ("latitude", "lat")
_LON_NAMES = ("longitude", "lon")
_MEMBER_NAMES = ("member", "number", "realization")
_NO_LEVEL_REASON = (
    "is not a level: the coordinate of a level has the standard_name air_pressure, axis: Z or positive: down, in units "
    "of pressure, or a name such as level, plev or isobaricInhPa; give the coordinate one of these properties"
)
# Unit of lead times -> its length in minutes.
_MINUTES_PER_UNIT = {
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
    """Metadata of one forecast file or store.

    A variable is a field if it has the dimensions `leading`, latitude and longitude, in any order. It may also have a
    member dimension and a level dimension, but no further dimensions. Variables that are not fields are skipped. In an
    ensemble, fields without the member dimension are also skipped. Such a field may be an ensemble mean or a control
    forecast, and would be scored as an ensemble without spread.

    Args:
        source: variables and attributes of the file or store.
        leading: names of the time dimensions that every field has.
        lead: name of the variable with the lead times.
        rename: name of a variable in this package -> its name in the source.
        level_units: units to which the levels are converted (hPa, Pa or model_level); None to keep the source's units.
        warn: True to log a warning about skipped variables. For a folder of files, set it for one file only.

    Attributes:
        grid: grid in canonical orientation.
        orientation: order of rows and columns in the source, which converts its fields to `grid`.
        lead_minutes: lead times in minutes, int64.
        attributes: global attributes without the history.
        variables: name of a field in the source -> names of its dimensions, in the stored order.
        dim_order: names of the dimensions of fields other than `leading`: member, level, latitude, longitude.
        members: number of ensemble members; None without a member dimension.
        units: name of a variable in this package -> its units; a variable with unknown units has no entry.
        cell_methods: name of a variable in this package -> CF cell methods, for example ``time: sum``; a variable
            without cell methods has no entry.
        descriptions: name of a variable in this package -> attributes ``standard_name`` and ``long_name``.
        windows: for the name of each sum or mean in this package, a mapping from lead time to the length of the window
            that ends at this lead time, both in minutes. The inner mapping is empty if the windows are unknown.
        level_units: units of the levels; empty without levels.
        names_without_levels: names in this package of the variables without levels.
        channel_names: names of the channels, such as ``z500`` and ``t2m``.
        channel_levels: name of a channel -> (name of its variable in this package, level); the level is None for a
            variable without levels.
        channel_positions: name of a channel -> (name of its variable in the source, {level dimension: index}); the dict
            is empty for a variable without levels.

    Raises:
        DataError: if a coordinate is missing, a renamed variable is not a field, or no variable is a field.
    """

    def __init__(
        self,
        source: StoredVariables,
        leading: tuple[str, ...],
        lead: str,
        rename: Mapping[str, str],
        level_units: str | None = None,
        warn: bool = True,
    ) -> None:
        origin = source.origin
        lat = source.find_first(_LAT_NAMES)
        lon = source.find_first(_LON_NAMES)
        self.grid, self.orientation = LatLonGrid.from_coords(source.values(lat), source.values(lon), origin=str(origin))
        self.lead_minutes = _read_lead_minutes(source, lead)
        self.attributes = {name: value for name, value in source.attributes.items() if name != HISTORY}
        new_names = _rename_variables(source, rename)
        # The variables that are fields.
        required_dims = {*leading, lat, lon}
        level_dims_finder = _LevelDimsFinder(source, required_dims, level_units)
        self.variables = _find_fields(source, new_names, (*leading, lat, lon), level_dims_finder, rename, warn)
        self._drop_fields_without_members(origin, rename, warn)

        # The dimensions of fields other than times, latitude and longitude.
        further_dims = {dim for dims in self.variables.values() for dim in dims} - required_dims
        level_dims = further_dims.intersection(level_dims_finder.levels)
        member_dims = further_dims - level_dims
        self.dim_order = (*sorted(member_dims), *sorted(level_dims), lat, lon)
        self.members = None
        if member_dims:
            self.members = source.length(min(member_dims))
        # Units and names, under the names in this package.
        self.units = {}
        self.cell_methods = {}
        self.descriptions = {}
        self.windows: dict[str, dict[int, int]] = {}
        for name in self.variables:
            attributes = source.variable_attributes(name)
            new_name = new_names[name]
            if attributes.get("units"):
                self.units[new_name] = attributes["units"]
            if attributes.get("cell_methods"):
                self.cell_methods[new_name] = attributes["cell_methods"]
            # Instants and sums share the time coordinate, but its bounds apply only to sums and means.
            if re.search(r"time: (sum|mean)", attributes.get("cell_methods", "")):
                self.windows[new_name] = read_windows(source, name, leading, self.lead_minutes, _MINUTES_PER_UNIT)
            self.descriptions[new_name] = {key: attributes.get(key, "") for key in ("standard_name", "long_name")}
        dims_by_name = {new_names[name]: dims for name, dims in self.variables.items()}
        self.names_without_levels = frozenset(
            name for name, dims in dims_by_name.items() if level_dims.isdisjoint(dims)
        )
        levels = level_dims_finder.levels
        self.level_units = next((levels[dim][1] for dim in sorted(level_dims)), "")
        self.channel_levels = _list_channels(dims_by_name, self.names_without_levels, levels)
        self.channel_names = list(self.channel_levels)
        source_names = {new_names[name]: name for name in self.variables}
        self.channel_positions: dict[str, tuple[str, dict[str, int]]] = {}
        for channel, (variable, level) in self.channel_levels.items():
            level_dim = level_dims.intersection(dims_by_name[variable])
            position = {dim: levels[dim][0].tolist().index(level) for dim in level_dim}
            self.channel_positions[channel] = (source_names[variable], position)

    def _drop_fields_without_members(self, origin: Path | str, rename: Mapping[str, str], warn: bool) -> None:
        """Remove fields without a member dimension from `variables`, if other fields have a member dimension.

        Args:
            origin: file, store or URL, for messages.
            rename: name of a variable in this package -> its name in the source.
            warn: True to log a warning about removed fields.

        Raises:
            DataError: if a field in `rename` lacks the member dimension.
        """
        # Among the possible names of the member dimension, choose the name that most variables have.
        names_with_member: list[str] = []
        member = ""
        for dim in _MEMBER_NAMES:
            names = [name for name, dims in self.variables.items() if dim in dims]
            if len(names) > len(names_with_member):
                names_with_member = names
                member = dim
        if not names_with_member:
            return
        # A variable in `rename` was requested by the user, so skipping it is an error.
        for name in list(self.variables):
            if name in names_with_member:
                continue
            problem = (
                f"{origin}: {name} has no dimension {member}, unlike {names_with_member[0]}: it may be a mean or a "
                "control"
            )
            if name in rename.values():
                raise DataError(f"{problem}; rename a different variable, or repeat this variable along {member}")
            if warn:
                logger.warning("%s; it is skipped", problem)
            del self.variables[name]

    def describe_mismatch(self, other: ForecastMetadata) -> str | None:
        """Return the first difference from the metadata of a second file; None if both files may be of the same run.

        The result continues a message that names the second file, such as "has a different number of members". Files of
        one run may have different lead times.
        """
        if self.members != other.members:
            return "has a different number of members"
        if self.channel_names != other.channel_names:
            return "has different variables or levels"
        # Attributes that depend only on the version of the package or a tool are ignored.
        attributes = select_run_attributes(self.attributes)
        other_attributes = select_run_attributes(other.attributes)
        if attributes != other_attributes:
            names = {*attributes, *other_attributes}
            changed = sorted(name for name in names if attributes.get(name) != other_attributes.get(name))
            return f"is of a different run (global attributes {', '.join(changed)})"
        return self.grid.describe_mismatch(other.grid)


class _LevelDimsFinder:
    """Finder of the level dimensions among the dimensions other than time, latitude, longitude and member.

    Args:
        source: variables of the file or store.
        required_dims: names of the dimensions of time, latitude and longitude.
        level_units: units to which the levels are converted; None to keep the source's units.

    Attributes:
        levels: name of a level dimension -> (level values, units); the names of channels contain the level values.
        reasons_text: end of an error message with the reasons why dimensions are not levels; empty if all dimensions
            are levels.
    """

    def __init__(self, source: StoredVariables, required_dims: set[str], level_units: str | None) -> None:
        self.levels: dict[str, tuple[np.ndarray, str]] = {}
        # Dimension -> reason why it is not a level.
        self._reasons: dict[str, str] = {}
        for dim in sorted({*source.all_dims} - {*required_dims, *_MEMBER_NAMES}):
            coordinate = source.coordinate(dim)
            if coordinate is None:
                self._reasons[dim] = "has no coordinate"
            elif not dim.startswith("level") and find_role(dim, coordinate) != "level":
                self._reasons[dim] = _NO_LEVEL_REASON
            else:
                try:
                    self.levels[dim] = _read_levels(coordinate, dim, level_units, source.origin)
                except DataError as error:
                    self._reasons[dim] = f"is not a level of the data ({error})"
        self.reasons_text = "".join(f"; {dim} {reason}" for dim, reason in self._reasons.items())

    def describe_misfit(self, dims: Sequence[str]) -> str | None:
        """Return the reason why a variable is not a field; None if it is a field.

        Args:
            dims: names of the variable's dimensions other than time, latitude and longitude.

        Returns:
            The end of an error message, beginning with "; ".
        """
        text = ""
        for dim in dims:
            if dim in self._reasons:
                text += f"; {dim} {self._reasons[dim]}"
        if text:
            return text
        num_levels = sum(dim in self.levels for dim in dims)
        num_members = len(dims) - num_levels
        if num_levels > 1 or num_members > 1:
            return "; at most one of each"
        return None


def _find_fields(
    source: StoredVariables,
    names: Collection[str],
    required_dims: tuple[str, ...],
    level_dims_finder: _LevelDimsFinder,
    rename: Mapping[str, str],
    warn: bool,
) -> dict[str, tuple[str, ...]]:
    """Return the variables that are forecast fields (see `ForecastMetadata`), with their dimensions.

    Args:
        source: variables of the file or store.
        names: names of the variables to consider, in the source.
        required_dims: names of the dimensions of time, latitude and longitude, which every field has.
        level_dims_finder: finder of the level dimensions of the source.
        rename: name of a variable in this package -> its name in the source.
        warn: True to log a warning about variables with the required dimensions that are not fields.

    Returns:
        Name of each field in the source -> names of its dimensions.

    Raises:
        DataError: if a variable in `rename` is not a field, or no variable is a field.
    """
    dims_text = ", ".join(required_dims)
    rule = f"{dims_text} and perhaps a member ({' or '.join(_MEMBER_NAMES)}) and a level"
    variables = {}
    for name in names:
        dims = source.dims(name)
        is_renamed = name in rename.values()
        reason: str | None = ""
        if set(required_dims) <= set(dims):
            further_dims = [dim for dim in dims if dim not in required_dims]
            reason = level_dims_finder.describe_misfit(further_dims)
            if reason is None:
                variables[name] = dims
                continue
        # Coordinates and other variables without the dimensions of a field are skipped without a warning.
        if not reason and not is_renamed:
            continue
        problem = f"{source.origin}: {name} has the dimensions {', '.join(dims)}, but a forecast has {rule}{reason}"
        if is_renamed:
            raise DataError(f"{problem}; select one index along the other dimensions, or rename another variable")
        if warn:
            logger.warning("%s; it is skipped", problem)
    if not variables:
        raise DataError(
            f"{source.origin}: no variable has the dimensions {rule}; there are {', '.join(source.all_dims)}"
            f"{level_dims_finder.reasons_text}"
        )
    return variables


def _read_levels(
    coordinate: xr.Variable, dim: str, level_units: str | None, origin: Path | str
) -> tuple[np.ndarray, str]:
    """Return the values of a level dimension and their units.

    Args:
        coordinate: coordinate variable of the levels.
        dim: name of the level dimension.
        level_units: units to which the values are converted; None to keep the source's units.
        origin: file, store or URL, for messages.

    Raises:
        DataError: if the values cannot be converted to `level_units`.
    """
    if level_units is not None:
        return read_level_values(coordinate, dim, level_units, str(origin)), level_units
    units = str(coordinate.attrs.get("units", "hPa"))
    return coordinate.values, "model_level" if units == "1" else units


def _rename_variables(source: StoredVariables, rename: Mapping[str, str]) -> dict[str, str]:
    """Return a mapping from the name of each variable in the source to its name in this package.

    If `rename` gives a variable the name of another variable in the source, that other variable is omitted.

    Args:
        source: variables of the file or store.
        rename: name of a variable in this package -> its name in the source.

    Raises:
        DataError: if a variable in `rename` does not exist in the source.
    """
    for name, source_name in rename.items():
        if source_name not in source.names:
            raise DataError(
                f"{source.origin}: has no variable {source_name} (rename: {name})"
                f"{did_you_mean(source_name, source.names)}"
            )
    renamed = {source_name: name for name, source_name in rename.items()}
    new_names = {}
    for name in source.names:
        if name in renamed or name not in rename:
            new_names[name] = renamed.get(name, name)
    return new_names


def _read_lead_minutes(source: StoredVariables, name: str) -> np.ndarray:
    """Return the lead times in minutes, int64.

    Args:
        source: variables of the file or store.
        name: name of the variable with the lead times.

    Raises:
        DataError: if there is no such variable, or its units are unknown.
    """
    if name not in source.names:
        raise DataError(f"{source.origin}: has no lead times ({name})")
    values = source.values(name)
    if values.dtype.kind == "m":
        return values.astype("timedelta64[m]").astype(np.int64)
    units = str(source.variable_attributes(name).get("units", "hours"))
    if units not in _MINUTES_PER_UNIT:
        raise DataError(
            f'{source.origin}: {name} has the unknown units "{units}"; valid units are {", ".join(_MINUTES_PER_UNIT)}'
        )
    return np.rint(values.astype(np.float64) * _MINUTES_PER_UNIT[units]).astype(np.int64)


def _list_channels(
    variables: Mapping[str, tuple[str, ...]],
    names_without_levels: Collection[str],
    levels: Mapping[str, tuple[np.ndarray, str]],
) -> dict[str, tuple[str, float | None]]:
    """Return a mapping from channel to (variable, level). The names follow the rules of `credit.channels.ChannelMap`.

    Args:
        variables: name of a variable in this package -> names of its dimensions.
        names_without_levels: names of the variables without levels.
        levels: name of a level dimension -> level values and units.
    """
    channels: dict[str, tuple[str, float | None]] = {}
    for name, dims in variables.items():
        if name in names_without_levels:
            channels[name] = (name, None)
            continue
        values, units = next(levels[dim] for dim in dims if dim in levels)
        for level in values:
            channel_name = f"{name}{level:g}"
            # A variable without levels may have the same name: u10 is the wind at 10 m, and u at 10 hPa.
            if channel_name in names_without_levels:
                channel_name += units
            channels[channel_name] = (name, float(level))
    return channels
