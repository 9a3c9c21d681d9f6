"""CF conventions: roles of coordinates, units of levels, and the layout of a variable in its file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.data.formats.grib.dataset import UNREADABLE
from credit.data.formats.regrid import Regridder
from credit.data.formats.select import listing
from credit.data.formats.unit_checks import Implausible, ValueRules
from credit.data.formats.units import Conversion, ExpConversion, require_packing
from credit.errors import DataError
from credit.grid import AxisOrder, LatLonGrid
from credit.physics.vertical import Column

_STANDARD_NAMES = {
    "time": "time",
    "latitude": "lat",
    "longitude": "lon",
    "air_pressure": "level",
    "model_level_number": "level",
    "atmosphere_hybrid_sigma_pressure_coordinate": "level",
    "atmosphere_sigma_coordinate": "level",
}
# Coordinates with the units of one of the roles, but another meaning.
_OTHER_STANDARD_NAMES = ("forecast_reference_time", "forecast_period", "grid_latitude", "grid_longitude")
_NAMES = {
    "time": ("time", "valid_time", "date"),
    "lat": ("lat", "latitude", "nav_lat"),
    "lon": ("lon", "longitude", "nav_lon"),
    "level": ("level", "plev", "lev", "pressure", "pressure_level", "isobaricinhpa", "isobaricinpa", "hybrid"),
}
_DEGREES = {
    **dict.fromkeys(("degree_north", "degree_n", "degreen"), "lat"),
    **dict.fromkeys(("degree_east", "degree_e", "degreee"), "lon"),
}
_ROLE_WORDS = {"time": "time", "lat": "latitude", "lon": "longitude", "level": "level"}
_AXES = {"T": "time", "Y": "lat", "X": "lon", "Z": "level"}
PRESSURE_IN_HPA = {"hpa": 1.0, "millibar": 1.0, "millibars": 1.0, "mbar": 1.0, "mb": 1.0, "pa": 0.01, "pascal": 0.01}
# Relative tolerance for float32 and for Pa against hPa, far below the distance of any two levels.
_LEVEL_TOLERANCE = 1e-5
_HIGHEST_HPA = 1100.0
# Files converted from GRIB have the initial time as dimension `time` and this coordinate; both claim to be time.
_VALID_TIME = "valid_time"
# Fields that are unpacked at once. While they are unpacked, packed values are float64.
_FIELDS_AT_ONCE = 16


@dataclass(frozen=True)
class VariableLayout:
    """Layout of one variable in one file.

    Attributes:
        name: the variable's name in the file.
        dims: role (``time``, ``level``, ``lat``, ``lon``) -> dimension; other dimensions have length 1.
        level_rows: row in the file of each level that is read; None for a 2-D variable.
        column: vertical interpolation from these rows to the levels of the run; None if they are those of the run.
        grid: grid of the file.
        orientation: brings the fields of the file into the order of the grid.
        regridder: brings them to the grid of the run; None if the file is on it.
        conversion: to the units of the config; None if the fields have them.
        to_si: from the units of the file to those of formulas; None if the file has them, or no formula needs it.
        times: (N,) int64 minutes along the time dimension; None if the file has no time.
        window_bounds: (N, 2) int64 minutes of the time bounds; None if the file has none.
        attributes: units (converted), standard_name, long_name and cell_methods, if the file has them.
        packing_step: step of packed integers in these units, 0 if the variable is not packed.
        chunk_times: number of times in a chunk of the file, which are unpacked together; 1 without chunks.
        rules: checks of the values.
        origin: file and variable, for messages.
        calendar: calendar of `times`, for messages; None if no file has had a time yet.
    """

    name: str
    dims: dict[str, str]
    level_rows: tuple[int, ...] | None
    column: Column | None
    grid: LatLonGrid
    orientation: AxisOrder
    regridder: Regridder | None
    conversion: Conversion | None
    to_si: Conversion | ExpConversion | None
    times: np.ndarray | None
    window_bounds: np.ndarray | None
    attributes: dict[str, str]
    packing_step: float
    chunk_times: int
    rules: ValueRules
    origin: str
    calendar: Calendar | None

    def read(self, dataset: xr.Dataset, position: int | slice) -> np.ndarray:
        """Return fields on the grid and in the units of the run, missing values as NaN.

        Args:
            dataset: the file.
            position: index of one time, for (levels or 1, H, W), or a slice of T times, for (T, levels or 1, H, W).

        Raises:
            DataError: for values that cannot be right, see `credit.data.formats.unit_checks`.
        """
        return self.to_run(self.orientation.apply(self._values(dataset, position)))

    def read_raw(self, dataset: xr.Dataset, position: int | slice) -> np.ndarray:
        """Return fields for formulas, ([T,] levels or 1, h, w), on the grid of the file and in SI units; see `read`."""
        rows = self.level_rows
        if rows is None or "level" not in self.dims:
            return self._raw(dataset, position)
        times = (position.stop - position.start,) if isinstance(position, slice) else ()
        chunks = dataset.variables[self.name].encoding.get("preferred_chunks", {})
        chunk_levels = chunks.get(self.dims["level"], 1)
        # A few fields at once are unpacked in memory that is used again; unpacking all would need new memory.
        chunks_at_once = math.ceil(_FIELDS_AT_ONCE / (chunk_levels * math.prod(times)))
        levels_at_once = chunks_at_once * chunk_levels
        fields = np.empty((*times, len(rows), *self.grid.shape), dtype=np.float32)
        for start in range(0, len(rows), levels_at_once):
            levels = slice(start, start + levels_at_once)
            fields[..., levels, :, :] = self._raw(dataset, position, levels)
        return fields

    def _raw(self, dataset: xr.Dataset, position: int | slice, levels: slice = slice(None)) -> np.ndarray:
        values = self.orientation.apply(self._values(dataset, position, levels))
        return values if self.to_si is None else self.to_si.apply(values)

    def to_run(self, fields: np.ndarray) -> np.ndarray:
        """Return fields on the grid of the file (..., h, w) on that of the run and in the units of the config."""
        if self.regridder is not None:
            fields = self.regridder.apply(fields)
        return fields if self.conversion is None else self.conversion.apply(fields)

    def _values(self, dataset: xr.Dataset, position: int | slice, levels: slice = slice(None)) -> np.ndarray:
        """Return checked values on some of the levels, in the order of the file."""
        values, implausible = self.rules.apply(self._stored_values(dataset, position, levels), levels)
        if implausible is not None:
            raise DataError(self._describe(implausible, position))
        return values

    def _describe(self, implausible: Implausible, position: int | slice) -> str:
        """Return the problem with some values, with their level and time and the location of the first."""
        levels = self.rules.levels
        when = ""
        if levels[0] is not None or len(levels) > 1:
            when = f", level {levels[implausible.row]:g}"
        if self.times is not None and self.calendar is not None:
            number = 0
            if "time" in self.dims:
                number = position.start + implausible.index[0] if isinstance(position, slice) else position
            when += f" at {self.calendar.format(self.times[number])}"
        row, column = np.argwhere(self.orientation.apply(implausible.cells))[0]
        location = f"latitude {self.grid.lat[row]:g}, longitude {self.grid.lon[column]:g}"
        return f"{self.origin}{when}: {self.rules.describe(implausible, location)}"

    def _stored_values(self, dataset: xr.Dataset, position: int | slice, levels: slice) -> np.ndarray:
        variable = dataset.variables[self.name]
        level_rows = None if self.level_rows is None else self.level_rows[levels]
        # Dimensions without a role have length 1.
        index: dict[str, object] = {dim: 0 for dim in variable.dims if dim not in self.dims.values()}
        if "time" in self.dims:
            index[self.dims["time"]] = position
        has_levels = level_rows is not None and "level" in self.dims
        if has_levels:
            # netCDF reads increasing rows only.
            increasing_rows, inverse = np.unique(level_rows, return_inverse=True)
            index[self.dims["level"]] = increasing_rows
        selected = variable.isel(index)
        ordered_dims = [self.dims[role] for role in ("time", "level", "lat", "lon") if role in self.dims]
        values = selected.transpose(*[dim for dim in ordered_dims if dim in selected.dims]).values
        values = values[..., inverse, :, :] if has_levels else values[..., None, :, :]
        if isinstance(position, slice) and "time" not in self.dims:
            return values[None]
        return values


class Coordinates:
    """Coordinates of a file by role.

    Args:
        dataset: the file, with times not decoded.

    Attributes:
        of_dim: dimension -> (role, name of the coordinate).
        scalar: role -> name of a scalar coordinate.
    """

    def __init__(self, dataset: xr.Dataset) -> None:
        self._dataset = dataset
        self.of_dim: dict[str, tuple[str, str]] = {}
        self.scalar: dict[str, str] = {}
        for name, variable in dataset.variables.items():
            role = role_of(str(name), variable) if variable.ndim <= 1 else None
            if role is None:
                continue
            if variable.ndim == 0:
                if role not in self.scalar or name == _VALID_TIME:
                    self.scalar[role] = str(name)
            elif self._is_better(str(name), str(variable.dims[0])):
                self.of_dim[str(variable.dims[0])] = (role, str(name))

    def _is_better(self, name: str, dim: str) -> bool:
        """Return whether `name` replaces the coordinate that `dim` has so far."""
        if dim not in self.of_dim or name == _VALID_TIME:
            return True
        return name == dim and self.of_dim[dim][1] != _VALID_TIME

    def roles(self, name: str, origin: str, level_units: str | None = None) -> dict[str, str]:
        """Return role -> dimension of a variable.

        Args:
            name: the variable.
            origin: the file, for messages.
            level_units: ``data.level_units`` for a variable on levels, else None.

        Raises:
            DataError: if a dimension is not time, level, latitude or longitude, or one of the last two is missing.
        """
        variable = self._dataset.variables[name]
        if UNREADABLE in variable.encoding:
            raise DataError(f"{origin}: {name} {variable.encoding[UNREADABLE].describe(level_units)}")
        coordinates = [coordinate for _, coordinate in self.of_dim.values()]
        for used_name in (name, *coordinates, *self.scalar.values()):
            require_packing(used_name, self._dataset.variables[used_name].encoding, origin)
        dims_of_role: dict[str, list[str]] = {}
        unknown_dims = []
        for dim in variable.dims:
            role = self.of_dim.get(dim, (None, None))[0]
            if role is not None:
                dims_of_role.setdefault(role, []).append(dim)
            elif variable.sizes[dim] > 1:
                unknown_dims.append(dim)
        dim_of_role = {role: self._choose_dim(name, role, dims, origin) for role, dims in dims_of_role.items()}
        if not {"lat", "lon"} <= set(dim_of_role):
            dims = ", ".join(map(str, variable.dims))
            raise DataError(
                f"{origin}: {name} has no latitude and longitude (its dimensions are {dims}); only fields on a "
                "latitude-longitude grid with 1-D coordinates can be read: interpolate the file to one first, or add "
                "its coordinates"
            )
        if unknown_dims:
            dim = unknown_dims[0]
            raise DataError(
                f"{origin}: dimension {dim} ({variable.sizes[dim]}) of {name} {self._describe_unknown(dim)}"
            )
        return dim_of_role

    def _choose_dim(self, name: str, role: str, dims: Sequence[str], origin: str) -> str:
        """Return the dimension of a role.

        If there are several, all but one must have length 1, for example the initial time of a forecast, which is a
        dimension besides its valid times.
        """
        sizes = self._dataset.variables[name].sizes
        longer = [dim for dim in dims if sizes[dim] > 1]
        if len(longer) > 1:
            listed = " and ".join(f"{dim} ({sizes[dim]})" for dim in longer)
            raise DataError(
                f"{origin}: dimensions {listed} of {name} are all {_ROLE_WORDS[role]} by their coordinates; correct "
                f"the attributes of those that are not, or {self._how_to_choose(longer[-1])}"
            )
        return (longer or dims)[0]

    def _describe_unknown(self, dim: str) -> str:
        """Return why a dimension has no role, and what to do, as a text that follows its name."""
        coordinate = self._dataset.variables.get(dim)
        if coordinate is None:
            return (
                "has no coordinate variable, so its values are not known; add the coordinate to the file, or cut the "
                "file to one position"
            )
        standard_name = coordinate.attrs.get("standard_name")
        if standard_name in _OTHER_STANDARD_NAMES:
            return (
                f"has the standard_name {standard_name}, which is not time, level, latitude or longitude; correct "
                f"it in the file, or {self._how_to_choose(dim)}"
            )
        is_numeric = coordinate.ndim == 1 and coordinate.dtype.kind in "iuf"
        if not is_numeric and dim.lower() in _NAMES["time"]:
            return (
                "has a coordinate that holds text; a time axis holds numbers whose units are, for example, hours since "
                f"a date: rewrite it so, or {self._how_to_choose(dim)}"
            )
        return f"is not time, level, latitude or longitude; {self._how_to_choose(dim)}"

    def _how_to_choose(self, dim: str) -> str:
        values = self._dataset.variables[dim].values
        return f"choose one with data.sources.N.select: {{{dim}: {listing(values[:1])}}}; it has {listing(values)}"

    def values(self, dim: str) -> np.ndarray:
        """Return the coordinate of a dimension."""
        return self._dataset.variables[self.of_dim[dim][1]].values

    def grid(self, lat: str, lon: str, origin: str) -> tuple[LatLonGrid, AxisOrder]:
        """Return the grid of two dimensions and the order of rows and columns of its fields."""
        bounds = self.bounds(self.of_dim[lat][1])
        return LatLonGrid.from_coords(self.values(lat), self.values(lon), bounds, origin)

    def bounds(self, name: str) -> np.ndarray | None:
        """Return the bounds (N, 2) of a coordinate, None if the file has none."""
        bounds_name = self._dataset.variables[name].attrs.get("bounds")
        if bounds_name not in self._dataset.variables:
            return None
        return self._dataset.variables[bounds_name].values


def role_of(name: str, variable: xr.Variable) -> str | None:
    """Return the role of a coordinate: by its standard_name, else units, axis or positive, else its name."""
    attributes = variable.attrs
    standard_name = attributes.get("standard_name")
    if standard_name in _STANDARD_NAMES:
        return _STANDARD_NAMES[standard_name]
    if standard_name in _OTHER_STANDARD_NAMES or variable.dtype.kind not in "iuf":
        return None
    units = str(attributes.get("units", "")).lower()
    singular_units = units.replace("degrees", "degree")
    if singular_units in _DEGREES:
        return _DEGREES[singular_units]
    if " since " in units:
        return "time"
    downward = "Z" if str(attributes.get("positive", "")).lower() == "down" else None
    axis = attributes.get("axis", downward)
    # Coordinates along X and Y in other units, such as metres, belong to a map projection.
    if axis in _AXES and units in ("", "1", "degree", "degrees", "level", *PRESSURE_IN_HPA):
        return _AXES[axis]
    for role, names in _NAMES.items():
        if name.lower() in names:
            return role
    return None


def is_vector_component(choice: str, standard_name: str) -> bool:
    """Return whether a variable is a component of a vector.

    The `choice` is ``data.variable_options.NAME.vector``; with ``auto`` the standard name decides.
    """
    if choice == "auto":
        return "eastward" in standard_name or "northward" in standard_name
    return choice == "yes"


def level_values(coordinate: xr.Variable, name: str, level_units: str, origin: str) -> np.ndarray:
    """Return a level coordinate in the units of the config, (K,) float64.

    Without units, values are taken as hPa if none is greater than 1100, else as Pa.

    Raises:
        DataError: if the file has pressures and `level_units`, from the config, is ``model_level``, or the reverse.
    """
    values = np.atleast_1d(np.asarray(coordinate.values, dtype=np.float64))
    units = str(coordinate.attrs.get("units", "")).strip()
    if not units and level_units != "model_level":
        units = "hPa" if values.max() <= _HIGHEST_HPA else "Pa"
    hpa_per_unit = PRESSURE_IN_HPA.get(units.lower())
    if level_units == "model_level":
        if hpa_per_unit is not None:
            raise DataError(f"{origin}: {name} is in {units}, but data.level_units is model_level; use hPa or Pa")
        return values
    if hpa_per_unit is None:
        raise DataError(
            f'{origin}: {name} is in "{units}", not in units of pressure; if these are model levels, set '
            "data.level_units: model_level"
        )
    units_per_hpa = 100.0 if level_units == "Pa" else 1.0
    return values * hpa_per_unit * units_per_hpa


def match_levels(
    available: np.ndarray, requested: Sequence[float], variable: str, units: str, origin: str
) -> tuple[int, ...]:
    """Return the row of each requested level; levels must be equal within rounding, and are never the nearest.

    Args:
        available: (K,) levels of the file.
        requested: levels to find.
        variable: the variable, for messages.
        units: units of the levels, for messages.
        origin: the file, for messages.

    Raises:
        DataError: if levels are missing; the message lists them and those of the file.
    """
    rows = []
    missing_levels = []
    for level in requested:
        distance = np.abs(available - level)
        if distance.min() <= _LEVEL_TOLERANCE * level:
            rows.append(int(distance.argmin()))
        else:
            missing_levels.append(level)
    if missing_levels:
        missing_text = ", ".join(f"{level:g}" for level in missing_levels)
        available_text = ", ".join(f"{level:g}" for level in available)
        raise DataError(
            f"{origin}: {variable} has no level {missing_text} {units}; it has {available_text} {units}; change "
            f"data.levels or data.variable_options.{variable}.levels"
        )
    return tuple(rows)
