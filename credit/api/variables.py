"""Description of the variables of a model."""

from __future__ import annotations

from dataclasses import dataclass

from credit.train.build.assets import ModelAssets


@dataclass(frozen=True)
class Variable:
    """A variable of a model.

    Attributes:
        name: name in the datasets.
        group: ``prognostic`` (input and output), ``diagnostic`` (output), ``dynamic_forcing`` or ``static`` (input).
        levels: levels in the units of the config, such as hPa; empty for a variable without levels.
        units: units, empty if unknown.
        source: ``data`` if the variable is read from data, ``computed`` if it is computed from time and location,
            ``mask`` if it shows where another variable is missing. The initial state must have the prognostic
            variables, and the dynamic forcing whose source is ``data``.
    """

    name: str
    group: str
    levels: tuple[float, ...]
    units: str
    source: str


def list_variables(assets: ModelAssets) -> tuple[Variable, ...]:
    """Return the variables of a model, group by group."""
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
