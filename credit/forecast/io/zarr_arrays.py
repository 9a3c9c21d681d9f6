"""Creation and comparison of the arrays of a zarr store of forecasts, with their dimensions and attributes.

Shape suffixes: I initial times, N lead times.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import zarr
from zarr.errors import ZarrUserWarning

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
    build_window_bounds,
    select_run_attributes,
)
from credit.parallel.domain.division import FieldPart

# Array that marks the complete initial times.
WRITTEN = "written"
# Length of the chunks of coordinates. The length does not depend on the number of initial times, so an extended store
# is identical to a store that was written at once. Each mark has a separate chunk, because a process writes one mark at
# a time.
_CHUNK_LENGTH = 1024


@dataclass(frozen=True)
class TimeDimNames:
    """Names of the time dimensions of a store, which depend on its layout.

    Attributes:
        init: name of the dimension of initial times.
        lead: name of the dimension of lead times.
        lead_attributes: attributes ``units`` and, if needed, ``dtype`` of the lead times.
    """

    init: str
    lead: str
    lead_attributes: dict[str, str]


# Values of inference.layout -> names.
TIME_NAMES = {
    "cf": TimeDimNames("init_time", "lead_time", {"units": HOURS}),
    # WeatherBench 2 needs a timedelta; the attribute dtype lets xarray decode hours to a timedelta.
    "weatherbench2": TimeDimNames("time", "prediction_timedelta", {"units": "hours", "dtype": "timedelta64[ns]"}),
}


def create_arrays(
    path: Path,
    schema: ForecastSchema,
    initial_minutes: np.ndarray,
    time_names: TimeDimNames,
    with_checksums: bool,
    grid_chunks: tuple[int, int],
) -> zarr.Group:
    """Create a store with all coordinates, and with arrays of the fields that contain no values yet.

    Args:
        path: path of the store; an existing store is replaced.
        schema: content of each forecast.
        initial_minutes: initial times in minutes, (I,) int64.
        time_names: names of the time dimensions.
        with_checksums: True to add an array for the checksums of the initial fields of each forecast.
        grid_chunks: number of rows and number of columns of a chunk of the fields.

    Returns:
        The store, open for writing.

    Raises:
        OSError: if the store cannot be written.
    """
    init = time_names.init
    lead = time_names.lead
    group = zarr.open_group(path, mode="w", zarr_format=3)
    group.attrs.update({**schema.global_attributes, HISTORY: MADE_BY})
    time_attributes = schema.time_attributes()

    # Times. Means or sums over different windows need time coordinates with different bounds.
    initial_I1 = initial_minutes[:, None]
    valid_IN = initial_I1 + schema.lead_minutes
    _write_coordinate(group, init, (init,), initial_minutes, {**INITIAL_TIME, **time_attributes}, _CHUNK_LENGTH)
    _write_coordinate(group, lead, (lead,), schema.lead_hours, {**LEAD_TIME, **time_names.lead_attributes})
    windows = {name: window for window, name in schema.time_names_by_window("valid_time").items()}
    for name in dict.fromkeys(("valid_time", *windows)):
        attributes = {**VALID_TIME, **time_attributes}
        if name in windows:
            attributes["bounds"] = f"{name}_bnds"
        _write_coordinate(group, name, (init, lead), valid_IN, attributes, _CHUNK_LENGTH)
        if name in windows:
            bounds = build_window_bounds(windows[name], initial_I1, valid_IN)
            _write_coordinate(group, f"{name}_bnds", (init, lead, "bnds"), bounds, {}, _CHUNK_LENGTH)

    # Members, levels and grid.
    if schema.members is not None:
        _write_coordinate(group, MEMBER, (MEMBER,), np.arange(schema.members), REALIZATION)
    for dim, values in schema.levels.items():
        _write_coordinate(group, dim, (dim,), np.array(values), schema.level_attributes(dim))
    _write_coordinate(group, "latitude", ("latitude",), schema.grid.lat, LATITUDE)
    _write_coordinate(group, "longitude", ("longitude",), schema.grid.lon, LONGITUDE)

    _create_mark_arrays(group, init, len(initial_minutes), with_checksums)
    for variable in schema.variables:
        _create_field_array(group, schema, variable, len(initial_minutes), time_names, grid_chunks)
    return group


def _create_mark_arrays(group: zarr.Group, init: str, num_initial: int, with_checksums: bool) -> None:
    """Create the array that marks complete forecasts, and the array of checksums, both filled with zeros.

    Args:
        group: the store.
        init: name of the dimension of initial times.
        num_initial: number of initial times.
        with_checksums: True to add the array of checksums.
    """
    mark_attributes = {"long_name": "1 where the forecast of the initial time is whole", "units": "1"}
    _write_coordinate(group, WRITTEN, (init,), np.zeros(num_initial, dtype=np.int8), mark_attributes, chunk_length=1)
    if with_checksums:
        checksum_attributes = {"long_name": "checksum of the fields that the forecast starts from", "units": "1"}
        checksums = np.zeros(num_initial, dtype=np.uint64)
        _write_coordinate(group, INITIAL_FIELDS, (init,), checksums, checksum_attributes, chunk_length=1)


def _create_field_array(
    group: zarr.Group,
    schema: ForecastSchema,
    variable: OutputVariable,
    num_initial: int,
    time_names: TimeDimNames,
    grid_chunks: tuple[int, int],
) -> None:
    """Create the array of a variable's fields in a store, without values.

    Args:
        group: the store.
        schema: content of each forecast.
        variable: variable of the schema.
        num_initial: number of initial times.
        time_names: names of the time dimensions.
        grid_chunks: number of rows and number of columns of a chunk.
    """
    shape = (num_initial, len(schema.lead_minutes), *schema.shape(variable))
    # A chunk has one initial time, lead time and member, and all levels.
    num_leading = 2 if schema.members is None else 3
    group.create_array(
        variable.name,
        shape=shape,
        chunks=(*(1,) * num_leading, *shape[num_leading:-2], *grid_chunks),
        dtype="float32",
        fill_value=float("nan"),
        compressors=build_compressors(schema),
        dimension_names=schema.dims(variable, time_names.init, time_names.lead),
        attributes=build_variable_attributes(schema, variable),
    )


def build_compressors(schema: ForecastSchema) -> tuple[zarr.codecs.ZstdCodec, ...]:
    """Return the compressors of the fields; empty if the compression level of the schema is 0."""
    if not schema.compression:
        return ()
    return (zarr.codecs.ZstdCodec(level=schema.compression),)


def build_variable_attributes(schema: ForecastSchema, variable: OutputVariable) -> dict[str, str | int]:
    """Return the CF attributes of the array of a variable's fields."""
    attributes: dict[str, str | int] = dict(variable.attributes)
    if schema.keep_bits is not None:
        attributes[QUANTIZED] = schema.keep_bits
    attributes["coordinates"] = schema.time_names_by_window("valid_time").get(variable.window, "valid_time")
    return attributes


def crop_masks(variables: Sequence[OutputVariable], part: FieldPart) -> list[OutputVariable]:
    """Return the variables with their masks cropped to a part of the grid."""
    selected = []
    for variable in variables:
        mask_HW = variable.mask_HW
        selected.append(variable if mask_HW is None else replace(variable, mask_HW=mask_HW[part.slices]))
    return selected


def find_store_differences(
    group: zarr.Group, schema: ForecastSchema, time_names: TimeDimNames, with_checksums: bool
) -> list[str]:
    """List the properties in which a store differs from the content to write: sorted names for messages.

    Args:
        group: the store.
        schema: content of each forecast to write.
        time_names: names of the time dimensions.
        with_checksums: True if checksums of the initial fields will be written.
    """
    # Global attributes and coordinates.
    stored_attributes = select_run_attributes(dict(group.attrs))
    attributes = select_run_attributes(schema.global_attributes)
    differences = set()
    for key in {*stored_attributes, *attributes}:
        if stored_attributes.get(key) != attributes.get(key):
            differences.add(f"global attribute {key}")
    if time_names.init not in group or time_names.lead not in group:
        differences.add("inference.layout")
    elif not np.array_equal(group[time_names.lead][:], schema.lead_hours):
        differences.add("lead times")
    if with_checksums and INITIAL_FIELDS not in group:
        differences.add(f"variable {INITIAL_FIELDS}, which earlier versions did not write")
    # Fields are all variables whose last dimension is the longitude.
    stored_fields = set()
    for name, array in group.arrays():
        if name != "longitude" and array.metadata.dimension_names[-1:] == ("longitude",):
            stored_fields.add(name)
    for name in stored_fields ^ {variable.name for variable in schema.variables}:
        differences.add(f"variable {name}")
    for variable in schema.variables:
        if variable.name in stored_fields:
            differences.update(find_variable_differences(group, schema, variable))
    return sorted(differences)


def find_variable_differences(group: zarr.Group, schema: ForecastSchema, variable: OutputVariable) -> list[str]:
    """List the properties in which a stored variable differs from the variable to write: names for messages.

    Args:
        group: the store.
        schema: content of each forecast to write.
        variable: variable of the schema; the store must have its array.
    """
    array = group[variable.name]
    dim = variable.level_dim
    has_same_levels = dim is None or (dim in group and np.array_equal(group[dim][:], schema.levels[dim]))
    # The first two dimensions are the initial and the lead time.
    stored_dims = array.metadata.dimension_names[2:]
    has_same_dims = stored_dims == schema.dims(variable) and array.shape[2:] == schema.shape(variable)
    stored_compressors = [codec.to_dict() for codec in array.compressors]
    compressors = [codec.to_dict() for codec in build_compressors(schema)]
    # The number of bits is compared separately.
    stored_attributes = {**array.attrs, QUANTIZED: None}
    attributes = {**build_variable_attributes(schema, variable), QUANTIZED: None}
    has_same_property = {
        f"levels of {variable.name}": has_same_levels,
        f"dimensions of {variable.name}": has_same_dims,
        "inference.keep_bits": array.attrs.get(QUANTIZED) == schema.keep_bits,
        "inference.compression": stored_compressors == compressors,
        f"attributes of {variable.name}": stored_attributes == attributes,
    }
    return [name for name, is_same in has_same_property.items() if not is_same]


def _write_coordinate(
    group: zarr.Group,
    name: str,
    dims: tuple[str, ...],
    values: np.ndarray,
    attributes: dict,
    chunk_length: int | None = None,
) -> None:
    """Create an array for a coordinate or any other variable that is not a field, and write its values.

    Args:
        group: the store.
        name: name of the array.
        dims: names of the dimensions.
        values: values of the array.
        attributes: attributes of the array.
        chunk_length: length of the chunks along the first dimension; None to store all values in one chunk.
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


def write_consolidated_metadata(path: Path) -> None:
    """Write the consolidated metadata of a store: a copy of the metadata of all arrays in the group's metadata."""
    with warnings.catch_warnings():
        # xarray reads consolidated metadata, and prints a warning if there are none. zarr warns that other programs
        # may ignore them.
        warnings.filterwarnings("ignore", "Consolidated metadata is currently not part", ZarrUserWarning)
        zarr.consolidate_metadata(path)
