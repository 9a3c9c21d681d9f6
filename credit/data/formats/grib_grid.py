"""The grid of a GRIB message: rows and columns of a latitude-longitude grid, or why it is none."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_REGULAR = ("regular_ll", "regular_gg")
_REDUCED = ("reduced_gg", "reduced_ll")


@dataclass(frozen=True)
class GribGrid:
    """Where the values of a message lie.

    Attributes:
        name: the kind and size, such as ``regular_ll 181x360``.
        lat: (H,) degrees north, from north to south.
        lon: (W,) degrees east, ascending.
        order: (H * W,) the point of the message for each point of (lat, lon); None where they follow each other so.
        problem: why the grid cannot be used, and the way out; None where it can.
    """

    name: str
    lat: np.ndarray = field(default_factory=lambda: np.empty(0))
    lon: np.ndarray = field(default_factory=lambda: np.empty(0))
    order: np.ndarray | None = None
    problem: str | None = None


def read_grid(handle: int) -> GribGrid:
    """Return the grid of a message.

    Rows and columns come from the place of every point, so that directions and order of scanning need no care.
    """
    import eccodes

    kind = eccodes.codes_get(handle, "gridType", str)
    if kind not in _REGULAR:
        return GribGrid(kind, problem=_why_not(kind))
    try:
        lat_of_point = eccodes.codes_get_array(handle, "latitudes", float)
        lon_of_point = eccodes.codes_get_array(handle, "longitudes", float)
    except eccodes.CodesInternalError as error:
        return GribGrid(kind, problem=f"is on a grid whose points ecCodes cannot place ({error})")
    lat, lon = np.unique(lat_of_point)[::-1], np.unique(lon_of_point)
    name = f"{kind} {len(lat)}x{len(lon)}"
    if len(lat) * len(lon) != len(lat_of_point):
        return GribGrid(name, problem=f"has {len(lat_of_point)} points, which are not {len(lat)} rows of {len(lon)}")
    if _get_flag(handle, "alternativeRowScanning"):
        # every other line runs backwards, which ecCodes leaves out of account
        line = len(lat) if _get_flag(handle, "jPointsAreConsecutive") else len(lon)
        there_and_back = np.arange(len(lat_of_point)).reshape(-1, line)
        there_and_back[1::2] = there_and_back[1::2, ::-1]
        lat_of_point, lon_of_point = lat_of_point[there_and_back.ravel()], lon_of_point[there_and_back.ravel()]
    order = np.lexsort((lon_of_point, -lat_of_point))
    return GribGrid(name, lat, lon, None if np.array_equal(order, np.arange(len(order))) else order)


def _get_flag(handle: int, key: str) -> bool:
    import eccodes

    return bool(eccodes.codes_is_defined(handle, key) and eccodes.codes_get(handle, key, int))


def _why_not(kind: str) -> str:
    if kind in _REDUCED:
        return (
            f"is on a reduced grid ({kind}), whose rows have fewer points towards the poles; make them equally long, "
            "for example with cdo setgridtype,regular IN OUT, or ask the archive for a regular grid (MARS, CDS: "
            "grid=1/1)"
        )
    if kind == "sh":
        return (
            "is given as spherical harmonics, not as values on a grid; transform it, for example with cdo sp2gpl IN "
            "OUT, or ask the archive for a regular grid (MARS, CDS: grid=1/1)"
        )
    return (
        f"is on a grid of the kind {kind}; only global latitude-longitude and regular Gaussian grids can be used: "
        "interpolate it, for example with cdo remapbil,r360x181 IN OUT"
    )
