"""CF conventions: roles of coordinates, grid and bounds, and units of levels.

The role of a coordinate is its physical meaning in this package: ``time``, ``level``, ``lat`` or ``lon``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from credit.data.formats.grib.unreadable import UNREADABLE
from credit.data.formats.select import format_values
from credit.data.formats.units import require_numeric_packing
from credit.errors import DataError
from credit.grid import AxisOrder, LatLonGrid

# Standard name of a coordinate -> role.
_STANDARD_NAMES = {
    "time": "time",
    "latitude": "lat",
    "longitude": "lon",
    "air_pressure": "level",
    "model_level_number": "level",
    "atmosphere_hybrid_sigma_pressure_coordinate": "level",
    "atmosphere_sigma_coordinate": "level",
}
# Standard names of coordinates that have the units of a role, but a different meaning.
_OTHER_STANDARD_NAMES = ("forecast_reference_time", "forecast_period", "grid_latitude", "grid_longitude")
# Role -> usual names of its coordinates. The names are used if the attributes of a coordinate do not define a role.
_NAMES = {
    "time": ("time", "valid_time", "date"),
    "lat": ("lat", "latitude", "nav_lat"),
    "lon": ("lon", "longitude", "nav_lon"),
    "level": ("level", "plev", "lev", "pressure", "pressure_level", "isobaricinhpa", "isobaricinpa", "hybrid"),
}
# Units of latitude and longitude that CF allows (in the singular) -> role.
_DEGREES = {
    **dict.fromkeys(("degree_north", "degree_n", "degreen"), "lat"),
    **dict.fromkeys(("degree_east", "degree_e", "degreee"), "lon"),
}
# Role -> name of the role in error messages.
_ROLE_WORDS = {"time": "time", "lat": "latitude", "lon": "longitude", "level": "level"}
# Attribute `axis` of a coordinate -> role.
_AXES = {"T": "time", "Y": "lat", "X": "lon", "Z": "level"}
# Unit of pressure in lower case -> number of hPa in this unit.
PRESSURE_IN_HPA = {"hpa": 1.0, "millibar": 1.0, "millibars": 1.0, "mbar": 1.0, "mb": 1.0, "pa": 0.01, "pascal": 0.01}
# Relative tolerance for levels that were rounded to float32 or converted between Pa and hPa. It is much smaller than
# the distance between two levels.
_LEVEL_TOLERANCE = 1e-5
# Pressures without units that exceed this value are assumed to be in Pa.
_HIGHEST_HPA = 1100.0
# Files converted from GRIB have the initial time as dimension `time`, and also this coordinate with the role time.
_VALID_TIME = "valid_time"


class Coordinates:
    """Coordinates of a file by role (``time``, ``level``, ``lat`` or ``lon``).

    Args:
        dataset: the open file, with times not decoded.

    Attributes:
        role_and_name_by_dim: name of a dimension -> role and name of the 1-D coordinate along this dimension.
            Dimensions without a coordinate with a role are not included.
        scalar_by_role: role -> name of the scalar coordinate with this role.
    """

    def __init__(self, dataset: xr.Dataset) -> None:
        self._dataset = dataset
        self.role_and_name_by_dim: dict[str, tuple[str, str]] = {}
        self.scalar_by_role: dict[str, str] = {}
        for key, variable in dataset.variables.items():
            name = str(key)
            role = None
            # Variables with more dimensions are fields, or coordinates of curvilinear grids, which are not supported.
            if variable.ndim <= 1:
                role = find_role(name, variable)
            if role is None:
                continue
            # If valid time and initial time both have the role time, the valid time is used.
            if variable.ndim == 0:
                if role not in self.scalar_by_role or name == _VALID_TIME:
                    self.scalar_by_role[role] = name
                continue
            dim = str(variable.dims[0])
            if self._is_preferred(name, dim):
                self.role_and_name_by_dim[dim] = (role, name)

    def _is_preferred(self, name: str, dim: str) -> bool:
        """Return True if coordinate `name` is preferred to the coordinate that is registered for dimension `dim`.

        The valid time is preferred to the initial time. Otherwise, a coordinate with the name of its dimension is
        preferred to all other coordinates.
        """
        if dim not in self.role_and_name_by_dim or name == _VALID_TIME:
            return True
        return name == dim and self.role_and_name_by_dim[dim][1] != _VALID_TIME

    def find_dims(self, name: str, origin: str, level_units: str | None = None) -> dict[str, str]:
        """Return the dimensions of a variable as a mapping from role to name of the dimension.

        Dimensions of length 1 without a role are not included.

        Args:
            name: name of the variable.
            origin: name of the file, for error messages.
            level_units: ``data.level_units`` for a variable on levels, else None.

        Raises:
            DataError: if a dimension longer than 1 has no role, two such dimensions have the same role, latitude or
                longitude is missing, or packing attributes are not numbers.
        """
        # Report an unreadable GRIB variable, and a coordinate with wrong packing, in separate messages.
        variable = self._dataset.variables[name]
        if UNREADABLE in variable.encoding:
            raise DataError(f"{origin}: {name} {variable.encoding[UNREADABLE].describe(level_units)}")
        coordinates = [coordinate for _, coordinate in self.role_and_name_by_dim.values()]
        for used_name in (name, *coordinates, *self.scalar_by_role.values()):
            require_numeric_packing(used_name, self._dataset.variables[used_name].encoding, origin)
        # Dimensions of length 1 need no role, because there is only one position.
        dims_of_role: dict[str, list[str]] = {}
        unknown_dims = []
        for dim in variable.dims:
            if dim in self.role_and_name_by_dim:
                role, _ = self.role_and_name_by_dim[dim]
                dims_of_role.setdefault(role, []).append(dim)
            elif variable.sizes[dim] > 1:
                unknown_dims.append(dim)
        dim_of_role = {role: self._choose_dim(name, role, dims, origin) for role, dims in dims_of_role.items()}
        if not {"lat", "lon"} <= set(dim_of_role):
            dims = ", ".join(map(str, variable.dims))
            raise DataError(
                f"{origin}: {name} has no latitude and longitude (its dimensions are {dims}); only fields on a "
                "latitude-longitude grid with 1-D coordinates can be read: regrid the file first, or add its "
                "coordinates"
            )
        if unknown_dims:
            dim = unknown_dims[0]
            raise DataError(
                f"{origin}: dimension {dim} ({variable.sizes[dim]}) of {name} {self._describe_unknown(dim)}"
            )
        return dim_of_role

    def _choose_dim(self, name: str, role: str, dims: Sequence[str], origin: str) -> str:
        """Choose one of several dimensions of a variable that have the same role.

        At most one dimension may be longer than 1; this dimension is returned. For example, a forecast may have the
        dimensions initial time (length 1) and valid time, which both have the role ``time``.

        Raises:
            DataError: if several dimensions are longer than 1.
        """
        sizes = self._dataset.variables[name].sizes
        longer_dims = [dim for dim in dims if sizes[dim] > 1]
        if len(longer_dims) > 1:
            dims_with_sizes = " and ".join(f"{dim} ({sizes[dim]})" for dim in longer_dims)
            raise DataError(
                f"{origin}: dimensions {dims_with_sizes} of {name} are all {_ROLE_WORDS[role]} by their coordinates; "
                f"correct wrong attributes, or {self._describe_choice(longer_dims[-1])}"
            )
        if longer_dims:
            return longer_dims[0]
        return dims[0]

    def _describe_unknown(self, dim: str) -> str:
        """Return the reason why a dimension has no role, and advice.

        The text follows the name of the dimension in an error message.
        """
        coordinate = self._dataset.variables.get(dim)
        if coordinate is None:
            return (
                "has no coordinate variable, so its values are unknown; add the coordinate to the file, or cut the "
                "file to one position"
            )
        # The attributes of the coordinate may be wrong, or its values may not be numbers.
        standard_name = coordinate.attrs.get("standard_name")
        if standard_name in _OTHER_STANDARD_NAMES:
            return (
                f"has the standard_name {standard_name}, which is not time, level, latitude or longitude; correct "
                f"it in the file, or {self._describe_choice(dim)}"
            )
        is_numeric = coordinate.ndim == 1 and coordinate.dtype.kind in "iuf"
        if not is_numeric and dim.lower() in _NAMES["time"]:
            return (
                "has a coordinate that contains strings; a time axis must contain numbers in units such as hours since "
                f"a date: correct it, or {self._describe_choice(dim)}"
            )
        return f"is not time, level, latitude or longitude; {self._describe_choice(dim)}"

    def _describe_choice(self, dim: str) -> str:
        """Return a message that advises to select one position of a dimension, and lists the positions."""
        values = self._dataset.variables[dim].values
        example = format_values(values[:1])
        return f"choose one with data.sources.N.select: {{{dim}: {example}}}; it has {format_values(values)}"

    def read_values(self, dim: str) -> np.ndarray:
        """Return the values of the coordinate along a dimension, (N,) in the units of the file."""
        _, name = self.role_and_name_by_dim[dim]
        return self._dataset.variables[name].values

    def build_grid(self, lat: str, lon: str, origin: str) -> tuple[LatLonGrid, AxisOrder]:
        """Build the horizontal grid of fields from the coordinates of two dimensions.

        Args:
            lat: name of the dimension along latitude.
            lon: name of the dimension along longitude.
            origin: name of the file, for error messages.

        Returns:
            The grid, and the order of rows and columns in the file.

        Raises:
            DataError: if the coordinates do not form a global grid, see `LatLonGrid.from_coords`.
        """
        bounds = self.find_bounds(self.role_and_name_by_dim[lat][1])
        return LatLonGrid.from_coords(self.read_values(lat), self.read_values(lon), bounds, origin)

    def find_bounds(self, name: str) -> np.ndarray | None:
        """Return the cell bounds (N, 2) of coordinate `name` in the units of the file; None without bounds."""
        bounds_name = self._dataset.variables[name].attrs.get("bounds")
        if bounds_name not in self._dataset.variables:
            return None
        return self._dataset.variables[bounds_name].values


def find_role(name: str, variable: xr.Variable) -> str | None:
    """Return the role of a coordinate; None if it has no role.

    The role is found from the first of these that defines it: the standard_name, the units, the attributes axis and
    positive, and the name of the coordinate.

    Args:
        name: name of the coordinate.
        variable: values and attributes of the coordinate.

    Returns:
        The role: ``time``, ``level``, ``lat``, ``lon`` or None.
    """
    attributes = variable.attrs
    standard_name = attributes.get("standard_name")
    if standard_name in _STANDARD_NAMES:
        return _STANDARD_NAMES[standard_name]
    is_numeric = variable.dtype.kind in "iuf"
    if standard_name in _OTHER_STANDARD_NAMES or not is_numeric:
        return None
    # CF allows the units of latitude and longitude in the singular and in the plural.
    units = str(attributes.get("units", "")).lower()
    singular_units = units.replace("degrees", "degree")
    if singular_units in _DEGREES:
        return _DEGREES[singular_units]
    if " since " in units:
        return "time"
    axis = attributes.get("axis")
    # Only vertical coordinates have the attribute positive: down.
    if axis is None and str(attributes.get("positive", "")).lower() == "down":
        axis = "Z"
    # Coordinates along X and Y in other units, such as metres, belong to a map projection.
    if axis in _AXES and units in ("", "1", "degree", "degrees", "level", *PRESSURE_IN_HPA):
        return _AXES[axis]
    for role, names in _NAMES.items():
        if name.lower() in names:
            return role
    return None


def is_vector_component(choice: str, standard_name: str) -> bool:
    """Return True if a variable is a component of a vector, such as the eastward wind.

    Args:
        choice: ``data.variable_options.NAME.vector``: ``yes``, ``no``, or ``auto``. With ``auto``, the result
            depends on the standard name.
        standard_name: standard name of the variable; empty if it has none.
    """
    if choice == "auto":
        return "eastward" in standard_name or "northward" in standard_name
    return choice == "yes"


def read_level_values(coordinate: xr.Variable, name: str, level_units: str, origin: str) -> np.ndarray:
    """Return the values of a level coordinate in the units of the config, (K,) float64 for K levels.

    Pressures without units are assumed to be in hPa if all values are at most 1100, else in Pa.

    Args:
        coordinate: level coordinate, 1-D or a scalar.
        name: name of the coordinate, for error messages.
        level_units: ``data.level_units``: ``hPa``, ``Pa`` or ``model_level``.
        origin: name of the file, for error messages.

    Raises:
        DataError: if the file has pressure levels and `level_units` is ``model_level``, or if the file has other
            levels and `level_units` is a unit of pressure.
    """
    values = np.atleast_1d(np.asarray(coordinate.values, dtype=np.float64))
    units = str(coordinate.attrs.get("units", "")).strip()
    if not units and level_units != "model_level":
        units = "hPa" if values.max() <= _HIGHEST_HPA else "Pa"
    # Model levels must not have a unit of pressure, and pressure levels must have one.
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
    """Return the index in the file of each requested level.

    Two levels match if their relative difference is at most 1e-5. A level without a match is never replaced with the
    nearest level.

    Args:
        available: (K,) levels of the file, in the units of `requested`.
        requested: levels to find.
        variable: name of the variable, for error messages.
        units: units of the levels, for error messages.
        origin: name of the file, for error messages.

    Raises:
        DataError: if levels are missing; the message lists the missing levels and the levels of the file.
    """
    # Collect all missing levels for one message.
    rows = []
    missing_levels = []
    for level in requested:
        distances = np.abs(available - level)
        if distances.min() <= _LEVEL_TOLERANCE * level:
            rows.append(int(distances.argmin()))
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
