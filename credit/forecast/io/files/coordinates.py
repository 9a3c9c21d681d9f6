"""Coordinates and attributes of a forecast file, which are the same in netCDF and GRIB2 files.

In all functions, the argument `part` gives the lead times and members in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from credit.forecast.io.files.names import FilePart
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
    build_window_bounds,
)


@dataclass(frozen=True)
class Coordinate:
    """Coordinate of a forecast file, or the bounds of a coordinate.

    Attributes:
        dims: names of the dimensions.
        values: values, an array with the dimensions `dims`, float64 or int32.
        attributes: CF attributes.
    """

    dims: tuple[str, ...]
    values: np.ndarray
    attributes: Mapping[str, str]


def build_file_schema(schema: ForecastSchema, part: FilePart) -> ForecastSchema:
    """Return the schema of one forecast file; it has no member dimension if the file contains a single member."""
    if part.member is None:
        return schema
    return replace(schema, members=None)


def build_coordinates(schema: ForecastSchema, initial_minutes: int, part: FilePart) -> dict[str, Coordinate]:
    """Return all coordinates and bounds of a forecast file by name, in the order of the file.

    Args:
        schema: content of the file.
        initial_minutes: initial time in minutes.
        part: lead times and member that are in the file.
    """
    coordinates: dict[str, Coordinate] = {}

    def add(name: str, dims: tuple[str, ...], values: object, attributes: Mapping[str, str], dtype: str = "f8") -> None:
        coordinates[name] = Coordinate(dims, np.asarray(values, dtype=dtype), attributes)

    # Valid times. Means or sums over different windows need time coordinates with different bounds.
    valid_minutes = initial_minutes + schema.lead_minutes[part.lead_indices]
    time_attributes = schema.time_attributes()
    windows = {name: window for window, name in schema.time_names_by_window("time").items()}
    for name in dict.fromkeys(("time", *windows)):
        attributes = {**VALID_TIME, **time_attributes}
        if name in windows:
            attributes["bounds"] = f"{name}_bnds"
        if name == "time":
            attributes["axis"] = "T"
        add(name, ("time",), valid_minutes, attributes)
        if name in windows:
            add(
                f"{name}_bnds", ("time", "bnds"), build_window_bounds(windows[name], initial_minutes, valid_minutes), {}
            )

    # Initial time and lead times.
    add("forecast_reference_time", (), initial_minutes, {**INITIAL_TIME, **time_attributes})
    add("forecast_period", ("time",), schema.lead_hours[part.lead_indices], {**LEAD_TIME, "units": HOURS})

    # Members and levels.
    if schema.members is not None:
        add(MEMBER, (MEMBER,), np.arange(schema.members), REALIZATION, "i4")
    if part.member is not None:
        add(MEMBER, (), part.member, REALIZATION, "i4")
    for dim, values in schema.levels.items():
        add(dim, (dim,), values, schema.level_attributes(dim))

    # Grid.
    lat_edges = schema.grid.lat_bounds
    lat_bounds = np.stack([lat_edges[:-1], lat_edges[1:]], axis=1)
    add("latitude", ("latitude",), schema.grid.lat, {**LATITUDE, "bounds": "latitude_bnds"})
    add("latitude_bnds", ("latitude", "bnds"), lat_bounds, {})
    add("longitude", ("longitude",), schema.grid.lon, LONGITUDE)
    return coordinates


def build_field_attributes(schema: ForecastSchema, variable: OutputVariable, part: FilePart) -> dict[str, str | int]:
    """Return the CF attributes of a variable of a forecast file."""
    # The CF attribute `coordinates` lists coordinates that are not dimensions.
    coordinates = ["forecast_period", "forecast_reference_time"]
    time_name = schema.time_names_by_window("time").get(variable.window, "time")
    if time_name != "time":
        coordinates.append(time_name)
    if part.member is not None:
        coordinates.append(MEMBER)
    attributes = {**variable.attributes, "coordinates": " ".join(coordinates)}
    if schema.keep_bits is not None:
        attributes[QUANTIZED] = schema.keep_bits
    return attributes
