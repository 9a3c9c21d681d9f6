"""Forecasts as CF netCDF: one file an initial time, or one for each of its days, months, lead times or members.

Shapes: C output channels, H rows, W columns.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import netCDF4
import numpy as np

from credit.errors import CreditError
from credit.forecast.io.netcdf_names import PREFIX, FilePart, file_name, plan_files
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

# The global attribute with all lead times of a forecast, whatever the number of its files.
LEADS = "lead_minutes"
# The global attribute with the number of members, in files of one member each.
MEMBERS = "members"
# Temporary files of another host are removed after this time without writing. Two lead times may be hours apart.
_LEFT_SECONDS = 86400.0
_MISSING = np.float32(netCDF4.default_fillvals["f4"])


class NetcdfForecastWriter:
    """Writes forecasts of one layout into a folder; see `credit.forecast.io.forecast_writer.ForecastWriter`."""

    def __init__(
        self,
        folder: Path,
        layout: ForecastSchema,
        split: str | None = None,
        started_from: Callable[[int], str] | None = None,
    ) -> None:
        self._folder = folder
        self._layout = layout
        self._split = split
        self._started_from = None if started_from is None else functools.cache(started_from)
        # Initial time -> files of an incomplete forecast.
        self._open_files: dict[int, list[_ForecastFile]] = {}
        self._attributes = {**layout.global_attributes, LEADS: ", ".join(map(str, layout.lead_minutes.tolist()))}
        if split == "member":
            assert layout.members is not None, "the config requires an ensemble for this split"
            self._attributes[MEMBERS] = layout.members
        for path in find_stale(folder, f"{PREFIX}*.nc", process_exists, _LEFT_SECONDS):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def is_complete(self, initial_minutes: int) -> bool:
        """Return whether all files of the forecast exist with the content that would be written.

        A file has its final name only if it is complete. A file of other lead times makes the forecast incomplete, as
        it would be read as a part of it.
        """
        parts = plan_files(self._layout, initial_minutes, self._split)
        if self._other_files(initial_minutes, parts):
            return False
        return all(self._file_matches(self._folder / name, initial_minutes, part) for name, part in parts.items())

    def _other_files(self, initial_minutes: int, names: Collection[str]) -> list[Path]:
        """Return files of the same initial time that are not among `names`."""
        stem = file_name(self._layout, initial_minutes).removesuffix(".nc")
        return [path for path in self._folder.glob(f"{stem}_*.nc") if path.name not in names]

    def _file_matches(self, path: Path, initial_minutes: int, part: FilePart) -> bool:
        """Return whether a file exists with the content that would be written."""
        if not path.exists():
            return False
        try:
            with netCDF4.Dataset(path) as dataset:
                return self._dataset_matches(dataset, initial_minutes, part)
        except (OSError, RuntimeError):
            return False

    def _dataset_matches(self, dataset: netCDF4.Dataset, initial_minutes: int, part: FilePart) -> bool:
        stored_dims = {name: variable.dimensions for name, variable in dataset.variables.items()}
        layout = take_level_dims(_layout_of(self._layout, part), stored_dims)
        stored_fields = {name for name, dims in stored_dims.items() if dims[-1:] == ("longitude",)} - {"longitude"}
        if stored_fields != {variable.name for variable in layout.variables}:
            return False
        if "forecast_period" not in dataset.variables:
            return False
        attributes = {name: dataset.getncattr(name) for name in dataset.ncattrs()}
        checksum = attributes.pop(INITIAL_FIELDS, None)
        if run_attributes(attributes) != run_attributes(self._attributes):
            return False
        if not np.array_equal(dataset["forecast_period"][:], layout.lead_hours[part.numbers]):
            return False
        if part.member is not None and (MEMBER not in dataset.variables or dataset[MEMBER][...] != part.member):
            return False
        if not all(_is_as_defined(dataset, layout, variable, part) for variable in layout.variables):
            return False
        # The checksum comes last, because it reads the fields that the forecast starts from.
        return self._started_from is None or checksum == self._started_from(initial_minutes)

    def put(self, initial_minutes: int, member: int, number: int, fields_CHW: np.ndarray) -> None:
        """Write one lead time of one member; the last one of a file is flushed to the disk and gives it its name."""
        if initial_minutes not in self._open_files:
            self._open(initial_minutes)
        files = self._open_files[initial_minutes]
        file = next(file for file in files if file.contains(number, member))
        try:
            file.put(initial_minutes, member, number, fields_CHW)
        except (OSError, RuntimeError) as error:  # netCDF4 reports a full disk as RuntimeError("NetCDF: HDF error")
            self.discard(initial_minutes)
            raise _failure(file.path, error) from error
        except BaseException:
            self.discard(initial_minutes)
            raise
        if not any(file.missing for file in files):
            del self._open_files[initial_minutes]

    def _open(self, initial_minutes: int) -> None:
        """Remove files that the forecast replaces, and prepare its own."""
        attributes = {**self._attributes, HISTORY: MADE_BY}
        if self._started_from is not None:
            attributes[INITIAL_FIELDS] = self._started_from(initial_minutes)
        parts = plan_files(self._layout, initial_minutes, self._split)
        stale = self._other_files(initial_minutes, parts)
        # Files of an older forecast are removed first, because a killed run would leave a mixture of two forecasts.
        # A single file is replaced in one rename. Files with the right content may be of another run that writes the
        # same forecast at the same time; they stay.
        if len(parts) > 1:
            for name, part in parts.items():
                path = self._folder / name
                if not self._file_matches(path, initial_minutes, part):
                    stale.append(path)
        for path in stale:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise _failure(path, error) from error
        self._open_files[initial_minutes] = [
            _ForecastFile(self._folder / name, self._layout, part, attributes) for name, part in parts.items()
        ]

    def discard(self, initial_minutes: int) -> None:
        """Remove the files of an incomplete forecast."""
        for file in self._open_files.pop(initial_minutes, ()):
            file.discard()

    def close(self) -> None:
        """Remove the files of all incomplete forecasts."""
        for initial_minutes in list(self._open_files):
            self.discard(initial_minutes)

    def path_of(self, initial_minutes: int) -> Path:
        """Return the file of a forecast, the first one if there are several."""
        return self._folder / next(iter(plan_files(self._layout, initial_minutes, self._split)))


class _ForecastFile:
    """One file of a forecast, written under a temporary name until it is complete.

    Attributes:
        path: final path.
        missing: index of the lead time and member of the fields that are still to be written.
    """

    def __init__(self, path: Path, layout: ForecastSchema, part: FilePart, attributes: dict[str, str | int]) -> None:
        self.path = path
        self._part = part
        self._attributes = attributes
        self._layout = _layout_of(layout, part)
        members = range(layout.members or 1) if part.member is None else [part.member]
        self._content = frozenset(itertools.product(part.numbers, members))
        self.missing = set(self._content)
        # The name is unique, because another run may write the same forecast into this folder.
        self._temporary_path = temporary_path(path)
        # Identity of the complete file, if it did not replace an older one.
        self._added: tuple[int, int] | None = None
        self._dataset: netCDF4.Dataset | None = None

    def contains(self, number: int, member: int) -> bool:
        """Return whether a lead time of a member belongs to this file."""
        return (number, member) in self._content

    def put(self, initial_minutes: int, member: int, number: int, fields_CHW: np.ndarray) -> None:
        """Write one lead time of one member; see `NetcdfForecastWriter.put`."""
        layout = self._layout
        if self._dataset is None:
            self._dataset = netCDF4.Dataset(self._temporary_path, "w", format="NETCDF4")
            # A complete file has all values, so filling it with missing values first would write it twice.
            self._dataset.set_fill_off()
            self._dataset.setncatts(self._attributes)
            _define_coordinates(self._dataset, layout, initial_minutes, self._part)
            for variable in layout.variables:
                _define_variable(self._dataset, layout, variable, self._part)
        row = self._part.numbers.index(number)
        position = row if layout.members is None else (row, member)
        for variable in layout.variables:
            values = layout.select(variable, fields_CHW)
            is_missing = np.isnan(values)
            if is_missing.any():
                values = np.where(is_missing, _MISSING, values)
            self._dataset[variable.name][position] = values
        self.missing.discard((number, member))
        if self.missing:
            start_writeback(self._temporary_path)
            # Compressed fields may stay in memory. The time of the file shows other runs that it is still in use.
            with suppress(OSError):
                os.utime(self._temporary_path)
        else:
            self._dataset.close()
            with open(self._temporary_path, "rb") as handle:
                os.fsync(handle.fileno())
                identity = _file_identity(os.fstat(handle.fileno()))
            is_new = not self.path.exists()
            os.replace(self._temporary_path, self.path)
            self._added = identity if is_new else None

    def discard(self) -> None:
        """Remove the file, even if it is complete, because its forecast is not.

        A file that another run has written stays, because that run relies on it.
        """
        if self._dataset is not None and self._dataset.isopen():
            with suppress(OSError, RuntimeError):  # A full disk fails here a second time.
                self._dataset.close()
        with suppress(OSError):  # A read-only file system refuses this even if there is no file.
            self._temporary_path.unlink(missing_ok=True)
        with suppress(OSError):
            if self._added is not None and _file_identity(self.path.stat()) == self._added:
                self.path.unlink()


def _file_identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def _failure(path: Path, error: Exception) -> CreditError:
    reason = getattr(error, "strerror", None) or error
    return CreditError(f"{path}: cannot be written ({reason}); {WRITE_HINT}")


def _layout_of(layout: ForecastSchema, part: FilePart) -> ForecastSchema:
    """Return the layout of one file; a file of one member has no member dimension."""
    return layout if part.member is None else replace(layout, members=None)


def _define_coordinates(dataset: netCDF4.Dataset, layout: ForecastSchema, initial_minutes: int, part: FilePart) -> None:
    valid_minutes = initial_minutes + layout.lead_minutes[part.numbers]
    dataset.createDimension("time", len(valid_minutes))
    dataset.createDimension("bnds", 2)
    time = layout.time_attributes()
    windows = {name: window for window, name in layout.time_names("time").items()}
    for name in dict.fromkeys(("time", *windows)):
        attributes = {**VALID_TIME, **time}
        if name in windows:
            attributes["bounds"] = f"{name}_bnds"
        if name == "time":
            attributes["axis"] = "T"
        _put(dataset, name, "f8", ("time",), valid_minutes, attributes)
        if name in windows:
            bounds = window_bounds(windows[name], initial_minutes, valid_minutes)
            _put(dataset, f"{name}_bnds", "f8", ("time", "bnds"), bounds, {})
    _put(dataset, "forecast_reference_time", "f8", (), initial_minutes, {**INITIAL_TIME, **time})
    _put(dataset, "forecast_period", "f8", ("time",), layout.lead_hours[part.numbers], {**LEAD_TIME, "units": HOURS})
    if layout.members is not None:
        dataset.createDimension(MEMBER, layout.members)
        _put(dataset, MEMBER, "i4", (MEMBER,), np.arange(layout.members), REALIZATION)
    if part.member is not None:
        _put(dataset, MEMBER, "i4", (), part.member, REALIZATION)
    for dim, values in layout.levels.items():
        dataset.createDimension(dim, len(values))
        _put(dataset, dim, "f8", (dim,), values, layout.level_attributes(dim))
    lat_edges = layout.grid.lat_bounds
    lat_bounds = np.stack([lat_edges[:-1], lat_edges[1:]], axis=1)
    dataset.createDimension("latitude", layout.grid.shape[0])
    dataset.createDimension("longitude", layout.grid.shape[1])
    _put(dataset, "latitude", "f8", ("latitude",), layout.grid.lat, {**LATITUDE, "bounds": "latitude_bnds"})
    _put(dataset, "latitude_bnds", "f8", ("latitude", "bnds"), lat_bounds, {})
    _put(dataset, "longitude", "f8", ("longitude",), layout.grid.lon, LONGITUDE)


def _put(
    dataset: netCDF4.Dataset, name: str, kind: str, dims: tuple[str, ...], values: object, attributes: dict[str, str]
) -> None:
    variable = dataset.createVariable(name, kind, dims)
    variable.setncatts(attributes)
    variable[...] = values


def _define_variable(
    dataset: netCDF4.Dataset, layout: ForecastSchema, variable: OutputVariable, part: FilePart
) -> None:
    dims = layout.dims(variable, "time")
    # A chunk is one field.
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
    target.setncatts(_attributes_of(layout, variable, part))


def _attributes_of(layout: ForecastSchema, variable: OutputVariable, part: FilePart) -> dict[str, str | int]:
    coordinates = ["forecast_period", "forecast_reference_time"]
    time_name = layout.time_names("time").get(variable.window, "time")
    if time_name != "time":
        coordinates.append(time_name)
    if part.member is not None:
        coordinates.append(MEMBER)
    attributes = {**variable.attributes, "coordinates": " ".join(coordinates)}
    if layout.keep_bits is not None:
        attributes[QUANTIZED] = layout.keep_bits
    return attributes


def _is_as_defined(dataset: netCDF4.Dataset, layout: ForecastSchema, variable: OutputVariable, part: FilePart) -> bool:
    """Return whether a stored variable is what `_define_variable` makes."""
    stored = dataset[variable.name]
    dim = variable.level_dim
    attributes = {name: stored.getncattr(name) for name in stored.ncattrs() if name != "_FillValue"}
    return (
        stored.dimensions == layout.dims(variable, "time")
        and stored.shape[1:] == layout.shape(variable)
        and (dim is None or np.array_equal(dataset[dim][:], layout.levels[dim]))
        and attributes == _attributes_of(layout, variable, part)
        and stored.filters()["complevel"] == layout.compression
    )
