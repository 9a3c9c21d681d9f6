"""Reader of forecast files and stores, of this package or of others.

Shapes: N lead times, M members, C channels, L levels, H rows, W columns.
"""

from __future__ import annotations

import itertools
import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import netCDF4
import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.config.sections.verification import OtherForecastsConfig
from credit.data.formats.remote import is_remote, open_remote_store
from credit.errors import DataError
from credit.forecast.forecast_source import ForecastSource
from credit.forecast.io.metadata import ForecastMetadata, Source
from credit.forecast.io.netcdf_files import LEADS, MEMBERS
from credit.forecast.io.netcdf_names import PREFIX
from credit.forecast.io.schema import INITIAL_FIELDS, MEMBER
from credit.forecast.io.zarr_arrays import WRITTEN
from credit.forecast.io.zarr_store import STORE

# (lead time, member) -> file, row. In a file of all members the member is 0.
_Rows = dict[tuple[int, int], tuple[Path, int]]


class ForecastArchive(ForecastSource):
    """Forecasts on disk; `initial_minutes` has only those that are complete."""

    def __init__(
        self,
        origin: Path | str,
        initial_minutes: np.ndarray,
        lead_minutes: np.ndarray,
        metadata: ForecastMetadata,
        calendar: Calendar,
    ) -> None:
        self.origin = origin
        self.calendar = calendar
        self.initial_minutes = np.asarray(initial_minutes, dtype=np.int64)
        self.lead_minutes = lead_minutes
        self.members = metadata.members
        self.channel_names = metadata.channel_names
        self.flat_names = metadata.flat_names
        self.units = metadata.units
        self.attributes = metadata.attributes
        self.grid = metadata.grid
        self._orientation = metadata.orientation
        self._variables = metadata.variables
        self._order = metadata.order

    def read(self, initial_minutes: int) -> np.ndarray:
        """Return one forecast, (N, C, H, W) float32, NaN where missing; for an ensemble the mean of its members.

        Raises:
            DataError: if the forecast cannot be read.
        """
        fields = []
        for number in range(len(self.lead_minutes)):
            fields_MCHW = self.read_members(initial_minutes, number)
            # A single field is not averaged, so that its values stay the same bit for bit.
            is_single = len(fields_MCHW) == 1
            fields.append(fields_MCHW[0] if is_single else fields_MCHW.mean(axis=0, dtype=np.float32))
        return np.stack(fields)

    def read_members(self, initial_minutes: int, number: int) -> np.ndarray:
        """Return all members at one lead time, (M, C, H, W) float32, NaN where missing; M is 1 for a single forecast.

        Args:
            initial_minutes: initial time.
            number: index of the lead time in `lead_minutes`.

        Raises:
            DataError: if the forecast cannot be read.
        """
        arrays = self._read(int(initial_minutes), number)
        num_members = self.members or 1
        variables = [array.reshape(num_members, -1, *array.shape[-2:]) for array in arrays]
        return self._orientation.apply(np.concatenate(variables, axis=1)).astype(np.float32, copy=False)

    @abstractmethod
    def _read(self, initial_minutes: int, number: int) -> list[np.ndarray]:
        """Return each variable at one lead time, ([M,] [L,] H, W)."""

    def _select(
        self, source: Mapping | netCDF4.Dataset, position: Mapping[str, int], origin: Path | str
    ) -> list[np.ndarray]:
        """Return each variable at a position along the leading dimensions, ([M,] [L,] H, W)."""
        fields = []
        for name, dims in self._variables.items():
            selection = tuple(position.get(dim, slice(None)) for dim in dims)
            try:
                values = np.ma.filled(source[name][selection], np.nan)
            except Exception as error:
                # The library of each file system has its own errors.
                raise DataError(f"{origin}: {name} cannot be read ({error}); copy or forecast it again") from error
            remaining_dims = [dim for dim in dims if dim not in position]
            axes = [remaining_dims.index(dim) for dim in self._order if dim in remaining_dims]
            fields.append(values.transpose(axes))
        return fields


@dataclass(frozen=True)
class _FileMetadata:
    """Metadata of a netCDF file.

    Attributes:
        fields: variables, levels, lead times and grid.
        calendar: calendar of the times.
        initial_minutes: initial time.
        member: number of the only member, 0 in a file of all members.
        num_members: number of members in files of one member each, None for files of all members.
        lead_minutes: lead times of the whole forecast, None in files of other programs.
        checksum: checksum of the fields that the forecast starts from, None if there is none.
    """

    fields: ForecastMetadata
    calendar: Calendar
    initial_minutes: int
    member: int
    num_members: int | None
    lead_minutes: list[int] | None
    checksum: object


def _read_metadata(path: Path, rename: Mapping[str, str], level_units: str | None, warn: bool) -> _FileMetadata:
    try:
        with netCDF4.Dataset(path) as dataset:
            source = Source(path, dataset.variables, dataset.__dict__)
            fields = ForecastMetadata(source, ("time",), "forecast_period", rename, level_units, warn=warn)
            # These belong to one forecast, not to the run, so files of one run may differ in them.
            checksum = fields.attributes.pop(INITIAL_FIELDS, None)
            lead_text = fields.attributes.pop(LEADS, None)
            has_one_member = MEMBER in dataset.variables and dataset[MEMBER].ndim == 0
            num_members = fields.attributes.get(MEMBERS) if has_one_member else None
            member = 0 if num_members is None else int(dataset[MEMBER][...])
            reference = dataset["forecast_reference_time"]
            calendar = Calendar(getattr(reference, "calendar", "standard"))
            if "units" not in reference.ncattrs():
                raise DataError(
                    f'{path}: forecast_reference_time has no units; give it them, such as "hours since 1900-01-01", or '
                    "write the forecast again"
                )
            initial_minutes = int(calendar.minutes_from_cf(reference[...], reference.units))
    except (OSError, IndexError) as error:
        raise DataError(f"{path}: is not a readable forecast ({error}); remove it") from error
    lead_minutes = None if lead_text is None else [int(lead) for lead in str(lead_text).split(",")]
    return _FileMetadata(fields, calendar, initial_minutes, member, num_members, lead_minutes, checksum)


class _NetcdfArchive(ForecastArchive):
    def __init__(self, folder: Path, paths: list[Path], rename: Mapping[str, str], level_units: str | None) -> None:
        # The keys are initial times.
        rows: dict[int, _Rows] = {}
        # Lead times and members of the complete forecast, if the files name them.
        expected_rows: dict[int, set[tuple[int, int]]] = {}
        checksums: dict[int, object] = {}
        first: _FileMetadata | None = None
        for path in paths:
            file = _read_metadata(path, rename, level_units, warn=first is None)
            first = first or file
            initial = file.initial_minutes
            difference = first.fields.describe_difference(file.fields)
            if difference:
                raise DataError(f"{path}: {difference}, unlike {paths[0]}; remove the files of one of the runs")
            if checksums.setdefault(initial, file.checksum) != file.checksum:
                raise DataError(
                    f"{path}: is of another analysis than the forecast's other files; run credit_rollout again, or "
                    "remove the forecast's files"
                )
            forecast_rows = rows.setdefault(initial, {})
            for row, lead in enumerate(file.fields.lead_minutes.tolist()):
                other_path, other_row = forecast_rows.setdefault((lead, file.member), (path, row))
                if (other_path, other_row) != (path, row):
                    raise DataError(f"{path}: has the same lead times as {other_path}; remove one of them")
            num_members = file.num_members
            if file.lead_minutes is not None:
                members = range(num_members or 1)
                expected_rows.setdefault(initial, set()).update(itertools.product(file.lead_minutes, members))
        assert first is not None
        _require_complete(rows, expected_rows, num_members, file.calendar)
        example_rows = rows[min(rows)]
        for forecast_rows in rows.values():
            if forecast_rows.keys() != example_rows.keys():
                path, _ = next(iter(forecast_rows.values()))
                example_path, _ = next(iter(example_rows.values()))
                raise DataError(
                    f"{path}: the forecast has other lead times than that of {example_path}; run credit_rollout again, "
                    "or remove the files of one of the runs"
                )
        self._rows = rows
        self._file_members = range(num_members or 1)
        leads = sorted({lead for lead, _ in example_rows})
        super().__init__(folder, np.array(sorted(rows)), np.array(leads, dtype=np.int64), first.fields, file.calendar)
        if num_members is not None:
            self.members = int(num_members)

    def _read(self, initial_minutes: int, number: int) -> list[np.ndarray]:
        lead = int(self.lead_minutes[number])
        rows = self._rows[initial_minutes]
        fields = [self._read_file(*rows[lead, member]) for member in self._file_members]
        if len(fields) == 1:
            return fields[0]
        return [np.stack(members) for members in zip(*fields, strict=True)]

    def _read_file(self, path: Path, row: int) -> list[np.ndarray]:
        try:
            with netCDF4.Dataset(path) as dataset:
                return self._select(dataset, {"time": row}, path)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path}: cannot be read ({error})") from error


def _require_complete(
    rows: Mapping[int, _Rows],
    expected_rows: Mapping[int, set[tuple[int, int]]],
    num_members: int | None,
    calendar: Calendar,
) -> None:
    """Refuse a forecast that an interrupted run left without the files of some lead times or members."""
    for initial, expected in expected_rows.items():
        missing = sorted(expected - rows[initial].keys())
        if missing:
            lead, member = missing[0]
            first_missing = f"{lead / 60:g} h"
            if num_members is not None:
                first_missing += f" of member {member}"
            path, _ = next(iter(rows[initial].values()))
            raise DataError(
                f"{path}: of the forecast from {calendar.format(initial)} {len(missing)} of {len(expected)} lead times "
                f"are missing, the first of them {first_missing}; run credit_rollout again, which completes it, or "
                "remove its files"
            )


class _ZarrArchive(ForecastArchive):
    def __init__(
        self, path: Path | str, rename: Mapping[str, str], level_units: str | None, options: Mapping[str, object]
    ) -> None:
        variables, attributes = _open_remote_zarr(path, options) if is_remote(path) else _open_zarr(path)
        # A directory lists the variables in any order. Sorted, all processes have the channels in the same order.
        source = Source(path, dict(sorted(variables.items())), attributes)
        init, lead = ("init_time", "lead_time") if "init_time" in source.names else ("time", "prediction_timedelta")
        if init not in source.names:
            raise DataError(f"{path}: has neither init_time and lead_time nor time and prediction_timedelta")
        metadata = ForecastMetadata(source, (init, lead), lead, rename, level_units)
        init_attributes = source.variable_attributes(init)
        if "units" not in init_attributes:
            raise DataError(f'{path}: {init} has no units such as "hours since 1900-01-01"')
        calendar = Calendar(str(init_attributes.get("calendar", "standard")))
        initial_minutes = calendar.minutes_from_cf(source.values(init), str(init_attributes["units"]))
        self._source = variables
        self._leading_dims = (init, lead)
        self._init_index = {int(minutes): index for index, minutes in enumerate(initial_minutes)}
        is_complete = np.ones(len(initial_minutes), dtype=bool)
        if WRITTEN in source.names:
            # A store that is being extended gets its initial times last, so it may have more marks than times.
            is_complete = source.values(WRITTEN).astype(bool)[: len(initial_minutes)]
        super().__init__(path, np.sort(initial_minutes[is_complete]), metadata.lead_minutes, metadata, calendar)

    def _read(self, initial_minutes: int, number: int) -> list[np.ndarray]:
        init, lead = self._leading_dims
        position = {init: self._init_index[initial_minutes], lead: number}
        return self._select(self._source, position, self.origin)


def _open_zarr(path: Path) -> tuple[Mapping[str, xr.Variable], Mapping[str, object]]:
    try:
        # A dataset would require arrays of equal length, which differ for a moment while a store is extended.
        variables, attributes = xr.backends.ZarrStore.open_group(path, consolidated=False).load()
        decoded_variables, decoded_attributes, _ = xr.conventions.decode_cf_variables(
            variables, attributes, decode_times=False, decode_timedelta=False
        )
        return decoded_variables, decoded_attributes
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: cannot be read as zarr ({error})") from error


def _open_remote_zarr(
    url: str, options: Mapping[str, object]
) -> tuple[Mapping[str, xr.Variable], Mapping[str, object]]:
    dataset = open_remote_store(url, options, decode_times=False, decode_timedelta=False, chunks=None, cache=False)
    return dataset.variables, dataset.attrs


def open_other_forecasts(name: str, conf: OtherForecastsConfig, level_units: str) -> ForecastArchive:
    """Open the forecasts of ``verification.other_forecasts.NAME``, their levels in ``data.level_units``.

    Raises:
        DataError: naming the key, if there are no forecasts or they cannot be read.
    """
    try:
        return open_forecasts(conf.path, conf.rename, level_units, conf.storage_options)
    except DataError as error:
        raise DataError(f"verification.other_forecasts.{name}: {error}") from error


def open_forecasts(
    path: str | os.PathLike,
    rename: Mapping[str, str] | None = None,
    level_units: str | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> ForecastArchive:
    """Open a folder of netCDF files, a folder with ``forecasts.zarr``, or a zarr store of version 2 or 3.

    Args:
        path: folder, store, or URL of a store.
        rename: name of a variable in this package -> its name in the files.
        level_units: units of the levels in the names of channels; None for those of the files.
        storage_options: options of the file system of a URL, such as credentials.

    Raises:
        DataError: if there are no forecasts, or forecasts of different runs.
    """
    rename = rename or {}
    if is_remote(path):
        stores, files = [path], []
    else:
        stores, files = _find_forecasts(Path(path))
    if stores:
        archive = _ZarrArchive(stores[0], rename, level_units, storage_options or {})
    else:
        archive = _NetcdfArchive(Path(path), files, rename, level_units)
    if not len(archive.initial_minutes):
        raise DataError(f"{path}: no forecast is complete; run credit_rollout again")
    return archive


def _find_forecasts(path: Path) -> tuple[list[Path], list[Path]]:
    """Return stores and files of a folder or store, one of them empty."""
    stores = []
    for store in (path, path / STORE):
        if (store / "zarr.json").exists() or (store / ".zgroup").exists():
            stores.append(store)
    files = sorted(path.glob(f"{PREFIX}*.nc")) if path.is_dir() else []
    if stores and files:
        raise DataError(f"{path}: holds netCDF files and a zarr store; remove one of them")
    if not stores and not files:
        raise DataError(f"{path}: there are no forecasts; run credit_rollout first, or name a folder with forecasts")
    return stores, files
