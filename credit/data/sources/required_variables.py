"""Variables required from the files: those of the channels, the inputs of derived ones, and the ground below."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import xarray as xr

from credit.channels import ChannelMap
from credit.config.schema_data import DataConfig
from credit.config.schema_source import SourceConfig
from credit.data.error_collector import ErrorCollector
from credit.data.formats.grib import LEFT_OUT
from credit.data.formats.select import listing
from credit.errors import did_you_mean

FIELD, SURFACE_PRESSURE, SURFACE_GEOPOTENTIAL = "field", "surface_pressure", "surface_geopotential"

Levels = tuple[float, ...] | None


@dataclass(frozen=True)
class VariableRequest:
    """A variable to be found in the files.

    Attributes:
        name: our name of it.
        role: `FIELD` for what gives a variable of the channels its files and times: itself or, where it is derived, the
            first of its inputs; else the role of another input, or one of the ground.
        serves: the variable of the channels; empty for what belongs to the ground.
        levels: of the run; None without levels.
        key: of the config, which asks for it.
    """

    name: str
    role: str
    serves: str
    levels: Levels
    key: str


def required_variables(channels: ChannelMap) -> dict[str, Levels]:
    """Return variable -> its levels (None for a 2-D variable) of everything that comes from data."""
    wanted: dict[str, Levels] = {}
    for channel in channels.stored + channels.static_stored:
        before = wanted.get(channel.variable) or ()
        wanted[channel.variable] = None if channel.level is None else (*before, channel.level)
    return wanted


def list_required_variables(conf: DataConfig) -> list[VariableRequest]:
    """Return everything to be found in the files."""
    wants = []
    for variable, levels in required_variables(conf.channel_map()).items():
        inputs = conf.field(variable).derived_from or {FIELD: variable}
        key = f"data.variable_options.{variable}.inputs" if conf.field(variable).derive else "data.variables"
        for number, (role, name) in enumerate(inputs.items()):
            wants.append(VariableRequest(name, role if number else FIELD, variable, levels, key))
    for number, source in enumerate(conf.sources):
        for role, name in _ground(source).items():
            if name not in [want.name for want in wants if not want.serves]:
                wants.append(VariableRequest(name, role, "", None, f"data.sources.{number}.vertical.{role}"))
    return wants


def variables_in_source(
    source: SourceConfig, wants: Sequence[VariableRequest]
) -> Iterator[tuple[VariableRequest, list[str]]]:
    """Yield each variable that a source is to give, with the names that it may have in the files."""
    for want in wants:
        is_ground = not want.serves and want.name in _ground(source).values()
        if source.variables is None or want.name in source.variables or is_ground:
            yield want, source.names_of(want.name)


def find_names(offers: Sequence[tuple[VariableRequest, list[str]]], names: set[str]) -> dict[VariableRequest, str]:
    """Return what a file gives, each with its name in the file, the first of several.

    Args:
        offers: of its source, see `variables_in_source`.
        names: of the variables in the file.
    """
    in_file = {}
    for want, names_of_want in offers:
        name = next(filter(names.__contains__, names_of_want), None)
        if name is not None:
            in_file[want] = name
    return in_file


def describe_lack(offers: Sequence[tuple[VariableRequest, list[str]]], names: set[str]) -> str:
    """Return why a file with these variables gives nothing."""
    requested_names = [name for _, names_of_want in offers for name in names_of_want]
    present_names = listing(sorted(names)) if names else "no variable with two dimensions"
    return f"it has none of the variables that are read here ({listing(requested_names)}), but {present_names}"


def find_unusable(dataset: xr.Dataset, number: int) -> dict[str, str]:
    """Return variable -> why it cannot be read, for those that are in a file of source `number` all the same."""
    selected = f"data.sources.{number}.select leaves it out: read it from another entry with the same path"
    unusable = dict.fromkeys(dataset.encoding.get(LEFT_OUT, ()), selected)
    for name, variable in dataset.data_vars.items():
        if variable.ndim < 2:
            dims = ", ".join(map(str, variable.dims)) or "none"
            unusable[str(name)] = f"has no latitude and longitude (dimensions: {dims})"
    return unusable


def _ground(source: SourceConfig) -> dict[str, str]:
    """Return role -> variable of what a source says of its ground."""
    if source.vertical is None:
        return {}
    names = {SURFACE_PRESSURE: source.vertical.surface_pressure}
    if source.vertical.surface_geopotential is not None:
        names[SURFACE_GEOPOTENTIAL] = source.vertical.surface_geopotential
    return names


def report_missing(
    conf: DataConfig,
    wants: Sequence[VariableRequest],
    present: Sequence[set[str]],
    unusable: Sequence[Mapping[str, str]],
    problems: ErrorCollector,
) -> None:
    """Note the variables that no file holds, and those that a source promises but does not hold.

    Args:
        conf: the data section.
        wants: what is to be found.
        present: of each source the variables that can be read from its files.
        unusable: of each source the variables of its files that cannot be read -> why not.
        problems: receives what is missing.
    """
    found_names: set[str] = set()
    for number, source in enumerate(conf.sources):
        for want, names in variables_in_source(source, wants):
            if not present[number].isdisjoint(names):
                found_names.add(want.name)
            elif source.variables is not None and want.name in source.variables:
                found_names.add(want.name)
                problems.add(f"data.sources.{number}.variables: {_describe_lack_in(number, names, present, unusable)}")
    for want in wants:
        if want.name not in found_names:
            problems.add(f"{want.key}: {_describe_missing(conf, want, present, unusable)}")


def _describe_lack_in(
    number: int, names: Sequence[str], present: Sequence[set[str]], unusable: Sequence[Mapping[str, str]]
) -> str:
    """Return why a source does not give a variable that it promises, under any of its names in the files."""
    for name in names:
        if name in unusable[number]:
            return f'"{name}" is in its files, but {unusable[number][name]}'
    return f"{_quoted(names)} is not in its files{did_you_mean(names[0], present[number])}"


def _describe_missing(
    conf: DataConfig, want: VariableRequest, present: Sequence[set[str]], unusable: Sequence[Mapping[str, str]]
) -> str:
    """Return why no source gives a variable, and what to do."""
    for number, source in enumerate(conf.sources):
        for name in source.names_of(want.name):
            if name in present[number]:
                return (
                    f'"{name}" is in the files of data.sources.{number}, but data.sources.{number}.variables does not '
                    f"list {want.name}; add it there"
                )
            if name in unusable[number]:
                return f'"{name}" is in the files of data.sources.{number}, but {unusable[number][name]}'
    renaming = [source for source in conf.sources if want.name in source.rename]
    names = renaming[0].names_of(want.name) if renaming else [want.name]
    hint = did_you_mean(names[0], set().union(*present))
    select = "; data.sources.N.select may leave it out" if any(source.select for source in conf.sources) else ""
    return (
        f"{_quoted(names)} is in no file of data.sources{hint} "
        f"(data.sources.N.rename maps our name to that in the files{select})"
    )


def _quoted(names: Sequence[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)
