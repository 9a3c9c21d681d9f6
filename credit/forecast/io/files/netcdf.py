"""netCDF files of forecasts with CF metadata.

Shape suffixes: C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import netCDF4
import numpy as np

from credit.forecast.io.files.base import FileFormat, OpenFile, flush_and_rename
from credit.forecast.io.files.coordinates import build_coordinates, build_field_attributes, build_file_schema
from credit.forecast.io.files.names import EXTENSIONS, FilePart
from credit.forecast.io.schema import MEMBER, ForecastSchema, OutputVariable, use_stored_level_dims

# Value of missing cells on disk.
MISSING_VALUE = np.float32(netCDF4.default_fillvals["f4"])


class NetcdfFormat(FileFormat):
    """Format of forecast files: netCDF-4 with CF metadata.

    Args:
        schema: content of each forecast.
    """

    extension = EXTENSIONS["netcdf"]

    def __init__(self, schema: ForecastSchema) -> None:
        self._schema = schema

    def create(self, path: Path, initial_minutes: int, part: FilePart, attributes: Mapping[str, str | int]) -> OpenFile:
        """Create a netCDF file that contains coordinates but no fields yet; see `FileFormat.create`."""
        return _NetcdfFile(path, self._schema, initial_minutes, part, attributes)

    def read_matching_attributes(self, path: Path, initial_minutes: int, part: FilePart) -> dict[str, object] | None:
        """Return the global attributes of a netCDF file if it contains the variables that would be written; else None.

        See `FileFormat.read_matching_attributes` for the arguments.
        """
        try:
            with netCDF4.Dataset(path) as dataset:
                if self._has_expected_content(dataset, part):
                    return {name: dataset.getncattr(name) for name in dataset.ncattrs()}
        except (OSError, RuntimeError):
            pass
        return None

    def _has_expected_content(self, dataset: netCDF4.Dataset, part: FilePart) -> bool:
        """Return True if a netCDF file contains the variables, lead times and member that would be written."""
        stored_dims = {name: variable.dimensions for name, variable in dataset.variables.items()}
        schema = use_stored_level_dims(build_file_schema(self._schema, part), stored_dims)
        stored_fields = {name for name, dims in stored_dims.items() if dims[-1:] == ("longitude",)}
        stored_fields.discard("longitude")
        if stored_fields != {variable.name for variable in schema.variables}:
            return False
        if "forecast_period" not in dataset.variables:
            return False
        if not np.array_equal(dataset["forecast_period"][:], schema.lead_hours[part.lead_indices]):
            return False
        if part.member is not None and (MEMBER not in dataset.variables or dataset[MEMBER][...] != part.member):
            return False
        return all(_has_same_definition(dataset, schema, variable, part) for variable in schema.variables)


class _NetcdfFile(OpenFile):
    """NetCDF file that is being written; see `NetcdfFormat.create` for the arguments."""

    def __init__(
        self,
        path: Path,
        schema: ForecastSchema,
        initial_minutes: int,
        part: FilePart,
        attributes: Mapping[str, str | int],
    ) -> None:
        self._path = path
        self._schema = build_file_schema(schema, part)
        self._part = part
        self._dataset = netCDF4.Dataset(path, "w", format="NETCDF4")
        try:
            # All values will be written, so do not fill the file with missing values first.
            self._dataset.set_fill_off()
            self._dataset.setncatts(attributes)
            define_coordinates(self._dataset, self._schema, initial_minutes, part)
            for variable in self._schema.variables:
                define_variable(self._dataset, self._schema, variable, part)
        except BaseException:
            self.discard()
            raise

    def put(self, lead_index: int, member: int, fields_CHW: np.ndarray) -> None:
        """Write one lead time of one member; see `OpenFile.put`."""
        row = self._part.lead_indices.index(lead_index)
        position = (row,) if self._schema.members is None else (row, member)
        for variable in self._schema.variables:
            values = self._schema.select(variable, fields_CHW)
            is_missing = np.isnan(values)
            if is_missing.any():
                values = np.where(is_missing, MISSING_VALUE, values)
            self._dataset[variable.name][position] = values

    def close(self) -> None:
        """Close the netCDF file, if it is open."""
        if self._dataset.isopen():
            self._dataset.close()

    def publish(self, path: Path) -> None:
        """Rename the complete, closed file to its final name."""
        flush_and_rename(self._path, path)

    def discard(self) -> None:
        """Close and remove the incomplete file."""
        with suppress(OSError, RuntimeError):  # On a full disk, closing raises the error a second time.
            self.close()
        with suppress(OSError):  # A read-only file system raises an error even if there is no file.
            self._path.unlink(missing_ok=True)


def define_coordinates(dataset: netCDF4.Dataset, schema: ForecastSchema, initial_minutes: int, part: FilePart) -> None:
    """Create all dimensions and coordinates of a netCDF file, and write their values.

    Args:
        dataset: file that is open for writing.
        schema: content of the file.
        initial_minutes: initial time in minutes.
        part: lead times and member that are in the file.
    """
    for name, coordinate in build_coordinates(schema, initial_minutes, part).items():
        for dim, length in zip(coordinate.dims, coordinate.values.shape, strict=True):
            if dim not in dataset.dimensions:
                dataset.createDimension(dim, length)
        variable = dataset.createVariable(name, coordinate.values.dtype, coordinate.dims)
        variable.setncatts(coordinate.attributes)
        variable[...] = coordinate.values


def define_variable(dataset: netCDF4.Dataset, schema: ForecastSchema, variable: OutputVariable, part: FilePart) -> None:
    """Create a netCDF variable for the fields of an output variable, without values.

    Args:
        dataset: file that is open for writing, with all dimensions.
        schema: content of the file.
        variable: variable to create.
        part: lead times and member that are in the file.
    """
    dims = schema.dims(variable, "time")
    # A chunk is one field (H, W).
    num_leading = len(dims) - 2
    chunks = (*(1,) * num_leading, *schema.grid.shape)
    netcdf_variable = dataset.createVariable(
        variable.name,
        "f4",
        dims,
        fill_value=MISSING_VALUE,
        chunksizes=chunks if schema.compression else None,
        compression="zlib" if schema.compression else None,
        complevel=schema.compression,
        shuffle=True,
    )
    netcdf_variable.setncatts(build_field_attributes(schema, variable, part))


def _has_same_definition(
    dataset: netCDF4.Dataset, schema: ForecastSchema, variable: OutputVariable, part: FilePart
) -> bool:
    """Return True if a stored variable has the dimensions and attributes that `define_variable` would write."""
    stored = dataset[variable.name]
    dim = variable.level_dim
    attributes = {name: stored.getncattr(name) for name in stored.ncattrs()}
    attributes.pop("_FillValue", None)
    return (
        stored.dimensions == schema.dims(variable, "time")
        and stored.shape[1:] == schema.shape(variable)
        and (dim is None or np.array_equal(dataset[dim][:], schema.levels[dim]))
        and attributes == build_field_attributes(schema, variable, part)
        and stored.filters()["complevel"] == schema.compression
    )
