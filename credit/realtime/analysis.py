"""Writing of the analysis of one time to a netCDF file, on the grid of the analysis and in the units of the model.

`credit.data.sources` reads these files like any other source, and regrids them to the grid of the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import netCDF4
import numpy as np

from credit.calendar import TIME_UNITS
from credit.data.formats.grib.messages import GribGrid
from credit.errors import DataError
from credit.grid import LatLonGrid
from credit.realtime.fetch.decoding import DecodedField, find_field_conversion
from credit.realtime.fetch.records import RecordRequest
from credit.utils.atomic import atomic_write

_CELLS = ("latitude", "longitude")
_LEVEL_ATTRIBUTES = {"units": "hPa", "standard_name": "air_pressure", "positive": "down"}
_TIME_ATTRIBUTES = {"units": TIME_UNITS, "calendar": "standard", "standard_name": "time"}
# Name of the global attribute that identifies the content: origin, and channels with their units.
_CONTENT = "content"
# Attributes of a model variable that are copied to the file.
_COPIED_ATTRIBUTES = ("units", "standard_name", "long_name")


@dataclass(frozen=True)
class AnalysisContent:
    """Description of the content of an analysis file.

    Attributes:
        minutes: time of the analysis in minutes since 1900.
        origin: address of the GRIB file.
        requests: requested records, in the order of the channels.
        attributes: variable -> its attributes in the model; the file has the same ``units``.
    """

    minutes: int
    origin: str
    requests: Sequence[RecordRequest]
    attributes: Mapping[str, Mapping[str, str]]

    def units_of(self, variable: str) -> str:
        """Return the units of a variable in the model; empty if the variable has no units."""
        return self.attributes.get(variable, {}).get("units", "")

    def identity(self) -> str:
        """Return a string that identifies the content: it is different for analyses with different content."""
        channels = {request.describe(): self.units_of(request.variable) for request in self.requests}
        return json.dumps({"origin": self.origin, "channels": channels})

    def digest(self) -> str:
        """Return a short hash of `identity`, for the name of a folder."""
        return hashlib.sha256(self.identity().encode()).hexdigest()[:8]


def has_analysis(path: Path, content: AnalysisContent) -> bool:
    """Return True if the file `path` exists and its content is `content`."""
    if not path.exists():
        return False
    with netCDF4.Dataset(path) as file:
        return getattr(file, _CONTENT, "") == content.identity()


def write_analysis(path: Path, content: AnalysisContent, read: Callable[[RecordRequest], DecodedField]) -> None:
    """Write the file of an analysis atomically, with only one field in memory at a time.

    Args:
        path: file to write.
        content: description of the content.
        read: function that decodes a record in the units of its message.

    Raises:
        DataError: if a record cannot be converted to the units of the model, or its grid differs from the first record.
    """
    atomic_write(path, lambda temporary: _write(temporary, content, read))


def _write(path: Path, content: AnalysisContent, read: Callable[[RecordRequest], DecodedField]) -> None:
    """Write the fields of an analysis to `path`; for arguments and errors see `write_analysis`."""
    levels_of: dict[str, list[float]] = {}
    for request in content.requests:
        if request.level is not None:
            levels_of.setdefault(request.variable, []).append(request.level)
    grid: GribGrid | None = None
    with netCDF4.Dataset(path, "w") as file:
        file.setncattr(_CONTENT, content.identity())
        for request in content.requests:
            field = read(request)
            if grid is None:
                grid = field.grid
                _create_coordinates(file, content.minutes, grid)
            elif not (np.array_equal(grid.lat, field.grid.lat) and np.array_equal(grid.lon, field.grid.lon)):
                raise DataError(f"{request.describe()} is on the grid {field.grid.name}, but others are on {grid.name}")
            levels = levels_of.get(request.variable)
            if request.variable not in file.variables:
                _create_variable(file, request.variable, levels, content)
            conversion = find_field_conversion(field.units, content.units_of(request.variable), request)
            values_HW = field.values_HW if conversion is None else conversion.apply(field.values_HW)
            if levels is None:
                file.variables[request.variable][0] = values_HW
            else:
                file.variables[request.variable][0, levels.index(request.level)] = values_HW


def write_grid(path: Path, grid: LatLonGrid) -> None:
    """Write a netCDF file with the coordinates of a grid, for ``data.grid.like``."""

    def write(temporary: Path) -> None:
        with netCDF4.Dataset(temporary, "w") as file:
            for name, values, units in (
                ("latitude", grid.lat, "degrees_north"),
                ("longitude", grid.lon, "degrees_east"),
            ):
                _create_coordinate(file, name, values, {"units": units, "standard_name": name})
            file.variables["latitude"].bounds = "latitude_bounds"
            file.createDimension("edge", 2)
            bounds = file.createVariable("latitude_bounds", "f8", ("latitude", "edge"))
            bounds[:] = np.stack([grid.lat_bounds[:-1], grid.lat_bounds[1:]], axis=1)
            # A file is accepted as a data file only if it contains a field.
            cell_area = file.createVariable("cell_area", "f8", _CELLS)
            cell_area.units = "1"
            cell_area[:] = grid.area_weights()

    atomic_write(path, write)


def _create_coordinates(file: netCDF4.Dataset, minutes: int, grid: GribGrid) -> None:
    """Create the coordinates time, latitude and longitude of an analysis file."""
    _create_coordinate(file, "time", np.array([minutes]), _TIME_ATTRIBUTES)
    _create_coordinate(file, "latitude", grid.lat, {"units": "degrees_north", "standard_name": "latitude"})
    _create_coordinate(file, "longitude", grid.lon, {"units": "degrees_east", "standard_name": "longitude"})


def _create_coordinate(file: netCDF4.Dataset, name: str, values: np.ndarray, attributes: Mapping[str, str]) -> None:
    """Create a dimension and its coordinate variable."""
    file.createDimension(name, len(values))
    coordinate = file.createVariable(name, values.dtype, (name,))
    coordinate.setncatts(attributes)
    coordinate[:] = values


def _create_variable(
    file: netCDF4.Dataset, name: str, levels: Sequence[float] | None, content: AnalysisContent
) -> None:
    """Create a variable of the model; a variable on levels has a separate level dimension."""
    dims: tuple[str, ...] = ("time", *_CELLS)
    if levels is not None:
        level_dim = f"level_{name}"
        _create_coordinate(file, level_dim, np.array(levels), _LEVEL_ATTRIBUTES)
        dims = ("time", level_dim, *_CELLS)
    variable = file.createVariable(name, "f4", dims, fill_value=np.float32(np.nan))
    attributes = content.attributes.get(name, {})
    variable.setncatts({key: attributes[key] for key in _COPIED_ATTRIBUTES if attributes.get(key)})
