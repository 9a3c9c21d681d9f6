"""What a forecast's file holds and how it is described: variables, level sets, lead times, CF attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from credit import __version__
from credit.calendar import EPOCH, Calendar, format_duration
from credit.channels import ChannelMap, take_channels
from credit.errors import ConfigError, did_you_mean
from credit.grid import LatLonGrid

# a CF unit that no version of xarray decodes to a timedelta, which the plural is in some
HOURS = "hour"
WRITE_HINT = "is the disk full or the folder read-only? Free space, or set another inference.folder or save_loc"
MEMBER = "member"
# the name that netCDF's library gives it
QUANTIZED = "_QuantizeBitRoundNumberOfSignificantBits"
# the checksum of the fields that a forecast starts from
INITIAL_FIELDS = "initial_fields"
# the global attribute that says what made a file: without a clock time, so that files of one forecast are the same
# whenever they are made, and no sign of a run, which a new version of the package may continue
HISTORY = "history"
# the global attribute with the periods that the weights were trained or selected on; the weights themselves tell runs
# apart, and files of earlier versions have none
SEEN = "seen_periods"
MADE_BY = f"credit {__version__}: credit rollout"
_MANTISSA_BITS = 23  # of float32
_LEVEL_STANDARD_NAMES = {"hPa": "air_pressure", "Pa": "air_pressure", "model_level": "model_level_number"}
_VARIABLE_ATTRIBUTES = ("standard_name", "long_name", "units")
_CELL_METHODS = {"instant": "time: point", "mean": "time: mean", "accumulate": "time: sum"}
SINCE_START = 0  # the window of what is summed up from the initial time on


def of_the_run(attributes: Mapping[str, object]) -> dict[str, object]:
    """Return the global attributes that tell runs apart."""
    return {name: value for name, value in attributes.items() if name not in (HISTORY, SEEN)}


@dataclass(frozen=True)
class OutputVariable:
    """One variable of a file.

    Attributes:
        name: its name.
        index: where its channels lie among the model's output channels, in the order of the levels.
        level_dim: its level dimension, None for a 2-D variable.
        attributes: CF attributes.
        mask: (H, W) bool, True where it is always missing, None where it never is.
        window: minutes before the valid time that a mean or sum is taken over, or `SINCE_START`; None for an instant.
    """

    name: str
    index: tuple[int, ...]
    level_dim: str | None
    attributes: dict[str, str]
    mask: np.ndarray | None
    window: int | None


@dataclass(frozen=True)
class ForecastSchema:
    """What every forecast of a run holds.

    Attributes:
        variables: the variables in order.
        levels: level dimension -> level values in `level_units`.
        level_units: hPa, Pa or model_level.
        grid: horizontal grid.
        calendar: calendar.
        lead_minutes: lead times of the written fields.
        members: number of an ensemble's members; None for a single forecast, which has no such dimension.
        keep_bits: bits of the mantissa that are kept, None for all 23.
        compression: 0 (none) to 9, of zlib in netCDF and zstd in zarr.
        global_attributes: attributes of the file; two forecasts are of one run only if these are equal.
    """

    variables: tuple[OutputVariable, ...]
    levels: dict[str, tuple[float, ...]]
    level_units: str
    grid: LatLonGrid
    calendar: Calendar
    lead_minutes: np.ndarray
    members: int | None
    keep_bits: int | None
    compression: int
    global_attributes: dict[str, str | int]

    @property
    def lead_hours(self) -> np.ndarray:
        """Lead times in hours, float64."""
        return np.asarray(self.lead_minutes, dtype=np.float64) / 60.0

    def dims(self, variable: OutputVariable, *leading: str) -> tuple[str, ...]:
        """Return the dimensions of one variable, after `leading`, the names of those of time."""
        member = (MEMBER,) if self.members is not None else ()
        return (*leading, *member, *((variable.level_dim,) if variable.level_dim else ()), "latitude", "longitude")

    def shape(self, variable: OutputVariable) -> tuple[int, ...]:
        """Return ([members,] [levels,] H, W) of one variable at one lead time."""
        members = () if self.members is None else (self.members,)
        levels = (len(variable.index),) if variable.level_dim else ()
        return (*members, *levels, *self.grid.shape)

    def select(self, variable: OutputVariable, fields: np.ndarray) -> np.ndarray:
        """Return one variable of one member's `fields` (C_out, H, W), ([levels,] H, W), NaN where it is masked.

        It lies in the memory of `fields` where nothing has to be done.
        """
        values = take_channels(fields, list(variable.index))
        values = values if variable.level_dim else values[0]
        if self.keep_bits is not None:
            values = bitround(values, self.keep_bits)
        return values if variable.mask is None else np.where(variable.mask, np.float32(np.nan), values)

    def time_names(self, name: str) -> dict[int, str]:
        """Return window -> the coordinate of valid times that has its bounds.

        It is `name` itself where all windows are one. Two kinds of bounds need two coordinates, and then that of the
        dimension, which every variable has, goes without.
        """
        windows = list(dict.fromkeys(v.window for v in self.variables if v.window is not None))
        if len(windows) == 1:
            return {windows[0]: name}
        return {w: f"{name}_{'since_start' if w == SINCE_START else format_duration(w)}" for w in windows}

    def level_attributes(self, dim: str) -> dict[str, str]:
        """Return the CF attributes of a level dimension."""
        units = "1" if self.level_units == "model_level" else self.level_units
        # level numbers and pressures both grow downwards
        return {
            "standard_name": _LEVEL_STANDARD_NAMES[self.level_units],
            "long_name": f"level of {dim.removeprefix('level_')}" if dim != "level" else dim,
            "units": units, "positive": "down", "axis": "Z",
        }  # fmt: skip

    def time_attributes(self) -> dict[str, str]:
        """Return units and calendar of every time that is written as minutes."""
        return {"units": EPOCH, "calendar": self.calendar.name}


def window_bounds(window: int, initial_minutes: np.ndarray | int, valid_minutes: np.ndarray) -> np.ndarray:
    """Return where a window begins and ends, (..., 2), for valid times (...) of forecasts from `initial_minutes`."""
    begins = np.broadcast_to(initial_minutes, valid_minutes.shape) if window == SINCE_START else valid_minutes - window
    return np.stack([begins, valid_minutes], axis=-1)


def bitround(values: np.ndarray, keep_bits: int) -> np.ndarray:
    """Return float32 `values` rounded to `keep_bits` (1 to 23) bits of the mantissa, ties to even; NaN stays NaN.

    The relative error is at most 2^-(keep_bits + 1). The bits behind are zeros, which compress (Kloewer et al. 2021,
    doi:10.1038/s43588-021-00156-2). A number that would round to infinity is cut off instead.
    """
    drop = _MANTISSA_BITS - keep_bits
    if not drop:
        return values
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    half = np.uint32((1 << (drop - 1)) - 1) + ((bits >> np.uint32(drop)) & np.uint32(1))
    rounded = ((bits + half) >> np.uint32(drop)) << np.uint32(drop)
    largest = (np.finfo(np.float32).max.view(np.uint32) >> drop << drop).view(np.float32)
    return np.where(np.isfinite(values), np.clip(rounded.view(np.float32), -largest, largest), values)


LATITUDE = {"standard_name": "latitude", "long_name": "latitude", "units": "degrees_north", "axis": "Y"}
LONGITUDE = {"standard_name": "longitude", "long_name": "longitude", "units": "degrees_east", "axis": "X"}
INITIAL_TIME = {"standard_name": "forecast_reference_time", "long_name": "initial time of the forecast"}
LEAD_TIME = {"standard_name": "forecast_period", "long_name": "lead time: valid time minus initial time"}
REALIZATION = {"standard_name": "realization", "long_name": "number of the ensemble member", "units": "1"}
VALID_TIME = {"standard_name": "time", "long_name": "valid time"}


def build_layout(
    channels: ChannelMap,
    grid: LatLonGrid,
    calendar: Calendar,
    attributes: Mapping[str, Mapping[str, str]],
    step_minutes: int,
    lead_minutes: Sequence[int],
    level_units: str = "hPa",
    variables: Sequence[str] | None = None,
    levels: Sequence[float] | None = None,
    members: int | None = None,
    keep_bits: int | None = None,
    compression: int = 0,
    masks: Mapping[str, np.ndarray] | None = None,
    global_attributes: Mapping[str, str | int] | None = None,
    windows: Mapping[str, int] | None = None,
) -> ForecastSchema:
    """Describe the forecasts of a run; the arguments are those of `credit.forecast.io.forecast_writer.ForecastWriter`.

    Raises:
        ConfigError: if `variables` or `levels` names something that is no output.
    """
    positions: dict[str, list[int]] = {}
    for position, channel in enumerate(channels.output):
        positions.setdefault(channel.variable, []).append(position)
    for name in variables or ():
        if name not in positions:
            raise ConfigError(f'inference.variables: "{name}" is no output{did_you_mean(name, positions)}')
    if levels is not None:
        positions = _keep_levels(positions, channels, levels)
    written = [name for name in positions if variables is None or name in variables]
    if not written:
        raise ConfigError("inference.variables and inference.levels leave nothing to write")
    temporal = {name: attributes.get(name, {}).get("temporal", "instant") for name in written}
    has_windows = any(value != "instant" for value in temporal.values())
    dims: dict[str, tuple[float, ...]] = {}
    described = []
    for name in written:
        values = tuple(channels.output[position].level for position in positions[name])
        dim = None if values[0] is None else _level_dim(dims, values, name)
        known = attributes.get(name, {})
        own = {key: str(known[key]) for key in _VARIABLE_ATTRIBUTES if known.get(key)}
        if has_windows:
            own["cell_methods"] = _CELL_METHODS[temporal[name]]
        window = None if temporal[name] == "instant" else (windows or {}).get(name, step_minutes)
        described.append(OutputVariable(name, tuple(positions[name]), dim, own, (masks or {}).get(name), window))
    return ForecastSchema(
        tuple(described), dims, level_units, grid, calendar, np.asarray(lead_minutes, dtype=np.int64), members,
        keep_bits, compression, {"Conventions": "CF-1.8", **(global_attributes or {})},
    )  # fmt: skip


def _keep_levels(
    positions: dict[str, list[int]], channels: ChannelMap, levels: Sequence[float]
) -> dict[str, list[int]]:
    """Return the positions of the surface variables and of those on `levels`."""
    known = {channel.level for channel in channels.output if channel.level is not None}
    missing = [f"{level:g}" for level in levels if level not in known]
    if missing:
        raise ConfigError(
            f"inference.levels: {', '.join(missing)}: no output is on it; the levels are "
            + ", ".join(f"{level:g}" for level in sorted(known))
        )
    kept = {
        name: [p for p in own if channels.output[p].level is None or channels.output[p].level in levels]
        for name, own in positions.items()
    }
    return {name: own for name, own in kept.items() if own}


def _level_dim(levels: dict[str, tuple[float, ...]], values: tuple[float, ...], variable: str) -> str:
    """Return the dimension with just these levels: ``level`` for the first set of levels of a file.

    A further set is called after the first variable that lies on it, ``level_t``.
    """
    for dim, known in levels.items():
        if known == values:
            return dim
    dim = f"level_{variable}" if levels else "level"
    levels[dim] = values
    return dim


def take_level_dims(layout: ForecastSchema, stored: Mapping[str, Sequence[str]]) -> ForecastSchema:
    """Return the layout with the names that level dimensions have in a file that is there.

    Versions up to 0.14 numbered the sets of levels, ``level_2``. Such files are not other forecasts for that.

    Args:
        layout: of what is to be written.
        stored: variable -> its dimensions in the file.
    """
    levels: dict[str, tuple[float, ...]] = {}
    variables = []
    for variable in layout.variables:
        dim = variable.level_dim
        if dim is not None:
            there = stored.get(variable.name, ())[-3:-2]
            values = layout.levels[dim]
            if there and there[0].startswith("level") and levels.get(there[0], values) == values:
                dim = there[0]
            levels[dim] = values
        variables.append(replace(variable, level_dim=dim))
    return replace(layout, variables=tuple(variables), levels=levels)
