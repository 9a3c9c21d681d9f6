"""Content and description of forecast files: variables, level sets, lead times, CF attributes.

Shape suffixes: C output channels, L levels of a variable, M members, H latitude rows, W longitude columns. Dimensions
in brackets exist only for ensembles ([M,]) or variables on levels ([L,]).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from credit import __version__
from credit.calendar import TIME_UNITS, Calendar, format_duration
from credit.channels import Channel, ChannelMap, select_channels
from credit.errors import ConfigError, did_you_mean
from credit.forecast.io.grib.options import GribOptions
from credit.forecast.store_part import StorePart
from credit.grid import LatLonGrid
from credit.utils.bitround import bitround

# Units of lead times. CF also allows "hours", but some versions of xarray decode "hours" to a timedelta.
HOURS = "hour"
# Advice at the end of the message of a failed write.
WRITE_HINT = "is the disk full or the folder read-only? Free space, or set a different inference.folder or save_loc"
# Dimension and coordinate of ensemble members.
MEMBER = "member"
# Name of the attribute with the number of bits to which values are rounded, as in the netCDF library.
QUANTIZED = "_QuantizeBitRoundNumberOfSignificantBits"
# Global attribute or array with the checksum of the initial fields of a forecast.
INITIAL_FIELDS = "initial_fields"
# Global attribute with the name of the program, without a clock time, so that repeated forecasts have identical files.
# The attribute does not distinguish runs, because a new version of the package may continue a run.
HISTORY = "history"
# Global attribute with the periods of training and selection. It does not distinguish runs, because files of earlier
# versions do not have it; the attribute with the checksum of the weights distinguishes runs.
SEEN_PERIODS = "seen_periods"
MADE_BY = f"credit {__version__}: credit rollout"
_LEVEL_STANDARD_NAMES = {"hPa": "air_pressure", "Pa": "air_pressure", "model_level": "model_level_number"}
_VARIABLE_ATTRIBUTES = ("standard_name", "long_name", "units")
_CELL_METHODS = {"instant": "time: point", "mean": "time: mean", "accumulate": "time: sum"}
SINCE_START = 0  # the window of a sum since the initial time
LATITUDE = {"standard_name": "latitude", "long_name": "latitude", "units": "degrees_north", "axis": "Y"}
LONGITUDE = {"standard_name": "longitude", "long_name": "longitude", "units": "degrees_east", "axis": "X"}
INITIAL_TIME = {"standard_name": "forecast_reference_time", "long_name": "initial time of the forecast"}
LEAD_TIME = {"standard_name": "forecast_period", "long_name": "lead time: valid time minus initial time"}
REALIZATION = {"standard_name": "realization", "long_name": "number of the ensemble member", "units": "1"}
VALID_TIME = {"standard_name": "time", "long_name": "valid time"}


def select_run_attributes(attributes: Mapping[str, object]) -> dict[str, object]:
    """Return the global attributes that identify a run: all except the program's name and the training periods."""
    return {name: value for name, value in attributes.items() if name not in (HISTORY, SEEN_PERIODS)}


@dataclass(frozen=True)
class OutputFields:
    """Description of the fields of each step: the model's output, or diagnostics computed from the output.

    Attributes:
        channels: channel map whose output channels are the fields.
        grid: horizontal grid.
        calendar: calendar of the times.
        attributes: name of a variable -> its ``units``, ``standard_name``, ``long_name`` and ``temporal`` (instant,
            mean or accumulate).
        step_minutes: time step of the model in minutes.
        level_units: units of the levels: hPa, Pa or model_level.
        masks: name of a variable -> (H, W) bool, True where it is always missing.
        windows: name of a mean or sum -> length of its window in minutes, or `SINCE_START`. Means and sums without an
            entry are over one step.
    """

    channels: ChannelMap
    grid: LatLonGrid
    calendar: Calendar
    attributes: Mapping[str, Mapping[str, str]]
    step_minutes: int
    level_units: str = "hPa"
    masks: Mapping[str, np.ndarray] = field(default_factory=dict)
    windows: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OutputOptions:
    """Selection of the written fields, and their format on disk, as in section ``inference`` of a config.

    Attributes:
        format: ``netcdf``, ``grib2`` or ``zarr``.
        layout: ``cf`` or, for zarr, ``weatherbench2`` (dimensions ``time`` and ``prediction_timedelta``).
        split: ``day``, ``month`` (of the valid time), ``lead`` or ``member``: a file for each of them; None: one file.
        variables: names of the variables to write; None for all variables.
        levels: levels to write, in the units of the fields, for variables on levels; None for all levels.
        keep_bits: number of mantissa bits (1 to 23) to which values are rounded; None for no rounding.
        compression: level of lossless compression, 0 (none) to 9: zlib in netCDF, zstd in zarr.
        part: part of the fields that this process writes to a zarr store; None for whole fields.
        grib: settings of GRIB2 files; None for other formats.
    """

    format: str = "netcdf"
    layout: str = "cf"
    split: str | None = None
    variables: Sequence[str] | None = None
    levels: Sequence[float] | None = None
    keep_bits: int | None = None
    compression: int = 0
    part: StorePart | None = None
    grib: GribOptions | None = None


@dataclass(frozen=True)
class OutputVariable:
    """Variable of a forecast file or store.

    Attributes:
        name: name in the file.
        channel_index: indices of the variable's channels among the output channels, in the order of the levels.
        level_dim: name of the level dimension; None for a variable without levels.
        attributes: CF attributes.
        mask_HW: bool, True where the variable is always missing; None if it is never missing.
        window: length in minutes of the window of a mean or sum, which ends at the valid time, or `SINCE_START` for a
            sum since the initial time; None for an instantaneous variable.
    """

    name: str
    channel_index: tuple[int, ...]
    level_dim: str | None
    attributes: dict[str, str]
    mask_HW: np.ndarray | None
    window: int | None


@dataclass(frozen=True)
class ForecastSchema:
    """Description of the content on disk that all forecasts of a run have in common.

    Attributes:
        variables: variables in the order of the file.
        levels: name of a level dimension -> level values in `level_units`.
        level_units: hPa, Pa or model_level.
        grid: horizontal grid.
        calendar: calendar of the times.
        lead_minutes: lead times of the written fields in minutes, int64.
        members: number of ensemble members; None for a single forecast, which has no member dimension.
        keep_bits: number of mantissa bits to which values are rounded; None for no rounding.
        compression: level of lossless compression, 0 (none) to 9.
        global_attributes: attributes of the file. Forecasts of one run have equal `select_run_attributes`.
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
        """Return the names of the dimensions of one variable.

        Args:
            variable: a variable of this schema.
            leading: names of the time dimensions, which are the first dimensions.
        """
        dims = list(leading)
        if self.members is not None:
            dims.append(MEMBER)
        if variable.level_dim:
            dims.append(variable.level_dim)
        return (*dims, "latitude", "longitude")

    def shape(self, variable: OutputVariable) -> tuple[int, ...]:
        """Return the shape of one variable at one lead time, ([M,] [L,] H, W)."""
        shape: list[int] = []
        if self.members is not None:
            shape.append(self.members)
        if variable.level_dim:
            shape.append(len(variable.channel_index))
        return (*shape, *self.grid.shape)

    def select(self, variable: OutputVariable, fields_CHW: np.ndarray) -> np.ndarray:
        """Return the values to write for one variable of one member at one lead time.

        Args:
            variable: a variable of this schema.
            fields_CHW: output channels in physical units, float32.

        Returns:
            ([L,] H, W) float32, rounded to `keep_bits`, NaN where masked. It may share the memory of `fields_CHW`.
        """
        values = select_channels(fields_CHW, list(variable.channel_index))
        if not variable.level_dim:
            values = values[0]
        if self.keep_bits is not None:
            values = bitround(values, self.keep_bits)
        if variable.mask_HW is None:
            return values
        return np.where(variable.mask_HW, np.float32(np.nan), values)

    def time_names_by_window(self, name: str) -> dict[int, str]:
        """Map each window of means and sums, in minutes, to the name of the time coordinate that has its bounds.

        If all means and sums have the same window, its bounds belong to the coordinate `name` of the time dimension.
        Otherwise each window gets an additional coordinate, such as ``time_6h``. The coordinate `name` then has no
        bounds, because all variables share this coordinate.
        """
        windows = [variable.window for variable in self.variables if variable.window is not None]
        distinct_windows = list(dict.fromkeys(windows))
        if len(distinct_windows) == 1:
            return {distinct_windows[0]: name}
        names = {}
        for window in distinct_windows:
            suffix = format_duration(window)
            if window == SINCE_START:
                suffix = "since_start"
            names[window] = f"{name}_{suffix}"
        return names

    def level_attributes(self, dim: str) -> dict[str, str]:
        """Return the CF attributes of a level dimension."""
        units = self.level_units
        if units == "model_level":
            units = "1"
        # A second set of levels is named after its first variable, for example "level_t".
        long_name = dim
        if dim != "level":
            long_name = f"level of {dim.removeprefix('level_')}"
        return {
            "standard_name": _LEVEL_STANDARD_NAMES[self.level_units],
            "long_name": long_name,
            "units": units,
            # Level numbers and pressures both increase downwards.
            "positive": "down",
            "axis": "Z",
        }

    def time_attributes(self) -> dict[str, str]:
        """Return the CF attributes ``units`` and ``calendar`` of times that are written in minutes."""
        return {"units": TIME_UNITS, "calendar": self.calendar.name}


def build_window_bounds(window: int, initial_minutes: np.ndarray | int, valid_minutes: np.ndarray) -> np.ndarray:
    """Return the time bounds of a mean or sum: start and end of its window, for each valid time.

    Args:
        window: length in minutes, or `SINCE_START` for a window that starts at the initial time.
        initial_minutes: initial times in minutes; the shape broadcasts to the shape of the valid times.
        valid_minutes: valid times in minutes, of any shape (...).

    Returns:
        (..., 2) in minutes: start of the window, and its end, which is the valid time.
    """
    begins = valid_minutes - window
    if window == SINCE_START:
        begins = np.broadcast_to(initial_minutes, valid_minutes.shape)
    return np.stack([begins, valid_minutes], axis=-1)


def build_schema(
    fields: OutputFields,
    lead_minutes: Sequence[int],
    options: OutputOptions,
    members: int | None = None,
    global_attributes: Mapping[str, str | int] | None = None,
) -> ForecastSchema:
    """Build the description of the forecast files of a run.

    Args:
        fields: description of the fields of each step.
        lead_minutes: lead times of the written fields, in minutes.
        options: selection and format of the fields.
        members: number of ensemble members; None for a single forecast.
        global_attributes: global attributes of the files; ``Conventions`` is added.

    Raises:
        ConfigError: if the variables or levels of `options` are not among the outputs.
    """
    output = fields.channels.output
    channel_index = _select_channels(output, options)
    temporal = {}
    for name in channel_index:
        temporal[name] = fields.attributes.get(name, {}).get("temporal", "instant")
    has_windows = any(value != "instant" for value in temporal.values())
    level_dims: dict[str, tuple[float, ...]] = {}
    variables = []
    for name, indices in channel_index.items():
        levels = tuple(output[index].level for index in indices)
        level_dim = None
        if levels[0] is not None:
            level_dim = _find_or_add_level_dim(level_dims, levels, name)
        field_attributes = fields.attributes.get(name, {})
        attributes = {}
        for key in _VARIABLE_ATTRIBUTES:
            if field_attributes.get(key):
                attributes[key] = str(field_attributes[key])
        # If the file has no means or sums, all variables are instants and cell_methods is not needed.
        if has_windows:
            attributes["cell_methods"] = _CELL_METHODS[temporal[name]]
        window = None
        if temporal[name] != "instant":
            window = fields.windows.get(name, fields.step_minutes)
        mask_HW = fields.masks.get(name)
        variables.append(OutputVariable(name, tuple(indices), level_dim, attributes, mask_HW, window))
    return ForecastSchema(
        variables=tuple(variables),
        levels=level_dims,
        level_units=fields.level_units,
        grid=fields.grid,
        calendar=fields.calendar,
        lead_minutes=np.asarray(lead_minutes, dtype=np.int64),
        members=members,
        keep_bits=options.keep_bits,
        compression=options.compression,
        global_attributes={"Conventions": "CF-1.8", **(global_attributes or {})},
    )


def _select_channels(output: Sequence[Channel], options: OutputOptions) -> dict[str, list[int]]:
    """Return, for each variable to write, the indices of its channels in the list of output channels.

    Raises:
        ConfigError: if `options` names a variable or level that is not an output, or if no channel remains.
    """
    variables = options.variables
    levels = options.levels
    all_variables = {channel.variable for channel in output}
    for name in variables or ():
        if name not in all_variables:
            raise ConfigError(f'inference.variables: "{name}" is not an output{did_you_mean(name, all_variables)}')
    all_levels = {channel.level for channel in output if channel.level is not None}
    missing_levels = []
    for level in levels or ():
        if level not in all_levels:
            missing_levels.append(f"{level:g}")
    if missing_levels:
        raise ConfigError(
            f"inference.levels: {', '.join(missing_levels)}: no output is on this level; the levels are "
            + ", ".join(f"{level:g}" for level in sorted(all_levels))
        )
    channel_index: dict[str, list[int]] = {}
    for index, channel in enumerate(output):
        if variables is not None and channel.variable not in variables:
            continue
        # Variables without levels are not subject to the selection of levels.
        if levels is not None and channel.level is not None and channel.level not in levels:
            continue
        channel_index.setdefault(channel.variable, []).append(index)
    if not channel_index:
        raise ConfigError("inference.variables and inference.levels select nothing to write; select more")
    return channel_index


def _find_or_add_level_dim(level_dims: dict[str, tuple[float, ...]], levels: tuple[float, ...], variable: str) -> str:
    """Return the name of the level dimension with exactly these levels; add it to `level_dims` if it does not exist.

    The first level dimension of a file is ``level``; further ones are named after `variable`, for example ``level_t``.

    Args:
        level_dims: name of a level dimension -> level values.
        levels: level values of the variable.
        variable: name of the variable.
    """
    for dim, dim_levels in level_dims.items():
        if dim_levels == levels:
            return dim
    dim = f"level_{variable}" if level_dims else "level"
    level_dims[dim] = levels
    return dim


def use_stored_level_dims(schema: ForecastSchema, stored: Mapping[str, Sequence[str]]) -> ForecastSchema:
    """Return the schema with the names of level dimensions that an existing file has.

    Versions up to 0.14 wrote names such as ``level_2``. A run that continues these forecasts uses the same names.

    Args:
        schema: schema of the forecasts to write.
        stored: name of a variable -> names of its dimensions in the file.
    """
    level_dims: dict[str, tuple[float, ...]] = {}
    variables = []
    for variable in schema.variables:
        dim = variable.level_dim
        if dim is not None:
            levels = schema.levels[dim]
            # The level dimension, if there is one, is before latitude and longitude.
            stored_dim = next(iter(stored.get(variable.name, ())[-3:-2]), "")
            if stored_dim.startswith("level") and level_dims.get(stored_dim, levels) == levels:
                dim = stored_dim
            level_dims[dim] = levels
        variables.append(replace(variable, level_dim=dim))
    return replace(schema, variables=tuple(variables), levels=level_dims)
