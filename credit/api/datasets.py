"""Sample data as a dataset, and a reader of fields from a dataset with the same checks as for files."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

import cftime
import numpy as np
import xarray as xr

from credit.calendar import TIME_UNITS, Calendar
from credit.config.sections.data import DataConfig
from credit.config.sections.source import SourceConfig
from credit.data.analyses import select_forecast_inputs
from credit.data.formats.files import OpenFiles, expand_path
from credit.data.formats.plugin.fields import encode_times
from credit.data.sources.source_reader import SourceReader, open_sources
from credit.errors import DataError

# Type of the source, which appears in messages.
_SOURCE_TYPE = "xarray.Dataset"
# Names and standard names of the coordinates with valid times, initial times and lead times.
_VALID_TIME = "valid_time"
_INITIAL_TIMES = ("forecast_reference_time", "init_time", "initial_time")
_LEAD_TIME = "forecast_period"
# Attributes that mark packed values.
_PACKING = ("scale_factor", "add_offset")


def open_sample(name: str = "speedy") -> xr.Dataset:
    """Return the sample data of the package as a dataset in memory (100 MB).

    Args:
        name: name of the sample data. ``speedy``, the data of the quickstart, contains 17 months of a simulated
            atmosphere at 5.6 degrees, every 6 hours.

    Raises:
        DataError: if the package has no sample data of this name.
    """
    files = [xr.open_dataset(path) for path in expand_path(f"sample:{name}", "name")]
    return xr.concat(files, "time", data_vars="minimal", combine_attrs="override").astype("float32", keep_attrs=True)


def find_valid_times(dataset: xr.Dataset, origin: str) -> tuple[Hashable, xr.Variable]:
    """Return the name of the time dimension of a dataset, and the valid times along it.

    Args:
        dataset: fields at one or several times.
        origin: name of the dataset, for messages.

    Raises:
        DataError: if `dataset` is not an xarray dataset, if not exactly one dimension has dates as its coordinate, or
            if the dates are initial times of forecasts.
    """
    if not isinstance(dataset, xr.Dataset):
        raise DataError(f"{origin}: must be an xarray.Dataset, but is a {type(dataset).__name__}; see its to_dataset()")
    names = [name for name in dataset.dims if name in dataset.coords and _has_dates(dataset[name].variable)]
    if len(names) != 1:
        names_text = ", ".join(str(name) for name in names) or "none"
        raise DataError(
            f"{origin}: exactly one dimension must have dates (the valid times) as its coordinate; dimensions with "
            f'dates: {names_text}. For a single time without a dimension, write dataset.expand_dims("time")'
        )
    name = names[0]
    if name != _VALID_TIME and _VALID_TIME in dataset.variables:
        valid_times = dataset.variables[_VALID_TIME]
        if valid_times.dims == (name,) and _has_dates(valid_times):
            return name, valid_times
    times = dataset.variables[name]
    if name in _INITIAL_TIMES or times.attrs.get("standard_name") in _INITIAL_TIMES:
        raise DataError(f"{origin}: {name} contains initial times of forecasts; add the coordinate valid_time along it")
    for lead_name, lead in dataset.variables.items():
        is_lead = lead.dtype.kind == "m" or lead.attrs.get("standard_name") == _LEAD_TIME
        if is_lead and name not in lead.dims and np.any(lead.values.astype(np.float64) != 0):
            raise DataError(
                f"{origin}: {lead_name} is a lead time that is not 0, so {name} may contain initial times; add the "
                f"coordinate valid_time along {name}"
            )
    return name, times


def open_dataset_reader(conf: DataConfig, dataset: xr.Dataset, origin: str, with_outputs: bool = False) -> SourceReader:
    """Return a reader that checks and converts the fields of a dataset in the same way as the fields of files.

    Fields are read when they are needed, so the dataset may be larger than the memory. Variables have their names in
    the config, or the names in files that ``data.sources.N.rename`` lists. The dataset must contain derived variables,
    because the reader does not compute them.

    Args:
        conf: section ``data`` of the config of the run; the files of its sources are not read.
        dataset: fields on the grid and levels of the run.
        origin: name of the dataset, for messages.
        with_outputs: True to read all predicted variables, for example for the truth of scores; False to read only the
            inputs of a forecast.

    Raises:
        DataError: if the dataset lacks a variable, level or time, or has a different grid, unsuitable units or
            unexpected missing values.
    """
    options = {}
    for name, variable_options in conf.variable_options.items():
        options[name] = variable_options.model_copy(update={"derive": None, "inputs": {}})
    # The files of the grid and of the level coefficients are not read, because no field is interpolated.
    update = {
        "sources": [_build_source_config(conf)],
        "store": None,
        "grid": None,
        "coefficients": None,
        "variable_options": options,
    }
    conf = conf.model_copy(update=update)
    if with_outputs:
        static = conf.variables.static.model_copy(update={"vars_3D": [], "vars_2D": []})
        forcing = conf.variables.dynamic_forcing.model_copy(update={"vars_3D": [], "vars_2D": []})
        variables = conf.variables.model_copy(update={"static": static, "dynamic_forcing": forcing})
        conf = conf.model_copy(update={"variables": variables})
    else:
        conf = select_forecast_inputs(conf)
    files = _DatasetInMemory(_encode_dates(dataset, origin))
    try:
        return open_sources(conf, files)
    except DataError as error:
        # The messages refer to files, so the names of files are replaced with the name of the dataset.
        text = str(error).replace(files.path, origin).replace("is in no file of data.sources", f"is not in {origin}")
        raise DataError(text) from error


def decode_times(minutes: np.ndarray, calendar: Calendar) -> np.ndarray:
    """Convert times in minutes to dates: datetime64, or cftime objects if datetime64 does not support the calendar."""
    variable = xr.Variable("time", minutes, {"units": TIME_UNITS, "calendar": calendar.name})
    return xr.conventions.decode_cf_variable("time", variable).values


class _DatasetInMemory(OpenFiles):
    """Substitute for the open files of a source, which returns a single dataset in memory.

    Args:
        dataset: the dataset, with times as numbers.

    Attributes:
        path: string that messages show instead of the path of a file.
    """

    path = f"data.sources.0 ({_SOURCE_TYPE})"

    def __init__(self, dataset: xr.Dataset) -> None:
        super().__init__([])
        self._dataset = dataset

    def get(self, path: Path | str, source_number: int) -> xr.Dataset:
        """Return the dataset for every path."""
        return self._dataset

    def fingerprint(self, path: Path | str, source_number: int) -> list[int]:
        """Return constant numbers, because no file on disk depends on the content of the dataset."""
        return [0, 0]


def _build_source_config(conf: DataConfig) -> SourceConfig:
    """Return the config section of a source with all variables, under their names in the config or in files."""
    rename: dict[str, list[str]] = {}
    for source in conf.sources:
        for variable in source.rename:
            names = rename.setdefault(variable, [variable])
            names.extend(name for name in source.names_in_files(variable) if name not in names)
    # `model_construct` skips the validation, which would reject the unregistered type.
    return SourceConfig.model_construct(type=_SOURCE_TYPE, rename=rename)


def _encode_dates(dataset: xr.Dataset, origin: str) -> xr.Dataset:
    """Return a copy of a dataset with its times as numbers, as in a file that is read without decoding.

    Other variables with dates or durations, such as the initial time of a forecast, are dropped.

    Args:
        dataset: the dataset.
        origin: name of the dataset, for messages.

    Raises:
        DataError: if values are packed, or for the reasons that `find_valid_times` lists.
    """
    time_name, times = find_valid_times(dataset, origin)
    bounds_name = times.attrs.get("bounds")
    variables = {}
    for name, variable in dataset.variables.items():
        packing = [key for key in _PACKING if key in variable.attrs]
        if packing:
            raise DataError(
                f"{origin}: {name} has the attribute {packing[0]}, so its values are packed; open the file with "
                "mask_and_scale=True, the default of xarray.open_dataset"
            )
        if name == time_name:
            attributes = {"standard_name": "time", "axis": "T"}
            if bounds_name in dataset.variables:
                attributes["bounds"] = bounds_name
            variables[name] = _convert_to_minutes(times, attributes)
        elif name == bounds_name and _has_dates(variable):
            variables[name] = _convert_to_minutes(variable, {})
        elif not _has_dates(variable) and variable.dtype.kind != "m":
            copied = variable.copy(deep=False)
            copied.encoding = {}
            variables[name] = copied
    return xr.Dataset(variables, attrs=dataset.attrs)


def _convert_to_minutes(variable: xr.Variable, attributes: dict[str, str]) -> xr.Variable:
    """Convert dates to minutes, with CF time units, calendar and the additional `attributes`."""
    minutes, calendar = encode_times(variable.values.reshape(-1))
    attributes = {**attributes, "units": TIME_UNITS, "calendar": calendar}
    return xr.Variable(variable.dims, minutes.reshape(variable.shape), attributes)


def _has_dates(variable: xr.Variable) -> bool:
    """Return True if the values of a variable are datetime64 or cftime objects."""
    if variable.dtype == object and variable.size:
        return isinstance(variable.values.flat[0], cftime.datetime)
    return variable.dtype.kind == "M"
