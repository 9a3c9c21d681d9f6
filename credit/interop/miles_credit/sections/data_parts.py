"""Parts of the `data` section that configs of both generations of miles-credit contain, and functions that write them
into the draft of the converted config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from credit.interop.miles_credit.draft import ConfigDraft
from credit.interop.miles_credit.reading import MilesConfig
from credit.interop.miles_credit.report import ConversionReport

GROUPS = ("prognostic", "diagnostic", "dynamic_forcing", "static")
# Names of the incoming solar radiation in miles-credit, as energy over a step. This package computes the radiation.
_SOLAR_NAMES = ("tsi", "tisr", "toa_incident_solar_radiation")
SOLAR_VARIABLE = "toa_incident_solar_radiation"
# ERA5 has model levels 1 to 137, so larger levels must be pressures.
_LAST_MODEL_LEVEL = 137
# Levels of the data set with 16 model levels. Configs with this data set often omit the levels.
LEVELS_OF_16 = (10, 30, 40, 50, 60, 70, 80, 90, 95, 100, 105, 110, 120, 130, 136, 137)
# Order of the groups in the input channels, for `static_first: true` and for `static_first: false`.
ORDER_STATIC_FIRST = ("prognostic", "static", "dynamic_forcing")
ORDER_STATIC_LAST = ("prognostic", "dynamic_forcing", "static")


@dataclass
class DataParts:
    """Parts of the ``data`` section of a config of miles-credit: variables, files and levels.

    Attributes:
        variables: group of variables, such as ``prognostic`` -> {"vars_3D": names, "vars_2D": names}, in the order of
            the channels.
        sources: path -> variables that are read from this path, in the order of the file.
        source_options: path -> additional keys of the source.
        levels: levels of the 3-D variables.
        level_coord: name of the vertical coordinate; empty if the config does not contain it.
        published_names: variable of this package -> its name in the files of statistics.
    """

    variables: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    source_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    levels: list[float] = field(default_factory=list)
    level_coord: str = ""
    published_names: dict[str, str] = field(default_factory=dict)

    def add_group(self, group: str, vars_3d: Sequence[str], vars_2d: Sequence[str]) -> None:
        """Add variables to a group."""
        members = self.variables.setdefault(group, {})
        for kind, names in (("vars_3D", vars_3d), ("vars_2D", vars_2d)):
            if names:
                members.setdefault(kind, []).extend(names)

    def add_source(self, path: str, names: Sequence[str], options: Mapping[str, Any] | None = None) -> None:
        """Add variables that are read from a path; if several groups have the same path, it is a single source."""
        known_names = self.sources.setdefault(path, [])
        known_names += [name for name in names if name not in known_names]
        if options:
            self.source_options[path] = dict(options)

    def list_names(self, *groups: str) -> list[str]:
        """Return the names of all variables of some groups."""
        names = []
        for group in groups:
            for members in self.variables.get(group, {}).values():
                names += members
        return names


def replace_solar_forcing(parts: DataParts, report: ConversionReport, key: str) -> None:
    """Replace a forcing variable of incoming solar radiation, in place, with the variable that this package computes.

    Args:
        parts: parts of the data section.
        report: report in which the result is recorded.
        key: dotted key of the group of the variable.
    """
    names = parts.variables.get("dynamic_forcing", {}).get("vars_2D", [])
    for index, name in enumerate(names):
        if name not in _SOLAR_NAMES:
            continue
        # The files are no longer sources, unless they have other variables of the run.
        names[index] = SOLAR_VARIABLE
        parts.published_names[SOLAR_VARIABLE] = name
        report.record_derived(
            key,
            f"`{name}`: `{SOLAR_VARIABLE}` is computed for the window that ends at t; no file is read",
        )
        for path in list(parts.sources):
            members = parts.sources[path]
            if name in members:
                members.remove(name)
            if not members:
                del parts.sources[path]


def find_level_units(levels: Sequence[float], level_coord: str) -> str:
    """Derive `data.level_units` from the numbers of the levels, because configs of miles-credit do not contain units.

    Args:
        levels: numbers of the levels.
        level_coord: name of the vertical coordinate; empty if it is unknown.
    """
    is_integer = all(float(level).is_integer() for level in levels)
    if level_coord == "hybrid" or (is_integer and max(levels, default=0) <= _LAST_MODEL_LEVEL):
        return "model_level"
    return "hPa"


def write_data_section(config: MilesConfig, draft: ConfigDraft, parts: DataParts, input_order: Sequence[str]) -> None:
    """Write the ``data`` section of the draft: sources, variables, levels, and options of variables.

    Args:
        config: config to convert.
        draft: draft to which keys are added.
        parts: parts of the data section.
        input_order: order of the groups in the input channels.
    """
    report = config.report
    sources = []
    for path, names in parts.sources.items():
        source: dict[str, Any] = {"path": path}
        # If there are several sources, each source is read only for its variables, as in miles-credit.
        if len(parts.sources) > 1:
            source["variables"] = list(names)
        sources.append({**source, **parts.source_options.get(path, {})})
    draft.set("data.sources", sources)
    # The groups are written in the order of this package, regardless of the order in the file.
    draft.set("data.variables", {})
    for group in GROUPS:
        members = parts.variables.get(group)
        if members:
            draft.set(f"data.variables.{group}", members)
    if parts.levels:
        # Whole numbers are written as integers, so that names of channels are shorter.
        levels = [int(level) if float(level).is_integer() else float(level) for level in parts.levels]
        draft.set("data.levels", levels)
        units = find_level_units(levels, parts.level_coord)
        draft.set("data.level_units", units, "derived from the numbers; check it")
        report.record_derived("data.level_units", f"`{units}`, derived from the numbers of the levels; check it")
    draft.set("data.input_order", list(input_order), "order of the input channels of the weights")
    for name in parts.list_names("dynamic_forcing"):
        if name == SOLAR_VARIABLE:
            draft.set("data.solar", {"tsi": "era5", "window": "past"})
        else:
            draft.set_option(name, "in_forecast", "observed", "as in miles-credit; use `persist` for real forecasts")
            report.record_derived(
                f"data.variable_options.{name}.in_forecast",
                "`observed`: forecasts of miles-credit read future values of the forcing, but real forecasts cannot",
            )
    if not parts.list_names("prognostic"):
        report.record_refused("data.variables", "there are no prognostic variables")
    repeated_names = _find_repeated(parts.list_names(*GROUPS))
    if repeated_names:
        report.record_refused("data.variables", f"`{', '.join(repeated_names)}` is in two groups")


def _find_repeated(names: Sequence[str]) -> list[str]:
    """Return the names that occur more than once, sorted."""
    return sorted({name for name in names if names.count(name) > 1})
