"""Data sources that a plugin defines. Each source is converted to a dataset with the same layout as that of a file.

The main process reads the description of a source once. Each process that reads fields creates a separate instance of
the source from the options in the config.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import xarray as xr
from xarray.core import indexing

from credit.calendar import TIME_UNITS
from credit.config.sections.base import StrictModel
from credit.config.sections.source import SourceConfig, register_source_type
from credit.data.formats.cf import PRESSURE_IN_HPA
from credit.data.formats.plugin.fields import PluginFields, encode_times
from credit.errors import ConfigError, DataError

SourceClass = TypeVar("SourceClass", bound=type)
# Name of a source (``data.sources.N.type``) -> class of the source.
_SOURCES: dict[str, type] = {}
_REQUIRED_ATTRIBUTES = ("latitude", "longitude", "times", "variables")
_OPTIONAL_ATTRIBUTES = ("latitude_bounds", "version", "attributes")


@dataclass(frozen=True)
class SourceVariable:
    """Description of one variable of a plugin's source. Only `units` is required.

    Attributes:
        units: units in CF spelling, for example ``K``.
        levels: values of the levels, in any order; None for a variable without levels.
        level_units: units of `levels`: ``hPa`` or ``Pa``, or ``1`` for numbers of model levels.
        standard_name: CF standard name, which also defines whether the variable is a vector component.
        long_name: description for human readers.
        cell_methods: CF cell methods, for example ``time: mean``; empty for instantaneous values.
        is_static: True if the variable does not change with time.
        packing_step: step to which the values were rounded, for example by packing, in units of the variable; 0 if
            the values were not rounded.
    """

    units: str
    levels: Sequence[float] | None = None
    level_units: str = "hPa"
    standard_name: str = ""
    long_name: str = ""
    cell_methods: str = ""
    is_static: bool = False
    packing_step: float = 0.0


def register_source(name: str, options: type[StrictModel] | None = None) -> Callable[[SourceClass], SourceClass]:
    """Return a class decorator that registers a class as ``data.sources.N.type: name``.

    The class is instantiated with ``data.sources.N.options`` as keyword arguments. Instances have these attributes:

    - ``latitude`` (H,) and ``longitude`` (W,): degrees, in the order of the fields;
    - ``times``: dates in UTC (datetime64, datetime or cftime), whole minutes;
    - ``variables``: name -> `SourceVariable`;
    - ``latitude_bounds``, optional: (H, 2) degrees;
    - ``version``, optional: a string or number that changes when the data change;
    - ``attributes``, optional: global attributes, such as title.

    The method ``read(variable, time, levels)`` of an instance returns one variable at one of ``times``. The result has
    the shape (L, H, W) at the L requested levels, in the requested order, or (H, W) if `levels` is None. `time` is None
    for a static variable. Missing values are NaN or masked.

    Args:
        name: name of the type in the config.
        options: pydantic model of the options. If it is given, wrong options are reported when the config is checked,
            before any data are read.

    Raises:
        ConfigError: if the decorated object is not a class with a method ``read``, or if a different class is
            already registered under the name.
    """

    def register(cls: SourceClass) -> SourceClass:
        """Register the class and return it unchanged."""
        if not (isinstance(cls, type) and callable(getattr(cls, "read", None))):
            raise ConfigError(f"source {name!r} must be a class with a method read(variable, time, levels); is {cls!r}")
        registered = _SOURCES.get(name, cls)
        # Loading a plugin a second time creates its class again. This is not a conflict.
        if (registered.__module__, registered.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"source name {name!r} of {cls.__module__} is taken by {registered.__module__}; choose another name"
            )
        _SOURCES[name] = cls
        register_source_type(name, options)
        return cls

    return register


def open_plugin_source(source: SourceConfig, origin: str) -> xr.Dataset:
    """Open a plugin's source as a dataset with CF coordinates. Fields are read when they are accessed.

    The dataset can be pickled. Its encoding contains the entry ``fingerprint``, see
    `credit.data.formats.files.OpenFiles`.

    Args:
        source: section of the source in the config.
        origin: config key and type of the source, for error messages.

    Raises:
        DataError: if the source cannot be created, or its attributes are missing or wrong.
    """
    # Read only the description of the source here, not its fields.
    factory = SourceFactory(origin, _SOURCES[source.type], source.options)
    factory.require_importable()
    metadata = factory.describe()
    variables, level_names = _build_coordinates(metadata)
    conflicting_names = set(variables) & set(metadata.variables)
    if conflicting_names:
        raise factory.build_error(f"its variable {min(conflicting_names)} has the name of a coordinate; rename it")
    for name, variable in metadata.variables.items():
        dims = []
        times = None
        levels = None
        encoding: dict[str, object] = {}
        if variable.packing_step:
            # These keys are the same as those that xarray sets for packed integers of a file.
            encoding = {"dtype": np.dtype(np.int32), "scale_factor": float(variable.packing_step)}
        if not variable.is_static:
            dims.append("time")
            times = metadata.times
        if variable.levels is not None:
            level_axis = _build_level_axis(variable)
            dims.append(level_names[level_axis])
            levels, _ = level_axis
            # All levels are read from the plugin at once.
            encoding["preferred_chunks"] = {level_names[level_axis]: len(variable.levels)}
        attributes = {}
        for key in ("units", "standard_name", "long_name", "cell_methods"):
            if getattr(variable, key):
                attributes[key] = getattr(variable, key)
        fields = PluginFields(factory, name, levels, times, metadata.shape)
        lazy_fields = indexing.LazilyIndexedArray(fields)
        variables[name] = xr.Variable((*dims, "latitude", "longitude"), lazy_fields, attributes, encoding)
    dataset = xr.Dataset(variables, attrs=metadata.attributes)
    dataset.encoding["fingerprint"] = metadata.fingerprint()
    return dataset


def _build_coordinates(metadata: _SourceMetadata) -> tuple[dict[str, xr.Variable], dict[tuple, str]]:
    """Build the coordinates of a plugin's dataset.

    Returns:
        Two mappings. The first is from name to coordinate or bounds. The second is from the result of
        `_build_level_axis` (levels and units) to the name of the level coordinate.
    """
    variables = {
        "time": xr.Variable(
            "time",
            metadata.minutes,
            {"units": TIME_UNITS, "calendar": metadata.calendar, "standard_name": "time", "axis": "T"},
        ),
        "latitude": xr.Variable("latitude", metadata.latitude, {"units": "degrees_north"}),
        "longitude": xr.Variable("longitude", metadata.longitude, {"units": "degrees_east"}),
    }
    if metadata.latitude_bounds is not None:
        variables["latitude"].attrs["bounds"] = "latitude_bounds"
        variables["latitude_bounds"] = xr.Variable(("latitude", "two"), metadata.latitude_bounds)
    # Variables on the same levels share a coordinate. Its standard name depends on the units.
    level_names: dict[tuple, str] = {}
    for variable in metadata.variables.values():
        if variable.levels is not None and _build_level_axis(variable) not in level_names:
            values, units = _build_level_axis(variable)
            name = f"level_{len(level_names)}"
            level_names[values, units] = name
            standard_name = "air_pressure" if units.lower() in PRESSURE_IN_HPA else "model_level_number"
            variables[name] = xr.Variable(name, np.array(values), {"units": units, "standard_name": standard_name})
    return variables, level_names


def _build_level_axis(variable: SourceVariable) -> tuple[tuple[float, ...], str]:
    """Return the levels of a variable and their units. Variables with equal results share one level coordinate."""
    return tuple(float(level) for level in variable.levels), variable.level_units


@dataclass(frozen=True)
class _SourceMetadata:
    """Description of the contents of a source, after all checks.

    Attributes:
        latitude: (H,) degrees north, in the order of the source.
        longitude: (W,) degrees east, in the order of the source.
        latitude_bounds: (H, 2) degrees north; None if the source has no bounds.
        times: (N,) dates, as the source defines them.
        minutes: (N,) int64, the same dates in minutes since 1900 in `calendar`.
        calendar: name of the CF calendar of the dates.
        variables: name of a variable -> description.
        version: string that changes when the data change; empty if the source has no version.
        attributes: global attributes of the dataset, such as title.
    """

    latitude: np.ndarray
    longitude: np.ndarray
    latitude_bounds: np.ndarray | None
    times: np.ndarray
    minutes: np.ndarray
    calendar: str
    variables: dict[str, SourceVariable]
    version: str
    attributes: dict[str, str]

    @property
    def shape(self) -> tuple[int, int]:
        """(H, W), the numbers of rows and columns of a field."""
        return len(self.latitude), len(self.longitude)

    def fingerprint(self) -> list[int]:
        """Return the length in bytes and the CRC-32 checksum of this description, written as JSON."""
        # Sort the times and convert all numbers, so that equal contents have the same fingerprint.
        coordinates = [self.latitude.tolist(), self.longitude.tolist(), np.sort(self.minutes).tolist()]
        variables = {}
        levels = {}
        for name, variable in self.variables.items():
            variables[name] = {**asdict(variable), "levels": None}
            if variable.levels is not None:
                levels[name] = _build_level_axis(variable)[0]
        description = [self.version, self.calendar, *coordinates, variables, levels]
        text = json.dumps(description, sort_keys=True, default=float).encode()
        return [len(text), zlib.crc32(text)]


class SourceFactory:
    """Factory of a plugin's source. It creates one instance per process, because processes must not share open files.

    Args:
        origin: config key and type of the source, for error messages.
        cls: class of the source. It is pickled by name, so that each process imports the plugin.
        options: ``data.sources.N.options``, the keyword arguments of the class.
    """

    def __init__(self, origin: str, cls: type, options: Mapping[str, Any]) -> None:
        self.origin = origin
        self._class = cls
        self._options = dict(options)
        self._source: Any = None
        self._source_of_parent: Any = None
        # Id of the process that created the source.
        self._owner = -1

    def require_importable(self) -> None:
        """Raise DataError if other processes would not find the same class when they import it by name.

        Raises:
            DataError: if the name refers to a different class, for example because of a second decorator.
        """
        name = self._class.__qualname__
        module = sys.modules.get(self._class.__module__)
        if getattr(module, name, self._class) is not self._class:
            raise self.build_error(
                f"{name} of {self._class.__module__} is not the registered class; write register_source "
                "above all other decorators"
            )

    def get(self) -> Any:
        """Return the instance of the source for this process, and create it at the first call.

        Raises:
            DataError: if the constructor of the class raises an exception.
        """
        if self._owner != os.getpid():
            # After a fork, keep a reference to the parent's source, so that its connections are not closed here.
            self._source_of_parent = self._source
            # Do not show the values of the options, because they may contain credentials.
            arguments = ", ".join(f"{name}=..." for name in self._options)
            with self.translating_errors(f"{self._class.__name__}({arguments})"):
                self._source = self._class(**self._options)
            self._owner = os.getpid()
        return self._source

    def describe(self) -> _SourceMetadata:
        """Read and check the attributes of the source that describe its contents.

        Raises:
            DataError: if an attribute is missing or wrong.
        """
        source = self.get()
        attribute_values: dict[str, Any] = {}
        for name in (*_REQUIRED_ATTRIBUTES, *_OPTIONAL_ATTRIBUTES):
            if name in _OPTIONAL_ATTRIBUTES and not hasattr(source, name):
                continue
            # A missing attribute is reported as an error of the plugin.
            with self.translating_errors(name):
                attribute_values[name] = getattr(source, name)
        self._require_variables(attribute_values["variables"])
        latitude = self._check_numbers("latitude", attribute_values["latitude"])
        longitude = self._check_numbers("longitude", attribute_values["longitude"])
        bounds = attribute_values.get("latitude_bounds")
        if bounds is not None:
            with self.translating_errors("latitude_bounds"):
                bounds = np.asarray(bounds, dtype=np.float64)
            if bounds.shape != (len(latitude), 2):
                raise self.build_error(f"latitude_bounds must be ({len(latitude)}, 2) numbers; shape is {bounds.shape}")
        version = attribute_values.get("version", "")
        attributes = attribute_values.get("attributes", {})
        if not isinstance(version, str | int | float):
            raise self.build_error(f"version must be a string or a number; is {version!r}")
        if not isinstance(attributes, Mapping):
            raise self.build_error(f"attributes must map names to strings; is {attributes!r}")
        with self.translating_errors("times"):
            times = np.asarray(attribute_values["times"])
            minutes, calendar = encode_times(times)
        # A missing date is NaN, which also differs from its rounded value.
        is_wrong = minutes != np.rint(minutes)
        if len(minutes) == 0 or is_wrong.any():
            first_wrong = times[is_wrong][:1].tolist()
            raise self.build_error(f"times must be at least one date of whole minutes; is {first_wrong or 'empty'}")
        return _SourceMetadata(
            latitude=latitude,
            longitude=longitude,
            latitude_bounds=bounds,
            times=times,
            minutes=minutes.astype(np.int64),
            calendar=calendar,
            variables={str(name): variable for name, variable in attribute_values["variables"].items()},
            version=str(version),
            attributes={str(name): str(text) for name, text in attributes.items()},
        )

    def _require_variables(self, variables: Any) -> None:
        """Raise DataError if the attribute ``variables`` of a source does not map names to valid descriptions."""
        is_mapping = isinstance(variables, Mapping) and len(variables) > 0
        if not is_mapping or not all(isinstance(variable, SourceVariable) for variable in variables.values()):
            raise self.build_error(f"variables must map names to SourceVariable(units, ...); is {variables!r}")
        for name, variable in variables.items():
            if not isinstance(variable.units, str):
                raise self.build_error(f"the units of {name} must be a string, such as K; is {variable.units!r}")
            if variable.levels is not None:
                levels = self._check_numbers(f"the levels of {name}", variable.levels)
                if len(np.unique(levels)) < len(levels):
                    raise self.build_error(f"the levels of {name} contain a value twice; is {variable.levels!r}")

    def _check_numbers(self, name: str, values: Any) -> np.ndarray:
        """Check that values are a non-empty list of finite numbers, and return them as (N,) float64.

        Args:
            name: name of the attribute that contains the list, for error messages.
            values: value of the attribute.

        Raises:
            DataError: if `values` is not a non-empty list of finite numbers.
        """
        with self.translating_errors(name):
            numbers = np.asarray(values, dtype=np.float64)
        if numbers.ndim != 1 or not numbers.size or not np.isfinite(numbers).all():
            raise self.build_error(f"{name} must be a list of finite numbers; is {values!r}")
        return numbers

    def build_error(self, message: str) -> DataError:
        """Return a DataError about the source that names the class to correct. The caller raises this error.

        Args:
            message: description of the problem and of the rule.
        """
        return DataError(f"{self.origin}: {message}; correct {self._class.__qualname__} in {self._class.__module__}")

    @contextmanager
    def translating_errors(self, call: str) -> Iterator[None]:
        """Return a context manager that converts any exception in its block to a `DataError`.

        Args:
            call: attribute, or method with its arguments, that is called in the block, for the message.

        Raises:
            DataError: if the block raises an exception; the message names `call` and the line of the plugin's code.
        """
        try:
            yield
        except Exception as error:
            file = getattr(sys.modules.get(self._class.__module__), "__file__", None)
            location = self._class.__module__
            # Find the last frame in the plugin's file.
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename == file:
                    location = f"{file}, line {frame.lineno}"
            raise DataError(
                f"{self.origin}: {call} fails ({type(error).__name__}: {error}); look at "
                f"{self.origin.split()[0]}.options, or correct {self._class.__qualname__} in {location}"
            ) from error

    def __getstate__(self) -> dict[str, object]:
        # No process has the id -1, so a process that unpickles the factory creates a new source.
        return self.__dict__ | {"_source": None, "_source_of_parent": None, "_owner": -1}
