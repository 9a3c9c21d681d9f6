"""Forecasts as CF netCDF: one file an initial time, or one for each of its days, months, lead times or members.

Shape suffixes: C output channels, H rows, W columns.
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
from credit.forecast.io.netcdf_names import PREFIX, FilePart, build_file_name, plan_files
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
    window_bounds,
    with_stored_level_dims,
)
from credit.utils.temporary import find_stale, process_exists, temporary_path

# Global attribute with the lead times of the complete forecast, in each of its files.
LEADS = "lead_minutes"
# Global attribute with the number of members, in files of one member each.
MEMBERS = "members"
# A temporary file of another host is stale after this time without writing. A model may need hours for a lead time.
_STALE_SECONDS = 86400.0
_MISSING = np.float32(netCDF4.default_fillvals["f4"])


class NetcdfForecastWriter:
    """Writer of forecasts as CF netCDF files; see `credit.forecast.io.forecast_writer.ForecastWriter`.

    Args:
        folder: existing folder of the files; stale temporary files in it are removed.
        schema: content of each forecast.
        split: ``day``, ``month``, ``lead`` or ``member``; None for one file an initial time.
        initial_state_checksum: function initial time in minutes -> checksum of the fields that the forecast starts
            from; None to write no checksums.
    """

    def __init__(
        self,
        folder: Path,
        schema: ForecastSchema,
        split: str | None = None,
        initial_state_checksum: Callable[[int], str] | None = None,
    ) -> None:
        self._folder = folder
        self._schema = schema
        self._split = split
        # Computing a checksum reads fields, so each one is computed once.
        self._initial_state_checksum = None
        if initial_state_checksum is not None:
            self._initial_state_checksum = functools.cache(initial_state_checksum)
        # Initial time -> files of an incomplete forecast.
        self._open_files: dict[int, list[_ForecastFile]] = {}
        leads_text = ", ".join(str(lead) for lead in schema.lead_minutes.tolist())
        self._attributes = {**schema.global_attributes, LEADS: leads_text}
        if split == "member":
            assert schema.members is not None, "the config requires an ensemble for this split"
            self._attributes[MEMBERS] = schema.members
        for path in find_stale(folder, f"{PREFIX}*.nc", process_exists, _STALE_SECONDS):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def is_complete(self, initial_minutes: int) -> bool:
        """Return whether all files of a forecast exist with the content that would be written.

        A file has its final name only if it is complete. A file of other lead times makes the forecast incomplete, as
        it would be read as a part of it.

        Args:
            initial_minutes: initial time in minutes.
        """
        parts = plan_files(self._schema, initial_minutes, self._split)
        if self._other_files(initial_minutes, parts):
            return False
        return all(self._file_matches(self._folder / name, initial_minutes, part) for name, part in parts.items())

    def _other_files(self, initial_minutes: int, names: Collection[str]) -> list[Path]:
        """Return the files of the same initial time that are not among `names`; another split has written them."""
        stem = build_file_name(self._schema, initial_minutes).removesuffix(".nc")
        return [path for path in self._folder.glob(f"{stem}_*.nc") if path.name not in names]

    def _file_matches(self, path: Path, initial_minutes: int, part: FilePart) -> bool:
        """Return whether a file exists with the content that would be written; False if it cannot be read."""
        if not path.exists():
            return False
        try:
            with netCDF4.Dataset(path) as dataset:
                return self._dataset_matches(dataset, initial_minutes, part)
        except (OSError, RuntimeError):
            return False

    def _dataset_matches(self, dataset: netCDF4.Dataset, initial_minutes: int, part: FilePart) -> bool:
        """Return whether variables, global attributes, lead times, member and checksum are as they would be written."""
        stored_dims = {name: variable.dimensions for name, variable in dataset.variables.items()}
        schema = with_stored_level_dims(_schema_of_file(self._schema, part), stored_dims)
        stored_fields = {name for name, dims in stored_dims.items() if dims[-1:] == ("longitude",)}
        stored_fields.discard("longitude")
        if stored_fields != {variable.name for variable in schema.variables}:
            return False
        if "forecast_period" not in dataset.variables:
            return False
        attributes = {name: dataset.getncattr(name) for name in dataset.ncattrs()}
        checksum = attributes.pop(INITIAL_FIELDS, None)
        if run_attributes(attributes) != run_attributes(self._attributes):
            return False
        if not np.array_equal(dataset["forecast_period"][:], schema.lead_hours[part.lead_indices]):
            return False
        if part.member is not None and (MEMBER not in dataset.variables or dataset[MEMBER][...] != part.member):
            return False
        if not all(_is_as_defined(dataset, schema, variable, part) for variable in schema.variables):
            return False
        # The checksum comes last, because it reads the fields that the forecast starts from.
        return self._initial_state_checksum is None or checksum == self._initial_state_checksum(initial_minutes)

    def put(self, initial_minutes: int, member: int, lead_index: int, fields_CHW: np.ndarray) -> None:
        """Write one lead time of one member.

        The last fields of a file complete it: it is flushed to the disk and gets its final name.

        Args:
            initial_minutes: initial time in minutes.
            member: number of the member, 0 for a single forecast.
            lead_index: index of the lead time in the schema.
            fields_CHW: float32 in physical units, NaN where missing.

        Raises:
            CreditError: naming the file, if it cannot be written; the incomplete forecast is removed.
        """
        if initial_minutes not in self._open_files:
            self._begin_forecast(initial_minutes)
        files = self._open_files[initial_minutes]
        file = next(file for file in files if file.contains(lead_index, member))
        try:
            file.put(initial_minutes, member, lead_index, fields_CHW)
        except (OSError, RuntimeError) as error:  # netCDF4 reports a full disk as RuntimeError("NetCDF: HDF error")
            self.discard(initial_minutes)
            raise _build_write_error(file.path, error) from error
        except BaseException:
            self.discard(initial_minutes)
            raise
        if not any(file.missing for file in files):
            del self._open_files[initial_minutes]

    def _begin_forecast(self, initial_minutes: int) -> None:
        """Remove files that the forecast replaces, and prepare its own files."""
        attributes = {**self._attributes, HISTORY: MADE_BY}
        if self._initial_state_checksum is not None:
            attributes[INITIAL_FIELDS] = self._initial_state_checksum(initial_minutes)
        parts = plan_files(self._schema, initial_minutes, self._split)
        replaced_paths = self._other_files(initial_minutes, parts)
        # Files of an older forecast are removed first, because a killed run would leave a mixture of two forecasts.
        # A single file is replaced in one rename. Files with the right content may be of another run that writes the
        # same forecast at the same time; they stay.
        if len(parts) > 1:
            for name, part in parts.items():
                path = self._folder / name
                if not self._file_matches(path, initial_minutes, part):
                    replaced_paths.append(path)
        for path in replaced_paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise _build_write_error(path, error) from error
        files = []
        for name, part in parts.items():
            files.append(_ForecastFile(self._folder / name, self._schema, part, attributes))
        self._open_files[initial_minutes] = files

    def discard(self, initial_minutes: int) -> None:
        """Remove the files of an incomplete forecast."""
        for file in self._open_files.pop(initial_minutes, ()):
            file.discard()

    def close(self) -> None:
        """Remove the files of all incomplete forecasts."""
        for initial_minutes in list(self._open_files):
            self.discard(initial_minutes)

    def find_path(self, initial_minutes: int) -> Path:
        """Return the file of a forecast, the first one if there are several."""
        return self._folder / next(iter(plan_files(self._schema, initial_minutes, self._split)))


class _ForecastFile:
    """One file of a forecast, written under a temporary name until it is complete.

    Args:
        path: final path.
        schema: content of the forecast.
        part: part of the forecast in this file.
        attributes: global attributes.

    Attributes:
        path: final path.
        missing: (index of the lead time, member) of the fields that are still to be written.
    """

    def __init__(self, path: Path, schema: ForecastSchema, part: FilePart, attributes: dict[str, str | int]) -> None:
        self.path = path
        self._part = part
        self._attributes = attributes
        self._schema = _schema_of_file(schema, part)
        members = range(schema.members or 1)
        if part.member is not None:
            members = [part.member]
        self._content = frozenset(itertools.product(part.lead_indices, members))
        self.missing = set(self._content)
        # The name is unique, because another run may write the same forecast into this folder.
        self._temporary_path = temporary_path(path)
        # Inode and modification time of the complete file, if it did not replace an older one.
        self._new_file_identity: tuple[int, int] | None = None
        self._dataset: netCDF4.Dataset | None = None

    def contains(self, lead_index: int, member: int) -> bool:
        """Return whether a lead time of a member belongs to this file."""
        return (lead_index, member) in self._content

    def put(self, initial_minutes: int, member: int, lead_index: int, fields_CHW: np.ndarray) -> None:
        """Write one lead time of one member; see `NetcdfForecastWriter.put`."""
        if self._dataset is None:
            self._create(initial_minutes)
        schema = self._schema
        row = self._part.lead_indices.index(lead_index)
        position = (row,) if schema.members is None else (row, member)
        for variable in schema.variables:
            values = schema.select(variable, fields_CHW)
            is_missing = np.isnan(values)
            if is_missing.any():
                values = np.where(is_missing, _MISSING, values)
            self._dataset[variable.name][position] = values
        self.missing.discard((lead_index, member))
        if not self.missing:
            self._complete()
            return
        start_writeback(self._temporary_path)
        # Compressed fields may stay in memory. The time of the file shows other runs that it is still in use.
        with suppress(OSError):
            os.utime(self._temporary_path)

    def _create(self, initial_minutes: int) -> None:
        """Create the file under its temporary name, with coordinates and without fields."""
        self._dataset = netCDF4.Dataset(self._temporary_path, "w", format="NETCDF4")
        # A complete file has all values, so filling it with missing values first would write it twice.
        self._dataset.set_fill_off()
        self._dataset.setncatts(self._attributes)
        _define_coordinates(self._dataset, self._schema, initial_minutes, self._part)
        for variable in self._schema.variables:
            _define_variable(self._dataset, self._schema, variable, self._part)

    def _complete(self) -> None:
        """Flush the file to the disk and give it its final name."""
        self._dataset.close()
        with open(self._temporary_path, "rb") as handle:
            os.fsync(handle.fileno())
            identity = _file_identity(os.fstat(handle.fileno()))
        is_new = not self.path.exists()
        os.replace(self._temporary_path, self.path)
        self._new_file_identity = identity if is_new else None

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
            if self._new_file_identity is not None and _file_identity(self.path.stat()) == self._new_file_identity:
                self.path.unlink()


def _file_identity(status: os.stat_result) -> tuple[int, int]:
    """Return inode and modification time, by which a file is told from another one of the same name."""
    return status.st_ino, status.st_mtime_ns


def _build_write_error(path: Path, error: Exception) -> CreditError:
    """Return the error of this package for an error of the system or the netCDF library."""
    reason = getattr(error, "strerror", None) or error
    return CreditError(f"{path}: cannot be written ({reason}); {WRITE_HINT}")


def _schema_of_file(schema: ForecastSchema, part: FilePart) -> ForecastSchema:
    """Return the schema of one file; a file of one member has no member dimension."""
    if part.member is None:
        return schema
    return replace(schema, members=None)


def _define_coordinates(dataset: netCDF4.Dataset, schema: ForecastSchema, initial_minutes: int, part: FilePart) -> None:
    """Write the coordinates of times, members, levels and the grid, with their bounds."""
    # Valid times. Variables that are means or sums over different windows have coordinates with different bounds.
    valid_minutes = initial_minutes + schema.lead_minutes[part.lead_indices]
    dataset.createDimension("time", len(valid_minutes))
    dataset.createDimension("bnds", 2)
    time_attributes = schema.time_attributes()
    windows = {name: window for window, name in schema.time_names("time").items()}
    for name in dict.fromkeys(("time", *windows)):
        attributes = {**VALID_TIME, **time_attributes}
        if name in windows:
            attributes["bounds"] = f"{name}_bnds"
        if name == "time":
            attributes["axis"] = "T"
        _write_coordinate(dataset, name, "f8", ("time",), valid_minutes, attributes)
        if name in windows:
            bounds = window_bounds(windows[name], initial_minutes, valid_minutes)
            _write_coordinate(dataset, f"{name}_bnds", "f8", ("time", "bnds"), bounds, {})

    # Initial time and lead times.
    _write_coordinate(
        dataset, "forecast_reference_time", "f8", (), initial_minutes, {**INITIAL_TIME, **time_attributes}
    )
    _write_coordinate(
        dataset, "forecast_period", "f8", ("time",), schema.lead_hours[part.lead_indices], {**LEAD_TIME, "units": HOURS}
    )

    # Members and levels.
    if schema.members is not None:
        dataset.createDimension(MEMBER, schema.members)
        _write_coordinate(dataset, MEMBER, "i4", (MEMBER,), np.arange(schema.members), REALIZATION)
    if part.member is not None:
        _write_coordinate(dataset, MEMBER, "i4", (), part.member, REALIZATION)
    for dim, values in schema.levels.items():
        dataset.createDimension(dim, len(values))
        _write_coordinate(dataset, dim, "f8", (dim,), values, schema.level_attributes(dim))

    # Grid.
    lat_edges = schema.grid.lat_bounds
    lat_bounds = np.stack([lat_edges[:-1], lat_edges[1:]], axis=1)
    dataset.createDimension("latitude", schema.grid.shape[0])
    dataset.createDimension("longitude", schema.grid.shape[1])
    _write_coordinate(
        dataset, "latitude", "f8", ("latitude",), schema.grid.lat, {**LATITUDE, "bounds": "latitude_bnds"}
    )
    _write_coordinate(dataset, "latitude_bnds", "f8", ("latitude", "bnds"), lat_bounds, {})
    _write_coordinate(dataset, "longitude", "f8", ("longitude",), schema.grid.lon, LONGITUDE)


def _write_coordinate(
    dataset: netCDF4.Dataset, name: str, dtype: str, dims: tuple[str, ...], values: object, attributes: dict[str, str]
) -> None:
    """Create a variable that is not a field, and write its values."""
    variable = dataset.createVariable(name, dtype, dims)
    variable.setncatts(attributes)
    variable[...] = values


def _define_variable(
    dataset: netCDF4.Dataset, schema: ForecastSchema, variable: OutputVariable, part: FilePart
) -> None:
    """Create the variable of a field, without values."""
    dims = schema.dims(variable, "time")
    # A chunk is one field (H, W).
    num_leading = len(dims) - 2
    chunks = (*(1,) * num_leading, *schema.grid.shape)
    netcdf_variable = dataset.createVariable(
        variable.name,
        "f4",
        dims,
        fill_value=_MISSING,
        chunksizes=chunks if schema.compression else None,
        compression="zlib" if schema.compression else None,
        complevel=schema.compression,
        shuffle=True,
    )
    netcdf_variable.setncatts(_variable_attributes(schema, variable, part))


def _variable_attributes(schema: ForecastSchema, variable: OutputVariable, part: FilePart) -> dict[str, str | int]:
    """Return the attributes of a variable in a file."""
    # CF lists the coordinates that are not dimensions.
    coordinates = ["forecast_period", "forecast_reference_time"]
    time_name = schema.time_names("time").get(variable.window, "time")
    if time_name != "time":
        coordinates.append(time_name)
    if part.member is not None:
        coordinates.append(MEMBER)
    attributes = {**variable.attributes, "coordinates": " ".join(coordinates)}
    if schema.keep_bits is not None:
        attributes[QUANTIZED] = schema.keep_bits
    return attributes


def _is_as_defined(dataset: netCDF4.Dataset, schema: ForecastSchema, variable: OutputVariable, part: FilePart) -> bool:
    """Return whether a stored variable is what `_define_variable` makes."""
    stored = dataset[variable.name]
    dim = variable.level_dim
    attributes = {name: stored.getncattr(name) for name in stored.ncattrs()}
    attributes.pop("_FillValue", None)
    return (
        stored.dimensions == schema.dims(variable, "time")
        and stored.shape[1:] == schema.shape(variable)
        and (dim is None or np.array_equal(dataset[dim][:], schema.levels[dim]))
        and attributes == _variable_attributes(schema, variable, part)
        and stored.filters()["complevel"] == schema.compression
    )
