"""Hovmoeller diagrams: what travels is slanted.

Longitude and time of a mean over a band of latitudes; time and latitude of a mean over the longitudes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from credit.calendar import Calendar
from credit.grid import LatLonGrid
from credit.verify.plots.maps import (
    ERROR,
    FIELD,
    MISSING,
    WIDE_BAR,
    Background,
    degrees_east,
    degrees_north,
    largest,
    limits,
    narrow_bar,
)
from credit.verify.plots.scores import lead_unit
from credit.verify.plots.style import new_figure, pretty_units


def hovmoeller(
    channel: str, units: str, strips: Mapping[int, Sequence[np.ndarray]], band: tuple[float, float],
    forecast_name: str, initial: int, calendar: Calendar, background: Background,
) -> Figure:  # fmt: skip
    """Truth, forecast and error of one forecast by longitude; time runs downwards.

    Args:
        channel: its name.
        units: its units.
        strips: lead time in minutes -> (truth, forecast), each (W,); at least two lead times, increasing.
        band: south and north of the mean in degrees.
        forecast_name: what the forecast is, for the title.
        initial: initial time in minutes.
        calendar: of the times.
        background: with the grid of the strips.
    """
    edges, unit = _times(strips)
    between = " to ".join(f"{abs(value):g}°{'S' if value < 0 else 'N' if value > 0 else ''}" for value in band)
    title = f"{channel}, mean over {between}: forecast from {calendar.format(initial).replace('T', ' ')} UTC"
    values = _stack(strips)[..., background.order]
    figure, axes = _panels(channel, units, background.edges, edges, values, forecast_name, title)
    for axis in axes:
        degrees_east(axis, background)
        axis.set_xlabel("Longitude")
    axes[0].set_ylabel(f"Lead time ({unit})")
    axes[0].invert_yaxis()
    return figure


def latitude_time(
    channel: str, units: str, zonal: Mapping[int, Sequence[np.ndarray]], forecast_name: str, initial: int,
    calendar: Calendar, grid: LatLonGrid,
) -> Figure:  # fmt: skip
    """Truth, forecast and error of the zonal mean of one forecast by latitude; time runs to the right.

    Args:
        channel: its name.
        units: its units.
        zonal: lead time in minutes -> (truth, forecast), each (H,); at least two lead times, increasing.
        forecast_name: what the forecast is, for the title.
        initial: initial time in minutes.
        calendar: of the times.
        grid: of the rows.
    """
    edges, unit = _times(zonal)
    title = f"{channel}, zonal mean: forecast from {calendar.format(initial).replace('T', ' ')} UTC"
    values = _stack(zonal).swapaxes(1, 2)
    figure, axes = _panels(channel, units, edges, grid.lat_bounds, values, forecast_name, title)
    for axis in axes:
        degrees_north(axis)
        axis.set_xlabel(f"Lead time ({unit})")
    axes[0].set_ylabel("Latitude")
    return figure


def _times(pairs: Mapping[int, Sequence[np.ndarray]]) -> tuple[np.ndarray, str]:
    """Return the edges between lead times and their unit."""
    unit, hours = lead_unit(max(pairs) / 60)
    return time_edges(np.array(list(pairs)) / 60 / hours), unit


def time_edges(times: np.ndarray) -> np.ndarray:
    """Return (L + 1,) edges half way between increasing times (L,), the outermost as far out as the next is in."""
    middles = (times[:-1] + times[1:]) / 2
    return np.concatenate([[2 * times[0] - middles[0]], middles, [2 * times[-1] - middles[-1]]])


def _stack(pairs: Mapping[int, Sequence[np.ndarray]]) -> np.ndarray:
    """Return truth and forecast, (2, L, N)."""
    return np.stack([np.stack([own[number] for own in pairs.values()]) for number in range(2)])


def _panels(
    channel: str, units: str, x_edges: np.ndarray, y_edges: np.ndarray, values: np.ndarray, forecast_name: str,
    title: str,
) -> tuple[Figure, Sequence[Axes]]:  # fmt: skip
    """Draw truth and forecast, values (2, Y, X), in the same colours, and the error."""
    units, error = pretty_units(units), values[1] - values[0]
    low, high = limits(values)
    widest = largest([error])
    figure = new_figure(11.0, 4.4)
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    meshes = []
    panels = [
        ("Truth", values[0], FIELD, low, high),
        (forecast_name, values[1], FIELD, low, high),
        ("Error", error, ERROR, -widest, widest),
    ]
    for axis, (name, own, colours, least, most) in zip(axes, panels, strict=True):
        palette = colormaps[colours].with_extremes(bad=MISSING)
        meshes.append(axis.pcolormesh(x_edges, y_edges, own, cmap=palette, vmin=least, vmax=most))
        axis.grid(False)
        axis.set_title(name)
    figure.colorbar(meshes[0], ax=axes[:2], label=f"{channel} ({units})", **WIDE_BAR)
    narrow_bar(figure, meshes[2], axes[2], f"forecast minus truth ({units})")
    figure.suptitle(title)
    return figure, axes
