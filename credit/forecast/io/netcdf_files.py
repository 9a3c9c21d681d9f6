"""Forecasts as CF netCDF, one file an initial time, or one for each of its days, months, lead times or members."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import netCDF4
import numpy as np

from credit.errors import CreditError
from credit.forecast.io.page_cache import start_writeback
from credit.forecast.io.schema import (
    HISTORY,
    HOURS,
    INITIAL_FIELDS,
    INITIAL_TIME,
    LATITUDE,
    LEAD_TIME,
    LONGITUDE,
    MADE_BY,
    MEMBER,
    QUANTIZED,
    REALIZATION,
    VALID_TIME,
    WRITE_HINT,
    ForecastSchema,
    OutputVariable,
    run_attributes,
    take_level_dims,
    window_bounds,
)
from credit.utils.temporary import find_stale, process_exists, temporary_path

PREFIX = "forecast_"
SPLITS = {
    "day": r"\d{4}-\d{2}-\d{2}", "month": r"\d{4}-\d{2}", "lead": r"\d{3,}h(\d{2})?", "member": r"member\d{3,}"
}  # fmt: skip
# the global attribute with all lead times of a forecast, in however many files it is
LEADS = "lead_minutes"
# the one with the number of its members, in files of one member each
MEMBERS = "members"
# hours may lie between two lead times that are written; in another host's file no longer than that
_LEFT_SECONDS = 86400.0
_MISSING = np.float32(netCDF4.default_fillvals["f4"])


def file_name(layout: ForecastSchema, initial_minutes: int) -> str:
    """Return for example ``forecast_2001-04-01T00.nc``; minutes are added where they are not 0."""
    date = layout.calendar.datetime(initial_minutes)
    return date.strftime(f"{PREFIX}%Y-%m-%dT%H{'%M' if date.minute else ''}.nc")


@dataclass(frozen=True)
class FilePart:
    """What lies in one file of a forecast.

    Attributes:
        numbers: the numbers of its lead times.
        member: the only member in it, None where all are (or there is one forecast).
    """

    numbers: list[int]
    member: int | None = None


def cut(layout: ForecastSchema, initial_minutes: int, split: str | None) -> dict[str, FilePart]:
    """Return the file names of a forecast and what lies in each.

    Split by ``day`` or ``month`` of the valid time, names end in it (``forecast_2001-04-01T00_2001-05.nc``), by
    ``lead`` in hours (``_024h``, ``_000h30`` for half an hour), by ``member`` in its number (``_member003``).
    """
    name, every = file_name(layout, initial_minutes), list(range(len(layout.lead_minutes)))
    stem = name.removesuffix(".nc")
    if split is None:
        return {name: FilePart(every)}
    if split == "member":
        return {f"{stem}_member{member:03d}.nc": FilePart(every, member) for member in range(layout.members or 1)}
    cuts: dict[str, FilePart] = {}
    for number, lead in enumerate(layout.lead_minutes.tolist()):
        if split == "lead":
            suffix = f"{lead // 60:03d}h" + (f"{lead % 60:02d}" if lead % 60 else "")
        else:
            date = layout.calendar.datetime(initial_minutes + lead)
            suffix = date.strftime("%Y-%m-%d" if split == "day" else "%Y-%m")
        cuts.setdefault(f"{stem}_{suffix}.nc", FilePart([])).numbers.append(number)
    return cuts


class NetcdfFiles:
    """Writes forecasts of one layout into a folder; see `credit.forecast.io.forecast_writer.ForecastWriter`."""

    def __init__(
        self,
        folder: Path,
        layout: ForecastSchema,
        split: str | None = None,
        started_from: Callable[[int], str] | None = None,
    ) -> None:
        self._folder, self._layout, self._split = folder, layout, split
        self._started_from = None if started_from is None else functools.cache(started_from)
        self._begun: dict[int, list[_Piece]] = {}
        self._attributes = {**layout.global_attributes, LEADS: ", ".join(map(str, layout.lead_minutes.tolist()))}
        if split == "member":
            assert layout.members is not None, "the config wants an ensemble for it"
            self._attributes[MEMBERS] = layout.members
        for path in find_stale(folder, f"{PREFIX}*.nc", process_exists, _LEFT_SECONDS):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def is_complete(self, initial_minutes: int) -> bool:
        """Return whether the files are there and as they would be written; they got their names when they were whole.

        Files of other lead times beside them are not of this forecast.
        """
        pieces = cut(self._layout, initial_minutes, self._split)
        alone = not self._others(initial_minutes, pieces)
        return alone and all(self._holds(self._folder / own, initial_minutes, pieces[own]) for own in pieces)

    def _others(self, initial_minutes: int, pieces: Collection[str]) -> list[Path]:
        """Return files of the same initial time that are none of `pieces`."""
        stem = file_name(self._layout, initial_minutes).removesuffix(".nc")
        return [path for path in self._folder.glob(f"{stem}_*.nc") if path.name not in pieces]

    def _holds(self, path: Path, initial_minutes: int, own: FilePart) -> bool:
        if not path.exists():
            return False
        try:
            with netCDF4.Dataset(path) as dataset:
                return self._matches(dataset, initial_minutes, own)
        except (OSError, RuntimeError):
            return False

    def _matches(self, dataset: netCDF4.Dataset, initial_minutes: int, own: FilePart) -> bool:
        stored_dims = {name: variable.dimensions for name, variable in dataset.variables.items()}
        layout = take_level_dims(_layout_of(self._layout, own), stored_dims)
        names = {variable.name for variable in layout.variables}
        fields = {name for name, variable in dataset.variables.items() if variable.dimensions[-1:] == ("longitude",)}
        if names != fields - {"longitude"} or "forecast_period" not in dataset.variables:
            return False
        stored = {name: dataset.getncattr(name) for name in dataset.ncattrs()}
        fields_before = stored.pop(INITIAL_FIELDS, None)
        return (
            run_attributes(stored) == run_attributes(self._attributes)
            and np.array_equal(dataset["forecast_period"][:], layout.lead_hours[own.numbers])
            and (own.member is None or (MEMBER in dataset.variables and dataset[MEMBER][...] == own.member))
            and all(_is_as_defined(dataset, layout, variable, own) for variable in layout.variables)
            and (self._started_from is None or fields_before == self._started_from(initial_minutes))
        )

    def put(self, initial_minutes: int, member: int, number: int, fields: np.ndarray) -> None:
        """Write one lead time of one member; a file gets its name with its last, flushed to the disk."""
        if initial_minutes not in self._begun:
            self._begin(initial_minutes)
        pieces = self._begun[initial_minutes]
        piece = next(piece for piece in pieces if piece.has(number, member))
        try:
            piece.put(initial_minutes, member, number, fields)
        except (OSError, RuntimeError) as error:  # netCDF4 reports a full disk as RuntimeError("NetCDF: HDF error")
            self.discard(initial_minutes)
            raise _failure(piece.path, error) from error
        except BaseException:
            self.discard(initial_minutes)
            raise
        if not any(piece.missing for piece in pieces):
            del self._begun[initial_minutes]

    def _begin(self, initial_minutes: int) -> None:
        attributes = {**self._attributes, HISTORY: MADE_BY}
        if self._started_from is not None:
            attributes[INITIAL_FIELDS] = self._started_from(initial_minutes)
        pieces = cut(self._layout, initial_minutes, self._split)
        stale = self._others(initial_minutes, pieces)
        if len(pieces) > 1:  # or a run that is killed would leave pieces of two forecasts
            paths = {self._folder / name: own for name, own in pieces.items()}
            # those of this very one may be another run's that makes it at once
            stale += [path for path, own in paths.items() if not self._holds(path, initial_minutes, own)]
        for path in stale:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise _failure(path, error) from error
        self._begun[initial_minutes] = [
            _Piece(self._folder / name, self._layout, own, attributes) for name, own in pieces.items()
        ]

    def discard(self, initial_minutes: int) -> None:
        """Remove what is there of a forecast that is not whole."""
        for piece in self._begun.pop(initial_minutes, ()):
            piece.discard()

    def close(self) -> None:
        """Remove what is half written of every forecast."""
        for initial_minutes in list(self._begun):
            self.discard(initial_minutes)

    def place(self, initial_minutes: int) -> Path:
        """Return the forecast's file, the first if there are several."""
        return self._folder / next(iter(cut(self._layout, initial_minutes, self._split)))


class _Piece:
    """One file while it is written, under another name until it is whole."""

    def __init__(self, path: Path, layout: ForecastSchema, own: FilePart, attributes: dict[str, str | int]) -> None:
        self.path, self._cut, self._attributes, self._layout = path, own, attributes, _layout_of(layout, own)
        members = range(layout.members or 1) if own.member is None else [own.member]
        self._fields = frozenset(itertools.product(own.numbers, members))
        self.missing = set(self._fields)
        self._part = temporary_path(path)  # another run in this folder may be making the same forecast
        self._added: tuple[int, int] | None = None  # what the whole file is known by, where none was there before
        self._dataset: netCDF4.Dataset | None = None

    def has(self, number: int, member: int) -> bool:
        """Return whether a lead time of a member lies in this file."""
        return (number, member) in self._fields

    def put(self, initial: int, member: int, number: int, fields: np.ndarray) -> None:
        layout = self._layout
        if self._dataset is None:
            self._dataset = netCDF4.Dataset(self._part, "w", format="NETCDF4")
            self._dataset.set_fill_off()  # a file that gets its name has every value; filling it first is writing twice
            self._dataset.setncatts(self._attributes)
            _define_coordinates(self._dataset, layout, initial, self._cut)
            for variable in layout.variables:
                _define_variable(self._dataset, layout, variable, self._cut)
        row = self._cut.numbers.index(number)
        for variable in layout.variables:
            values = layout.select(variable, fields)
            place = row if layout.members is None else (row, member)
            missing = np.isnan(values)
            self._dataset[variable.name][place] = np.where(missing, _MISSING, values) if missing.any() else values
        self.missing.discard((number, member))
        if self.missing:
            start_writeback(self._part)
            with suppress(OSError):  # compressed fields wait in memory, and who looks for what is left sees no writing
                os.utime(self._part)
        else:
            self._dataset.close()
            with open(self._part, "rb") as handle:
                os.fsync(handle.fileno())
                own = _known_by(os.fstat(handle.fileno()))
            added = not self.path.exists()
            os.replace(self._part, self.path)
            self._added = own if added else None

    def discard(self) -> None:
        """Remove the file, also if it is whole: its forecast is not. Another run's stays: that counts on it."""
        if self._dataset is not None and self._dataset.isopen():
            with suppress(OSError, RuntimeError):  # of a full disk, a second time
                self._dataset.close()
        with suppress(OSError):  # of a read-only file system, also where no file is
            self._part.unlink(missing_ok=True)
        with suppress(OSError):
            if self._added is not None and _known_by(self.path.stat()) == self._added:
                self.path.unlink()


def _known_by(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def _failure(path: Path, error: Exception) -> CreditError:
    return CreditError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error}); {WRITE_HINT}")


def split_of(path: Path) -> str | None:
    """Return how the forecast that a file is of was split, by the file's name; ``other`` where it is none of ours."""
    _, _, suffix = path.stem.removeprefix(PREFIX).partition("_")
    known = (name for name, pattern in SPLITS.items() if re.fullmatch(pattern, suffix))
    return next(known, "other" if suffix else None)


def _layout_of(layout: ForecastSchema, own: FilePart) -> ForecastSchema:
    """Return the layout of one file: with a member of its own it has no such dimension."""
    return layout if own.member is None else replace(layout, members=None)


def _define_coordinates(dataset: netCDF4.Dataset, layout: ForecastSchema, initial_minutes: int, own: FilePart) -> None:
    valid = initial_minutes + layout.lead_minutes[own.numbers]
    dataset.createDimension("time", len(valid))
    dataset.createDimension("bnds", 2)
    time, bounded = layout.time_attributes(), {name: window for window, name in layout.time_names("time").items()}
    for name in dict.fromkeys(("time", *bounded)):
        axis = {"axis": "T"} if name == "time" else {}
        bounds = {"bounds": f"{name}_bnds"} if name in bounded else {}
        _put(dataset, name, "f8", ("time",), valid, {**VALID_TIME, **time, **bounds, **axis})
        if bounds:
            edges = window_bounds(bounded[name], initial_minutes, valid)
            _put(dataset, f"{name}_bnds", "f8", ("time", "bnds"), edges, {})
    _put(dataset, "forecast_reference_time", "f8", (), initial_minutes, {**INITIAL_TIME, **time})
    _put(dataset, "forecast_period", "f8", ("time",), layout.lead_hours[own.numbers], {**LEAD_TIME, "units": HOURS})
    if layout.members is not None:
        dataset.createDimension(MEMBER, layout.members)
        _put(dataset, MEMBER, "i4", (MEMBER,), np.arange(layout.members), REALIZATION)
    if own.member is not None:
        _put(dataset, MEMBER, "i4", (), own.member, REALIZATION)
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


def _define_variable(dataset: netCDF4.Dataset, layout: ForecastSchema, variable: OutputVariable, own: FilePart) -> None:
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
    target.setncatts(_attributes_of(layout, variable, own))


def _attributes_of(layout: ForecastSchema, variable: OutputVariable, own: FilePart) -> dict[str, str | int]:
    time = layout.time_names("time").get(variable.window, "time")
    names = ["forecast_period", "forecast_reference_time", *([time] if time != "time" else [])]
    names += [MEMBER] if own.member is not None else []
    quantized = {} if layout.keep_bits is None else {QUANTIZED: layout.keep_bits}
    return {**variable.attributes, "coordinates": " ".join(names), **quantized}


def _is_as_defined(dataset: netCDF4.Dataset, layout: ForecastSchema, variable: OutputVariable, own: FilePart) -> bool:
    """Return whether a stored variable is what `_define_variable` makes."""
    stored, dim = dataset[variable.name], variable.level_dim
    attributes = {name: stored.getncattr(name) for name in stored.ncattrs() if name != "_FillValue"}
    return (
        stored.dimensions == layout.dims(variable, "time")
        and stored.shape[1:] == layout.shape(variable)
        and (dim is None or np.array_equal(dataset[dim][:], layout.levels[dim]))
        and attributes == _attributes_of(layout, variable, own)
        and stored.filters()["complevel"] == layout.compression
    )
