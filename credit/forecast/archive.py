"""ForecastArchive: forecasts on disk, of this package or of others, read by initial time in the canonical order."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

import netCDF4
import numpy as np
import xarray as xr

from credit.config.schema_forecast import OtherForecastsConfig
from credit.errors import DataError, did_you_mean
from credit.forecast.forecasts import Forecasts
from credit.forecast.layout import INITIAL_FIELDS
from credit.forecast.netcdf_files import LEADS, PREFIX
from credit.forecast.zarr_store import WRITTEN
from credit.grid import LatLonGrid
from credit.times import Clock

_LAT_NAMES, _LON_NAMES = ("latitude", "lat"), ("longitude", "lon")
_MEMBER_NAMES = ("member", "number", "realization")
_MINUTES = {
    **dict.fromkeys(("d", "day", "days"), 1440.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 60.0),
    **dict.fromkeys(("min", "minute", "minutes"), 1.0),
    **dict.fromkeys(("s", "second", "seconds"), 1 / 60),
    **dict.fromkeys(("ms", "milliseconds"), 1 / 60e3),
    **dict.fromkeys(("us", "microseconds"), 1 / 60e6),
    **dict.fromkeys(("ns", "nanoseconds"), 1 / 60e9),
}

logger = logging.getLogger(__name__)


class ForecastArchive(Forecasts):
    """Forecasts on disk; `initial_minutes` are those of the forecasts that are whole."""

    def __init__(
        self, origin: Path, initial_minutes: np.ndarray, lead_minutes: np.ndarray, example: _Fields, clock: Clock
    ) -> None:
        self.origin, self.clock = origin, clock
        self.initial_minutes = np.asarray(initial_minutes, dtype=np.int64)
        self.lead_minutes = lead_minutes
        self.members = example.members
        self.channel_names = example.channel_names
        self.units, self.attributes = example.units, example.attributes
        self.grid, self._orientation = example.grid, example.orientation
        self._variables, self._order = example.variables, example.order

    def read(self, initial_minutes: int) -> np.ndarray:
        """Return one forecast, of an ensemble the mean of its members, (L, C, H, W) float32, NaN where missing.

        Raises:
            DataError: if it cannot be read.
        """
        fields = (self.read_members(initial_minutes, number) for number in range(len(self.lead_minutes)))
        return np.stack([own[0] if len(own) == 1 else own.mean(axis=0, dtype=np.float32) for own in fields])

    def read_members(self, initial_minutes: int, number: int) -> np.ndarray:
        """Return all members at one lead time, (M, C, H, W) float32, NaN where missing; M is 1 for a single forecast.

        Args:
            initial_minutes: its initial time.
            number: which of `lead_minutes`.

        Raises:
            DataError: if it cannot be read.
        """
        arrays = self._read(int(initial_minutes), number)
        whole = [array.reshape(self.members or 1, -1, *array.shape[-2:]) for array in arrays]
        return self._orientation.apply(np.concatenate(whole, axis=1)).astype(np.float32, copy=False)

    @abstractmethod
    def _read(self, initial_minutes: int, number: int) -> list[np.ndarray]:
        """Return every variable at one lead time, ([members,] [levels,] H, W)."""

    def _select(self, source: Mapping | netCDF4.Dataset, position: Mapping[str, int], origin: Path) -> list[np.ndarray]:
        """Return every variable at a position along the leading dimensions, ([members,] [levels,] H, W)."""
        fields = []
        for name, dims in self._variables.items():
            place = tuple(position.get(dim, slice(None)) for dim in dims)
            try:
                values = np.ma.filled(source[name][place], np.nan)
            except (OSError, RuntimeError, ValueError) as error:
                raise DataError(f"{origin}: {name} cannot be read ({error}); copy or forecast it again") from error
            left = [dim for dim in dims if dim not in position]
            fields.append(values.transpose([left.index(dim) for dim in self._order if dim in left]))
        return fields


class _Fields:
    """What the metadata of one file or store say.

    Fields are the variables with the dimensions `leading`, latitude and longitude, and perhaps a member and a level, in
    any order.

    Args:
        origin: the file or store.
        source: it, open.
        leading: the dimensions of initial and lead time.
        lead: the lead times.
        rename: our name of a variable -> its name there.
    """

    def __init__(
        self, origin: Path, source: _Source, leading: tuple[str, ...], lead: str, rename: Mapping[str, str]
    ) -> None:
        lat, lon = (source.first_of(names, origin) for names in (_LAT_NAMES, _LON_NAMES))
        self.grid, self.orientation = LatLonGrid.from_coords(source.values(lat), source.values(lon), origin=str(origin))
        self.lead_minutes = _lead_minutes(source, lead, origin)
        self.attributes = source.attributes
        ours = _our_names(source, rename, origin)
        wanted = f"{', '.join((*leading, lat, lon))} and perhaps a member ({' or '.join(_MEMBER_NAMES)}) and a level"
        self.variables: dict[str, tuple[str, ...]] = {}  # name there -> dimensions
        for name in ours:
            dims, needed = source.dims(name), {*leading, lat, lon}
            roles = [_role(dim) for dim in dims if dim not in needed]
            if needed <= set(dims) and None not in roles and len(set(roles)) == len(roles):
                self.variables[name] = dims
            elif needed <= set(dims) or name in rename.values():
                problem = f"{origin}: {name} has the dimensions {', '.join(dims)}, but a forecast has {wanted}"
                if name in rename.values():
                    raise DataError(f"{problem}; cut the store to one position along the others, or rename another")
                logger.warning("%s; it is left out", problem)
        if not self.variables:
            raise DataError(f"{origin}: no variable has the dimensions {wanted}")
        others = sorted({dim for dims in self.variables.values() for dim in dims} - {*leading, lat, lon})
        members, levels = ([dim for dim in others if _role(dim) == role] for role in ("member", "level"))
        self.order = (*members, *levels, lat, lon)
        self.members = len(source.values(members[0])) if members else None
        self.units = {ours[n]: u for n in self.variables if (u := source.variable_attributes(n).get("units"))}
        self.channel_names = _channel_names(source, {name: ours[name] for name in self.variables})

    def difference(self, other: _Fields) -> str | None:
        """Return in words how another file differs but for its lead times, None where it fits."""
        if self.members != other.members:
            return "has another number of members"
        if self.channel_names != other.channel_names:
            return "has other variables or levels"
        if self.attributes != other.attributes:
            changed = {k for k in {*self.attributes, *other.attributes}
                       if self.attributes.get(k) != other.attributes.get(k)}  # fmt: skip
            return f"is of another run (global attributes {', '.join(sorted(changed))})"
        return self.grid.difference(other.grid)


class _Source:
    """The few things that are asked of a netCDF file or a zarr store."""

    def __init__(
        self, variables: Mapping[str, netCDF4.Variable] | Mapping[str, xr.Variable], attributes: Mapping[str, object]
    ) -> None:
        self.names = list(variables)
        self.attributes = dict(attributes)
        self._variables = variables

    def values(self, name: str) -> np.ndarray:
        return np.asarray(self._variables[name][...])

    def dims(self, name: str) -> tuple[str, ...]:
        variable = self._variables[name]
        return variable.dims if isinstance(variable, xr.Variable) else variable.dimensions

    def variable_attributes(self, name: str) -> dict:
        variable = self._variables[name]
        return variable.attrs if isinstance(variable, xr.Variable) else variable.__dict__

    def first_of(self, names: Iterable[str], origin: Path) -> str:
        for name in names:
            if name in self.names:
                return name
        raise DataError(f"{origin}: has no coordinate {' or '.join(names)}")


def _role(dim: str) -> str | None:
    return "member" if dim in _MEMBER_NAMES else "level" if dim.startswith("level") else None


def _our_names(source: _Source, rename: Mapping[str, str], origin: Path) -> dict[str, str]:
    """Return name there -> our name, of all variables but those whose name another one is given."""
    for ours, theirs in rename.items():
        if theirs not in source.names:
            raise DataError(f"{origin}: has no variable {theirs} (rename: {ours}){did_you_mean(theirs, source.names)}")
    renamed = {theirs: ours for ours, theirs in rename.items()}
    return {name: renamed.get(name, name) for name in source.names if name in renamed or name not in rename}


def _lead_minutes(source: _Source, name: str, origin: Path) -> np.ndarray:
    if name not in source.names:
        raise DataError(f"{origin}: has no lead times ({name})")
    values = source.values(name)
    if values.dtype.kind == "m":
        return values.astype("timedelta64[m]").astype(np.int64)
    units = str(source.variable_attributes(name).get("units", "hours"))
    if units not in _MINUTES:
        raise DataError(f'{origin}: {name} is in "{units}", needs one of {", ".join(_MINUTES)}')
    return np.rint(values.astype(np.float64) * _MINUTES[units]).astype(np.int64)


def _channel_names(source: _Source, variables: Mapping[str, str]) -> list[str]:
    """Return names made as `credit.channels.ChannelMap` makes them, of name there -> our name."""
    flat = {ours for theirs, ours in variables.items() if not _level_dim(source, theirs)}
    names = []
    for theirs, ours in variables.items():
        dim = _level_dim(source, theirs)
        if dim is None:
            names.append(ours)
            continue
        units = source.variable_attributes(dim).get("units", "hPa") if dim in source.names else ""
        for level in source.values(dim):
            short = f"{ours}{level:g}"
            names.append(f"{short}{'model_level' if units == '1' else units}" if short in flat else short)
    return names


def _level_dim(source: _Source, variable: str) -> str | None:
    return next((dim for dim in source.dims(variable) if _role(dim) == "level"), None)


class _NetcdfArchive(ForecastArchive):
    def __init__(self, folder: Path, paths: list[Path], rename: Mapping[str, str]) -> None:
        places: dict[int, dict[int, tuple[Path, int]]] = {}  # initial time -> lead time -> file, row
        wanted: dict[int, set[int]] = {}  # initial time -> lead times, where its files say which it should have
        began: dict[int, object] = {}  # initial time -> checksum of what it started from
        first: _Fields | None = None
        for path in paths:
            try:
                with netCDF4.Dataset(path) as dataset:
                    source = _Source(dataset.variables, dataset.__dict__)
                    fields = _Fields(path, source, ("time",), "forecast_period", rename)
                    fields_before = fields.attributes.pop(INITIAL_FIELDS, None)  # is of one forecast, not of the run
                    whole = fields.attributes.pop(LEADS, None)
                    reference = dataset["forecast_reference_time"]
                    clock = Clock(getattr(reference, "calendar", "standard"))
                    initial = int(clock.from_cf(reference[...], reference.units))
            except (OSError, IndexError) as error:
                raise DataError(f"{path}: is no readable forecast ({error}); remove it") from error
            first = first or fields
            difference = first.difference(fields)
            if difference:
                raise DataError(f"{path}: {difference}, unlike {paths[0]}; remove what is of another run")
            if began.setdefault(initial, fields_before) != fields_before:
                raise DataError(
                    f"{path}: is of another analysis than the forecast's other files; run credit_rollout again, or "
                    "remove the forecast's files"
                )
            for row, lead in enumerate(fields.lead_minutes.tolist()):
                if lead in places.setdefault(initial, {}):
                    raise DataError(f"{path}: has lead times of {places[initial][lead][0]} again; remove one of them")
                places[initial][lead] = path, row
            if whole is not None:
                wanted.setdefault(initial, set()).update(int(lead) for lead in str(whole).split(","))
        _require_whole(places, wanted, clock)
        assert first is not None
        leads = sorted(places[min(places)])
        for own in places.values():
            if sorted(own) != leads:
                raise DataError(
                    f"{next(iter(own.values()))[0]}: the forecast has other lead times than that of "
                    f"{next(iter(places[min(places)].values()))[0]}; run credit_rollout again, or remove what is of "
                    "another run"
                )
        self._places = {initial: [own[lead] for lead in leads] for initial, own in places.items()}
        super().__init__(folder, np.array(sorted(places)), np.array(leads, dtype=np.int64), first, clock)

    def _read(self, initial_minutes: int, number: int) -> list[np.ndarray]:
        path, row = self._places[initial_minutes][number]
        try:
            with netCDF4.Dataset(path) as dataset:
                return self._select(dataset, {"time": row}, path)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path}: cannot be read ({error})") from error


def _require_whole(places: dict[int, dict[int, tuple[Path, int]]], wanted: dict[int, set[int]], clock: Clock) -> None:
    """Refuse a forecast that an interrupted run left without the files of some lead times."""
    for initial, leads in wanted.items():
        missing = sorted(leads - places[initial].keys())
        if missing:
            raise DataError(
                f"{next(iter(places[initial].values()))[0]}: of the forecast from {clock.format(initial)} "
                f"{len(missing)} of {len(leads)} lead times are missing, the first of them {missing[0] / 60:g} h; run "
                "credit_rollout again, which continues what was interrupted, or remove its files"
            )


class _ZarrArchive(ForecastArchive):
    def __init__(self, path: Path, rename: Mapping[str, str]) -> None:
        try:
            # not as a dataset: the arrays of a store that is made longer differ in length for a moment
            held = xr.backends.ZarrStore.open_group(path, consolidated=False).load()
            variables, attributes, _ = xr.conventions.decode_cf_variables(
                *held, decode_times=False, decode_timedelta=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{path}: cannot be read as zarr ({error})") from error
        # a directory lists them in any order, each time another
        source = _Source(dict(sorted(variables.items())), attributes)
        init, lead = ("init_time", "lead_time") if "init_time" in source.names else ("time", "prediction_timedelta")
        if init not in source.names:
            raise DataError(f"{path}: has neither init_time and lead_time nor time and prediction_timedelta")
        fields = _Fields(path, source, (init, lead), lead, rename)
        of_time = source.variable_attributes(init)
        if "units" not in of_time:
            raise DataError(f'{path}: {init} has no units such as "hours since 1900-01-01"')
        clock = Clock(str(of_time.get("calendar", "standard")))
        initial = clock.from_cf(source.values(init), str(of_time["units"]))
        self._source, self._leading = variables, (init, lead)
        self._position = {int(minutes): number for number, minutes in enumerate(initial)}
        whole = source.values(WRITTEN).astype(bool) if WRITTEN in source.names else np.ones(len(initial), dtype=bool)
        whole = whole[: len(initial)]  # a store that is made longer gets its initial times last
        super().__init__(path, np.sort(initial[whole]), fields.lead_minutes, fields, clock)

    def _read(self, initial_minutes: int, number: int) -> list[np.ndarray]:
        position = dict(zip(self._leading, (self._position[initial_minutes], number), strict=True))
        return self._select(self._source, position, self.origin)


def open_other_forecasts(name: str, conf: OtherForecastsConfig) -> ForecastArchive:
    """Open the forecasts of ``verification.other_forecasts.NAME``.

    Raises:
        DataError: naming the key, if there are none or they cannot be read.
    """
    try:
        return open_forecasts(conf.path, conf.rename)
    except DataError as error:
        raise DataError(f"verification.other_forecasts.{name}: {error}") from error


def open_forecasts(path: str | os.PathLike, rename: Mapping[str, str] | None = None) -> ForecastArchive:
    """Open a folder of netCDF files, a folder with ``forecasts.zarr``, or a zarr store of version 2 or 3.

    Args:
        path: the folder or store.
        rename: our name of a variable -> its name there.

    Raises:
        DataError: if there are no forecasts, or forecasts of different runs.
    """
    path, rename = Path(path), rename or {}
    marks = "zarr.json", ".zgroup"
    stores = [one for one in (path, path / "forecasts.zarr") if any((one / mark).exists() for mark in marks)]
    files = sorted(path.glob(f"{PREFIX}*.nc")) if path.is_dir() else []
    if stores and files:
        raise DataError(f"{path}: holds netCDF files and a zarr store; remove one of them")
    if not stores and not files:
        raise DataError(f"{path}: there are no forecasts; run credit_rollout first, or name the folder that has some")
    archive = _ZarrArchive(stores[0], rename) if stores else _NetcdfArchive(path, files, rename)
    if not len(archive.initial_minutes):
        raise DataError(f"{path}: no forecast is whole; run credit_rollout again")
    return archive
