"""Reader of zarr stores that anemoi-datasets writes, as datasets with CF coordinates.

A store contains one array ``data`` (time, variable, ensemble, cell). Attributes of the store describe this array:
``variables`` names the variables, ``field_shape`` is the shape of a field, and ``missing_dates`` lists times without
values. The dataset contains each variable under its name in the store (``z_500``). It also contains
each variable on pressure levels with all its levels under the name of the parameter (``z``), and common variables under
their names in this package (``t2m`` for ``2t``).
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
import zarr
from xarray.backends import BackendArray
from xarray.core import indexing

from credit.calendar import TIME_UNITS
from credit.data.formats.zarr.array_chunks import ARRAY_PART, ArrayPart
from credit.errors import DataError

logger = logging.getLogger(__name__)

_DIMS = ("time", "variable", "ensemble", "cell")
# Names of variables on levels, such as z_500 (parameter and level), in stores that do not describe their variables.
_NAME_WITH_LEVEL = re.compile(r"^(.+)_(\d+)$")
_EPOCH = np.datetime64(TIME_UNITS.removeprefix("minutes since ").replace(" ", "T"), "m")
# Memory for the cache of decoded times. A chunk mostly contains all variables of a time, but variables are read one by
# one.
_CACHE_BYTES = 2**28
_SURFACE_GEOPOTENTIAL = "z of the surface"
# ECMWF's short name of a parameter -> units, standard name and usual name in this package. These units are used if the
# store has none; versions of anemoi-datasets before 2026 did not write units.
_PARAMETERS: dict[str, tuple[str, str, str]] = {
    "z": ("m2 s-2", "geopotential", ""),
    "t": ("K", "air_temperature", ""),
    "u": ("m s-1", "eastward_wind", ""),
    "v": ("m s-1", "northward_wind", ""),
    "q": ("kg kg-1", "specific_humidity", ""),
    "w": ("Pa s-1", "lagrangian_tendency_of_air_pressure", ""),
    "r": ("%", "relative_humidity", ""),
    "2t": ("K", "air_temperature", "t2m"),
    "2d": ("K", "dew_point_temperature", "d2m"),
    "10u": ("m s-1", "eastward_wind", "u10"),
    "10v": ("m s-1", "northward_wind", "v10"),
    "100u": ("m s-1", "eastward_wind", "u100"),
    "100v": ("m s-1", "northward_wind", "v100"),
    "sp": ("Pa", "surface_air_pressure", ""),
    "msl": ("Pa", "air_pressure_at_mean_sea_level", ""),
    "sst": ("K", "sea_surface_temperature", ""),
    "skt": ("K", "surface_temperature", ""),
    "tcw": ("kg m-2", "", ""),
    "tcwv": ("kg m-2", "atmosphere_mass_content_of_water_vapor", ""),
    "tp": ("m", "", ""),
    "cp": ("m", "", ""),
    "tcc": ("(0 - 1)", "cloud_area_fraction", ""),
    "ci": ("(0 - 1)", "sea_ice_area_fraction", ""),
    "lsm": ("(0 - 1)", "land_binary_mask", "land_sea_mask"),
    "sdor": ("m", "", ""),
    "slor": ("1", "", ""),
    # The geopotential without a level is the surface geopotential.
    _SURFACE_GEOPOTENTIAL: ("m2 s-2", "surface_geopotential", "geopotential_at_surface"),
}
# Entry for a parameter that is not in the table.
_UNKNOWN = ("", "", "")


def is_anemoi(attributes: Mapping[str, Any]) -> bool:
    """Return True if a zarr store has the attributes that anemoi-datasets writes."""
    return {"variables", "field_shape", "missing_dates"} <= set(attributes)


def open_anemoi(group: zarr.Group, origin: str) -> xr.Dataset:
    """Open a store of anemoi-datasets as a dataset whose fields are read when they are accessed.

    The dataset does not contain the times without values (``missing_dates``).

    Args:
        group: root group of the store.
        origin: path or URL of the store, for error messages.

    Raises:
        DataError: if the store contains trajectories, or its grid is not a regular latitude-longitude grid.
    """
    data = group["data"]
    dims = tuple(data.attrs.get("_ARRAY_DIMENSIONS", _DIMS))
    names = list(group.attrs["variables"])
    if dims != _DIMS or data.ndim != len(_DIMS) or data.shape[1] != len(names):
        raise DataError(
            f"{origin}: the array data has the dimensions {', '.join(dims)} and the shape {data.shape}; only gridded "
            f"stores of anemoi-datasets can be read, with the dimensions {', '.join(_DIMS)} and {len(names)} variables"
        )
    latitude, longitude = _read_grid(group, origin)
    dates = group["dates"][:].astype("datetime64[m]")
    is_missing = np.isin(dates, np.array(group.attrs["missing_dates"], dtype="datetime64[m]"))
    if is_missing.any():
        logger.warning(
            "%s: %d of %d times are left out, because the store lists them as missing; the first is %s",
            origin,
            is_missing.sum(),
            len(dates),
            dates[is_missing][0],
        )
    positions = np.flatnonzero(~is_missing)
    variables = {
        "time": xr.Variable(
            "time",
            (dates[positions] - _EPOCH).astype(np.int64),
            {"units": TIME_UNITS, "calendar": "proleptic_gregorian", "standard_name": "time", "axis": "T"},
        ),
        "number": xr.Variable("number", np.arange(data.shape[2])),
        "latitude": xr.Variable("latitude", latitude, {"units": "degrees_north"}),
        "longitude": xr.Variable("longitude", longitude, {"units": "degrees_east"}),
    }
    reader = _DataReader(data, positions, (len(latitude), len(longitude)))
    variables |= _build_variables(names, group.attrs.get("variables_metadata") or {}, reader)
    return xr.Dataset(variables)


def _read_grid(group: zarr.Group, origin: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the latitudes of the rows and the longitudes of the columns, in degrees and in the order of the store.

    Raises:
        DataError: if the cells do not form a regular latitude-longitude grid.
    """
    latitudes = group["latitudes"][:]
    longitudes = group["longitudes"][:]
    shape = tuple(group.attrs["field_shape"])
    if len(shape) == 2 and shape[0] * shape[1] == len(latitudes):
        rows = latitudes.reshape(shape)
        columns = longitudes.reshape(shape)
        if (rows == rows[:, :1]).all() and (columns == columns[:1]).all():
            return rows[:, 0], columns[0]
    resolution = group.attrs.get("resolution")
    grid_text = f"{len(latitudes)} cells"
    if resolution is not None:
        grid_text = f"{resolution}, {grid_text}"
    raise DataError(
        f"{origin}: its grid ({grid_text}, field_shape {list(shape)}) is not a regular latitude-longitude grid, but "
        "for example a reduced Gaussian grid (N320, O96); create the store again with a regular grid, such as "
        "grid: [1, 1] in the MARS request, or with the filter regrid of anemoi-transform"
    )


def _build_variables(
    names: Sequence[str], metadata: Mapping[str, Mapping[str, Any]], reader: _DataReader
) -> dict[str, xr.Variable]:
    """Build the variables of the dataset and the coordinates of their levels.

    Args:
        names: names of the variables of the store.
        metadata: name of a variable -> description; variables without a description are not included.
        reader: reader of the values of the store.
    """
    variables: dict[str, xr.Variable] = {}
    rows_on_levels: dict[str, list[tuple[float, int]]] = {}
    units_of: dict[str, str] = {}
    surface_rows: dict[str, int] = {}
    for row, name in enumerate(names):
        description = metadata.get(name, {})
        parameter, level = _find_parameter(name, description)
        units_of[name] = str(description.get("units") or "")
        if level is None:
            surface_rows[name] = row
        else:
            rows_on_levels.setdefault(parameter, []).append((level, row))
            variables[name] = _build_variable(reader, [row], parameter, units_of[name], None)
    # A parameter on levels has priority over a surface field of the same name, such as z.
    for parameter, levels_and_rows in rows_on_levels.items():
        levels, rows = zip(*sorted(levels_and_rows), strict=True)
        level_name = f"level_{parameter}"
        attributes = {"units": "hPa", "standard_name": "air_pressure"}
        variables[level_name] = xr.Variable(level_name, np.array(levels), attributes)
        units = units_of[names[rows[0]]]
        variables[parameter] = _build_variable(reader, list(rows), parameter, units, level_name)
    for name, row in surface_rows.items():
        parameter, _ = _find_parameter(name, metadata.get(name, {}))
        variable = _build_variable(reader, [row], parameter, units_of[name], None)
        variables.setdefault(name, variable)
        _, _, usual_name = _PARAMETERS.get(parameter, _UNKNOWN)
        if usual_name:
            variables.setdefault(usual_name, variable)
    return variables


def _find_parameter(name: str, description: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return the short name of the parameter of a variable, and its pressure level in hPa (None without one).

    Args:
        name: name of the variable in the store.
        description: entry of the variable in ``variables_metadata``, which may be empty.
    """
    mars = description.get("mars") or {}
    match = _NAME_WITH_LEVEL.match(name)
    parameter = str(mars.get("param", name))
    if mars.get("levtype") == "pl" and "levelist" in mars:
        return parameter, float(mars["levelist"])
    # In names such as swvl_1, the number is not a pressure level.
    if "levtype" not in mars and match is not None and match[1] in _PARAMETERS:
        return match[1], float(match[2])
    return _SURFACE_GEOPOTENTIAL if parameter == "z" else parameter, None


def _build_variable(
    reader: _DataReader, variable_indices: Sequence[int], parameter: str, units: str, level_name: str | None
) -> xr.Variable:
    """Build a variable (time, number, [level,] latitude, longitude) whose values are read lazily.

    Args:
        reader: reader of the values of the store.
        variable_indices: indices of the variable in the store, one for each level.
        parameter: short name of the parameter.
        units: units in the store; empty if the store has none.
        level_name: name of the coordinate of the levels; None for a variable without levels.
    """
    usual_units, standard_name, _ = _PARAMETERS.get(parameter, _UNKNOWN)
    attributes = {"units": units or usual_units, "standard_name": standard_name}
    attributes = {key: text for key, text in attributes.items() if text}
    level_dims = [] if level_name is None else [level_name]
    dims = ["time", "number", *level_dims, "latitude", "longitude"]
    encoding = {
        "preferred_chunks": {"time": reader.times_per_chunk},
        ARRAY_PART: ArrayPart("data", reader.positions, np.array(variable_indices)),
    }
    fields = indexing.LazilyIndexedArray(_Fields(reader, np.array(variable_indices), level_name is not None))
    return xr.Variable(dims, fields, attributes, encoding)


class _DataReader:
    """Reader of the array ``data``, with a cache of the times that were read last.

    Args:
        data: array (time, variable, ensemble, cell).
        positions: (N,) indices in `data` of the times of the dataset.
        grid_shape: numbers of rows and columns of a field.

    Attributes:
        positions: (N,) indices in `data` of the times of the dataset.
        times_per_chunk: number of times in a chunk of the store.
        shape: numbers of times, members, rows and columns of the dataset.
        dtype: data type of the values.
    """

    def __init__(self, data: zarr.Array, positions: np.ndarray, grid_shape: tuple[int, int]) -> None:
        self.times_per_chunk = data.chunks[0]
        self.shape = (len(positions), data.shape[2], *grid_shape)
        self.dtype = data.dtype
        self._data = data
        self.positions = positions
        self._variables_per_chunk = data.chunks[1]
        bytes_per_time = self.dtype.itemsize * min(data.chunks[1], data.shape[1]) * data.shape[2] * data.shape[3]
        self._max_cached = max(self.times_per_chunk, _CACHE_BYTES // bytes_per_time)
        # (Index of the time in the store, number of the chunk) -> values (variables of a chunk, members, cells).
        self._cache: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def read(self, time_indices: np.ndarray, variable_indices: np.ndarray) -> np.ndarray:
        """Return the values (times, variables, members, grid rows, grid columns) at given times of the dataset.

        Args:
            time_indices: indices of the times in the dataset.
            variable_indices: indices of the variables in the store.
        """
        times_in_store = self.positions[time_indices]
        values = np.empty((len(time_indices), len(variable_indices), *self.shape[1:]), dtype=self.dtype)
        for chunk in np.unique(variable_indices // self._variables_per_chunk).tolist():
            is_in_chunk = variable_indices // self._variables_per_chunk == chunk
            self._load(times_in_store, chunk)
            for index, time in enumerate(times_in_store.tolist()):
                fields = self._cache[time, chunk][variable_indices[is_in_chunk] - chunk * self._variables_per_chunk]
                values[index, is_in_chunk] = fields.reshape(-1, *self.shape[1:])
        return values

    def _load(self, times: np.ndarray, chunk: int) -> None:
        """Read the variables of a chunk at the given times into the cache, except times that it already contains."""
        absent_times = [time for time in times.tolist() if (time, chunk) not in self._cache]
        first = chunk * self._variables_per_chunk
        variables = slice(first, first + self._variables_per_chunk)
        if absent_times:
            for time, fields in zip(absent_times, self._data.oindex[absent_times, variables], strict=True):
                self._cache[time, chunk] = fields
        for time in times.tolist():
            self._cache.move_to_end((time, chunk))
        # Keep all times of this call, even if they exceed the size of the cache.
        while len(self._cache) > max(self._max_cached, len(times)):
            self._cache.popitem(last=False)


class _Fields(BackendArray):
    """Lazily read values of one variable, (time, number, [level,] latitude, longitude).

    Args:
        reader: reader of the values of the store.
        variable_indices: indices of the variable in the store, one for each level.
        has_levels: True for a variable with a dimension of levels.
    """

    def __init__(self, reader: _DataReader, variable_indices: np.ndarray, has_levels: bool) -> None:
        self._reader = reader
        self._variable_indices = variable_indices
        num_times, num_members, *grid_shape = reader.shape
        level_shape = (len(variable_indices),) if has_levels else ()
        self.shape = (num_times, num_members, *level_shape, *grid_shape)
        self.dtype = reader.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> np.ndarray:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[int | slice | np.ndarray, ...]) -> np.ndarray:
        """Return the values at `key`, which contains a separate index for each axis (orthogonal indexing)."""
        times, members, *level_key, latitudes, longitudes = key
        variable_indices = np.atleast_1d(self._variable_indices[level_key[0]]) if level_key else self._variable_indices
        time_indices = np.arange(self.shape[0])[times]
        # The axes are times, levels, members, rows and columns.
        values = self._reader.read(np.atleast_1d(time_indices), variable_indices)
        values = np.moveaxis(values[..., latitudes, :][..., longitudes], 1, 2)[:, members]
        # An integer index drops its axis; the axis of the members has already been indexed.
        has_member_axis = np.ndim(np.arange(self.shape[1])[members]) > 0
        level_axis = 2 if has_member_axis else 1
        if not level_key or np.ndim(self._variable_indices[level_key[0]]) == 0:
            values = values.take(0, axis=level_axis)
        return values if np.ndim(time_indices) else values[0]
