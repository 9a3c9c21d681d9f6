"""Variables that the files must contain: variables of the channels, inputs of derived variables, and surface fields.

A surface field is surface pressure or surface geopotential, which vertical interpolation needs.
"""

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

# Roles of variables in formulas. Further inputs of a derived variable have roles that depend on the formula.
FIELD = "field"
SURFACE_PRESSURE = "surface_pressure"
SURFACE_GEOPOTENTIAL = "surface_geopotential"

Levels = tuple[float, ...] | None


@dataclass(frozen=True)
class VariableRequest:
    """Request for a variable that the files must contain.

    Attributes:
        name: name of the variable in the run.
        role: `FIELD` for a variable that is not derived, and for the first input of a derived variable, which
            determines the files and times of the derived variable. Any other input has its role in the formula, such as
            ``northward_wind``. A surface field has the role `SURFACE_PRESSURE` or `SURFACE_GEOPOTENTIAL`.
        target_variable: name of the model variable that needs the requested variable; empty for a surface field.
        levels: levels of the run, in ``data.level_units``; None for a variable without levels.
        key: config key that requires the variable, for error messages.
    """

    name: str
    role: str
    target_variable: str
    levels: Levels
    key: str


def find_required_levels(channels: ChannelMap) -> dict[str, Levels]:
    """Return a mapping from the name of each variable that is read from data to its levels, None if it is 2-D."""
    levels: dict[str, Levels] = {}
    for channel in channels.time_varying_stored + channels.static_stored:
        if channel.level is None:
            levels[channel.variable] = None
        else:
            levels[channel.variable] = (*levels.get(channel.variable, ()), channel.level)
    return levels


def list_variable_requests(conf: DataConfig) -> list[VariableRequest]:
    """Return the requests for all variables, in the order of the channels, followed by the surface fields."""
    requests = []
    for variable, levels in find_required_levels(conf.channel_map()).items():
        options = conf.options_of(variable)
        inputs = options.derived_from or {FIELD: variable}
        key = "data.variables"
        if options.derive:
            key = f"data.variable_options.{variable}.inputs"
        for number, (role, name) in enumerate(inputs.items()):
            # The first input determines the files and times of a derived variable.
            if number == 0:
                role = FIELD
            requests.append(VariableRequest(name, role, variable, levels, key))
    # Several sources may name the same surface field, which is requested once.
    for number, source in enumerate(conf.sources):
        for role, name in _find_surface_variables(source).items():
            ground_names = [request.name for request in requests if not request.target_variable]
            if name not in ground_names:
                requests.append(VariableRequest(name, role, "", None, f"data.sources.{number}.vertical.{role}"))
    return requests


def find_source_requests(
    source: SourceConfig, requests: Sequence[VariableRequest]
) -> Iterator[tuple[VariableRequest, list[str]]]:
    """Yield each request that the config allows a source to serve, with the possible names of the variable in files.

    Args:
        source: section of the source in the config.
        requests: requests for all variables that the files must contain.
    """
    ground_names = _find_surface_variables(source).values()
    for request in requests:
        # A source reads its surface fields even if its list of variables does not name them.
        is_ground = not request.target_variable and request.name in ground_names
        is_listed = source.variables is None or request.name in source.variables
        if is_listed or is_ground:
            yield request, source.names_in_files(request.name)


def match_requests(
    source_requests: Sequence[tuple[VariableRequest, list[str]]], names: set[str]
) -> dict[VariableRequest, str]:
    """Return the requests that a file can serve, with the names of the variables in the file.

    Args:
        source_requests: the requests to the source of the file and their possible names, see `find_source_requests`.
        names: names of the variables in the file.

    Returns:
        Mapping from a request to the first of its possible names that is in the file. Requests that the file cannot
        serve are not in the mapping.
    """
    name_of_request = {}
    for request, names_in_file in source_requests:
        present_names = [name for name in names_in_file if name in names]
        if present_names:
            name_of_request[request] = present_names[0]
    return name_of_request


def describe_no_match(source_requests: Sequence[tuple[VariableRequest, list[str]]], names: set[str]) -> str:
    """Return a message about a file that can serve no request, with the requested names and the names in the file.

    The arguments are described at `match_requests`.
    """
    requested_names = []
    for _, names_in_file in source_requests:
        requested_names += names_in_file
    present_names = "no variable with two dimensions"
    if names:
        present_names = format_values(sorted(names))
    return f"it has none of the requested variables ({format_values(requested_names)}), but {present_names}"


def find_unusable_variables(dataset: xr.Dataset, source_number: int) -> dict[str, str]:
    """Return the variables of a file that cannot be read, as a mapping from name to reason.

    Args:
        dataset: the open file.
        source_number: index of the source of the file in ``data.sources``.
    """
    left_out_reason = (
        f"data.sources.{source_number}.select excludes it: read it from a second source with the same path"
    )
    unusable_variables = dict.fromkeys(dataset.encoding.get(LEFT_OUT, ()), left_out_reason)
    for name, variable in dataset.data_vars.items():
        if variable.ndim < 2:
            dims = ", ".join(map(str, variable.dims)) or "none"
            unusable_variables[str(name)] = f"has no latitude and longitude (dimensions: {dims})"
    return unusable_variables


def _find_surface_variables(source: SourceConfig) -> dict[str, str]:
    """Return the surface fields that ``data.sources.N.vertical`` lists, as a mapping from role to name."""
    if source.vertical is None:
        return {}
    names = {SURFACE_PRESSURE: source.vertical.surface_pressure}
    if source.vertical.surface_geopotential is not None:
        names[SURFACE_GEOPOTENTIAL] = source.vertical.surface_geopotential
    return names


def report_missing_variables(
    conf: DataConfig,
    requests: Sequence[VariableRequest],
    present_variables: Sequence[set[str]],
    unusable_variables: Sequence[Mapping[str, str]],
    problems: ErrorCollector,
) -> None:
    """Report variables that no file has, and variables in ``data.sources.N.variables`` that source N lacks.

    Args:
        conf: the ``data`` section of the config.
        requests: requests for all variables that the files must contain.
        present_variables: for each source, the names of the variables in its files that can be read.
        unusable_variables: for each source, a mapping from the name of a variable that cannot be read to the reason.
        problems: collector to which a message for each missing variable is added.
    """
    # Variables that a source lists but lacks come first, then variables that no source has.
    reported_or_present: set[str] = set()
    for number, source in enumerate(conf.sources):
        for request, names in find_source_requests(source, requests):
            if not present_variables[number].isdisjoint(names):
                reported_or_present.add(request.name)
            elif source.variables is not None and request.name in source.variables:
                # The user names the source of this variable, so the message is about this source.
                reported_or_present.add(request.name)
                reason = _describe_lack_in_source(number, names, present_variables, unusable_variables)
                problems.add(f"data.sources.{number}.variables: {reason}")
    for request in requests:
        if request.name not in reported_or_present:
            problems.add(f"{request.key}: {_describe_missing(conf, request, present_variables, unusable_variables)}")


def _describe_lack_in_source(
    source_number: int,
    names: Sequence[str],
    present_variables: Sequence[set[str]],
    unusable_variables: Sequence[Mapping[str, str]],
) -> str:
    """Return the reason why a source lacks a variable that its section in the config lists.

    Args:
        source_number: index of the source in ``data.sources``.
        names: names that the variable may have in the files.
        present_variables: see `report_missing_variables`.
        unusable_variables: see `report_missing_variables`.
    """
    for name in names:
        if name in unusable_variables[source_number]:
            return f'"{name}" is in its files, but {unusable_variables[source_number][name]}'
    return f"{_quote_names(names)} is not in its files{did_you_mean(names[0], present_variables[source_number])}"


def _describe_missing(
    conf: DataConfig,
    request: VariableRequest,
    present_variables: Sequence[set[str]],
    unusable_variables: Sequence[Mapping[str, str]],
) -> str:
    """Return the reason why no source has a variable, with advice; see `report_missing_variables` for the arguments."""
    # The files may contain the variable although the config does not allow it to be read from them.
    for number, source in enumerate(conf.sources):
        for name in source.names_in_files(request.name):
            if name in present_variables[number]:
                return (
                    f'"{name}" is in the files of data.sources.{number}, but data.sources.{number}.variables does not '
                    f"list {request.name}; add it there"
                )
            if name in unusable_variables[number]:
                return f'"{name}" is in the files of data.sources.{number}, but {unusable_variables[number][name]}'
    # The message shows the names in the first source that renames the variable, or else the name in the run.
    names = [request.name]
    for source in conf.sources:
        if request.name in source.rename:
            names = source.names_in_files(request.name)
            break
    hint = did_you_mean(names[0], set().union(*present_variables))
    select_hint = ""
    if any(source.select for source in conf.sources):
        select_hint = "; data.sources.N.select may exclude it"
    return (
        f"{_quote_names(names)} is in no file of data.sources{hint} "
        f"(data.sources.N.rename maps the name in the config to the name in the files{select_hint})"
    )


def _quote_names(names: Sequence[str]) -> str:
    """Return the possible names of a variable in quotes, joined by "or"."""
    return " or ".join(f'"{name}"' for name in names)
