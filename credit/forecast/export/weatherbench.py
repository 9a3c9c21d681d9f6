"""Export of forecasts and their truth to zarr stores that WeatherBench-X can read.

WeatherBench-X expects long names of variables, one dimension ``level`` for all variables, and the dimension ``number``
for ensemble members. The time dimensions have the names of ECMWF: ``time`` and ``prediction_timedelta`` in forecasts,
and ``time`` in the truth.

Shape suffixes: M members, C channels, L levels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zarr
from zarr.errors import ZarrUserWarning

from credit.calendar import TIME_UNITS, Calendar
from credit.data.reader import FieldReader
from credit.errors import ConfigError, CreditError
from credit.forecast.io.archive.base import ForecastArchive
from credit.forecast.io.schema import INITIAL_TIME, LATITUDE, LEAD_TIME, LONGITUDE, REALIZATION, VALID_TIME
from credit.grid import LatLonGrid
from credit.interop.variable_names import weatherbench_name
from credit.utils.atomic import atomic_folder

FORECASTS = "forecasts.zarr"
TRUTH = "truth.zarr"
CLIMATOLOGY = "climatology.zarr"
_MEMBER = "number"
_CALENDARS = ("standard", "gregorian", "proleptic_gregorian")


@dataclass(frozen=True)
class ExportNames:
    """Settings that determine the names and levels of the exported variables.

    Attributes:
        rename: name of a variable in the config -> its name in the stores. Variables without an entry get their
            WeatherBench names.
        hours: name of a variable that is a sum over time -> period of the sum in hours.
        level_units: value of ``data.level_units``, the units of the levels. Pressure levels are exported in hPa.
    """

    rename: Mapping[str, str]
    hours: Mapping[str, int]
    level_units: str


@dataclass(frozen=True)
class _ExportedVariable:
    """Variable of an exported store.

    Attributes:
        name: name in the store.
        channel_index: indices of the variable's channels in the fields to write.
        level_index: indices of the variable's levels along the dimension ``level``; None for a variable without levels.
        units: units of the variable; empty if unknown.
    """

    name: str
    channel_index: list[int]
    level_index: list[int] | None
    units: str


class _StoreWriter:
    """Writer of fields to a new zarr store in the WeatherBench layout, one time after another.

    All variables share one dimension ``level``. At levels that a variable does not have, its values are NaN.

    Args:
        path: path of the store; it must not exist.
        channels: name of each channel of the fields -> name of its variable, and its level or None.
        units: name of a variable -> its units.
        names: names and level units of the export.
        grid: grid of the fields.
        leading: name of each leading dimension -> its length. A chunk has length 1 along each leading dimension.
    """

    def __init__(
        self,
        path: Path,
        channels: Mapping[str, tuple[str, float | None]],
        units: Mapping[str, str],
        names: ExportNames,
        grid: LatLonGrid,
        leading: Mapping[str, int],
    ) -> None:
        self._group = zarr.open_group(path, mode="w-", zarr_format=3)
        self._path = path
        self._grid = grid
        self._levels = sorted({level for _, level in channels.values() if level is not None})
        self._variables = self._list_variables(channels, units, names)
        if self._levels:
            is_pressure = names.level_units != "model_level"
            # WeatherBench has pressures in hPa.
            scale = 0.01 if names.level_units == "Pa" else 1.0
            values = np.array(self._levels) * scale
            if (values == values.round()).all():
                values = values.astype(np.int64)
            self.write_coordinate("level", ("level",), values, {"units": "hPa" if is_pressure else "1"})
        self.write_coordinate("latitude", ("latitude",), grid.lat, LATITUDE)
        self.write_coordinate("longitude", ("longitude",), grid.lon, LONGITUDE)
        for variable in self._variables:
            shape, dims = grid.shape, ("latitude", "longitude")
            if variable.level_index is not None:
                shape, dims = (len(self._levels), *shape), ("level", *dims)
            self._group.create_array(
                variable.name,
                shape=(*leading.values(), *shape),
                chunks=(*(1 for _ in leading), *shape),
                dtype="float32",
                fill_value=float("nan"),
                dimension_names=(*leading, *dims),
                attributes={"units": variable.units} if variable.units else {},
            )

    def _list_variables(
        self, channels: Mapping[str, tuple[str, float | None]], units: Mapping[str, str], names: ExportNames
    ) -> list[_ExportedVariable]:
        """Return the variables of the store; see `_StoreWriter` for the arguments.

        Raises:
            ConfigError: if two variables get the same name.
        """
        # Variable -> indices and levels of its channels.
        indices: dict[str, list[int]] = {}
        levels: dict[str, list[float]] = {}
        for index, (variable, level) in enumerate(channels.values()):
            indices.setdefault(variable, []).append(index)
            if level is not None:
                levels.setdefault(variable, []).append(level)
        variables: dict[str, _ExportedVariable] = {}
        for variable, channel_index in indices.items():
            level_index = None
            if variable in levels:
                level_index = [self._levels.index(level) for level in levels[variable]]
            default_name = weatherbench_name(variable, level_index is not None, names.hours.get(variable))
            name = names.rename.get(variable, default_name)
            if name in variables:
                raise ConfigError(f"{variable}: a second variable has the name {name}; give --rename {variable}=NAME")
            variables[name] = _ExportedVariable(name, channel_index, level_index, units.get(variable, ""))
        return list(variables.values())

    def write_coordinate(self, name: str, dims: tuple[str, ...], values: np.ndarray, attributes: Mapping) -> None:
        """Write a coordinate variable in one chunk.

        Args:
            name: name of the variable.
            dims: names of its dimensions.
            values: values, an array with the dimensions `dims`.
            attributes: CF attributes.
        """
        array = self._group.create_array(
            name, shape=values.shape, dtype=values.dtype, dimension_names=dims, attributes=dict(attributes)
        )
        array[...] = values

    def write_times(self, name: str, minutes: np.ndarray, calendar: Calendar, attributes: Mapping[str, str]) -> None:
        """Write the coordinate variable of a time dimension.

        Args:
            name: name of the dimension.
            minutes: (N,) times, in minutes of `calendar`.
            calendar: calendar of the times.
            attributes: CF attributes; units and calendar are added.
        """
        values = np.asarray(minutes, dtype=np.int64)
        self.write_coordinate(name, (name,), values, {**attributes, "units": TIME_UNITS, "calendar": calendar.name})

    def write_fields(self, position: tuple[int, ...], fields_CHW: np.ndarray) -> None:
        """Write all channels at one index of each leading dimension.

        Args:
            position: index along each leading dimension.
            fields_CHW: fields, float32, with the channels in the order of the constructor's argument.
        """
        for variable in self._variables:
            values = fields_CHW[variable.channel_index]
            if variable.level_index is None:
                self._group[variable.name][position] = values[0]
                continue
            fields_LHW = np.full((len(self._levels), *self._grid.shape), np.nan, dtype=np.float32)
            fields_LHW[variable.level_index] = values
            self._group[variable.name][position] = fields_LHW

    def close(self, attributes: Mapping[str, object]) -> None:
        """Write the consolidated metadata, and the global attributes that are strings or numbers."""
        plain = {name: value for name, value in attributes.items() if isinstance(value, str | int | float)}
        self._group.attrs.update(plain)
        with warnings.catch_warnings():
            # xarray reads consolidated metadata, and prints a warning if there are none. zarr warns that other programs
            # may ignore them.
            warnings.filterwarnings("ignore", "Consolidated metadata is currently not part", ZarrUserWarning)
            zarr.consolidate_metadata(self._path)


def export_weatherbench(
    folder: Path,
    archive: ForecastArchive,
    reader: FieldReader,
    evaluate_climatology: Callable[[int], np.ndarray] | None,
    names: ExportNames,
) -> Path:
    """Write ``forecasts.zarr``, ``truth.zarr`` and ``climatology.zarr`` to a new folder.

    The truth contains the output variables at all initial and valid times that are in the data. The climatology
    contains the expected fields at the same times. Values and units are not changed.

    Args:
        folder: the folder to create.
        archive: the forecasts.
        reader: reader of the truth.
        evaluate_climatology: function that takes a time in minutes and returns the expected fields (C, H, W) of the
            output channels; None to write no climatology.
        names: names of the variables and units of the levels.

    Returns:
        `folder`.

    Raises:
        ConfigError: if the folder exists, a renamed variable does not exist, two variables get the same name, or the
            calendar is not the standard calendar.
        CreditError: if the folder cannot be written.
    """
    if folder.exists():
        raise ConfigError(f"{folder}: exists already; remove it or name a different folder")
    if archive.calendar.name not in _CALENDARS:
        raise ConfigError(
            f"{archive.origin}: the calendar of the forecasts is {archive.calendar.name}; WeatherBench-X needs dates "
            "of the standard calendar"
        )
    variables = {variable for variable, _ in archive.channel_levels.values()}
    for variable in names.rename:
        if variable not in variables:
            raise ConfigError(
                f"--rename: {variable} is not a variable of {archive.origin}, which has {', '.join(sorted(variables))}"
            )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder) as temporary:
            temporary.mkdir()
            _write_forecasts(temporary / FORECASTS, archive, names)
            valid_minutes = archive.initial_minutes[:, None] + np.array([0, *archive.lead_minutes])
            truth_minutes = np.intersect1d(valid_minutes, reader.times)
            _write_fields_of_data(
                temporary / TRUTH, reader, truth_minutes, names, functools.partial(_read_truth, reader)
            )
            if evaluate_climatology is not None:
                path = temporary / CLIMATOLOGY
                _write_fields_of_data(path, reader, truth_minutes, names, evaluate_climatology)
    except OSError as error:
        raise CreditError(f"{folder}: cannot be written ({error.strerror or error}); is the disk full?") from error
    return folder


def _write_forecasts(path: Path, archive: ForecastArchive, names: ExportNames) -> None:
    """Write the store of the forecasts, one lead time after another."""
    leading = {"time": len(archive.initial_minutes), "prediction_timedelta": len(archive.lead_minutes)}
    if archive.members is not None:
        leading[_MEMBER] = archive.members
    writer = _StoreWriter(path, archive.channel_levels, archive.units, names, archive.grid, leading)
    writer.write_times("time", archive.initial_minutes, archive.calendar, INITIAL_TIME)
    # The attribute dtype lets xarray decode hours to a timedelta.
    lead_attributes = {**LEAD_TIME, "units": "hours", "dtype": "timedelta64[ns]"}
    lead_hours = np.asarray(archive.lead_minutes) / 60.0
    writer.write_coordinate("prediction_timedelta", ("prediction_timedelta",), lead_hours, lead_attributes)
    if archive.members is not None:
        writer.write_coordinate(_MEMBER, (_MEMBER,), np.arange(archive.members), REALIZATION)
    for initial_index, initial_minutes in enumerate(archive.initial_minutes.tolist()):
        for lead_index in range(len(archive.lead_minutes)):
            fields_MCHW = archive.read_members(initial_minutes, lead_index)
            for member, fields_CHW in enumerate(fields_MCHW):
                position = (initial_index, lead_index)
                if archive.members is not None:
                    position = (*position, member)
                writer.write_fields(position, fields_CHW)
    writer.close(archive.attributes)


def _write_fields_of_data(
    path: Path,
    reader: FieldReader,
    minutes: np.ndarray,
    names: ExportNames,
    read_fields: Callable[[int], np.ndarray],
) -> None:
    """Write a store with fields of the data's output channels, one time after another.

    Args:
        path: the store.
        reader: reader of the data.
        minutes: times of the store in minutes.
        names: names of the variables and units of the levels.
        read_fields: function that takes a time in minutes and returns the output channels (C, H, W).
    """
    channels = {channel.name: (channel.variable, channel.level) for channel in reader.channels.output}
    units = {variable: attributes.get("units", "") for variable, attributes in reader.attributes.items()}
    writer = _StoreWriter(path, channels, units, names, reader.grid, {"time": len(minutes)})
    writer.write_times("time", minutes, reader.calendar, VALID_TIME)
    for time_index, valid_minutes in enumerate(minutes.tolist()):
        writer.write_fields((time_index,), read_fields(valid_minutes))
    writer.close({})


def _read_truth(reader: FieldReader, minutes: int) -> np.ndarray:
    """Return the output channels of the data (C, H, W) at a time (in minutes) that is in the data."""
    index = reader.index_of(minutes)
    assert index is not None, minutes
    # The first channels of the data are the output channels.
    return reader.read(index)[: len(reader.channels.output)]
