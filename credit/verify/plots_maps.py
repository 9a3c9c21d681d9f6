"""Maps: in the Equal Earth projection where cartopy is installed (the extra ``maps``), else on plain axes.

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

from credit.data.regrid import Regridder
from credit.grid import LatLonGrid
from credit.times import Clock
from credit.verify.plots import new_figure, pretty_units

if TYPE_CHECKING:
    from cartopy.crs import Projection

    from credit.data.reader import FieldReader

FIELD, ERROR, SPREAD = "viridis", "RdBu_r", "magma_r"
MISSING = "#CCCCCC"
WIDE_BAR = {"orientation": "horizontal", "shrink": 0.7, "aspect": 40, "pad": 0.02, "extend": "both"}
_NARROW_BAR = WIDE_BAR | {"shrink": 0.85, "aspect": 25}
_LAND_STANDARD_NAMES = ("land_area_fraction", "land_binary_mask")
_PARALLELS, _MERIDIANS = range(-60, 61, 30), range(-180, 181, 60)
# the western edge and the eastern are one meridian; a projection must be told which is which
_ASIDE = 1e-7


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
        if grid is not None and land is not None and reader.grid.difference(grid):
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

    @cached_property
    def projection(self) -> Projection | None:
        """Equal Earth of a sphere, cut between two columns of the grid so that no cell is; None without cartopy."""
        try:
            from cartopy.crs import EqualEarth, Globe
        except ModuleNotFoundError:
            return None
        return EqualEarth(central_longitude=self.edges[0] + 180.0, globe=Globe(ellipse="sphere"))

    def places(self, lon: np.ndarray, lat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the points of all `lon` (M,) and `lat` (N,) lie on a map, each (N, M)."""
        if self.projection is None:
            return tuple(np.meshgrid(lon, lat))
        lon, lat = np.meshgrid(np.clip(lon, self.edges[0] + _ASIDE, self.edges[-1] - _ASIDE), lat)
        placed = self.projection.transform_points(self.projection.as_geodetic(), lon, lat)
        return placed[..., 0], placed[..., 1]


def _land_fraction(reader: FieldReader) -> np.ndarray | None:
    """Return the land fraction where a static field of the data is one."""
    for number, channel in enumerate(reader.channels.static_stored):
        if reader.attributes.get(channel.variable, {}).get("standard_name") in _LAND_STANDARD_NAMES:
            return reader.static()[number]
    return None


def map_axes(figure: Figure, rows: int, columns: int, background: Background) -> np.ndarray:
    """Return (rows, columns) axes for `draw_map`."""
    shared = background.projection is None
    own = {"projection": background.projection}
    return figure.subplots(rows, columns, squeeze=False, sharex=shared, sharey=shared, subplot_kw=own)


def draw_map(
    axis: Axes, field: np.ndarray, background: Background, colours: str, low: float, high: float
) -> QuadMesh:  # fmt: skip
    """Draw a field (H, W), each cell in its colour, with the coastline over it; NaN is grey."""
    grid = background.grid
    palette = colormaps[colours].with_extremes(bad=MISSING)
    corners = background.places(background.edges, grid.lat_bounds)
    mesh = axis.pcolormesh(*corners, field[:, background.order], cmap=palette, vmin=low, vmax=high, rasterized=True)
    if background.land is not None:
        _draw_coastline(axis, background)
    axis.grid(False)
    if background.projection is None:
        degrees_east(axis, background)
        axis.set_yticks(_PARALLELS, [_degrees(value, "S", "N") for value in _PARALLELS])
        axis.set_ylim(-90, 90)
    else:
        axis.set_global()
        axis.gridlines(xlocs=_MERIDIANS, ylocs=_PARALLELS, linewidth=0.4, color="black", alpha=0.25)
        axis.spines["geo"].set_linewidth(0.6)
    return mesh


def degrees_east(axis: Axes, background: Background) -> None:
    """Make the horizontal axis one of longitude, closed all round."""
    axis.set_xticks(_MERIDIANS, [_degrees(value, "W", "E") for value in _MERIDIANS])
    axis.set_xlim(background.edges[0], background.edges[-1])
    axis.spines[["top", "right"]].set_visible(True)


def _draw_coastline(axis: Axes, background: Background) -> None:
    """Draw where the land fraction is one half, up to the edges of the map."""
    land, edges = background.land[:, background.order], background.edges
    seam = (land[:, :1] + land[:, -1:]) / 2
    lon = np.concatenate([edges[:1], (edges[:-1] + edges[1:]) / 2, edges[-1:]])
    places = background.places(lon, background.grid.lat)
    axis.contour(*places, np.hstack([seam, land, seam]), [0.5], colors="black", linewidths=0.6)


def _degrees(value: int, negative: str, positive: str) -> str:
    side = "" if value % 180 == 0 else negative if value < 0 else positive
    return f"{abs(value)}°{side}"


def maps(
    channel: str, units: str, fields: Mapping[int, Sequence[np.ndarray]], initial: int, clock: Clock,
    background: Background,
) -> Figure:  # fmt: skip
    """Truth, forecast, error and, where it is given, spread at one initial time; a row a lead time (minutes)."""
    units = pretty_units(units)
    low, high = limits([field for own in fields.values() for field in own[:2]])
    errors = {lead: own[1] - own[0] for lead, own in fields.items()}
    widest = largest(list(errors.values()))
    columns = 1 + len(next(iter(fields.values())))
    forecast_name = "Forecast" if columns == 3 else "Ensemble mean"
    figure = new_figure(11.0 / 3 * columns, 2.05 * len(fields) + 1.15)
    axes = map_axes(figure, len(fields), columns, background)
    area = background.grid.area_weights()
    for row, (lead, own) in enumerate(fields.items()):
        field = draw_map(axes[row, 0], own[0], background, FIELD, low, high)
        draw_map(axes[row, 1], own[1], background, FIELD, low, high)
        error = draw_map(axes[row, 2], errors[lead], background, ERROR, -widest, widest)
        axes[row, 0].set_title(f"Truth, {clock.format(initial + lead).replace('T', ' ')} UTC")
        axes[row, 1].set_title(f"{forecast_name} at {lead / 60:g} h")
        axes[row, 2].set_title(f"Error, RMSE {_root_mean_square(errors[lead], area):.3g} {units}")
        axes[row, 0].set_ylabel("Latitude")
        if columns == 4:
            spread = draw_map(axes[row, 3], own[2], background, SPREAD, 0.0, widest)
            axes[row, 3].set_title(f"Spread, {_root_mean_square(own[2], area):.3g} {units}")
    for axis in axes[-1]:
        axis.set_xlabel("Longitude")
    figure.colorbar(field, ax=axes[:, :2], label=f"{channel} ({units})", **WIDE_BAR)
    narrow_bar(figure, error, axes[:, 2], f"forecast minus truth ({units})")
    if columns == 4:
        narrow_bar(figure, spread, axes[:, 3], f"standard deviation over members ({units})", extend="max")
    figure.suptitle(f"{channel}: forecast from {clock.format(initial).replace('T', ' ')} UTC")
    return figure


def narrow_bar(figure: Figure, mesh: QuadMesh, axes: Axes | np.ndarray, label: str, extend: str = "both") -> None:
    """Draw a colour bar below one column of axes, with so few ticks that their labels stay apart."""
    figure.colorbar(mesh, ax=axes, label=label, ticks=MaxNLocator(5), **_NARROW_BAR | {"extend": extend})


def _root_mean_square(field: np.ndarray, area: np.ndarray) -> float:
    seen = np.isfinite(field)
    return float(np.sqrt((field[seen] ** 2 * area[seen]).sum() / area[seen].sum()))


def portrait(field: np.ndarray, values: np.ndarray, background: Background, units: str) -> Figure:
    """A field (H, W) as a map, and how often each of `values` occurs, with a logarithmic count."""
    figure = new_figure(9.6, 2.9)
    places = figure.add_gridspec(1, 2, width_ratios=[5, 3])
    left = figure.add_subplot(places[0], projection=background.projection)
    right = figure.add_subplot(places[1])
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
