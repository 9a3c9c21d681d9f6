"""Datasets in memory: the sample data, and a reader of initial states and forcing with the checks of files."""

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

# Name of the source in messages.
_SOURCE_TYPE = "xarray.Dataset"
# Names and standard names of coordinates that hold valid times, initial times and lead times.
_VALID_TIME = "valid_time"
_INITIAL_TIMES = ("forecast_reference_time", "init_time", "initial_time")
_LEAD_TIME = "forecast_period"
# Attributes of packed values.
_PACKING = ("scale_factor", "add_offset")


def open_sample(name: str = "speedy") -> xr.Dataset:
    """Return sample data that ship with the package, in memory (100 MB).

    Args:
        name: name of the sample. ``speedy`` has 17 months of a simulated atmosphere at 5.6 degrees and every 6 hours,
            the data of the quickstart.

    Raises:
        DataError: if the package has no sample of this name.
    """
    files = [xr.open_dataset(path) for path in expand_path(f"sample:{name}", "name")]
    return xr.concat(files, "time", data_vars="minimal", combine_attrs="override").astype("float32", keep_attrs=True)


def find_valid_times(dataset: xr.Dataset, origin: str) -> tuple[Hashable, xr.Variable]:
    """Return the name of the time dimension of a dataset, and the valid times along it.

    Args:
        dataset: fields at one or several times.
        origin: name of the dataset, for messages.

    Raises:
        DataError: if `dataset` is no dataset, if no dimension, or more than one, has dates as its coordinate, or if
            these are initial times of forecasts.
    """
    if not isinstance(dataset, xr.Dataset):
        raise DataError(f"{origin}: must be an xarray.Dataset, is a {type(dataset).__name__}; see its to_dataset()")
    names = [name for name in dataset.dims if name in dataset.coords and _has_dates(dataset[name].variable)]
    if len(names) != 1:
        names_text = ", ".join(str(name) for name in names) or "none"
        raise DataError(
            f"{origin}: exactly one dimension must have dates as its coordinate, the valid times; these have them: "
            f'{names_text}. For a single time without a dimension, write dataset.expand_dims("time")'
        )
    name = names[0]
    if name != _VALID_TIME and _VALID_TIME in dataset.variables:
        valid_times = dataset.variables[_VALID_TIME]
        if valid_times.dims == (name,) and _has_dates(valid_times):
            return name, valid_times
    times = dataset.variables[name]
    if name in _INITIAL_TIMES or times.attrs.get("standard_name") in _INITIAL_TIMES:
        raise DataError(f"{origin}: {name} holds initial times of forecasts; add the coordinate valid_time along it")
    for lead_name, lead in dataset.variables.items():
        is_lead = lead.dtype.kind == "m" or lead.attrs.get("standard_name") == _LEAD_TIME
        if is_lead and name not in lead.dims and np.any(lead.values.astype(np.float64) != 0):
            raise DataError(
                f"{origin}: {lead_name} is a lead time that is not 0, so {name} may hold initial times; add the "
                f"coordinate valid_time along {name}"
            )
    return name, times


def open_dataset(conf: DataConfig, dataset: xr.Dataset, origin: str, with_outputs: bool = False) -> SourceReader:
    """Return a reader of the fields of a dataset, checked and converted like the fields of files.

    Fields are read when they are needed, so the dataset may be larger than the memory. Variables have the names of the
    config, or those that ``data.sources.N.rename`` gives them. Derived variables must be in the dataset.

    Args:
        conf: section ``data`` of the config of the run; its sources are not read.
        dataset: fields on the grid and levels of the run.
        origin: name of the dataset, for messages.
        with_outputs: True to read all predicted variables, as for the truth of scores; False to read only what a
            forecast reads.

    Raises:
        DataError: if the dataset lacks a variable, level or time, or has another grid, other units or missing values.
    """
    options = {}
    for name, variable_options in conf.variable_options.items():
        options[name] = variable_options.model_copy(update={"derive": None, "inputs": {}})
    # Neither the grid nor the coefficients of levels are read from files, because nothing is interpolated.
    update = {
        "sources": [_build_source(conf)],
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
        # The messages were written for files; here the dataset takes the place of a file.
        text = str(error).replace(files.path, origin).replace("is in no file of data.sources", f"is not in {origin}")
        raise DataError(text) from error


def decode_times(minutes: np.ndarray, calendar: Calendar) -> np.ndarray:
    """Return times in minutes as dates: datetime64, or cftime objects in a calendar that datetime64 does not have."""
    variable = xr.Variable("time", minutes, {"units": TIME_UNITS, "calendar": calendar.name})
    return xr.conventions.decode_cf_variable("time", variable).values


class _DatasetInMemory(OpenFiles):
    """The files of a source that is one dataset in memory.

    Args:
        dataset: the dataset, with times as numbers.

    Attributes:
        path: text that stands for the path of a file.
    """

    path = f"data.sources.0 ({_SOURCE_TYPE})"

    def __init__(self, dataset: xr.Dataset) -> None:
        super().__init__([])
        self._dataset = dataset

    def get(self, path: Path | str, number: int) -> xr.Dataset:
        """Return the dataset."""
        return self._dataset

    def fingerprint(self, path: Path | str, number: int) -> list[int]:
        """Return two constant numbers, because no file that depends on the dataset is kept."""
        return [0, 0]


def _build_source(conf: DataConfig) -> SourceConfig:
    """Return the section of a source with all variables, each under its name in the config or in the files."""
    rename: dict[str, list[str]] = {}
    for source in conf.sources:
        for variable in source.rename:
            names = rename.setdefault(variable, [variable])
            names.extend(name for name in source.names_in_files(variable) if name not in names)
    # The constructor would refuse the type, which is registered nowhere.
    return SourceConfig.model_construct(type=_SOURCE_TYPE, rename=rename)


def _encode_dates(dataset: xr.Dataset, origin: str) -> xr.Dataset:
    """Return a dataset whose times are numbers, as in a file that is read without decoding.

    Other variables with dates or durations, such as the initial time of a forecast, are left out.

    Args:
        dataset: the dataset.
        origin: name of the dataset, for messages.

    Raises:
        DataError: if values are packed, or see `find_valid_times`.
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
            variables[name] = _to_minutes(times, attributes)
        elif name == bounds_name and _has_dates(variable):
            variables[name] = _to_minutes(variable, {})
        elif not _has_dates(variable) and variable.dtype.kind != "m":
            copied = variable.copy(deep=False)
            copied.encoding = {}
            variables[name] = copied
    return xr.Dataset(variables, attrs=dataset.attrs)


def _to_minutes(variable: xr.Variable, attributes: dict[str, str]) -> xr.Variable:
    """Return dates as minutes, with the attributes of times and `attributes`."""
    minutes, calendar = encode_times(variable.values.reshape(-1))
    attributes = {**attributes, "units": TIME_UNITS, "calendar": calendar}
    return xr.Variable(variable.dims, minutes.reshape(variable.shape), attributes)


def _has_dates(variable: xr.Variable) -> bool:
    """Return True if the values are datetime64 or cftime objects."""
    if variable.dtype == object and variable.size:
        return isinstance(variable.values.flat[0], cftime.datetime)
    return variable.dtype.kind == "M"
