"""ForecastArchive: forecasts on disk, of this package or of others, read by initial time in the canonical order."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path

import netCDF4
import numpy as np
import zarr

from credit.errors import DataError
from credit.forecast.forecasts import Forecasts
from credit.forecast.layout import INITIAL_FIELDS
from credit.forecast.netcdf_files import LEADS, PREFIX
from credit.forecast.zarr_store import WRITTEN
from credit.grid import LatLonGrid
from credit.times import Clock

_LAT_NAMES, _LON_NAMES = ("latitude", "lat"), ("longitude", "lon")
_MEMBER_NAMES = ("member", "number", "realization")
_MINUTES = {"h": 60, "hr": 60, "hour": 60, "hours": 60, "min": 1, "minute": 1, "minutes": 1, "d": 1440, "days": 1440}


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
        self._variables = example.variables

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


class _Fields:
    """What the metadata of one file or store say.

    Fields are the variables with the dimensions `leading`, then perhaps a member, a level, and latitude and longitude.
    """

    def __init__(self, origin: Path, source: _Source, leading: tuple[str, ...], lead: str) -> None:
        lat, lon = (source.first_of(names, origin) for names in (_LAT_NAMES, _LON_NAMES))
        self.grid, self.orientation = LatLonGrid.from_coords(source.values(lat), source.values(lon), origin=str(origin))
        self.lead_minutes = _lead_minutes(source, lead, origin)
        self.attributes = source.attributes
        self.variables = [n for n in source.names if _is_field(source.dims(n), leading, (lat, lon))]
        members = {
            dims[len(leading)] for n in self.variables if (dims := source.dims(n))[len(leading)] in _MEMBER_NAMES
        }
        self.members = len(source.values(members.pop())) if members else None
        if not self.variables:
            wanted = ", ".join((*leading, "[level]", lat, lon))
            raise DataError(f"{origin}: no variable has the dimensions {wanted}")
        self.units = {name: u for name in self.variables if (u := source.variable_attributes(name).get("units"))}
        self.channel_names = _channel_names(source, self.variables)

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
    """The few things that are asked of a netCDF file or a zarr group."""

    def __init__(self, source: netCDF4.Dataset | zarr.Group) -> None:
        if isinstance(source, netCDF4.Dataset):
            self.names = list(source.variables)
            self.attributes = {name: source.getncattr(name) for name in source.ncattrs()}
        else:
            self.names = sorted(source.array_keys())  # a directory lists them in any order, each time another
            self.attributes = dict(source.attrs)
        self._source = source

    def values(self, name: str) -> np.ndarray:
        return np.asarray(self._source[name][...])

    def dims(self, name: str) -> tuple[str, ...]:
        array = self._source[name]
        if isinstance(array, zarr.Array):
            return tuple(array.metadata.dimension_names or array.attrs.get("_ARRAY_DIMENSIONS", ()))
        return array.dimensions

    def variable_attributes(self, name: str) -> dict:
        array = self._source[name]
        return dict(array.attrs) if isinstance(array, zarr.Array) else {k: array.getncattr(k) for k in array.ncattrs()}

    def first_of(self, names: Iterable[str], origin: Path) -> str:
        for name in names:
            if name in self.names:
                return name
        raise DataError(f"{origin}: has no coordinate {' or '.join(names)}")


def _is_field(dims: tuple[str, ...], leading: tuple[str, ...], horizontal: tuple[str, str]) -> bool:
    return dims[: len(leading)] == leading and dims[-2:] == horizontal


def _lead_minutes(source: _Source, name: str, origin: Path) -> np.ndarray:
    if name not in source.names:
        raise DataError(f"{origin}: has no lead times ({name})")
    units = str(source.variable_attributes(name).get("units", "hours"))
    if units not in _MINUTES:
        raise DataError(f'{origin}: {name} is in "{units}", needs one of {", ".join(_MINUTES)}')
    return np.rint(source.values(name).astype(np.float64) * _MINUTES[units]).astype(np.int64)


def _channel_names(source: _Source, variables: list[str]) -> list[str]:
    """Return names made as `credit.channels.ChannelMap` makes them."""
    flat = {name for name in variables if not _level_dim(source, name)}
    names = []
    for variable in variables:
        dim = _level_dim(source, variable)
        if dim is None:
            names.append(variable)
            continue
        units = source.variable_attributes(dim).get("units", "hPa") if dim in source.names else ""
        for level in source.values(dim):
            short = f"{variable}{level:g}"
            names.append(f"{short}{'model_level' if units == '1' else units}" if short in flat else short)
    return names


def _level_dim(source: _Source, variable: str) -> str | None:
    return next((dim for dim in source.dims(variable) if dim.startswith("level")), None)


class _NetcdfArchive(ForecastArchive):
    def __init__(self, folder: Path, paths: list[Path]) -> None:
        places: dict[int, dict[int, tuple[Path, int]]] = {}  # initial time -> lead time -> file, row
        wanted: dict[int, set[int]] = {}  # initial time -> lead times, where its files say which it should have
        first: _Fields | None = None
        for path in paths:
            try:
                with netCDF4.Dataset(path) as dataset:
                    fields = _Fields(path, _Source(dataset), ("time",), "forecast_period")
                    fields.attributes.pop(INITIAL_FIELDS, None)  # is of one forecast, not of the run
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
                return [np.ma.filled(dataset[name][row], np.nan) for name in self._variables]
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
    def __init__(self, path: Path) -> None:
        try:
            self._group = zarr.open_group(path, mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read as zarr ({error})") from error
        source = _Source(self._group)
        init, lead = ("init_time", "lead_time") if "init_time" in source.names else ("time", "prediction_timedelta")
        if init not in source.names:
            raise DataError(f"{path}: has neither init_time and lead_time nor time and prediction_timedelta")
        fields = _Fields(path, source, (init, lead), lead)
        for name in fields.variables:
            if "scale_factor" in source.variable_attributes(name):
                raise DataError(f"{path}: {name} is packed (scale_factor); write the store with plain floats")
        attributes = source.variable_attributes(init)
        if "units" not in attributes:
            raise DataError(f'{path}: {init} has no units such as "hours since 1900-01-01"')
        clock = Clock(str(attributes.get("calendar", "standard")))
        initial = clock.from_cf(source.values(init), str(attributes["units"]))
        self._position = {int(minutes): number for number, minutes in enumerate(initial)}
        whole = source.values(WRITTEN).astype(bool) if WRITTEN in source.names else np.ones(len(initial), dtype=bool)
        whole = whole[: len(initial)]  # a store that is made longer gets its initial times last
        super().__init__(path, np.sort(initial[whole]), fields.lead_minutes, fields, clock)

    def _read(self, initial_minutes: int, number: int) -> list[np.ndarray]:
        position = self._position[initial_minutes]
        return [np.asarray(self._group[name][position, number]) for name in self._variables]


def open_forecasts(path: str | os.PathLike) -> ForecastArchive:
    """Open a folder of netCDF files, a folder with ``forecasts.zarr``, or a zarr store.

    Raises:
        DataError: if there are no forecasts, or forecasts of different runs.
    """
    path = Path(path)
    stores = [store for store in (path, path / "forecasts.zarr") if (store / "zarr.json").exists()]
    stores += [store for store in (path,) if (store / ".zgroup").exists()]
    files = sorted(path.glob(f"{PREFIX}*.nc")) if path.is_dir() else []
    if stores and files:
        raise DataError(f"{path}: holds netCDF files and a zarr store; remove one of them")
    if not stores and not files:
        raise DataError(f"{path}: there are no forecasts; run credit_rollout first")
    archive = _ZarrArchive(stores[0]) if stores else _NetcdfArchive(path, files)
    if not len(archive.initial_minutes):
        raise DataError(f"{path}: no forecast is whole; run credit_rollout again")
    return archive
