"""What a forecast's file holds and how it is described: variables, level sets, lead times, CF attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from credit.channels import ChannelMap
from credit.errors import ConfigError, did_you_mean
from credit.grid import LatLonGrid
from credit.times import EPOCH, Clock

# a CF unit that no version of xarray decodes to a timedelta, which the plural is in some
HOURS = "hour"
WRITE_HINT = "is the disk full or the folder read-only? Free space or set another save_loc"
_LEVEL_STANDARD_NAMES = {"hPa": "air_pressure", "Pa": "air_pressure", "model_level": "model_level_number"}
_VARIABLE_ATTRIBUTES = ("standard_name", "long_name", "units")
_CELL_METHODS = {"instant": "time: point", "mean": "time: mean", "accumulate": "time: sum"}


@dataclass(frozen=True)
class OutputVariable:
    """One variable of a file.

    Attributes:
        name: its name.
        index: where its channels lie among the model's output channels, in the order of the levels.
        level_dim: its level dimension, None for a 2-D variable.
        attributes: CF attributes.
        mask: (H, W) bool, True where it is always missing, None where it never is.
    """

    name: str
    index: tuple[int, ...]
    level_dim: str | None
    attributes: dict[str, str]
    mask: np.ndarray | None


@dataclass(frozen=True)
class ForecastLayout:
    """What every forecast of a run holds.

    Attributes:
        variables: the variables in order.
        levels: level dimension -> level values in `level_units`.
        level_units: hPa, Pa or model_level.
        grid: horizontal grid.
        clock: calendar.
        lead_minutes: lead times of the written fields.
        step_minutes: the model's step, the length of the window of means and accumulations.
        has_windows: whether some variable is a mean or an accumulation, so that times need bounds.
        global_attributes: attributes of the file; two forecasts are of one run only if these are equal.
    """

    variables: tuple[OutputVariable, ...]
    levels: dict[str, tuple[float, ...]]
    level_units: str
    grid: LatLonGrid
    clock: Clock
    lead_minutes: np.ndarray
    step_minutes: int
    has_windows: bool
    global_attributes: dict[str, str | int]

    @property
    def lead_hours(self) -> np.ndarray:
        """Lead times in hours, float64."""
        return np.asarray(self.lead_minutes, dtype=np.float64) / 60.0

    def shape(self, variable: OutputVariable) -> tuple[int, ...]:
        """Return (L, [levels,] H, W) of one variable of one forecast."""
        levels = (len(variable.index),) if variable.level_dim else ()
        return (len(self.lead_minutes), *levels, *self.grid.shape)

    def select(self, variable: OutputVariable, fields: np.ndarray) -> np.ndarray:
        """Return one variable of `fields` (L, C_out, H, W), in the shape of `shape`, NaN where it is masked."""
        values = fields[:, list(variable.index)].reshape(self.shape(variable))
        return values if variable.mask is None else np.where(variable.mask, np.float32(np.nan), values)

    def level_attributes(self, dim: str) -> dict[str, str]:
        """Return the CF attributes of a level dimension."""
        units = "1" if self.level_units == "model_level" else self.level_units
        # level numbers and pressures both grow downwards
        return {
            "standard_name": _LEVEL_STANDARD_NAMES[self.level_units], "long_name": dim.replace("_", " "),
            "units": units, "positive": "down", "axis": "Z",
        }  # fmt: skip

    def time_attributes(self) -> dict[str, str]:
        """Return units and calendar of every time that is written as minutes."""
        return {"units": EPOCH, "calendar": self.clock.calendar}


LATITUDE = {"standard_name": "latitude", "long_name": "latitude", "units": "degrees_north", "axis": "Y"}
LONGITUDE = {"standard_name": "longitude", "long_name": "longitude", "units": "degrees_east", "axis": "X"}
INITIAL_TIME = {"standard_name": "forecast_reference_time", "long_name": "initial time of the forecast"}
LEAD_TIME = {"standard_name": "forecast_period", "long_name": "lead time: valid time minus initial time"}
VALID_TIME = {"standard_name": "time", "long_name": "valid time"}


def build_layout(
    channels: ChannelMap,
    grid: LatLonGrid,
    clock: Clock,
    attributes: Mapping[str, Mapping[str, str]],
    step_minutes: int,
    lead_minutes: Sequence[int],
    level_units: str = "hPa",
    variables: Sequence[str] | None = None,
    masks: Mapping[str, np.ndarray] | None = None,
    global_attributes: Mapping[str, str | int] | None = None,
) -> ForecastLayout:
    """Describe the forecasts of a run; the arguments are those of `credit.forecast.writer.ForecastWriter`.

    Raises:
        ConfigError: if `variables` names something that is no output.
    """
    members: dict[str, list[int]] = {}
    for position, channel in enumerate(channels.output):
        members.setdefault(channel.variable, []).append(position)
    for name in variables or ():
        if name not in members:
            raise ConfigError(f'inference.variables: "{name}" is no output{did_you_mean(name, members)}')
    written = [name for name in members if variables is None or name in variables]
    temporal = {name: attributes.get(name, {}).get("temporal", "instant") for name in written}
    has_windows = any(value != "instant" for value in temporal.values())
    levels: dict[str, tuple[float, ...]] = {}
    described = []
    for name in written:
        values = tuple(channels.output[position].level for position in members[name])
        dim = None if values[0] is None else _level_dim(levels, values)
        known = attributes.get(name, {})
        own = {key: str(known[key]) for key in _VARIABLE_ATTRIBUTES if known.get(key)}
        if has_windows:
            own["cell_methods"] = _CELL_METHODS[temporal[name]]
        described.append(OutputVariable(name, tuple(members[name]), dim, own, (masks or {}).get(name)))
    return ForecastLayout(
        tuple(described), levels, level_units, grid, clock, np.asarray(lead_minutes, dtype=np.int64), step_minutes,
        has_windows, {"Conventions": "CF-1.8", **(global_attributes or {})},
    )  # fmt: skip


def _level_dim(levels: dict[str, tuple[float, ...]], values: tuple[float, ...]) -> str:
    """Return the dimension with just these levels, adding ``level``, ``level_2``, ... as needed."""
    for dim, known in levels.items():
        if known == values:
            return dim
    dim = f"level_{len(levels) + 1}" if levels else "level"
    levels[dim] = values
    return dim
