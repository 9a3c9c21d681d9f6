"""Maps in the Equal Earth projection.

Areas of Equal Earth are true, so an error takes as much of the picture as it weighs in a score. Nothing is downloaded:
the coastline is the data's own land fraction at one half.
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
from credit.verify.plots.style import new_figure, pretty_units

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

FIELD, ERROR, SPREAD = "viridis", "RdBu_r", "magma_r"
MISSING = "#CCCCCC"
# of the error's largest, the least that the spread's is drawn with the same scale
_COMMON_SCALE = 1 / 3
WIDE_BAR = {"orientation": "horizontal", "shrink": 0.7, "aspect": 40, "pad": 0.02, "extend": "both"}
_NARROW_BAR = WIDE_BAR | {"shrink": 0.85, "aspect": 25}
_LAND_STANDARD_NAMES = ("land_area_fraction", "land_binary_mask")
_PARALLELS, _MERIDIANS, _LATITUDES = range(-60, 61, 30), range(-180, 181, 60), range(-90, 91, 30)
# degrees; columns this near to the dateline lie on it
_ASIDE = 1e-7
_GRATICULE = {"color": "black", "linewidth": 0.4, "alpha": 0.25}
_LABEL = {"fontsize": 6.5, "color": "#444444", "textcoords": "offset points"}


def equal_earth(lon: np.ndarray, lat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y on a sphere of radius 1 of the Equal Earth projection.

    Savric, Patterson and Jenny (2018), doi:10.1080/13658816.2018.1504949.

    Args:
        lon: degrees east of the middle of the map, -180 to 180.
        lat: degrees north, of the same shape.
    """
    theta = np.arcsin(np.sqrt(3) / 2 * np.sin(np.deg2rad(lat)))
    powers = {1: 1.340264, 3: -0.081106, 7: 0.000893, 9: 0.003796}
    slope = sum(power * factor * theta ** (power - 1) for power, factor in powers.items())
    x = 2 / np.sqrt(3) * np.deg2rad(lon) * np.cos(theta) / slope
    return x, sum(factor * theta**power for power, factor in powers.items())


@dataclass(frozen=True)
class Background:
    """What maps are drawn on: the grid's cells, turned so that Greenwich is in the middle.

    Attributes:
        grid: the grid.
        land: (H, W) land fraction for the coastline, None where the data have none.
    """

    grid: LatLonGrid
    land: np.ndarray | None

    @classmethod
    def of(cls, reader: FieldReader, grid: LatLonGrid | None = None) -> Background:
        """Return the background of the data, on another grid if one is given."""
        land = _land_fraction(reader)
        if grid is not None and land is not None and reader.grid.describe_mismatch(grid):
            land = Regridder(reader.grid, grid, "conservative").apply(land)
        return cls(grid or reader.grid, land)

    @cached_property
    def order(self) -> np.ndarray:
        """(W,) the grid's columns eastward from the dateline, or from the one that lies on it."""
        return np.roll(np.arange(len(self.grid.lon)), -int(self._beyond.argmax()))

    @cached_property
    def edges(self) -> np.ndarray:
        """(W + 1,) edges of the turned columns, degrees east, the last 360 beyond the first."""
        first, width = self.order[0], 360.0 / len(self.grid.lon)
        west = self.grid.lon[first] - (360.0 if self._beyond[first] else 0.0)
        return west + width * (np.arange(len(self.order) + 1) - 0.5)

    @cached_property
    def _beyond(self) -> np.ndarray:
        """(W,) whether a column reaches beyond the dateline."""
        return self.grid.lon > 180.0 - 180.0 / len(self.grid.lon) + _ASIDE

    def places(self, lon: np.ndarray, lat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where points of longitudes between the outermost edges and latitudes, of one shape, lie on a map."""
        # cut between two columns of the grid, so that no cell is
        return equal_earth(lon - self.edges[0] - 180.0, lat)


def _land_fraction(reader: FieldReader) -> np.ndarray | None:
    """Return the land fraction where a static field of the data is one."""
    for number, channel in enumerate(reader.channels.static_stored):
        if reader.attributes.get(channel.variable, {}).get("standard_name") in _LAND_STANDARD_NAMES:
            return reader.static()[number]
    return None


def map_axes(figure: Figure, rows: int, columns: int) -> np.ndarray:
    """Return (rows, columns) axes for `draw_map`."""
    return figure.subplots(rows, columns, squeeze=False)


def draw_map(
    axis: Axes, field: np.ndarray, background: Background, colours: str, low: float, high: float
) -> QuadMesh:  # fmt: skip
    """Draw a field (H, W), each cell in its colour, with the coastline over it; NaN is grey."""
    grid = background.grid
    palette = colormaps[colours].with_extremes(bad=MISSING)
    corners = background.places(*np.meshgrid(background.edges, grid.lat_bounds))
    mesh = axis.pcolormesh(*corners, field[:, background.order], cmap=palette, vmin=low, vmax=high, rasterized=True)
    if background.land is not None:
        _draw_coastline(axis, background)
    _draw_graticule(axis, background)
    axis.set_axis_off()
    axis.set_aspect("equal")
    return mesh


def _draw_graticule(axis: Axes, background: Background) -> None:
    """Draw parallels, meridians and the edge of the map, and their degrees on the left and below."""
    (west, *_, east), along, up = background.edges, np.linspace(0, 1, 61), np.linspace(-90, 90, 61)
    for parallel in _PARALLELS:
        line = background.places(west + (east - west) * along, np.full(61, float(parallel)))
        axis.plot(*line, **_GRATICULE)
        at = line[0][0], line[1][0]
        axis.annotate(_degrees(parallel, "S", "N"), at, (-2, 0), ha="right", va="center", **_LABEL)
    for meridian in _MERIDIANS:
        if west < meridian < east:
            line = background.places(np.full(61, float(meridian)), up)
            axis.plot(*line, **_GRATICULE)
            if abs(meridian) < 180:
                at = line[0][0], line[1][0]
                axis.annotate(_degrees(meridian, "W", "E"), at, (0, -2), ha="center", va="top", **_LABEL)
    edge = np.concatenate([np.full(61, west), np.full(61, east), [west]]), np.concatenate([up, up[::-1], up[:1]])
    axis.plot(*background.places(*edge), color="black", linewidth=0.6, clip_on=False)


def degrees_east(axis: Axes, background: Background) -> None:
    """Make the horizontal axis one of longitude, closed all round."""
    axis.set_xticks(_MERIDIANS, [_degrees(value, "W", "E") for value in _MERIDIANS])
    axis.set_xlim(background.edges[0], background.edges[-1])
    axis.spines[["top", "right"]].set_visible(True)


def degrees_north(axis: Axes) -> None:
    """Make the vertical axis one of latitude, from pole to pole."""
    axis.set_yticks(_LATITUDES, [_degrees(value, "S", "N") for value in _LATITUDES])
    axis.set_ylim(-90, 90)
    axis.spines[["top", "right"]].set_visible(True)


def _draw_coastline(axis: Axes, background: Background) -> None:
    """Draw where the land fraction is one half, up to the edges of the map."""
    land, edges = background.land[:, background.order], background.edges
    seam = (land[:, :1] + land[:, -1:]) / 2
    lon = np.concatenate([edges[:1], (edges[:-1] + edges[1:]) / 2, edges[-1:]])
    places = background.places(*np.meshgrid(lon, background.grid.lat))
    axis.contour(*places, np.hstack([seam, land, seam]), [0.5], colors="black", linewidths=0.6)


def _degrees(value: int, negative: str, positive: str) -> str:
    side = "" if value % 180 == 0 else negative if value < 0 else positive
    return f"{abs(value)}°{side}"


def maps(
    channel: str, units: str, fields: Mapping[int, Sequence[np.ndarray]], initial: int, calendar: Calendar,
    background: Background,
) -> Figure:  # fmt: skip
    """Truth, forecast, error and, where it is given, spread at one initial time; a row a lead time (minutes).

    Truth and forecast have one scale; each error has its own, so that the first day's is no blank map.
    """
    units = pretty_units(units)
    low, high = limits([field for own in fields.values() for field in own[:2]])
    columns = 1 + len(next(iter(fields.values())))
    forecast_name = "Forecast" if columns == 3 else "Ensemble mean"
    figure = new_figure(11.0 / 3 * columns + 0.8 * (columns - 1), 2.05 * len(fields) + 0.45)
    axes = map_axes(figure, len(fields), columns)
    area = background.grid.area_weights()
    for row, (lead, own) in enumerate(fields.items()):
        field = draw_map(axes[row, 0], own[0], background, FIELD, low, high)
        draw_map(axes[row, 1], own[1], background, FIELD, low, high)
        axes[row, 0].set_title(f"Truth, {calendar.format(initial + lead).replace('T', ' ')} UTC")
        axes[row, 1].set_title(f"{forecast_name} at {lead / 60:g} h")
        error = own[1] - own[0]
        widest = largest([error])
        mesh = draw_map(axes[row, 2], error, background, ERROR, -widest, widest)
        axes[row, 2].set_title(f"Error, RMSE {_root_mean_square(error, area):.3g} {units}")
        _side_bar(figure, mesh, axes[row, 2], f"forecast \N{MINUS SIGN} truth ({units})")
        if columns == 4:
            _draw_spread(figure, axes[row, 3], own[2], widest, background, units)
    _side_bar(figure, field, axes[:, :2], f"{channel} ({units})")
    own_scales = "; each error has its own scale" if len(fields) > 1 else ""
    figure.suptitle(f"{channel}: forecast from {calendar.format(initial).replace('T', ' ')} UTC{own_scales}")
    return figure


def _draw_spread(
    figure: Figure, axis: Axes, spread: np.ndarray, widest: float, background: Background, units: str
) -> None:
    """Draw a spread in the scale of the error beside it, which goes as far as `widest`; one far below it in its own."""
    most = largest([spread])
    # in the error's colours a spread far below it would be a blank map
    common = most >= _COMMON_SCALE * widest
    mesh = draw_map(axis, spread, background, SPREAD, 0.0, widest if common else most)
    axis.set_title(f"Spread, {_root_mean_square(spread, background.grid.area_weights()):.3g} {units}")
    scale = "" if common else f"\nown scale: {most / widest:.2g} of the error's"
    _side_bar(figure, mesh, axis, f"standard deviation ({units}){scale}", extend="max")


def _side_bar(figure: Figure, mesh: QuadMesh, axes: Axes | np.ndarray, label: str, extend: str = "both") -> None:
    """Draw a colour bar to the right of one map or of rows of them."""
    aspect = 15 * (len(axes) if isinstance(axes, np.ndarray) else 1)
    bar = figure.colorbar(mesh, ax=axes, ticks=MaxNLocator(5), shrink=0.85, aspect=aspect, pad=0.02, extend=extend)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)


def narrow_bar(figure: Figure, mesh: QuadMesh, axis: Axes, label: str) -> None:
    """Draw a colour bar below one of several axes, with so few ticks that their labels stay apart."""
    figure.colorbar(mesh, ax=axis, label=label, ticks=MaxNLocator(5), **_NARROW_BAR)


def _root_mean_square(field: np.ndarray, area: np.ndarray) -> float:
    seen = np.isfinite(field)
    return float(np.sqrt((field[seen] ** 2 * area[seen]).sum() / area[seen].sum()))


def portrait(field: np.ndarray, values: np.ndarray, background: Background, units: str) -> Figure:
    """A field (H, W) as a map, and how often each of `values` occurs, with a logarithmic count."""
    figure = new_figure(9.6, 2.9)
    left, right = figure.subplots(1, 2, width_ratios=[5, 3])
    mesh = draw_map(left, field, background, FIELD, *limits([field]))
    figure.colorbar(mesh, ax=left, shrink=0.9, pad=0.02)
    right.hist(values[np.isfinite(values)].ravel(), bins=60, color="#0072B2", log=True)
    right.set_xlabel(pretty_units(units))
    right.set_ylabel("cells")
    return figure


def limits(fields: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the range of all but the outermost half percent."""
    low, high = np.nanpercentile(np.stack(fields), [0.5, 99.5])
    return float(low), float(high) if high > low else float(low) + 1.0


def largest(errors: Sequence[np.ndarray]) -> float:
    """Return what all but half a percent of the absolute errors of each field stay below, for symmetric colours."""
    return max(float(np.nanpercentile(np.abs(error), 99.5)) for error in errors) or 1.0
