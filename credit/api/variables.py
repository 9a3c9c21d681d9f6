"""Descriptions of the input and output variables of a model."""

from __future__ import annotations

from dataclasses import dataclass

from credit.train.build.assets import ModelAssets


@dataclass(frozen=True)
class Variable:
    """Description of a variable of a model.

    Attributes:
        name: name of the variable in datasets.
        group: role of the variable: ``prognostic`` (input and output), ``diagnostic`` (output), ``dynamic_forcing`` or
            ``static`` (input).
        levels: levels in the units of the config, such as hPa; empty for a variable without levels.
        units: units of the values; empty if unknown.
        source: ``data`` if the variable is read from data, ``computed`` if it is computed from time and location,
            ``mask`` if it marks the cells in which a different variable is missing. The initial state must contain the
            prognostic variables, and the dynamic forcing with the source ``data``.
    """

    name: str
    group: str
    levels: tuple[float, ...]
    units: str
    source: str


def list_variables(assets: ModelAssets) -> tuple[Variable, ...]:
    """Return the variables of a model in the order of the groups of `Variable.group`."""
    # (name, group, source) -> levels
    levels: dict[tuple[str, str, str], list[float]] = {}
    for group in ("prognostic", "diagnostic", "dynamic_forcing", "static"):
        for channel in assets.channels.group(group):
            variable_levels = levels.setdefault((channel.variable, group, channel.source), [])
            if channel.level is not None:
                variable_levels.append(channel.level)
    variables = []
    for (name, group, source), variable_levels in levels.items():
        units = assets.attributes.get(name, {}).get("units", "")
        variables.append(Variable(name, group, tuple(variable_levels), units, source))
    return tuple(variables)
