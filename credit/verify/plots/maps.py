"""Maps in the Equal Earth projection.

The projection preserves areas, so the area of an error on the map is proportional to its weight in a score. The
coastline is the line where the land fraction in the data is one half, so nothing needs to be downloaded.

Shapes: H x W cells of the grid of the maps; rows run from north to south, columns eastward.
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

from credit.calendar import Calendar
from credit.data.formats.regrid import Regridder
from credit.grid import LatLonGrid
from credit.verify.plots.style import add_title, display_units, new_figure

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

FIELD_COLORMAP = "viridis"
ERROR_COLORMAP = "RdBu_r"
SPREAD_COLORMAP = "magma_r"
MISSING_COLOR = "#CCCCCC"
# The spread is drawn in the colour scale of the error unless it is smaller than this fraction of the error.
_COMMON_SCALE = 1 / 3
# Colour bars of figures over the whole width, and below one of several panels.
WIDE_COLORBAR = {"orientation": "horizontal", "shrink": 0.7, "aspect": 40, "pad": 0.02, "extend": "both"}
_NARROW_COLORBAR = WIDE_COLORBAR | {"shrink": 0.85, "aspect": 25}
_LAND_STANDARD_NAMES = ("land_area_fraction", "land_binary_mask")
# Degrees of the lines of maps, and of the ticks of a latitude axis.
_PARALLELS = range(-60, 61, 30)
_MERIDIANS = range(-180, 181, 60)
_LATITUDE_TICKS = range(-90, 91, 30)
# Columns this near to the dateline lie on it, in degrees.
_DATELINE_TOLERANCE = 1e-7
_GRATICULE = {"color": "black", "linewidth": 0.4, "alpha": 0.25}
_LABEL = {"fontsize": 6.5, "color": "#444444", "textcoords": "offset points"}


def equal_earth(lon: np.ndarray, lat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the map coordinates of points in the Equal Earth projection.

    Savric, Patterson and Jenny (2018), doi:10.1080/13658816.2018.1504949.

    Args:
        lon: longitudes in degrees east of the central meridian of the map, -180 to 180, of any shape.
        lat: latitudes in degrees north, of the same shape.

    Returns:
        x and y in units of the Earth's radius, each of the shape of `lon`.
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
    """Grid and coastline of maps, whose columns are rotated so that Greenwich is in the middle.

    Attributes:
        grid: grid of H x W cells of the fields on the maps.
        land: (H, W) land fraction (0 to 1) from which the coastline is drawn; None draws no coastline.
    """

    grid: LatLonGrid
    land: np.ndarray | None

    @classmethod
    def build(cls, reader: FieldReader, grid: LatLonGrid | None = None) -> MapBackground:
        """Return the background with the coastline from the land fraction of the data, if the data have one.

        Args:
            reader: reader of the data.
            grid: grid of the maps; None for the grid of the data.
        """
        land = _read_land_fraction(reader)
        # The land fraction is on the grid of the data, which may differ from that of the maps.
        if grid is not None and land is not None and reader.grid.describe_mismatch(grid):
            land = Regridder(reader.grid, grid, "conservative").apply(land)
        return cls(grid or reader.grid, land)

    @cached_property
    def column_order(self) -> np.ndarray:
        """(W,) indices of the columns of the grid from west to east on the map, starting at the dateline."""
        # `argmax` is the first column beyond the dateline; it is 0, and nothing moves, if there is none.
        first_column = int(self._is_beyond_dateline.argmax())
        return np.roll(np.arange(len(self.grid.lon)), -first_column)

    @cached_property
    def edges(self) -> np.ndarray:
        """(W + 1,) edges of the columns in `column_order`, in degrees east from about -180 to 180."""
        first = self.column_order[0]
        width = 360.0 / len(self.grid.lon)
        west = self.grid.lon[first]
        # A column beyond the dateline is drawn at the left edge, at about -180 degrees.
        if self._is_beyond_dateline[first]:
            west -= 360.0
        return west + width * (np.arange(len(self.column_order) + 1) - 0.5)

    @cached_property
    def _is_beyond_dateline(self) -> np.ndarray:
        """(W,) bool, True for columns whose eastern edge lies east of the dateline, so they are drawn on the left."""
        return self.grid.lon > 180.0 - 180.0 / len(self.grid.lon) + _DATELINE_TOLERANCE

    def project(self, lon: np.ndarray, lat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the coordinates x and y of points on the map, see `equal_earth`.

        Args:
            lon: longitudes in degrees east, between the first and the last of `edges`.
            lat: latitudes in degrees north, of the same shape.
        """
        # The map is cut between two columns of the grid, so that no cell is cut.
        return equal_earth(lon - self.edges[0] - 180.0, lat)


def _read_land_fraction(reader: FieldReader) -> np.ndarray | None:
    """Return the land fraction, (H, W) from 0 to 1; None if it is not among the static fields of the data."""
    for number, channel in enumerate(reader.channels.static_stored):
        if reader.attributes.get(channel.variable, {}).get("standard_name") in _LAND_STANDARD_NAMES:
            return reader.static()[number]
    return None


def create_map_axes(figure: Figure, rows: int, columns: int) -> np.ndarray:
    """Return an array (rows, columns) of new axes for `draw_map`."""
    return figure.subplots(rows, columns, squeeze=False)


def draw_map(
    axis: Axes, field: np.ndarray, background: MapBackground, colormap: str, low: float, high: float
) -> QuadMesh:  # fmt: skip
    """Draw a field as a map with coastline, meridians and parallels; cells with NaN are grey.

    Args:
        axis: axis from `create_map_axes`.
        field: (H, W) field in any units.
        background: grid and coastline.
        colormap: name of a colour map of matplotlib.
        low: value of the first colour.
        high: value of the last colour.

    Returns:
        The drawn cells, from which a colour bar can be made.
    """
    colors = colormaps[colormap].with_extremes(bad=MISSING_COLOR)
    x, y = background.project(*np.meshgrid(background.edges, background.grid.lat_bounds))
    values = field[:, background.column_order]
    mesh = axis.pcolormesh(x, y, values, cmap=colors, vmin=low, vmax=high, rasterized=True)
    if background.land is not None:
        _draw_coastline(axis, background)
    _draw_graticule(axis, background)
    axis.set_axis_off()
    axis.set_aspect("equal")
    return mesh


def _draw_graticule(axis: Axes, background: MapBackground) -> None:
    """Draw the outline of the map, and parallels and meridians with their degrees at the left and lower edge."""
    west = background.edges[0]
    east = background.edges[-1]
    longitudes = west + (east - west) * np.linspace(0, 1, 61)
    latitudes = np.linspace(-90, 90, 61)
    # Each line is drawn through 61 points, as parallels and meridians are curved.
    for parallel in _PARALLELS:
        x, y = background.project(longitudes, np.full(61, float(parallel)))
        axis.plot(x, y, **_GRATICULE)
        label = _format_degrees(parallel, "S", "N")
        axis.annotate(label, (x[0], y[0]), (-2, 0), ha="right", va="center", **_LABEL)
    for meridian in _MERIDIANS:
        # A meridian on the edge would be drawn over the outline.
        if west < meridian < east:
            x, y = background.project(np.full(61, float(meridian)), latitudes)
            axis.plot(x, y, **_GRATICULE)
            if abs(meridian) < 180:
                label = _format_degrees(meridian, "W", "E")
                axis.annotate(label, (x[0], y[0]), (0, -2), ha="center", va="top", **_LABEL)
    # The outline runs north along the western edge, then south along the eastern edge, and closes at its start.
    outline_lon = np.concatenate([np.full(61, west), np.full(61, east), [west]])
    outline_lat = np.concatenate([latitudes, latitudes[::-1], latitudes[:1]])
    axis.plot(*background.project(outline_lon, outline_lat), color="black", linewidth=0.6, clip_on=False)


def format_longitude_axis(axis: Axes, background: MapBackground) -> None:
    """Format the horizontal axis as longitudes in degrees, over the same range as a map, and close the frame."""
    axis.set_xticks(_MERIDIANS, [_format_degrees(value, "W", "E") for value in _MERIDIANS])
    axis.set_xlim(background.edges[0], background.edges[-1])
    axis.spines[["top", "right"]].set_visible(True)


def format_latitude_axis(axis: Axes) -> None:
    """Format the vertical axis as latitudes in degrees, from pole to pole, and close the frame."""
    axis.set_yticks(_LATITUDE_TICKS, [_format_degrees(value, "S", "N") for value in _LATITUDE_TICKS])
    axis.set_ylim(-90, 90)
    axis.spines[["top", "right"]].set_visible(True)


def _draw_coastline(axis: Axes, background: MapBackground) -> None:
    """Draw the line where the land fraction is one half, up to the edges of the map."""
    land = background.land[:, background.column_order]
    edges = background.edges
    # The first and the last column meet at the edges of the map. Contours run between the centres of cells, so their
    # mean is added at both edges.
    land_at_edge = (land[:, :1] + land[:, -1:]) / 2
    lon = np.concatenate([edges[:1], (edges[:-1] + edges[1:]) / 2, edges[-1:]])
    x, y = background.project(*np.meshgrid(lon, background.grid.lat))
    land = np.hstack([land_at_edge, land, land_at_edge])
    axis.contour(x, y, land, [0.5], colors="black", linewidths=0.6)


def _format_degrees(value: int, negative: str, positive: str) -> str:
    """Return whole degrees as text, such as 60°W for -60; 0 and 180 have no letter.

    Args:
        value: degrees.
        negative: letter for negative values, W or S.
        positive: letter for positive values, E or N.
    """
    if value % 180 == 0:
        return f"{abs(value)}°"
    side = negative if value < 0 else positive
    return f"{abs(value)}°{side}"


def plot_maps(
    channel: str, units: str, fields: Mapping[int, Sequence[np.ndarray]], initial_time: int, calendar: Calendar,
    background: MapBackground, forecast_name: str = "Forecast",
) -> Figure:  # fmt: skip
    """Return the figure with maps of truth, forecast, error and, if it is given, spread of one case.

    There is a row for each lead time. Truth and forecast share one colour scale. Each error has its own, because errors
    of the first day would be invisible in the scale of later ones.

    Args:
        channel: name of the channel.
        units: units of the fields, which `credit.verify.plots.style.display_units` converts to those of the figure.
        fields: lead time in minutes -> (truth, forecast) or (truth, ensemble mean, spread), each (H, W).
        initial_time: initial time in minutes.
        calendar: calendar of the times.
        background: grid and coastline.
        forecast_name: name of the forecast for the title.
    """
    # Truth and forecast have one colour scale, in the units of figures.
    factor, units = display_units(units)
    scaled_fields = {}
    truths_and_forecasts = []
    for lead, lead_fields in fields.items():
        scaled_fields[lead] = [factor * field for field in lead_fields]
        truths_and_forecasts += scaled_fields[lead][:2]
    low, high = robust_range(truths_and_forecasts)
    columns = 1 + len(next(iter(fields.values())))
    has_spread = columns == 4
    # Maps are twice as wide as high; each error and spread has a colour bar beside it.
    figure = new_figure(11.0 / 3 * columns + 0.8 * (columns - 1), 2.05 * len(fields) + 0.45)
    axes = create_map_axes(figure, len(fields), columns)
    forecast_kind = "Ensemble mean" if has_spread else "Forecast"
    area = background.grid.area_weights()
    for row, (lead, lead_fields) in enumerate(scaled_fields.items()):
        truth, forecast = lead_fields[:2]
        field_mesh = draw_map(axes[row, 0], truth, background, FIELD_COLORMAP, low, high)
        draw_map(axes[row, 1], forecast, background, FIELD_COLORMAP, low, high)
        axes[row, 0].set_title(f"Truth, {calendar.format(initial_time + lead).replace('T', ' ')} UTC")
        axes[row, 1].set_title(f"{forecast_kind} at {lead / 60:g} h")
        error = forecast - truth
        error_limit = symmetric_limit([error])
        error_mesh = draw_map(axes[row, 2], error, background, ERROR_COLORMAP, -error_limit, error_limit)
        axes[row, 2].set_title(f"Error, RMSE {_root_mean_square(error, area):.3g} {units}")
        _add_side_colorbar(figure, error_mesh, axes[row, 2], f"forecast \N{MINUS SIGN} truth ({units})")
        if has_spread:
            _draw_spread(figure, axes[row, 3], lead_fields[2], error_limit, background, units)
    _add_side_colorbar(figure, field_mesh, axes[:, :2], f"{channel} ({units})")
    note = "; each error has its own scale" if len(fields) > 1 else ""
    add_title(figure, f"{channel}: {forecast_name} from {calendar.format(initial_time).replace('T', ' ')} UTC{note}")
    return figure


def _draw_spread(
    figure: Figure, axis: Axes, spread: np.ndarray, error_limit: float, background: MapBackground, units: str
) -> None:
    """Draw a map of the spread (standard deviation) of an ensemble in the colour scale of its error.

    A spread far below the error would be invisible in that scale, so it gets its own.

    Args:
        figure: the figure.
        axis: axis from `create_map_axes`.
        spread: (H, W) spread in the units of the figure.
        error_limit: largest value of the colour scale of the error, in the same units.
        background: grid and coastline.
        units: units of the figure as text.
    """
    spread_limit = symmetric_limit([spread])
    color_limit = error_limit
    scale = ""
    if spread_limit < _COMMON_SCALE * error_limit:
        color_limit = spread_limit
        scale = f"\nown scale: {spread_limit / error_limit:.2g} of the error's"
    mesh = draw_map(axis, spread, background, SPREAD_COLORMAP, 0.0, color_limit)
    axis.set_title(f"Spread, {_root_mean_square(spread, background.grid.area_weights()):.3g} {units}")
    _add_side_colorbar(figure, mesh, axis, f"standard deviation ({units}){scale}", extend="max")


def _add_side_colorbar(
    figure: Figure, mesh: QuadMesh, axes: Axes | np.ndarray, label: str, extend: str = "both"
) -> None:
    """Draw a colour bar to the right of one map, or of a two-dimensional array of maps."""
    # The bar is as thick beside several rows as beside one.
    aspect = 15
    if isinstance(axes, np.ndarray):
        aspect *= len(axes)
    bar = figure.colorbar(mesh, ax=axes, ticks=MaxNLocator(5), shrink=0.85, aspect=aspect, pad=0.02, extend=extend)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)


def add_narrow_colorbar(figure: Figure, mesh: QuadMesh, axis: Axes, label: str) -> None:
    """Draw a colour bar below one of several panels; it has few ticks, so that their labels do not overlap."""
    figure.colorbar(mesh, ax=axis, label=label, ticks=MaxNLocator(5), **_NARROW_COLORBAR)


def _root_mean_square(field: np.ndarray, area: np.ndarray) -> float:
    """Return the area-weighted root mean square of the finite values of a field; field and area are (H, W)."""
    is_valid = np.isfinite(field)
    return float(np.sqrt((field[is_valid] ** 2 * area[is_valid]).sum() / area[is_valid].sum()))


def plot_map_and_histogram(field: np.ndarray, values: np.ndarray, background: MapBackground, units: str) -> Figure:
    """Return the figure with a map of a field, and with a histogram of values whose counts are logarithmic.

    Args:
        field: (H, W) field of a channel; NaN is missing.
        values: values of the same channel for the histogram, of any shape; NaN is left out.
        background: grid and coastline.
        units: units of field and values, which `credit.verify.plots.style.display_units` converts for the figure.
    """
    factor, units = display_units(units)
    field = factor * field
    values = factor * values
    # The map is on the left, the histogram on the right.
    figure = new_figure(9.6, 2.9)
    left, right = figure.subplots(1, 2, width_ratios=[5, 3])
    mesh = draw_map(left, field, background, FIELD_COLORMAP, *robust_range([field]))
    figure.colorbar(mesh, ax=left, shrink=0.9, pad=0.02)
    right.hist(values[np.isfinite(values)].ravel(), bins=60, color="#0072B2", log=True)
    right.set_xlabel(units)
    right.set_ylabel("cells")
    return figure


def robust_range(fields: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the 0.5 % and the 99.5 % quantile of all values of the fields, as a range for a colour scale.

    NaN is left out. A range of length 0 is extended to length 1.

    Args:
        fields: fields, all of the same shape.
    """
    low, high = np.nanpercentile(np.stack(fields), [0.5, 99.5])
    # A constant field, such as precipitation in a dry region, needs some range.
    if high <= low:
        high = low + 1.0
    return float(low), float(high)


def symmetric_limit(errors: Sequence[np.ndarray]) -> float:
    """Return the largest value of a symmetric colour scale for errors; 1 if all errors are 0.

    In each field, at most half a percent of the absolute errors exceed it. NaN is left out.

    Args:
        errors: fields of errors, of any shape.
    """
    limits = [float(np.nanpercentile(np.abs(error), 99.5)) for error in errors]
    return max(limits) or 1.0
