"""Variables required from the files: those of the channels, the inputs of derived ones, and the ground below."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import xarray as xr

from credit.channels import ChannelMap
from credit.config.sections.data import DataConfig
from credit.config.sections.source import SourceConfig
from credit.data.error_collector import ErrorCollector
from credit.data.formats.grib.dataset import LEFT_OUT
from credit.data.formats.select import format_values
from credit.errors import did_you_mean

FIELD, SURFACE_PRESSURE, SURFACE_GEOPOTENTIAL = "field", "surface_pressure", "surface_geopotential"

Levels = tuple[float, ...] | None


@dataclass(frozen=True)
class VariableRequest:
    """A variable to be found in the files.

    Attributes:
        name: its name in the run.
        role: `FIELD` for the variable that decides the files and times of a channel's variable: itself or, if that is
            derived, the first of its inputs; else the role of another input, or of a field of the ground.
        target_variable: the variable of the channels; empty for a field of the ground.
        levels: levels of the run; None without levels.
        key: config key that requires it.
    """

    name: str
    role: str
    target_variable: str
    levels: Levels
    key: str


def find_required_levels(channels: ChannelMap) -> dict[str, Levels]:
    """Return variable -> its levels (None for a 2-D variable), for everything that is read from data."""
    levels: dict[str, Levels] = {}
    for channel in channels.stored + channels.static_stored:
        if channel.level is None:
            levels[channel.variable] = None
        else:
            levels[channel.variable] = (*levels.get(channel.variable, ()), channel.level)
    return levels


def list_variable_requests(conf: DataConfig) -> list[VariableRequest]:
    """Return everything that the files must have."""
    requests = []
    for variable, levels in find_required_levels(conf.channel_map()).items():
        inputs = conf.options_of(variable).derived_from or {FIELD: variable}
        key = f"data.variable_options.{variable}.inputs" if conf.options_of(variable).derive else "data.variables"
        for number, (role, name) in enumerate(inputs.items()):
            requests.append(VariableRequest(name, role if number else FIELD, variable, levels, key))
    for number, source in enumerate(conf.sources):
        for role, name in _ground(source).items():
            ground_names = [request.name for request in requests if not request.target_variable]
            if name not in ground_names:
                requests.append(VariableRequest(name, role, "", None, f"data.sources.{number}.vertical.{role}"))
    return requests


def find_source_requests(
    source: SourceConfig, requests: Sequence[VariableRequest]
) -> Iterator[tuple[VariableRequest, list[str]]]:
    """Yield each variable that a source has to give, with the names that it may have in the files."""
    for request in requests:
        is_ground = not request.target_variable and request.name in _ground(source).values()
        if source.variables is None or request.name in source.variables or is_ground:
            yield request, source.names_in_files(request.name)


def match_requests(offers: Sequence[tuple[VariableRequest, list[str]]], names: set[str]) -> dict[VariableRequest, str]:
    """Return request -> name in the file, for the requests that a file can serve.

    Args:
        offers: the requests to its source, see `find_source_requests`; the first name that is present counts.
        names: names of the variables in the file.
    """
    in_file = {}
    for request, names_in_file in offers:
        present_names = [name for name in names_in_file if name in names]
        if present_names:
            in_file[request] = present_names[0]
    return in_file


def describe_no_match(offers: Sequence[tuple[VariableRequest, list[str]]], names: set[str]) -> str:
    """Return why a file with these variables gives nothing."""
    requested_names = []
    for _, names_in_file in offers:
        requested_names += names_in_file
    present_names = format_values(sorted(names)) if names else "no variable with two dimensions"
    return f"it has none of the variables that are read here ({format_values(requested_names)}), but {present_names}"


def find_unusable_variables(dataset: xr.Dataset, number: int) -> dict[str, str]:
    """Return variable -> why it cannot be read, for the variables in a file of source `number` that cannot be read."""
    selected = f"data.sources.{number}.select leaves it out: read it from another entry with the same path"
    unusable = dict.fromkeys(dataset.encoding.get(LEFT_OUT, ()), selected)
    for name, variable in dataset.data_vars.items():
        if variable.ndim < 2:
            dims = ", ".join(map(str, variable.dims)) or "none"
            unusable[str(name)] = f"has no latitude and longitude (dimensions: {dims})"
    return unusable


def _ground(source: SourceConfig) -> dict[str, str]:
    """Return role -> variable, for the fields of the ground that a source names."""
    if source.vertical is None:
        return {}
    names = {SURFACE_PRESSURE: source.vertical.surface_pressure}
    if source.vertical.surface_geopotential is not None:
        names[SURFACE_GEOPOTENTIAL] = source.vertical.surface_geopotential
    return names


def report_missing_variables(
    conf: DataConfig,
    requests: Sequence[VariableRequest],
    present: Sequence[set[str]],
    unusable: Sequence[Mapping[str, str]],
    problems: ErrorCollector,
) -> None:
    """Report the variables that no file has, and those that a source should give but does not have.

    Args:
        conf: the data section.
        requests: what the files must have.
        present: for each source, the variables that can be read from its files.
        unusable: for each source, variable -> why it cannot be read.
        problems: receives the missing variables.
    """
    found_names: set[str] = set()
    for number, source in enumerate(conf.sources):
        for request, names in find_source_requests(source, requests):
            if not present[number].isdisjoint(names):
                found_names.add(request.name)
            elif source.variables is not None and request.name in source.variables:
                found_names.add(request.name)
                problems.add(f"data.sources.{number}.variables: {_describe_lack_in(number, names, present, unusable)}")
    for request in requests:
        if request.name not in found_names:
            problems.add(f"{request.key}: {_describe_missing(conf, request, present, unusable)}")


def _describe_lack_in(
    number: int, names: Sequence[str], present: Sequence[set[str]], unusable: Sequence[Mapping[str, str]]
) -> str:
    """Return why a source does not give a variable that it should, under any of its names in the files."""
    for name in names:
        if name in unusable[number]:
            return f'"{name}" is in its files, but {unusable[number][name]}'
    return f"{_quoted(names)} is not in its files{did_you_mean(names[0], present[number])}"


def _describe_missing(
    conf: DataConfig, request: VariableRequest, present: Sequence[set[str]], unusable: Sequence[Mapping[str, str]]
) -> str:
    """Return why no source gives a variable, and what to do."""
    for number, source in enumerate(conf.sources):
        for name in source.names_in_files(request.name):
            if name in present[number]:
                return (
                    f'"{name}" is in the files of data.sources.{number}, but data.sources.{number}.variables does not '
                    f"list {request.name}; add it there"
                )
            if name in unusable[number]:
                return f'"{name}" is in the files of data.sources.{number}, but {unusable[number][name]}'
    renaming = [source for source in conf.sources if request.name in source.rename]
    names = renaming[0].names_in_files(request.name) if renaming else [request.name]
    hint = did_you_mean(names[0], set().union(*present))
    select = "; data.sources.N.select may leave it out" if any(source.select for source in conf.sources) else ""
    return (
        f"{_quoted(names)} is in no file of data.sources{hint} "
        f"(data.sources.N.rename maps our name to that in the files{select})"
    )


def _quoted(names: Sequence[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)
