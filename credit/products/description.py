"""Descriptions of forecasts from which products are made, for existing files and for files that a run will write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from credit.calendar import Calendar
from credit.forecast.io.archive.base import ForecastArchive
from credit.forecast.io.schema import MEMBER, SINCE_START, ForecastSchema
from credit.grid import LatLonGrid


@dataclass(frozen=True)
class FieldInfo:
    """Description of a field (N, H, W): a channel of the forecasts, or a product that is a field.

    Attributes:
        name: name of the channel or product.
        units: units of the values; empty if the units are unknown.
        standard_name: CF standard name; empty if the field has none.
        long_name: CF long name, a description in words; empty if the field has none.
        level: value of the vertical level in the level units of the forecasts; None without a level.
        height: height above ground in m; None if the height is unknown.
        dim: name of the first dimension, ``member`` or ``quantile``; None for a single field (N = 1).
        coordinate: (N,) values along `dim`; empty for a single field.
        temporal: ``point`` for instantaneous values; ``sum`` or ``mean`` for values over `windows`.
        windows: lead time in minutes -> length in minutes of the window that ends at this lead time; empty for
            instantaneous values, or if the length is unknown.
        statistic: CF cell method over the members, such as ``mean``; empty for the members themselves.
        is_probability: True if the values are probabilities from 0 to 1.
    """

    name: str
    units: str = ""
    standard_name: str = ""
    long_name: str = ""
    level: float | None = None
    height: float | None = None
    dim: str | None = None
    coordinate: tuple[float, ...] = ()
    temporal: str = "point"
    windows: Mapping[int, int] = field(default_factory=dict)
    statistic: str = ""
    is_probability: bool = False

    @property
    def title(self) -> str:
        """Title for figures and messages: the long name, or the name if there is no long name."""
        return self.long_name or self.name


@dataclass(frozen=True)
class ForecastDescription:
    """Description of the forecasts of a folder or store.

    Attributes:
        fields: name of a channel, such as ``t2m`` or ``z500`` -> description of the channel.
        lead_minutes: (L,) lead times in minutes, increasing.
        members: number of ensemble members; None for forecasts without members.
        grid: grid of the fields.
        calendar: calendar of the times.
        level_units: units of the levels: hPa, Pa or model_level; empty without levels.
    """

    fields: Mapping[str, FieldInfo]
    lead_minutes: np.ndarray
    members: int | None
    grid: LatLonGrid
    calendar: Calendar
    level_units: str


def describe_archive(archive: ForecastArchive) -> ForecastDescription:
    """Return the description of existing forecasts.

    Args:
        archive: reader of the forecasts.
    """
    fields = {}
    for channel, (variable, level) in archive.channel_levels.items():
        attributes = {**archive.descriptions[variable], "units": archive.units.get(variable, "")}
        temporal = _parse_temporal(archive.cell_methods.get(variable, ""))
        windows = archive.windows.get(variable, {})
        fields[channel] = _describe_channel(channel, attributes, level, archive.members, temporal, windows)
    return ForecastDescription(
        fields, archive.lead_minutes, archive.members, archive.grid, archive.calendar, archive.level_units
    )


def describe_schema(schema: ForecastSchema) -> ForecastDescription:
    """Return the description of forecasts that a run will write.

    Args:
        schema: content of the forecasts.
    """
    names_without_levels = {variable.name for variable in schema.variables if variable.level_dim is None}
    fields = {}
    for variable in schema.variables:
        windows = {}
        if variable.window is not None:
            for lead in schema.lead_minutes.tolist():
                windows[lead] = lead if variable.window == SINCE_START else variable.window
        temporal = _parse_temporal(variable.attributes.get("cell_methods", ""))
        levels = (None,) if variable.level_dim is None else schema.levels[variable.level_dim]
        for level in levels:
            # The names of channels follow the rules of `credit.channels.ChannelMap`.
            channel = variable.name if level is None else f"{variable.name}{level:g}"
            if level is not None and channel in names_without_levels:
                channel += schema.level_units
            fields[channel] = _describe_channel(channel, variable.attributes, level, schema.members, temporal, windows)
    level_units = schema.level_units if schema.levels else ""
    return ForecastDescription(fields, schema.lead_minutes, schema.members, schema.grid, schema.calendar, level_units)


def _describe_channel(
    name: str,
    attributes: Mapping[str, str],
    level: float | None,
    members: int | None,
    temporal: str,
    windows: Mapping[int, int],
) -> FieldInfo:
    """Return the description of a channel of the forecasts; the arguments are attributes of `FieldInfo`."""
    return FieldInfo(
        name,
        str(attributes.get("units", "")),
        str(attributes.get("standard_name", "")),
        str(attributes.get("long_name", "")),
        level,
        dim=None if members is None else MEMBER,
        coordinate=() if members is None else tuple(float(member) for member in range(members)),
        temporal=temporal,
        windows=windows,
    )


def _parse_temporal(cell_methods: str) -> str:
    """Return the time method of a CF attribute ``cell_methods``: ``sum``, ``mean``, or ``point`` for all others."""
    for method in ("sum", "mean"):
        if f"time: {method}" in cell_methods:
            return method
    return "point"
