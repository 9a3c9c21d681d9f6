"""Arrays of a zarr store of forecasts, with their dimensions and attributes.

Shapes: I initial times, N lead times.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zarr

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
    ForecastSchema,
    OutputVariable,
    window_bounds,
)

WRITTEN = "written"
# Length of the chunks of coordinates. It does not depend on the number of initial times, so a store that has grown is
# identical to one that was written at once. Marks have a chunk each, because processes write them one by one.
_CHUNK_LENGTH = 1024


@dataclass(frozen=True)
class TimeNames:
    """Names of the time dimensions of a store.

    Attributes:
        init: dimension of initial times.
        lead: dimension of lead times.
        lead_attributes: units and type of the lead times.
    """

    init: str
    lead: str
    lead_attributes: dict[str, str]


# Values of inference.layout -> names.
TIME_NAMES = {
    "cf": TimeNames("init_time", "lead_time", {"units": HOURS}),
    # WeatherBench 2 needs a timedelta; xarray decodes hours to one if the attribute dtype says so.
    "weatherbench2": TimeNames("time", "prediction_timedelta", {"units": "hours", "dtype": "timedelta64[ns]"}),
}


def create_arrays(
    path: Path, layout: ForecastSchema, initial_minutes: np.ndarray, names: TimeNames, with_checksums: bool
) -> zarr.Group:
    """Create a store with coordinates and empty fields.

    Args:
        path: path of the store; an existing one is replaced.
        layout: layout of the forecasts.
        initial_minutes: initial times.
        names: names of the time dimensions.
        with_checksums: True to add an array for the checksums of the fields that forecasts start from.
    """
    init = names.init
    lead = names.lead
    group = zarr.open_group(path, mode="w", zarr_format=3)
    group.attrs.update({**layout.global_attributes, HISTORY: MADE_BY})
    time = layout.time_attributes()
    initial_I1 = initial_minutes[:, None]
    valid_IN = initial_I1 + layout.lead_minutes
    _put(group, init, (init,), initial_minutes, {**INITIAL_TIME, **time}, _CHUNK_LENGTH)
    _put(group, lead, (lead,), layout.lead_hours, {**LEAD_TIME, **names.lead_attributes})
    windows = {name: window for window, name in layout.time_names("valid_time").items()}
    for name in dict.fromkeys(("valid_time", *windows)):
        attributes = {**VALID_TIME, **time}
        if name in windows:
            attributes["bounds"] = f"{name}_bnds"
        _put(group, name, (init, lead), valid_IN, attributes, _CHUNK_LENGTH)
        if name in windows:
            bounds = window_bounds(windows[name], initial_I1, valid_IN)
            _put(group, f"{name}_bnds", (init, lead, "bnds"), bounds, {}, _CHUNK_LENGTH)
    if layout.members is not None:
        _put(group, MEMBER, (MEMBER,), np.arange(layout.members), REALIZATION)
    for dim, values in layout.levels.items():
        _put(group, dim, (dim,), np.array(values), layout.level_attributes(dim))
    _put(group, "latitude", ("latitude",), layout.grid.lat, LATITUDE)
    _put(group, "longitude", ("longitude",), layout.grid.lon, LONGITUDE)
    num_initial = len(initial_minutes)
    mark_attributes = {"long_name": "1 where the forecast of the initial time is whole", "units": "1"}
    _put(group, WRITTEN, (init,), np.zeros(num_initial, dtype=np.int8), mark_attributes, chunk_length=1)
    if with_checksums:
        checksum_attributes = {"long_name": "checksum of the fields that the forecast starts from", "units": "1"}
        checksums = np.zeros(num_initial, dtype=np.uint64)
        _put(group, INITIAL_FIELDS, (init,), checksums, checksum_attributes, chunk_length=1)
    for variable in layout.variables:
        _define_variable(group, layout, variable, num_initial, names)
    return group


def _define_variable(
    group: zarr.Group, layout: ForecastSchema, variable: OutputVariable, num_initial: int, names: TimeNames
) -> None:
    shape = (num_initial, len(layout.lead_minutes), *layout.shape(variable))
    # A chunk has one initial time, lead time and member.
    num_leading = 2 if layout.members is None else 3
    group.create_array(
        variable.name,
        shape=shape,
        chunks=(*(1,) * num_leading, *shape[num_leading:]),
        dtype="float32",
        fill_value=float("nan"),
        compressors=build_compressors(layout),
        dimension_names=layout.dims(variable, names.init, names.lead),
        attributes=variable_attributes(layout, variable),
    )


def build_compressors(layout: ForecastSchema) -> tuple[zarr.codecs.ZstdCodec, ...]:
    """Return the compressors of the fields."""
    if not layout.compression:
        return ()
    return (zarr.codecs.ZstdCodec(level=layout.compression),)


def variable_attributes(layout: ForecastSchema, variable: OutputVariable) -> dict[str, str | int]:
    """Return the attributes of the array of a variable."""
    attributes: dict[str, str | int] = dict(variable.attributes)
    if layout.keep_bits is not None:
        attributes[QUANTIZED] = layout.keep_bits
    attributes["coordinates"] = layout.time_names("valid_time").get(variable.window, "valid_time")
    return attributes


def _put(
    group: zarr.Group,
    name: str,
    dims: tuple[str, ...],
    values: np.ndarray,
    attributes: dict,
    chunk_length: int | None = None,
) -> None:
    """Create an array that is not a field, and write its values.

    Args:
        group: the store.
        name: name of the array.
        dims: names of its dimensions.
        values: its values.
        attributes: its attributes.
        chunk_length: length of the chunks along the first dimension, None for one chunk in all.
    """
    chunks = values.shape
    if chunk_length is not None:
        chunks = (chunk_length, *values.shape[1:])
    array = group.create_array(
        name,
        shape=values.shape,
        chunks=chunks,
        dtype=values.dtype,
        dimension_names=dims,
        attributes=attributes,
    )
    array[...] = values
