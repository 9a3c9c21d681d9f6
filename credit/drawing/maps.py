"""Maps in the Equal Earth projection.

The projection preserves areas, so the area of an error on the map is proportional to its weight in a score. The
coastline is the line where the land fraction in the data is one half, so no coastline data need to be downloaded.

Shapes: H x W cells of the grid of the maps. Rows are ordered from north to south, columns from west to east.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from credit.channels import Channel
from credit.data.formats.regrid import Regridder
from credit.grid import LatLonGrid

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

FIELD_COLORMAP = "viridis"
ERROR_COLORMAP = "RdBu_r"
SPREAD_COLORMAP = "magma_r"
MISSING_COLOR = "#CCCCCC"
# Settings of a colour bar over the complete width of a figure, and of a colour bar below one of several panels.
WIDE_COLORBAR = {"orientation": "horizontal", "shrink": 0.7, "aspect": 40, "pad": 0.02, "extend": "both"}
_NARROW_COLORBAR = WIDE_COLORBAR | {"shrink": 0.85, "aspect": 25}
LAND_STANDARD_NAMES = ("land_area_fraction", "land_binary_mask")
# Degrees of the parallels and meridians on maps, and of the ticks of a latitude axis.
_PARALLELS = range(-60, 61, 30)
_MERIDIANS = range(-180, 181, 60)
_LATITUDE_TICKS = range(-90, 91, 30)
# Distance in degrees below which a column is treated as being on the dateline.
_DATELINE_TOLERANCE = 1e-7
_GRATICULE = {"color": "black", "linewidth": 0.4, "alpha": 0.25}
_LABEL = {"fontsize": 6.5, "color": "#444444", "textcoords": "offset points"}


def equal_earth(lon: np.ndarray, lat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the map coordinates of points in the Equal Earth projection.

    Source: Savric, Patterson and Jenny (2018), doi:10.1080/13658816.2018.1504949.

    Args:
        lon: longitudes in degrees east of the central meridian of the map, -180 to 180, of any shape.
        lat: latitudes in degrees north, of the same shape.

    Returns:
        Map coordinates x and y in units of the radius of the Earth, both with the shape of `lon`.
    """
    theta = np.arcsin(np.sqrt(3) / 2 * np.sin(np.deg2rad(lat)))
    # y is a polynomial of theta; x contains the derivative of this polynomial.
    y = np.zeros_like(theta)
    slope = np.zeros_like(theta)
    for power, factor in {1: 1.340264, 3: -0.081106, 7: 0.000893, 9: 0.003796}.items():
        y = y + factor * theta**power
        slope = slope + power * factor * theta ** (power - 1)
    x = 2 / np.sqrt(3) * np.deg2rad(lon) * np.cos(theta) / slope
    return x, y


@dataclass(frozen=True)
class MapBackground:
    """Grid and coastline of maps. The columns are rotated so that Greenwich is in the middle of the map.

    Attributes:
        grid: grid of H x W cells of the fields on the maps.
        land: (H, W) land fraction (0 to 1), whose 0.5 contour is the coastline; None for maps without a coastline.
    """

    grid: LatLonGrid
    land: np.ndarray | None

    @classmethod
    def build(cls, reader: FieldReader, grid: LatLonGrid | None = None) -> MapBackground:
        """Return the background for maps; it has a coastline if the data contain a land fraction.

        Args:
            reader: reader of the data.
            grid: grid of the maps; None for the grid of the data.
        """
        land = find_land_fraction(reader.channels.static_stored, reader.attributes, reader.static())
        # The land fraction is on the grid of the data, which may differ from the grid of the maps.
        if grid is not None and land is not None and reader.grid.describe_mismatch(grid):
            land = Regridder(reader.grid, grid, "conservative").apply(land)
        return cls(grid or reader.grid, land)

    @cached_property
    def column_order(self) -> np.ndarray:
        """(W,) indices of the columns of the grid from west to east on the map, starting at the dateline."""
        # `argmax` is the first column beyond the dateline. Without such a column, it is 0 and the order does not
        # change.
        first_column = int(self._is_beyond_dateline.argmax())
        return np.roll(np.arange(len(self.grid.lon)), -first_column)

    @cached_property
    def edges(self) -> np.ndarray:
        """(W + 1,) edges of the columns in `column_order`, in degrees east from about -180 to 180."""
        first = self.column_order[0]
        width = 360.0 / len(self.grid.lon)
        west = self.grid.lon[first]
        # A column beyond the dateline is plotted at the left edge, at about -180 degrees.
        if self._is_beyond_dateline[first]:
            west -= 360.0
        return west + width * (np.arange(len(self.column_order) + 1) - 0.5)

    @cached_property
    def _is_beyond_dateline(self) -> np.ndarray:
        """(W,) bool, True for columns whose eastern edge is east of the dateline; they are plotted on the left."""
        return self.grid.lon > 180.0 - 180.0 / len(self.grid.lon) + _DATELINE_TOLERANCE

    def project(self, lon: np.ndarray, lat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the coordinates x and y of points on the map, see `equal_earth`.

        Args:
            lon: longitudes in degrees east, between the first and the last value of `edges`.
            lat: latitudes in degrees north, of the same shape.
        """
        # The edge of the map is between two columns of the grid, so that no cell is divided.
        return equal_earth(lon - self.edges[0] - 180.0, lat)


def find_land_fraction(
    channels: Sequence[Channel], attributes: Mapping[str, Mapping[str, str]], static_CHW: np.ndarray
) -> np.ndarray | None:
    """Return the land fraction (H, W), from 0 to 1; None if the static fields do not contain it.

    Args:
        channels: channels of the static fields.
        attributes: name of a variable -> its attributes; the land fraction is found by its `standard_name`.
        static_CHW: static fields.
    """
    for number, channel in enumerate(channels):
        if attributes.get(channel.variable, {}).get("standard_name") in LAND_STANDARD_NAMES:
            return static_CHW[number]
    return None


def create_map_axes(figure: Figure, rows: int, columns: int) -> np.ndarray:
    """Return an array (rows, columns) of new axes for `draw_map`."""
    return figure.subplots(rows, columns, squeeze=False)


def draw_map(
    axis: Axes, field: np.ndarray, background: MapBackground, colormap: str, low: float, high: float
) -> QuadMesh:  # fmt: skip
    """Plot a field as a map with coastline, meridians and parallels; cells with NaN are grey.

    Args:
        axis: axis from `create_map_axes`.
        field: (H, W) field in any units.
        background: grid and coastline.
        colormap: name of a colour map of matplotlib.
        low: value of the first colour.
        high: value of the last colour.

    Returns:
        The plotted cells, for which a colour bar can be created.
    """
    colors = colormaps[colormap].with_extremes(bad=MISSING_COLOR)
    x, y = background.project(*np.meshgrid(background.edges, background.grid.lat_bounds))
    values = field[:, background.column_order]
    mesh = axis.pcolormesh(x, y, values, cmap=colors, vmin=low, vmax=high, rasterized=True)
    draw_background(axis, background)
    return mesh


def draw_background(axis: Axes, background: MapBackground) -> None:
    """Plot coastline, meridians, parallels and the outline of a map, and remove the frame of the axis.

    Args:
        axis: axis from `create_map_axes`.
        background: grid and coastline.
    """
    if background.land is not None:
        _draw_coastline(axis, background)
    _draw_graticule(axis, background)
    axis.set_axis_off()
    axis.set_aspect("equal")


def _draw_graticule(axis: Axes, background: MapBackground) -> None:
    """Plot the outline of the map, parallels with labels at the left edge, and meridians with labels below the map."""
    west = background.edges[0]
    east = background.edges[-1]
    longitudes = west + (east - west) * np.linspace(0, 1, 61)
    latitudes = np.linspace(-90, 90, 61)
    # Each line has 61 points, because parallels and meridians are curved.
    for parallel in _PARALLELS:
        x, y = background.project(longitudes, np.full(61, float(parallel)))
        axis.plot(x, y, **_GRATICULE)
        label = _format_degrees(parallel, "S", "N")
        axis.annotate(label, (x[0], y[0]), (-2, 0), ha="right", va="center", **_LABEL)
    for meridian in _MERIDIANS:
        # A meridian on the edge of the map would cover the outline.
        if west < meridian < east:
            x, y = background.project(np.full(61, float(meridian)), latitudes)
            axis.plot(x, y, **_GRATICULE)
            if abs(meridian) < 180:
                label = _format_degrees(meridian, "W", "E")
                axis.annotate(label, (x[0], y[0]), (0, -2), ha="center", va="top", **_LABEL)
    # The outline follows the western edge northwards, then the eastern edge southwards, and returns to its start.
    outline_lon = np.concatenate([np.full(61, west), np.full(61, east), [west]])
    outline_lat = np.concatenate([latitudes, latitudes[::-1], latitudes[:1]])
    axis.plot(*background.project(outline_lon, outline_lat), color="black", linewidth=0.6, clip_on=False)


def format_longitude_axis(axis: Axes, background: MapBackground) -> None:
    """Format the horizontal axis as longitudes in degrees, over the same range as a map, with a complete frame."""
    axis.set_xticks(_MERIDIANS, [_format_degrees(value, "W", "E") for value in _MERIDIANS])
    axis.set_xlim(background.edges[0], background.edges[-1])
    axis.spines[["top", "right"]].set_visible(True)


def format_latitude_axis(axis: Axes) -> None:
    """Format the vertical axis as latitudes in degrees, from pole to pole, with a complete frame."""
    axis.set_yticks(_LATITUDE_TICKS, [_format_degrees(value, "S", "N") for value in _LATITUDE_TICKS])
    axis.set_ylim(-90, 90)
    axis.spines[["top", "right"]].set_visible(True)


def _draw_coastline(axis: Axes, background: MapBackground) -> None:
    """Plot the coastline, which is the line where the land fraction is one half, up to the edges of the map."""
    land = background.land[:, background.column_order]
    edges = background.edges
    # Contours only extend to the centres of the outermost cells. The first and the last column are neighbours at the
    # edges of the map, so their mean is added as an additional column at both edges.
    land_at_edge = (land[:, :1] + land[:, -1:]) / 2
    lon = np.concatenate([edges[:1], (edges[:-1] + edges[1:]) / 2, edges[-1:]])
    x, y = background.project(*np.meshgrid(lon, background.grid.lat))
    land = np.hstack([land_at_edge, land, land_at_edge])
    axis.contour(x, y, land, [0.5], colors="black", linewidths=0.6)


def _format_degrees(value: int, negative: str, positive: str) -> str:
    """Return integer degrees as a string, such as 60°W for -60; 0 and 180 have no letter.

    Args:
        value: degrees.
        negative: letter for negative values, W or S.
        positive: letter for positive values, E or N.
    """
    if value % 180 == 0:
        return f"{abs(value)}°"
    side = negative if value < 0 else positive
    return f"{abs(value)}°{side}"


def add_narrow_colorbar(figure: Figure, mesh: QuadMesh, axis: Axes, label: str) -> None:
    """Add a colour bar below one of several panels; it has few ticks, so that the tick labels do not overlap."""
    figure.colorbar(mesh, ax=axis, label=label, ticks=MaxNLocator(5), **_NARROW_COLORBAR)


def compute_robust_range(fields: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the range of a colour scale: the 0.5 % and the 99.5 % quantile of all values of the fields.

    NaN is ignored. A range of length 0 is extended to length 1.

    Args:
        fields: fields, all of the same shape.
    """
    low, high = np.nanpercentile(np.stack(fields), [0.5, 99.5])
    # A constant field, such as precipitation in a dry region, needs a range above 0.
    if high <= low:
        high = low + 1.0
    return float(low), float(high)


def compute_symmetric_limit(errors: Sequence[np.ndarray]) -> float:
    """Return the upper limit of a symmetric colour scale for errors; 1 if all errors are 0.

    In each field, at most 0.5 % of the absolute errors exceed the limit. NaN is ignored.

    Args:
        errors: fields of errors, of any shape.
    """
    limits = [float(np.nanpercentile(np.abs(error), 99.5)) for error in errors]
    return max(limits) or 1.0
