"""Reads CF conventions: which coordinate is which, level units, and how a variable lies in its file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.data.formats.grib import UNREADABLE
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
# these look like one of ours by their units, but are something else
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
# room for float32 and for Pa against hPa, far below the distance of any two levels
_LEVEL_TOLERANCE = 1e-5
_HIGHEST_HPA = 1100.0
# files made from GRIB have the initial time as dimension time, and this beside it; both say that they are time
_VALID_TIME = "valid_time"
# of columns, of one time or several; packed values are float64 while they are unpacked
_FIELDS_AT_ONCE = 16


@dataclass(frozen=True)
class VariableLayout:
    """How one variable lies in one file.

    Attributes:
        name: the variable's name in the file.
        dims: role (``time``, ``level``, ``lat``, ``lon``) -> dimension; other dimensions have length 1.
        level_rows: for each wanted level its row in the file; None for a 2-D variable.
        column: how the run's levels are made of these rows; None where they are the run's.
        grid: of the file.
        orientation: brings the file's fields into the package's order.
        regridder: brings them to the run's grid; None where they are on it.
        conversion: to the units of the config; None where they are those of the fields.
        to_si: from the file's units to those of formulas; None where they are, or no formula needs it.
        times: (N,) int64 minutes of the positions along time; None where the file gives no time.
        window_bounds: (N, 2) int64 minutes of the time bounds, where the file gives them.
        attributes: units (converted), standard_name, long_name, cell_methods where given.
        packing_step: the step of packed integers in these units, 0 where the variable is not packed.
        chunk_times: how many times a chunk of the file spans, which are unpacked together; 1 without chunks.
        rules: what the values may be.
        where: the file and the variable, for messages.
        calendar: the calendar of `times`, for messages; None where no file has had a time yet.
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
    where: str
    calendar: Calendar | None

    def read(self, dataset: xr.Dataset, position: int | slice) -> np.ndarray:
        """Return fields on the run's grid and in its units, missing ones NaN.

        Args:
            dataset: the file.
            position: of one time, for (levels or 1, H, W), or of T times, for (T, levels or 1, H, W).

        Raises:
            DataError: for values that cannot be right, see `credit.data.formats.unit_checks`.
        """
        return self.to_run(self.orientation.apply(self._values(dataset, position)))

    def read_raw(self, dataset: xr.Dataset, position: int | slice) -> np.ndarray:
        """Return fields for formulas, ([T,] levels or 1, h, w), on the file's grid, in `to_si`'s units; see `read`."""
        rows = self.level_rows
        if rows is None or "level" not in self.dims:
            return self._raw(dataset, position)
        times = (position.stop - position.start,) if isinstance(position, slice) else ()
        chunk = dataset.variables[self.name].encoding.get("preferred_chunks", {}).get(self.dims["level"], 1)
        # a few fields at once are unpacked in the same memory; for all of them the system would give new memory
        at_once = -(-_FIELDS_AT_ONCE // (chunk * math.prod(times))) * chunk
        fields = np.empty((*times, len(rows), *self.grid.shape), dtype=np.float32)
        for first in range(0, len(rows), at_once):
            part = slice(first, first + at_once)
            fields[..., part, :, :] = self._raw(dataset, position, part)
        return fields

    def _raw(self, dataset: xr.Dataset, position: int | slice, levels: slice = slice(None)) -> np.ndarray:
        values = self.orientation.apply(self._values(dataset, position, levels))
        return values if self.to_si is None else self.to_si.apply(values)

    def to_run(self, fields: np.ndarray) -> np.ndarray:
        """Return fields of the file's grid (..., h, w) on the run's and in the units of the config."""
        if self.regridder is not None:
            fields = self.regridder.apply(fields)
        return fields if self.conversion is None else self.conversion.apply(fields)

    def _values(self, dataset: xr.Dataset, position: int | slice, levels: slice = slice(None)) -> np.ndarray:
        """Return values on some of the wanted levels as they lie in the file; each is checked here, once."""
        values, implausible = self.rules.apply(self._stored_values(dataset, position, levels), levels)
        if implausible is not None:
            raise DataError(self._describe(implausible, position))
        return values

    def _describe(self, implausible: Implausible, position: int | slice) -> str:
        """Return what is wrong with values, with their time and the place of the first."""
        levels = self.rules.levels
        when = "" if len(levels) == 1 and levels[0] is None else f", level {levels[implausible.row]:g}"
        if self.times is not None and self.calendar is not None:
            number = 0
            if "time" in self.dims:
                number = position.start + implausible.index[0] if isinstance(position, slice) else position
            when += f" at {self.calendar.format(self.times[number])}"
        row, column = np.argwhere(self.orientation.apply(implausible.cells))[0]
        place = f"latitude {self.grid.lat[row]:g}, longitude {self.grid.lon[column]:g}"
        return f"{self.where}{when}: {self.rules.describe(implausible, place)}"

    def _stored_values(self, dataset: xr.Dataset, position: int | slice, levels: slice) -> np.ndarray:
        variable = dataset.variables[self.name]
        level_rows = None if self.level_rows is None else self.level_rows[levels]
        index: dict[str, object] = {dim: 0 for dim in variable.dims if dim not in self.dims.values()}
        if "time" in self.dims:
            index[self.dims["time"]] = position
        on_levels = level_rows is not None and "level" in self.dims
        if on_levels:
            # file access wants increasing rows
            rows, inverse = np.unique(level_rows, return_inverse=True)
            index[self.dims["level"]] = rows
        part = variable.isel(index)
        order = (self.dims[role] for role in ("time", "level", "lat", "lon") if role in self.dims)
        values = part.transpose(*filter(part.dims.__contains__, order)).values
        values = values[..., inverse, :, :] if on_levels else values[..., None, :, :]
        return values[None] if isinstance(position, slice) and "time" not in self.dims else values


class Coordinates:
    """The coordinates of a file by role.

    Args:
        dataset: the file, times not decoded.
    """

    def __init__(self, dataset: xr.Dataset) -> None:
        self._dataset = dataset
        self.of_dim: dict[str, tuple[str, str]] = {}  # dimension -> role, coordinate's name
        self.scalar: dict[str, str] = {}  # role -> coordinate's name
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
        """Whether `name` is the coordinate of `dim` rather than what was found before."""
        return dim not in self.of_dim or name == _VALID_TIME or (name == dim and self.of_dim[dim][1] != _VALID_TIME)

    def roles(self, name: str, where: str, level_units: str | None = None) -> dict[str, str]:
        """Return role -> dimension of a variable.

        Args:
            name: the variable.
            where: the file, for messages.
            level_units: ``data.level_units`` where the variable is wanted on levels, else None.

        Raises:
            DataError: where a dimension is none of time, level, latitude and longitude, or the last two are lacking.
        """
        variable = self._dataset.variables[name]
        if UNREADABLE in variable.encoding:
            raise DataError(f"{where}: {name} {variable.encoding[UNREADABLE].describe(level_units)}")
        for used in (name, *(coordinate for _, coordinate in self.of_dim.values()), *self.scalar.values()):
            require_packing(used, self._dataset.variables[used].encoding, where)
        dims_of_role: dict[str, list[str]] = {}
        unknown = []
        for dim in variable.dims:
            role = self.of_dim.get(dim, (None, None))[0]
            if role is not None:
                dims_of_role.setdefault(role, []).append(dim)
            elif variable.sizes[dim] > 1:
                unknown.append(dim)
        found = {role: self._choose_dim(name, role, dims, where) for role, dims in dims_of_role.items()}
        if not {"lat", "lon"} <= set(found):
            dims = ", ".join(map(str, variable.dims))
            raise DataError(
                f"{where}: {name} has no latitude and longitude (its dimensions are {dims}); only fields on a "
                "latitude-longitude grid with 1-D coordinates can be read: interpolate the file to one first, or add "
                "its coordinates"
            )
        if unknown:
            raise DataError(
                f"{where}: dimension {unknown[0]} ({variable.sizes[unknown[0]]}) of {name} "
                f"{self._describe_unknown(unknown[0])}"
            )
        return found

    def _choose_dim(self, name: str, role: str, dims: Sequence[str], where: str) -> str:
        """Return the dimension that stands for a role.

        Of several, all but one must have length 1, as the time at which a forecast began has beside its valid times.
        """
        sizes = self._dataset.variables[name].sizes
        longer = [dim for dim in dims if sizes[dim] > 1]
        if len(longer) > 1:
            listed = " and ".join(f"{dim} ({sizes[dim]})" for dim in longer)
            raise DataError(
                f"{where}: dimensions {listed} of {name} are all {_ROLE_WORDS[role]} by their coordinates; correct the "
                f"attributes of what is not, or {self._how_to_choose(longer[-1])}"
            )
        return (longer or dims)[0]

    def _describe_unknown(self, dim: str) -> str:
        """Return why a dimension has no role, and a way out, in words that follow its name."""
        coordinate = self._dataset.variables.get(dim)
        if coordinate is None:
            return (
                "has no coordinate variable, so its values are not known; add the coordinate to the file, or cut the "
                "file to one position"
            )
        standard_name = coordinate.attrs.get("standard_name")
        if standard_name in _OTHER_STANDARD_NAMES:
            return (
                f"has the standard_name {standard_name}, which is none of time, level, latitude and longitude; correct "
                f"it in the file, or {self._how_to_choose(dim)}"
            )
        is_numeric = coordinate.ndim == 1 and coordinate.dtype.kind in "iuf"
        if not is_numeric and dim.lower() in _NAMES["time"]:
            return (
                "has a coordinate that holds text; a time axis holds numbers whose units are, for example, hours since "
                f"a date: rewrite it so, or {self._how_to_choose(dim)}"
            )
        return f"is none of time, level, latitude and longitude; {self._how_to_choose(dim)}"

    def _how_to_choose(self, dim: str) -> str:
        values = self._dataset.variables[dim].values
        return f"choose one with data.sources.N.select: {{{dim}: {listing(values[:1])}}}; it has {listing(values)}"

    def values(self, dim: str) -> np.ndarray:
        """Return the coordinate of a dimension."""
        return self._dataset.variables[self.of_dim[dim][1]].values

    def grid(self, lat: str, lon: str, where: str) -> tuple[LatLonGrid, AxisOrder]:
        """Return the grid of two dimensions and what brings fields on them into its order."""
        bounds = self.bounds(self.of_dim[lat][1])
        return LatLonGrid.from_coords(self.values(lat), self.values(lon), bounds, where)

    def bounds(self, name: str) -> np.ndarray | None:
        """Return the bounds (N, 2) of a coordinate where the file has them."""
        bounds = self._dataset.variables[name].attrs.get("bounds")
        return self._dataset.variables[bounds].values if bounds in self._dataset.variables else None


def role_of(name: str, variable: xr.Variable) -> str | None:
    """Return what a coordinate stands for by standard_name, else units, axis or positive, else usual names."""
    attributes = variable.attrs
    standard = attributes.get("standard_name")
    if standard in _STANDARD_NAMES:
        return _STANDARD_NAMES[standard]
    if standard in _OTHER_STANDARD_NAMES or variable.dtype.kind not in "iuf":
        return None
    units = str(attributes.get("units", "")).lower()
    if units.replace("degrees", "degree") in _DEGREES:
        return _DEGREES[units.replace("degrees", "degree")]
    if " since " in units:
        return "time"
    downward = "Z" if str(attributes.get("positive", "")).lower() == "down" else None
    axis = attributes.get("axis", downward)
    # metres along X and Y are a map projection's
    if axis in _AXES and units in ("", "1", "degree", "degrees", "level", *PRESSURE_IN_HPA):
        return _AXES[axis]
    return next((role for role, names in _NAMES.items() if name.lower() in names), None)


def is_vector_component(choice: str, standard_name: str) -> bool:
    """Whether a variable is a component of a vector, by ``data.variable_options.NAME.vector`` and, for ``auto``, by "
    "its name."""
    return choice == "yes" or (choice == "auto" and ("eastward" in standard_name or "northward" in standard_name))


def level_values(coordinate: xr.Variable, name: str, wanted_units: str, where: str) -> np.ndarray:
    """Return a level coordinate in the config's units, float64.

    Without units, values up to 1100 are taken as hPa, others as Pa.

    Raises:
        DataError: where the file has pressures and the config model levels, or the other way round.
    """
    values = np.atleast_1d(np.asarray(coordinate.values, dtype=np.float64))
    units = str(coordinate.attrs.get("units", "")).strip()
    if not units and wanted_units != "model_level":
        units = "hPa" if values.max() <= _HIGHEST_HPA else "Pa"
    factor = PRESSURE_IN_HPA.get(units.lower())
    if wanted_units == "model_level":
        if factor is not None:
            raise DataError(f"{where}: {name} is in {units}, but data.level_units is model_level; use hPa or Pa")
        return values
    if factor is None:
        raise DataError(
            f'{where}: {name} is in "{units}", not in units of pressure; if these are model levels, set '
            "data.level_units: model_level"
        )
    return values * factor * (100.0 if wanted_units == "Pa" else 1.0)


def match_levels(have: np.ndarray, wanted: Sequence[float], variable: str, units: str, where: str) -> tuple[int, ...]:
    """Return the row of each wanted level; equal within rounding, never the nearest.

    Raises:
        DataError: naming the levels that are missing and those that there are.
    """
    rows, missing = [], []
    for level in wanted:
        gap = np.abs(have - level)
        if gap.min() <= _LEVEL_TOLERANCE * level:
            rows.append(int(gap.argmin()))
        else:
            missing.append(level)
    if missing:
        raise DataError(
            f"{where}: {variable} has no level {', '.join(f'{level:g}' for level in missing)} {units}; it has "
            f"{', '.join(f'{level:g}' for level in have)} {units}; change data.levels or "
            f"data.variable_options.{variable}.levels"
        )
    return tuple(rows)
