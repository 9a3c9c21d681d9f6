"""ForecastArchive: written forecasts, of this package or of others, read by initial time in the canonical order."""

from __future__ import annotations

import itertools
import os
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path

import netCDF4
import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.config.schema_verification import OtherForecastsConfig
from credit.data.formats.remote import is_remote, open_remote
from credit.errors import DataError
from credit.forecast.forecast_source import ForecastSource
from credit.forecast.io.metadata import ForecastMetadata, Source
from credit.forecast.io.netcdf_files import LEADS, MEMBERS
from credit.forecast.io.netcdf_names import PREFIX
from credit.forecast.io.schema import INITIAL_FIELDS, MEMBER
from credit.forecast.io.zarr_store import STORE, WRITTEN


class ForecastArchive(ForecastSource):
    """Forecasts that were written; `initial_minutes` are those of the forecasts that are whole."""

    def __init__(
        self,
        origin: Path | str,
        initial_minutes: np.ndarray,
        lead_minutes: np.ndarray,
        example: ForecastMetadata,
        calendar: Calendar,
    ) -> None:
        self.origin, self.calendar = origin, calendar
        self.initial_minutes = np.asarray(initial_minutes, dtype=np.int64)
        self.lead_minutes = lead_minutes
        self.members = example.members
        self.channel_names, self.flat_names = example.channel_names, example.flat_names
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

    def _select(
        self, source: Mapping | netCDF4.Dataset, position: Mapping[str, int], origin: Path | str
    ) -> list[np.ndarray]:
        """Return every variable at a position along the leading dimensions, ([members,] [levels,] H, W)."""
        fields = []
        for name, dims in self._variables.items():
            place = tuple(position.get(dim, slice(None)) for dim in dims)
            try:
                values = np.ma.filled(source[name][place], np.nan)
            except Exception as error:
                # each file system's library has its own errors
                raise DataError(f"{origin}: {name} cannot be read ({error}); copy or forecast it again") from error
            left = [dim for dim in dims if dim not in position]
            fields.append(values.transpose([left.index(dim) for dim in self._order if dim in left]))
        return fields


class _NetcdfArchive(ForecastArchive):
    def __init__(self, folder: Path, paths: list[Path], rename: Mapping[str, str], level_units: str | None) -> None:
        # initial time -> lead time and member, 0 in a file of all members -> file, row
        places: dict[int, dict[tuple[int, int], tuple[Path, int]]] = {}
        wanted: dict[int, set[tuple[int, int]]] = {}  # the same that there should be, where files say so
        began: dict[int, object] = {}  # initial time -> checksum of what it started from
        first: ForecastMetadata | None = None
        for path in paths:
            try:
                with netCDF4.Dataset(path) as dataset:
                    source = Source(path, dataset.variables, dataset.__dict__)
                    fields = ForecastMetadata(
                        source, ("time",), "forecast_period", rename, level_units, warn=first is None
                    )
                    fields_before = fields.attributes.pop(INITIAL_FIELDS, None)  # is of one forecast, not of the run
                    whole = fields.attributes.pop(LEADS, None)
                    alone = MEMBER in dataset.variables and dataset[MEMBER].ndim == 0
                    members = fields.attributes.get(MEMBERS) if alone else None
                    member = 0 if members is None else int(dataset[MEMBER][...])
                    reference = dataset["forecast_reference_time"]
                    calendar = Calendar(getattr(reference, "calendar", "standard"))
                    if "units" not in reference.ncattrs():
                        raise DataError(
                            f'{path}: forecast_reference_time has no units; give it them, such as "hours since '
                            '1900-01-01", or write the forecast again'
                        )
                    initial = int(calendar.from_cf(reference[...], reference.units))
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
                known = places.setdefault(initial, {}).setdefault((lead, member), (path, row))
                if known != (path, row):
                    raise DataError(f"{path}: has lead times of {known[0]} again; remove one of them")
            if whole is not None:
                leads = [int(lead) for lead in str(whole).split(",")]
                wanted.setdefault(initial, set()).update(itertools.product(leads, range(members or 1)))
        _require_whole(places, wanted, members, calendar)
        assert first is not None
        example = places[min(places)]
        for own in places.values():
            if own.keys() != example.keys():
                raise DataError(
                    f"{next(iter(own.values()))[0]}: the forecast has other lead times than that of "
                    f"{next(iter(example.values()))[0]}; run credit_rollout again, or remove what is of "
                    "another run"
                )
        self._places, self._in_files = places, range(members or 1)
        leads = sorted({lead for lead, _ in example})
        super().__init__(folder, np.array(sorted(places)), np.array(leads, dtype=np.int64), first, calendar)
        self.members = self.members if members is None else int(members)

    def _read(self, initial_minutes: int, number: int) -> list[np.ndarray]:
        lead, own = int(self.lead_minutes[number]), self._places[initial_minutes]
        fields = [self._read_file(*own[lead, member]) for member in self._in_files]
        return fields[0] if len(fields) == 1 else [np.stack(members) for members in zip(*fields, strict=True)]

    def _read_file(self, path: Path, row: int) -> list[np.ndarray]:
        try:
            with netCDF4.Dataset(path) as dataset:
                return self._select(dataset, {"time": row}, path)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path}: cannot be read ({error})") from error


def _require_whole(
    places: dict[int, dict[tuple[int, int], tuple[Path, int]]], wanted: dict[int, set[tuple[int, int]]],
    members: int | None, calendar: Calendar,
) -> None:  # fmt: skip
    """Refuse a forecast that an interrupted run left without the files of some lead times or members."""
    for initial, whole in wanted.items():
        missing = sorted(whole - places[initial].keys())
        if missing:
            lead, member = missing[0]
            first = f"{lead / 60:g} h" if members is None else f"{lead / 60:g} h of member {member}"
            raise DataError(
                f"{next(iter(places[initial].values()))[0]}: of the forecast from {calendar.format(initial)} "
                f"{len(missing)} of {len(whole)} lead times are missing, the first of them {first}; run "
                "credit_rollout again, which continues what was interrupted, or remove its files"
            )


class _ZarrArchive(ForecastArchive):
    def __init__(
        self, path: Path | str, rename: Mapping[str, str], level_units: str | None, options: Mapping[str, object]
    ) -> None:
        variables, attributes = _open_remote_zarr(path, options) if is_remote(path) else _open_zarr(path)
        # a directory lists them in any order, each time another
        source = Source(path, dict(sorted(variables.items())), attributes)
        init, lead = ("init_time", "lead_time") if "init_time" in source.names else ("time", "prediction_timedelta")
        if init not in source.names:
            raise DataError(f"{path}: has neither init_time and lead_time nor time and prediction_timedelta")
        fields = ForecastMetadata(source, (init, lead), lead, rename, level_units)
        of_time = source.variable_attributes(init)
        if "units" not in of_time:
            raise DataError(f'{path}: {init} has no units such as "hours since 1900-01-01"')
        calendar = Calendar(str(of_time.get("calendar", "standard")))
        initial = calendar.from_cf(source.values(init), str(of_time["units"]))
        self._source, self._leading = variables, (init, lead)
        self._position = {int(minutes): number for number, minutes in enumerate(initial)}
        whole = source.values(WRITTEN).astype(bool) if WRITTEN in source.names else np.ones(len(initial), dtype=bool)
        whole = whole[: len(initial)]  # a store that is made longer gets its initial times last
        super().__init__(path, np.sort(initial[whole]), fields.lead_minutes, fields, calendar)

    def _read(self, initial_minutes: int, number: int) -> list[np.ndarray]:
        position = dict(zip(self._leading, (self._position[initial_minutes], number), strict=True))
        return self._select(self._source, position, self.origin)


def _open_zarr(path: Path) -> tuple[Mapping[str, xr.Variable], Mapping[str, object]]:
    try:
        # not as a dataset: the arrays of a store that is made longer differ in length for a moment
        held = xr.backends.ZarrStore.open_group(path, consolidated=False).load()
        return xr.conventions.decode_cf_variables(*held, decode_times=False, decode_timedelta=False)[:2]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: cannot be read as zarr ({error})") from error


def _open_remote_zarr(
    url: str, options: Mapping[str, object]
) -> tuple[Mapping[str, xr.Variable], Mapping[str, object]]:
    dataset = open_remote(url, options, decode_times=False, decode_timedelta=False, chunks=None, cache=False)
    return dataset.variables, dataset.attrs


def open_other_forecasts(name: str, conf: OtherForecastsConfig, level_units: str) -> ForecastArchive:
    """Open the forecasts of ``verification.other_forecasts.NAME``, their levels in ``data.level_units``.

    Raises:
        DataError: naming the key, if there are none or they cannot be read.
    """
    try:
        return open_forecasts(conf.path, conf.rename, level_units, conf.storage_options)
    except DataError as error:
        raise DataError(f"verification.other_forecasts.{name}: {error}") from error


def open_forecasts(
    path: str | os.PathLike, rename: Mapping[str, str] | None = None, level_units: str | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> ForecastArchive:  # fmt: skip
    """Open a folder of netCDF files, a folder with ``forecasts.zarr``, or a zarr store of version 2 or 3.

    Args:
        path: the folder, the store, or the URL of a store.
        rename: our name of a variable -> its name there.
        level_units: of levels in the names of channels, which others are brought to; None for those of the files.
        storage_options: how to reach a URL.

    Raises:
        DataError: if there are no forecasts, or forecasts of different runs.
    """
    rename = rename or {}
    stores, files = ([path], []) if is_remote(path) else _find(Path(path))
    if stores:
        archive = _ZarrArchive(stores[0], rename, level_units, storage_options or {})
    else:
        archive = _NetcdfArchive(Path(path), files, rename, level_units)
    if not len(archive.initial_minutes):
        raise DataError(f"{path}: no forecast is whole; run credit_rollout again")
    return archive


def _find(path: Path) -> tuple[list[Path], list[Path]]:
    """Return stores and files of a folder or store, one of them empty."""
    marks = "zarr.json", ".zgroup"
    stores = [one for one in (path, path / STORE) if any((one / mark).exists() for mark in marks)]
    files = sorted(path.glob(f"{PREFIX}*.nc")) if path.is_dir() else []
    if stores and files:
        raise DataError(f"{path}: holds netCDF files and a zarr store; remove one of them")
    if not stores and not files:
        raise DataError(f"{path}: there are no forecasts; run credit_rollout first, or name the folder that has some")
    return stores, files
