"""Requests for the records of an analysis that a forecast needs, and the built-in names of records in GFS and IFS."""

from __future__ import annotations

import re
from dataclasses import dataclass

from credit.calendar import parse_duration
from credit.channels import Channel
from credit.config import Config
from credit.config.realtime_section import RealtimeConfig, RecordConfig
from credit.config.sections.data import DataConfig
from credit.data.analyses import select_forecast_inputs
from credit.data.formats.grib.messages import Message
from credit.data.formats.grib.unreadable import find_level_type, find_level_value
from credit.errors import ConfigError, did_you_mean
from credit.forecast.ensemble.perturbations import compute_analysis_offsets
from credit.forecast.initial_times import list_frame_offsets

_TWO_METRES = "2 m above ground"
_TEN_METRES = "10 m above ground"

# Records of variables that are not in `realtime.fields`. GFS uses the names of wgrib2, and IFS the names of MARS.
_BUILT_IN: dict[str, dict[str, RecordConfig]] = {
    "gfs_idx": {
        "z": RecordConfig(param="HGT"),
        "t": RecordConfig(param="TMP"),
        "u": RecordConfig(param="UGRD"),
        "v": RecordConfig(param="VGRD"),
        "q": RecordConfig(param="SPFH"),
        "r": RecordConfig(param="RH"),
        "w": RecordConfig(param="VVEL"),
        "t2m": RecordConfig(param="TMP", level=_TWO_METRES),
        "d2m": RecordConfig(param="DPT", level=_TWO_METRES),
        "u10": RecordConfig(param="UGRD", level=_TEN_METRES),
        "v10": RecordConfig(param="VGRD", level=_TEN_METRES),
        "msl": RecordConfig(param="PRMSL", level="mean sea level"),
        "sp": RecordConfig(param="PRES", level="surface"),
        "skt": RecordConfig(param="TMP", level="surface"),
        "tcwv": RecordConfig(param="PWAT", level="entire atmosphere (considered as a single layer)"),
        "siconc": RecordConfig(param="ICEC", level="surface"),
    },
    "ecmwf_index": {
        "z": RecordConfig(param="gh"),
        **{name: RecordConfig(param=name) for name in ("t", "u", "v", "q", "r", "w", "msl", "sp", "skt", "tcwv")},
        "t2m": RecordConfig(param="2t"),
        "d2m": RecordConfig(param="2d"),
        "u10": RecordConfig(param="10u"),
        "v10": RecordConfig(param="10v"),
    },
}
# Alternative names of these variables, from WeatherBench 2 and ECMWF.
_ALIASES = {
    "geopotential": "z", "temperature": "t", "u_component_of_wind": "u", "v_component_of_wind": "v",
    "specific_humidity": "q", "relative_humidity": "r", "vertical_velocity": "w", "2m_temperature": "t2m",
    "2m_dewpoint_temperature": "d2m", "10m_u_component_of_wind": "u10", "10m_v_component_of_wind": "v10",
    "mean_sea_level_pressure": "msl", "surface_pressure": "sp", "skin_temperature": "skt",
    "total_column_water_vapour": "tcwv", "sea_ice_cover": "siconc", "2t": "t2m", "2d": "d2m", "10u": "u10",
    "10v": "v10", "ci": "siconc",
}  # fmt: skip
# Values of ecCodes' shortName for the parameters of GFS. A parameter has several values if ecCodes defines different
# short names for some heights. In IFS, the name of the parameter is the shortName.
_GFS_SHORT_NAMES = {
    "HGT": ("gh", "orog"), "TMP": ("t", "2t"), "UGRD": ("u", "10u"), "VGRD": ("v", "10v"), "SPFH": ("q", "2sh"),
    "RH": ("r", "2r"), "VVEL": ("w",), "DPT": ("dpt", "2d"), "PRMSL": ("prmsl",), "MSLET": ("mslet",),
    "PRES": ("pres", "sp"), "PWAT": ("pwat",), "ICEC": ("ci",), "LAND": ("lsm",),
}  # fmt: skip
# Names of sums over a period, which an analysis at one instant does not contain.
_ACCUMULATIONS = {"tp", "precipitation", "total_precipitation", "rain", "cp", "lsp", "sf", "snowfall", "ro", "e",
                  "ssr", "str", "tsr", "ttr", "ssrd", "strd", "sshf", "slhf", "APCP", "ACPCP"}  # fmt: skip

_PRESSURE = "pressure"
_COLUMN = "column"
# Values of ecCodes' typeOfLevel for a complete column of air.
_COLUMN_TYPES = ("atmosphere", "atmosphereSingleLayer", "entireAtmosphere")
_HEIGHT_TEXT = re.compile(r"([0-9.]+) m above ground")
_PRESSURE_TEXT = re.compile(r"([0-9.]+) (?:mb|hPa)")


@dataclass(frozen=True)
class RecordRequest:
    """Request for a record, with the properties that identify the record in the index and in the decoded message.

    Attributes:
        name: name of the channel, such as ``z500``.
        variable: variable of the model.
        level: level in hPa of a variable in ``vars_3D``; None for a variable in ``vars_2D``.
        param: name of the parameter in the index.
        index_level: level in the index, as a string.
        short_names: allowed values of ecCodes' shortName in the message.
        level_type: ``pressure``, ``column``, or a typeOfLevel of ecCodes; empty if shortName implies the level.
        level_value: level of the message in hPa or m; None if the type has only one level.
        may_be_missing: True if values may be missing in some cells (``missing: fill_mean``).
    """

    name: str
    variable: str
    level: float | None
    param: str
    index_level: str
    short_names: tuple[str, ...]
    level_type: str
    level_value: float | None
    may_be_missing: bool

    def describe(self) -> str:
        """Return the channel and its record as a string, such as ``z500 (HGT:500 mb)``."""
        return f"{self.name} ({self.param}:{self.index_level})"

    def is_at_level(self, message: Message) -> bool:
        """Return True if the level of a decoded message is the requested level."""
        type_of_level = message.key_values.get("typeOfLevel")
        if self.level_type == _PRESSURE:
            is_pressure = find_level_type(message) == "pressure"
            return is_pressure and abs(find_level_value(message) - self.level_value) < 1e-6 * self.level_value
        if self.level_type == _COLUMN:
            return type_of_level in _COLUMN_TYPES
        if not self.level_type:
            return find_level_type(message) not in ("pressure", "hybrid")
        return type_of_level == self.level_type and self.level_value in (None, message.level)


def list_record_requests(config: Config) -> list[RecordRequest]:
    """Return requests for the records of one analysis that a forecast needs, in the order of the channels.

    A forecast needs the prognostic variables and the dynamic forcing that is read from data.

    Raises:
        ConfigError: if the section ``realtime`` is missing, or a variable cannot be in an analysis.
    """
    realtime = require_realtime_section(config)
    channels = select_forecast_inputs(config.data).channel_map().time_varying_stored
    variables = {channel.variable for channel in channels}
    for name in realtime.fields:
        if name not in variables:
            raise ConfigError(
                f"realtime.fields.{name}: a forecast does not read this variable from data"
                f"{did_you_mean(name, variables)}"
            )
    return [_build_request(channel, config.data, realtime) for channel in channels]


def require_realtime_section(config: Config) -> RealtimeConfig:
    """Return the section ``realtime`` of a config.

    Raises:
        ConfigError: if the section is missing.
    """
    if config.realtime is None:
        raise ConfigError("realtime: the section is missing; it defines the address and format of the analyses")
    return config.realtime


def list_analysis_offsets(config: Config) -> list[int]:
    """Return the times of the analyses that a forecast reads, in minutes before its initial time, increasing from 0.

    Models with several input frames, and lagged ensembles, need earlier analyses.

    Raises:
        ConfigError: if an earlier analysis would not be at an hour of ``realtime.cycles``.
    """
    realtime = require_realtime_section(config)
    offsets = sorted(set(list_frame_offsets(compute_analysis_offsets(config.inference.ensemble), config.data)))
    for hour in realtime.cycles:
        for offset in offsets:
            minutes = (60 * hour - offset) % 1440
            if minutes % 60 or minutes // 60 not in realtime.cycles:
                raise ConfigError(
                    f"realtime.cycles: a forecast from {hour:02d} UTC needs the analysis {offset / 60:g} h earlier "
                    f"(data.history_len {config.data.history_len}, data.timestep {config.data.timestep}), but "
                    f"{realtime.cycles} does not contain its hour"
                )
    if max(offsets) + parse_duration(realtime.max_age) > parse_duration(realtime.keep_analyses):
        raise ConfigError(
            f"realtime.keep_analyses: {realtime.keep_analyses} is too short; a forecast from a cycle of max_age "
            f"{realtime.max_age} reads analyses up to {max(offsets) / 60:g} h before it"
        )
    return offsets


def _build_request(channel: Channel, data: DataConfig, realtime: RealtimeConfig) -> RecordRequest:
    """Return the request for the record of one channel; for errors see `list_record_requests`."""
    variable = channel.variable
    options = data.options_of(variable)
    _require_available_in_analysis(channel, data)
    record = realtime.fields.get(variable) or _find_built_in_record(variable, realtime.format)
    key = f"realtime.fields.{variable}"
    if channel.level is not None and record.level is not None:
        raise ConfigError(f"{key}.level: {variable} is in vars_3D, so its levels are data.levels; remove this key")
    is_gfs = realtime.format == "gfs_idx"
    level = None
    if channel.level is not None:
        level = channel.level / (100.0 if data.level_units == "Pa" else 1.0)
        index_level = f"{level:g} mb" if is_gfs else f"{level:g} hPa"
    elif record.level is not None:
        index_level = record.level
    elif is_gfs:
        raise ConfigError(f"{key}.level: is missing; {variable} is in vars_2D, so set a level such as surface")
    else:
        index_level = "sfc"
    level_type, level_value = _parse_level(index_level, f"{key}.level")
    if record.short_name is not None:
        short_names: tuple[str, ...] = (record.short_name,)
    elif is_gfs and record.param not in _GFS_SHORT_NAMES:
        raise ConfigError(
            f"{key}.short_name: is missing; there is no built-in name for {record.param}"
            f"{did_you_mean(record.param, _GFS_SHORT_NAMES)}"
        )
    else:
        short_names = _GFS_SHORT_NAMES[record.param] if is_gfs else (record.param,)
    return RecordRequest(
        channel.name,
        variable,
        level,
        record.param,
        index_level,
        short_names,
        level_type,
        level_value,
        may_be_missing=options.missing == "fill_mean",
    )


def _require_available_in_analysis(channel: Channel, data: DataConfig) -> None:
    """Raise ConfigError if an analysis at one instant on pressure levels cannot contain a variable.

    Raises:
        ConfigError: if the variable cannot be in an analysis; the message gives the reason.
    """
    variable = channel.variable
    options = data.options_of(variable)
    if channel.level is not None and data.level_units == "model_level":
        raise ConfigError(
            f"realtime: {variable} is on model levels (data.level_units), but operational analyses are read only on "
            "pressure levels"
        )
    if options.temporal != "instant":
        raise ConfigError(
            f"realtime: {variable} is {options.temporal} (data.variable_options.{variable}.temporal), a value over a "
            "period, but an analysis is at one instant; make it diagnostic, or remove it from the model"
        )
    if channel.group == "dynamic_forcing" and options.in_forecast == "observed":
        raise ConfigError(
            f"realtime: {variable} (data.variable_options.{variable}.in_forecast: observed) needs values after the "
            "analysis; set persist or climatology"
        )


def _find_built_in_record(variable: str, index_format: str) -> RecordConfig:
    """Return the built-in record of a variable.

    Raises:
        ConfigError: if there is no built-in record of the variable.
    """
    records = _BUILT_IN[index_format]
    record = records.get(_ALIASES.get(variable, variable))
    if record is not None:
        return record
    if variable in _ACCUMULATIONS:
        raise ConfigError(
            f"realtime: {variable} is a sum over a period, but an analysis is at one instant; make it diagnostic in "
            "data.variables, or remove it from the model"
        )
    raise ConfigError(
        f"realtime.fields: there is no built-in record of {variable} for {index_format}; add {variable}: {{param: ..., "
        f"level: ...}}, or remove it from the model; built-in variables are {', '.join(records)}"
    )


def _parse_level(text: str, key: str) -> tuple[str, float | None]:
    """Return the type and value (see `RecordRequest`) of a level that is given in the spelling of the index.

    Raises:
        ConfigError: if `text` is not a level that can be compared with the decoded message.
    """
    pressure = _PRESSURE_TEXT.fullmatch(text)
    if pressure is not None:
        return _PRESSURE, float(pressure[1])
    height = _HEIGHT_TEXT.fullmatch(text)
    if height is not None:
        return "heightAboveGround", float(height[1])
    if text.startswith("entire atmosphere"):
        return _COLUMN, None
    types = {"surface": "surface", "mean sea level": "meanSea", "sfc": ""}
    if text not in types:
        raise ConfigError(
            f'{key}: "{text}" cannot be compared with a decoded record; levels are surface, mean sea level, N m above '
            "ground, N mb, entire atmosphere ... (gfs_idx), sfc and N hPa (ecmwf_index)"
        )
    return types[text], None
