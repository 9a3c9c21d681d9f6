"""Coordinates and variables of a netCDF file of forecasts.

Shape suffixes: H latitude rows, W longitude columns. The argument `part` of all functions says which lead times and
members are in the file.
"""

from __future__ import annotations

from dataclasses import replace

import netCDF4
import numpy as np

from credit.forecast.io.netcdf_names import FilePart
from credit.forecast.io.schema import (
    HOURS,
    INITIAL_TIME,
    LATITUDE,
    LEAD_TIME,
    LONGITUDE,
    MEMBER,
    QUANTIZED,
    REALIZATION,
    VALID_TIME,
    ForecastSchema,
    OutputVariable,
    window_bounds,
)

# Value of missing cells on disk.
MISSING_VALUE = np.float32(netCDF4.default_fillvals["f4"])


def schema_of_file(schema: ForecastSchema, part: FilePart) -> ForecastSchema:
    """Return the schema of one file, which has no member dimension if the file is of one member."""
    if part.member is None:
        return schema
    return replace(schema, members=None)


def define_coordinates(dataset: netCDF4.Dataset, schema: ForecastSchema, initial_minutes: int, part: FilePart) -> None:
    """Create all dimensions and coordinates of a file, with bounds, and write their values.

    Args:
        dataset: file that is open for writing.
        schema: content of the file.
        initial_minutes: initial time in minutes.
        part: lead times and member that are in the file.
    """
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
    """Create a coordinate or bounds variable with the netCDF type `dtype`, and write its values."""
    variable = dataset.createVariable(name, dtype, dims)
    variable.setncatts(attributes)
    variable[...] = values


def define_variable(dataset: netCDF4.Dataset, schema: ForecastSchema, variable: OutputVariable, part: FilePart) -> None:
    """Create the netCDF variable of a field, without values."""
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
    netcdf_variable.setncatts(_variable_attributes(schema, variable, part))


def _variable_attributes(schema: ForecastSchema, variable: OutputVariable, part: FilePart) -> dict[str, str | int]:
    """Return the netCDF attributes of the variable of a field."""
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


def is_as_defined(dataset: netCDF4.Dataset, schema: ForecastSchema, variable: OutputVariable, part: FilePart) -> bool:
    """Return True if a stored variable has the type, dimensions and attributes that `define_variable` would give it."""
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
