"""GRIB2 keys of a global latitude-longitude or regular Gaussian grid."""

from __future__ import annotations

import numpy as np
from scipy.special import roots_legendre

from credit.errors import ConfigError
from credit.grid import LatLonGrid

# Latitudes that differ by less than this tolerance are treated as equal, as in `credit.grid`.
_TOLERANCE_DEGREES = 1e-3
# GRIB2 stores angles as integers in microdegrees.
_UNITS_PER_DEGREE = 10**6
# Code of the sphere that models use, with a radius of 6371229 m (code table 3.2).
_SPHERE = 6


def build_grid_keys(grid: LatLonGrid) -> dict[str, int | str | None]:
    """Return the ecCodes keys that describe a grid (section 3), in the order in which they must be set.

    The value None marks a key as missing.

    Rows run from north to south and columns eastward from the smallest longitude in 0..360, as in every `LatLonGrid`.
    Increments that are not a whole number of microdegrees, such as 360 / 1024 degrees, are marked as not given.
    Decoders then compute exact increments from the first and last point.

    Raises:
        ConfigError: if the rows are neither equally spaced nor the rows of a Gaussian grid.
    """
    num_rows, num_columns = grid.shape
    is_gaussian = _is_gaussian(grid.lat)
    spacing = (grid.lat[0] - grid.lat[-1]) / (num_rows - 1)
    if not is_gaussian:
        equal_rows = grid.lat[0] - np.arange(num_rows) * spacing
        if np.abs(grid.lat - equal_rows).max() > min(_TOLERANCE_DEGREES, 0.01 * spacing):
            raise ConfigError(
                f"inference.format: grib2: the {num_rows} latitudes of the grid are neither equally spaced nor the "
                "latitudes of a Gaussian grid; GRIB2 has no widely supported template for this grid; write netcdf or "
                "zarr"
            )
    keys: dict[str, int | str | None] = {
        "gridType": "regular_gg" if is_gaussian else "regular_ll",
        "shapeOfTheEarth": _SPHERE,
        "Ni": num_columns,
        "Nj": num_rows,
        "latitudeOfFirstGridPoint": _to_integer(grid.lat[0]),
        "longitudeOfFirstGridPoint": _to_integer(grid.lon[0]),
        "latitudeOfLastGridPoint": _to_integer(grid.lat[-1]),
        "longitudeOfLastGridPoint": _to_integer(grid.lon[-1]),
        "iDirectionIncrementGiven": 1,
        "jDirectionIncrementGiven": 1,
        "iDirectionIncrement": _find_increment(360.0 / num_columns, num_columns),
        "iScansNegatively": 0,
        "jScansPositively": 0,
        "jPointsAreConsecutive": 0,
        "alternativeRowScanning": 0,
    }
    if is_gaussian:
        keys["N"] = num_rows // 2
    else:
        keys["jDirectionIncrement"] = _find_increment(spacing, num_rows)
        if keys["jDirectionIncrement"] is None:
            keys["jDirectionIncrementGiven"] = 0
    if keys["iDirectionIncrement"] is None:
        keys["iDirectionIncrementGiven"] = 0
    return keys


def _is_gaussian(lat: np.ndarray) -> bool:
    """Return True if latitudes (in degrees, from north to south) are the rows of a regular Gaussian grid.

    The sines of Gaussian latitudes are the roots of the Legendre polynomial whose degree is the number of rows.
    """
    if len(lat) % 2:
        return False
    roots, _ = roots_legendre(len(lat))
    gaussian = np.rad2deg(np.arcsin(roots))[::-1]
    return bool(np.abs(lat - gaussian).max() < _TOLERANCE_DEGREES)


def _to_integer(degrees: float) -> int:
    """Return an angle as an integer in microdegrees."""
    return round(degrees * _UNITS_PER_DEGREE)


def _find_increment(spacing: float, num_points: int) -> int | None:
    """Return a grid spacing in microdegrees; None if its rounding moves the last point by a microdegree or more."""
    increment = _to_integer(spacing)
    error = abs(increment - spacing * _UNITS_PER_DEGREE) * num_points
    return increment if error < 1.0 else None
