"""Forecasts as CF netCDF, one file an initial time, or one for each of its days, months or lead times."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from pathlib import Path

import netCDF4
import numpy as np

from credit.errors import CreditError
from credit.forecast.layout import (
    HOURS,
    INITIAL_TIME,
    LATITUDE,
    LEAD_TIME,
    LONGITUDE,
    MEMBER,
    QUANTIZED,
    REALIZATION,
    VALID_TIME,
    WRITE_HINT,
    ForecastLayout,
    OutputVariable,
)

PREFIX = "forecast_"
SPLITS = ("day", "month", "lead")
_MISSING = np.float32(netCDF4.default_fillvals["f4"])


def file_name(layout: ForecastLayout, initial_minutes: int) -> str:
    """Return for example ``forecast_2001-04-01T00.nc``; minutes are added where they are not 0."""
    date = layout.clock.datetime(initial_minutes)
    return date.strftime(f"{PREFIX}%Y-%m-%dT%H{'%M' if date.minute else ''}.nc")


def split_leads(layout: ForecastLayout, initial_minutes: int, split: str | None) -> dict[str, list[int]]:
    """Return the file names of a forecast and the numbers of the lead times that lie in each.

    Split by ``day`` or ``month`` of the valid time, names end in it (``forecast_2001-04-01T00_2001-05.nc``), by
    ``lead`` in hours (``_024h``, ``_000h30`` for half an hour).
    """
    name = file_name(layout, initial_minutes)
    if split is None:
        return {name: list(range(len(layout.lead_minutes)))}
    pieces: dict[str, list[int]] = {}
    for number, lead in enumerate(layout.lead_minutes.tolist()):
        if split == "lead":
            suffix = f"{lead // 60:03d}h" + (f"{lead % 60:02d}" if lead % 60 else "")
        else:
            date = layout.clock.datetime(initial_minutes + lead)
            suffix = date.strftime("%Y-%m-%d" if split == "day" else "%Y-%m")
        pieces.setdefault(f"{name.removesuffix('.nc')}_{suffix}.nc", []).append(number)
    return pieces


class NetcdfFiles:
    """Writes forecasts of one layout into a folder; see `credit.forecast.writer.ForecastWriter`."""

    def __init__(self, folder: Path, layout: ForecastLayout, split: str | None = None) -> None:
        self._folder, self._layout, self._split = folder, layout, split
        self._begun: dict[int, list[_Piece]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CreditError(f"{folder}: cannot be made ({error.strerror}); choose another save_loc") from error

    def is_complete(self, initial_minutes: int) -> bool:
        """Return whether the files are there and of this layout; they got their names only when they were whole."""
        pieces = split_leads(self._layout, initial_minutes, self._split)
        return all(self._holds(self._folder / name, numbers) for name, numbers in pieces.items())

    def _holds(self, path: Path, numbers: list[int]) -> bool:
        if not path.exists():
            return False
        try:
            with netCDF4.Dataset(path) as dataset:
                return self._matches(dataset, numbers)
        except OSError:
            return False

    def _matches(self, dataset: netCDF4.Dataset, numbers: list[int]) -> bool:
        layout = self._layout
        names = {variable.name for variable in layout.variables}
        fields = {name for name, variable in dataset.variables.items() if variable.dimensions[-1:] == ("longitude",)}
        if names != fields - {"longitude"} or "forecast_period" not in dataset.variables:
            return False
        same_shapes = all(dataset[v.name].shape[1:] == layout.shape(v) for v in layout.variables)
        same_leads = np.array_equal(dataset["forecast_period"][:], layout.lead_hours[numbers])
        stored = {name: dataset.getncattr(name) for name in dataset.ncattrs()}
        return same_shapes and same_leads and stored == layout.global_attributes

    def put(self, initial_minutes: int, member: int, number: int, fields: np.ndarray) -> None:
        """Write one lead time of one member; a file gets its name with its last, flushed to the disk."""
        if initial_minutes not in self._begun:
            pieces = split_leads(self._layout, initial_minutes, self._split).items()
            self._begun[initial_minutes] = [_Piece(self._folder / name, numbers) for name, numbers in pieces]
        pieces = self._begun[initial_minutes]
        piece = next(piece for piece in pieces if number in piece.numbers)
        try:
            piece.put(self._layout, initial_minutes, member, number, fields)
        except (OSError, RuntimeError) as error:  # netCDF4 reports a full disk as RuntimeError("NetCDF: HDF error")
            self.discard(initial_minutes)
            reason = getattr(error, "strerror", None) or error
            raise CreditError(f"{piece.path}: cannot be written ({reason}); {WRITE_HINT}") from error
        except BaseException:
            self.discard(initial_minutes)
            raise
        if not any(piece.missing for piece in pieces):
            del self._begun[initial_minutes]

    def discard(self, initial_minutes: int) -> None:
        """Remove what is half written of a forecast."""
        for piece in self._begun.pop(initial_minutes, ()):
            piece.discard()

    def close(self) -> None:
        """Remove what is half written of every forecast."""
        for initial_minutes in list(self._begun):
            self.discard(initial_minutes)

    def place(self, initial_minutes: int) -> Path:
        """Return the forecast's file, the first if there are several."""
        return self._folder / next(iter(split_leads(self._layout, initial_minutes, self._split)))


class _Piece:
    """One file while it is written, under another name until it is whole."""

    def __init__(self, path: Path, numbers: list[int]) -> None:
        self.path, self.numbers = path, numbers
        self.missing = {(number, 0) for number in numbers}  # with the number of the member
        self._part = path.with_name(path.name + ".part")
        self._dataset: netCDF4.Dataset | None = None

    def put(self, layout: ForecastLayout, initial: int, member: int, number: int, fields: np.ndarray) -> None:
        if self._dataset is None:
            self._dataset = netCDF4.Dataset(self._part, "w", format="NETCDF4")
            self._dataset.set_fill_off()  # a file that gets its name has every value; filling it first is writing twice
            _define_coordinates(self._dataset, layout, initial, self.numbers)
            for variable in layout.variables:
                _define_variable(self._dataset, layout, variable)
            self.missing = set(itertools.product(self.numbers, range(layout.members or 1)))
        row = self.numbers.index(number)
        for variable in layout.variables:
            values = layout.select(variable, fields)
            place = row if layout.members is None else (row, member)
            missing = np.isnan(values)
            self._dataset[variable.name][place] = np.where(missing, _MISSING, values) if missing.any() else values
        self.missing.discard((number, member))
        if self.missing:
            _begin_to_store(self._part)
        else:
            self._dataset.close()
            with open(self._part, "rb") as handle:
                os.fsync(handle.fileno())
            os.replace(self._part, self.path)

    def discard(self) -> None:
        if self._dataset is not None and self._dataset.isopen():
            with suppress(OSError, RuntimeError):  # of a full disk, a second time
                self._dataset.close()
        self._part.unlink(missing_ok=True)


def _begin_to_store(path: Path) -> None:
    """Have the system store, while the model computes, what a file has; else all of it waits for its last step."""
    if hasattr(os, "posix_fadvise"):  # Linux
        with suppress(OSError), open(path, "rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _define_coordinates(
    dataset: netCDF4.Dataset, layout: ForecastLayout, initial_minutes: int, numbers: list[int]
) -> None:
    dataset.setncatts(layout.global_attributes)
    valid = initial_minutes + layout.lead_minutes[numbers]
    dataset.createDimension("time", len(valid))
    dataset.createDimension("bnds", 2)
    time = layout.time_attributes()
    bounds = {"bounds": "time_bnds"} if layout.has_windows else {}
    _put(dataset, "time", "f8", ("time",), valid, {**VALID_TIME, **time, **bounds, "axis": "T"})
    if layout.has_windows:
        _put(dataset, "time_bnds", "f8", ("time", "bnds"), np.stack([valid - layout.step_minutes, valid], 1), {})
    _put(dataset, "forecast_reference_time", "f8", (), initial_minutes, {**INITIAL_TIME, **time})
    _put(dataset, "forecast_period", "f8", ("time",), layout.lead_hours[numbers], {**LEAD_TIME, "units": HOURS})
    if layout.members is not None:
        dataset.createDimension(MEMBER, layout.members)
        _put(dataset, MEMBER, "i4", (MEMBER,), np.arange(layout.members), REALIZATION)
    for dim, values in layout.levels.items():
        dataset.createDimension(dim, len(values))
        _put(dataset, dim, "f8", (dim,), values, layout.level_attributes(dim))
    edges = layout.grid.lat_bounds
    dataset.createDimension("latitude", layout.grid.shape[0])
    dataset.createDimension("longitude", layout.grid.shape[1])
    _put(dataset, "latitude", "f8", ("latitude",), layout.grid.lat, {**LATITUDE, "bounds": "latitude_bnds"})
    _put(dataset, "latitude_bnds", "f8", ("latitude", "bnds"), np.stack([edges[:-1], edges[1:]], 1), {})
    _put(dataset, "longitude", "f8", ("longitude",), layout.grid.lon, LONGITUDE)


def _put(
    dataset: netCDF4.Dataset, name: str, kind: str, dims: tuple[str, ...], values: object, attributes: dict[str, str]
) -> None:
    variable = dataset.createVariable(name, kind, dims)
    variable.setncatts(attributes)
    variable[...] = values


def _define_variable(dataset: netCDF4.Dataset, layout: ForecastLayout, variable: OutputVariable) -> None:
    dims = layout.dims(variable, "time")
    chunks = (*(1,) * (len(dims) - 2), *layout.grid.shape)
    target = dataset.createVariable(
        variable.name,
        "f4",
        dims,
        fill_value=_MISSING,
        chunksizes=chunks if layout.compression else None,
        compression="zlib" if layout.compression else None,
        complevel=layout.compression,
        shuffle=True,
    )
    target.setncatts({**variable.attributes, "coordinates": "forecast_period forecast_reference_time"})
    if layout.keep_bits is not None:
        target.setncattr(QUANTIZED, layout.keep_bits)
