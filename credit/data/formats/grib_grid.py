"""Grid of a GRIB message: rows and columns of a latitude-longitude grid, or the reason why it cannot be used."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_REGULAR = ("regular_ll", "regular_gg")
_REDUCED = ("reduced_gg", "reduced_ll")


@dataclass(frozen=True)
class GribGrid:
    """Latitudes and longitudes of the values of a message.

    Attributes:
        name: type and size, such as ``regular_ll 181x360``.
        lat: (H,) degrees north, from north to south.
        lon: (W,) degrees east, ascending.
        order: (H * W,) index in the message of each point of (lat, lon); None if the message has them in this order.
        problem: reason why the grid cannot be used, and what to do, as a text that follows the name of a variable;
            None if it can be used.
    """

    name: str
    lat: np.ndarray = field(default_factory=lambda: np.empty(0))
    lon: np.ndarray = field(default_factory=lambda: np.empty(0))
    order: np.ndarray | None = None
    problem: str | None = None


def read_grid(handle: int) -> GribGrid:
    """Return the grid of a message.

    Rows and columns are derived from the coordinates of all points, so that the scanning directions do not matter.
    """
    import eccodes

    grid_type = eccodes.codes_get(handle, "gridType", str)
    if grid_type not in _REGULAR:
        return GribGrid(grid_type, problem=_describe_unsupported(grid_type))
    try:
        lat_of_point = eccodes.codes_get_array(handle, "latitudes", float)
        lon_of_point = eccodes.codes_get_array(handle, "longitudes", float)
    except eccodes.CodesInternalError as error:
        return GribGrid(grid_type, problem=f"is on a grid whose coordinates ecCodes cannot compute ({error})")
    lat = np.unique(lat_of_point)[::-1]
    lon = np.unique(lon_of_point)
    name = f"{grid_type} {len(lat)}x{len(lon)}"
    if len(lat) * len(lon) != len(lat_of_point):
        return GribGrid(name, problem=f"has {len(lat_of_point)} points, which are not {len(lat)} rows of {len(lon)}")
    if _get_flag(handle, "alternativeRowScanning"):
        # Every second line runs backwards, but ecCodes computes coordinates as if it did not.
        line_length = len(lat) if _get_flag(handle, "jPointsAreConsecutive") else len(lon)
        scan_order = np.arange(len(lat_of_point)).reshape(-1, line_length)
        scan_order[1::2] = scan_order[1::2, ::-1]
        lat_of_point = lat_of_point[scan_order.ravel()]
        lon_of_point = lon_of_point[scan_order.ravel()]
    order = np.lexsort((lon_of_point, -lat_of_point))
    is_in_order = np.array_equal(order, np.arange(len(order)))
    return GribGrid(name, lat, lon, None if is_in_order else order)


def _get_flag(handle: int, key: str) -> bool:
    import eccodes

    return bool(eccodes.codes_is_defined(handle, key) and eccodes.codes_get(handle, key, int))


def _describe_unsupported(grid_type: str) -> str:
    if grid_type in _REDUCED:
        return (
            f"is on a reduced grid ({grid_type}), whose rows have fewer points towards the poles; make them equally "
            "long, for example with cdo setgridtype,regular IN OUT, or ask the archive for a regular grid (MARS, CDS: "
            "grid=1/1)"
        )
    if grid_type == "sh":
        return (
            "is given as spherical harmonics, not as values on a grid; transform it, for example with cdo sp2gpl IN "
            "OUT, or ask the archive for a regular grid (MARS, CDS: grid=1/1)"
        )
    return (
        f"is on a grid of the type {grid_type}; only global latitude-longitude and regular Gaussian grids can be used: "
        "interpolate it, for example with cdo remapbil,r360x181 IN OUT"
    )
