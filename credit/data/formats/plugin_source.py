"""Sources of a user's own, by name: a plugin's class, shown to everything else as the dataset of a file would be.

What a source says of itself is asked once, on the main process. Fields are read wherever they are needed: each process
that does so makes the source anew, from the options of the config.
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

import cftime
import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from credit.calendar import EPOCH
from credit.config.schema_base import StrictModel
from credit.config.schema_source import SourceConfig, register_source_type
from credit.data.formats.cf import PRESSURE_IN_HPA
from credit.errors import ConfigError, DataError

SourceClass = TypeVar("SourceClass", bound=type)
_SOURCES: dict[str, type] = {}
_GIVEN = ("latitude", "longitude", "times", "variables")
_MINUTE = np.timedelta64(1, "m")
_EPOCH = np.datetime64(EPOCH.removeprefix("minutes since ").replace(" ", "T"), "us")


@dataclass(frozen=True)
class SourceVariable:
    """Description of one variable of a plugin's source; only `units` must be given.

    Attributes:
        units: as in CF, ``K``.
        levels: the values of its levels, in any order; None where it has none.
        level_units: ``hPa`` or ``Pa``; ``1`` for numbers of model levels.
        standard_name: of CF; by this components of vectors are known, too.
        long_name: for people.
        cell_methods: of CF, ``time: mean``, where values are not instantaneous.
        is_static: it does not vary in time.
        packing_step: what its values were rounded to before they came here, in its units.
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
    """Class decorator that makes a class available as ``data.sources.N.type: name``.

    The class is called with ``data.sources.N.options`` as keyword arguments. `options` declares them: with it, a wrong
    option is an error of the config, before anything is read. What it makes has the attributes

    - ``latitude`` (H,) and ``longitude`` (W,), degrees, in the order of its fields;
    - ``times``: dates in UTC (datetime64, datetime or cftime), whole minutes;
    - ``variables``: mapping from name to `SourceVariable`;
    - ``latitude_bounds`` (H, 2), ``version`` (any text or number that changes when the data do) and ``attributes``
      (global ones, such as title), where it likes;

    and the method ``read(variable, time, levels)``, which returns one variable at one of ``times``, (L, H, W) at the
    levels that are asked for, in that order, or (H, W) where `levels` is None; `time` is None where it is static.
    Missing values are NaN or masked.

    Raises:
        ConfigError: for no class with a method ``read``, or if another class has the name.
    """

    def register(cls: SourceClass) -> SourceClass:
        if not (isinstance(cls, type) and callable(getattr(cls, "read", None))):
            raise ConfigError(f"source {name!r} must be a class with a method read(variable, time, levels); is {cls!r}")
        other = _SOURCES.get(name, cls)
        # a plugin that is loaded again brings its class anew
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"source name {name!r} of {cls.__module__} is taken by {other.__module__}; choose another name"
            )
        _SOURCES[name] = cls
        register_source_type(name, options)
        return cls

    return register


def open_registered(source: SourceConfig, where: str) -> xr.Dataset:
    """Return a source of a plugin as a dataset with CF coordinates; fields are read when they are asked for.

    The dataset can be pickled; its encoding has a ``fingerprint``, see `credit.data.formats.files.OpenFiles`.

    Args:
        source: its section.
        where: its place in the config, for messages.

    Raises:
        DataError: if it cannot be made, or does not say what it has.
    """
    maker = _Maker(where, _SOURCES[source.type], source.options)
    maker.require_importable()
    said = maker.describe()
    variables = {
        "time": xr.Variable(
            "time", said.minutes, {"units": EPOCH, "calendar": said.calendar, "standard_name": "time", "axis": "T"}
        ),
        "latitude": xr.Variable("latitude", said.latitude, {"units": "degrees_north"}),
        "longitude": xr.Variable("longitude", said.longitude, {"units": "degrees_east"}),
    }
    if said.latitude_bounds is not None:
        variables["latitude"].attrs["bounds"] = "latitude_bounds"
        variables["latitude_bounds"] = xr.Variable(("latitude", "two"), said.latitude_bounds)
    axes: dict[tuple, str] = {}
    for one in said.variables.values():
        if one.levels is not None and _axis_of(one) not in axes:
            values, units = _axis_of(one)
            name = axes[values, units] = f"level_{len(axes)}"
            of_pressure = "air_pressure" if units.lower() in PRESSURE_IN_HPA else "model_level_number"
            variables[name] = xr.Variable(name, np.array(values), {"units": units, "standard_name": of_pressure})
    taken = set(variables) & set(said.variables)
    if taken:
        raise maker.wrong(f"its variable {min(taken)} has the name of a coordinate; call it otherwise")
    for name, one in said.variables.items():
        dims = [*([] if one.is_static else ["time"]), *([] if one.levels is None else [axes[_axis_of(one)]])]
        fields = _Fields(maker, name, one, None if one.is_static else said.times, said.shape)
        kept = {key: getattr(one, key) for key in ("units", "standard_name", "long_name", "cell_methods")}
        encoding: dict[str, object] = {}
        if one.packing_step:
            encoding = {"dtype": np.dtype(np.int32), "scale_factor": float(one.packing_step)}
        if one.levels is not None:  # all are asked for at once
            encoding["preferred_chunks"] = {axes[_axis_of(one)]: len(one.levels)}
        variables[name] = xr.Variable(
            (*dims, "latitude", "longitude"),
            indexing.LazilyIndexedArray(fields),
            {key: text for key, text in kept.items() if text},
            encoding,
        )
    made = xr.Dataset(variables, attrs=said.attributes)
    made.encoding["fingerprint"] = said.fingerprint()
    return made


def _axis_of(variable: SourceVariable) -> tuple[tuple[float, ...], str]:
    return tuple(float(level) for level in variable.levels), variable.level_units


@dataclass(frozen=True)
class _Said:
    """Checked description that a source gives of itself.

    Attributes:
        times: (N,) as it gives them.
        minutes: (N,) of them, since `EPOCH` in `calendar`.
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
        return len(self.latitude), len(self.longitude)

    def fingerprint(self) -> list[int]:
        """Return length and checksum of what is said."""
        arrays = (self.latitude, self.longitude, np.sort(self.minutes))
        said = [self.version, self.calendar, *(array.tolist() for array in arrays)]
        described = {name: {**asdict(one), "levels": None} for name, one in self.variables.items()}
        levels = {name: _axis_of(one)[0] for name, one in self.variables.items() if one.levels is not None}
        text = json.dumps([*said, described, levels], sort_keys=True, default=float).encode()
        return [len(text), zlib.crc32(text)]


class _Maker:
    """Makes the source where it is needed: in each process of its own, as its handles must not be shared.

    Args:
        where: its place in the config and its type, for messages.
        cls: the plugin's class; is pickled by its name, so that another process imports the plugin.
        options: of the config.
    """

    def __init__(self, where: str, cls: type, options: Mapping[str, Any]) -> None:
        self.where, self._class, self._options = where, cls, dict(options)
        self._made, self._before, self._owner = None, None, -1

    def require_importable(self) -> None:
        """Refuse a class in whose place another process would find another one under its name."""
        name, module = self._class.__qualname__, sys.modules.get(self._class.__module__)
        if getattr(module, name, self._class) is not self._class:
            raise self.wrong(
                f"{name} of {self._class.__module__} is another class than the registered one; write register_source "
                "above all other decorators"
            )

    def get(self) -> Any:
        """Return the source.

        Raises:
            DataError: if it cannot be made.
        """
        if self._owner != os.getpid():
            # what was made before a fork stays referred to: its connections are the parent's, not to be ended here
            self._before = self._made
            with self.asking(f"{self._class.__name__}({', '.join(f'{name}=...' for name in self._options)})"):
                self._made = self._class(**self._options)
            self._owner = os.getpid()
        return self._made

    def describe(self) -> _Said:
        """Return what the source has.

        Raises:
            DataError: where something is lacking, or is not what it must be.
        """
        made = self.get()
        given: dict[str, Any] = {}
        for name in (*_GIVEN, "latitude_bounds", "version", "attributes"):
            if name not in _GIVEN and not hasattr(made, name):
                continue
            with self.asking(name):
                given[name] = getattr(made, name)
        variables = given["variables"]
        fits = isinstance(variables, Mapping) and all(isinstance(one, SourceVariable) for one in variables.values())
        if not fits or not variables:
            raise self.wrong(f"variables must map names to SourceVariable(units, ...); is {variables!r}")
        for name, one in variables.items():
            if not isinstance(one.units, str):
                raise self.wrong(f"the units of {name} must be a text, such as K; is {one.units!r}")
            if one.levels is not None:
                levels = self._numbers(f"the levels of {name}", one.levels)
                if len(np.unique(levels)) < len(levels):
                    raise self.wrong(f"the levels of {name} hold a value twice; is {one.levels!r}")
        latitude, longitude = (self._numbers(name, given[name]) for name in ("latitude", "longitude"))
        bounds = given.get("latitude_bounds")
        if bounds is not None:
            with self.asking("latitude_bounds"):
                bounds = np.asarray(bounds, dtype=np.float64)
            if bounds.shape != (len(latitude), 2):
                raise self.wrong(f"latitude_bounds must be ({len(latitude)}, 2) numbers; has the shape {bounds.shape}")
        version, attributes = given.get("version", ""), given.get("attributes", {})
        if not isinstance(version, str | int | float):
            raise self.wrong(f"version must be a text or a number; is {version!r}")
        if not isinstance(attributes, Mapping):
            raise self.wrong(f"attributes must map names to texts; is {attributes!r}")
        with self.asking("times"):
            times = np.asarray(given["times"])
            minutes, calendar = _encode(times)
        if len(minutes) == 0 or not (minutes == np.rint(minutes)).all():
            odd = times[minutes != np.rint(minutes)][:1].tolist()
            raise self.wrong(f"times must be at least one date of whole minutes; is {odd or 'empty'}")
        return _Said(
            latitude, longitude, bounds, times, minutes.astype(np.int64), calendar,
            {str(name): one for name, one in variables.items()},
            str(version), {str(k): str(v) for k, v in attributes.items()},
        )  # fmt: skip

    def _numbers(self, what: str, values: Any) -> np.ndarray:
        with self.asking(what):
            found = np.asarray(values, dtype=np.float64)
        if found.ndim != 1 or not found.size or not np.isfinite(found).all():
            raise self.wrong(f"{what} must be a list of finite numbers; is {values!r}")
        return found

    def wrong(self, what: str) -> DataError:
        """Return an error that says what is wrong with the source, and where to correct it."""
        return DataError(f"{self.where}: {what}; correct {self._class.__qualname__} in {self._class.__module__}")

    @contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Say of anything that the plugin's code raises what was asked of it, and where it was raised."""
        try:
            yield
        except Exception as error:
            file = getattr(sys.modules.get(self._class.__module__), "__file__", None)
            places = traceback.extract_tb(error.__traceback__)
            own = next((place for place in reversed(places) if place.filename == file), None)
            there = f"{file}, line {own.lineno}" if own else self._class.__module__
            raise DataError(
                f"{self.where}: {what} fails ({type(error).__name__}: {error}); look at "
                f"{self.where.split()[0]}.options, or correct {self._class.__qualname__} in {there}"
            ) from error

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_made": None, "_before": None, "_owner": -1}


def _encode(times: np.ndarray) -> tuple[np.ndarray, str]:
    """Return minutes of dates, float64, NaN for none, and their calendar."""
    if times.ndim == 1 and times.size and isinstance(times[0], cftime.datetime):
        return np.asarray(cftime.date2num(times, EPOCH, times[0].calendar), dtype=np.float64), times[0].calendar
    if times.ndim != 1 or (times.size and times.dtype.kind not in "MO"):
        raise TypeError(f"must be a list of dates, is of type {times.dtype} and shape {times.shape}")
    return (times.astype("datetime64[us]") - _EPOCH) / _MINUTE, "proleptic_gregorian"


class _Fields(BackendArray):
    """The values of one variable of a source, read time by time.

    Args:
        maker: makes the source.
        name: the variable.
        variable: what is said of it.
        times: (N,) as the source gives them; None where the variable is static.
        cells: rows and columns.
    """

    def __init__(
        self, maker: _Maker, name: str, variable: SourceVariable, times: np.ndarray | None, cells: tuple[int, int]
    ) -> None:
        self._maker, self._name, self._times, self._cells = maker, name, times, cells
        self._levels = None if variable.levels is None else np.array(_axis_of(variable)[0])
        axes = (axis for axis in (times, self._levels) if axis is not None)
        self.shape = (*map(len, axes), *cells)
        self.dtype = np.dtype(np.float32)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> np.ndarray:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[int | slice | np.ndarray, ...]) -> np.ndarray:
        """Return what the indices of times, levels, rows and columns choose, each by itself."""
        *front, rows, columns = key
        levels = None if self._levels is None else self._levels[front[-1]]
        asked = None if levels is None else tuple(np.atleast_1d(levels).tolist())
        if self._times is None:
            fields = self._one(None, asked)
        elif isinstance(front[0], int | np.integer):
            fields = self._one(self._times[front[0]], asked)
        else:
            fields = np.stack([self._one(time, asked) for time in self._times[front[0]]])
        if levels is not None and levels.ndim == 0:
            fields = fields[..., 0, :, :]
        return fields[..., rows, :][..., columns]

    def _one(self, time: Any, levels: tuple[float, ...] | None) -> np.ndarray:
        """Return the field of one time, float32, as the source gives it, checked."""
        call = f"read({self._name!r}, {time}, {levels})"
        source = self._maker.get()
        with self._maker.asking(call):
            found = source.read(self._name, time, levels)
            # what carries its time is known to be of another one
            of = found.coords.get("time") if isinstance(found, xr.DataArray) and time is not None else None
            if of is not None and _encode(of.values.reshape(-1))[0].tolist() != _encode(np.array([time]))[0].tolist():
                raise ValueError(f"it returns the field of {of.values}")
            values = np.ma.asarray(found.values if isinstance(found, xr.DataArray) else found)
        shape = self._cells if levels is None else (len(levels), *self._cells)
        if values.shape != shape or values.dtype.kind not in "fiub":
            got = f"{values.dtype} of shape {values.shape}"
            raise self._maker.wrong(f"{call} must return numbers of shape {shape}; it returned {got}")
        with np.errstate(over="ignore"):  # becomes infinite, which is refused
            return values.astype(np.float32).filled(np.nan)
