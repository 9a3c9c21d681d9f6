"""Hovmoeller diagrams: longitude and time of a mean over a band of latitudes. What travels is slanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from credit.times import Clock
from credit.verify.plots import new_figure, pretty_units
from credit.verify.plots_maps import (
    ERROR,
    FIELD,
    MISSING,
    WIDE_BAR,
    Background,
    degrees_east,
    largest,
    limits,
    narrow_bar,
)
from credit.verify.plots_scores import lead_unit


def hovmoeller(
    channel: str, units: str, strips: Mapping[int, Sequence[np.ndarray]], band: tuple[float, float],
    forecast_name: str, initial: int, clock: Clock, background: Background,
) -> Figure:  # fmt: skip
    """Truth, forecast and error of one forecast; time runs downwards.

    Args:
        channel: its name.
        units: its units.
        strips: lead time in minutes -> (truth, forecast), each (W,); at least two lead times, increasing.
        band: south and north of the mean in degrees.
        forecast_name: what the forecast is, for the title.
        initial: initial time in minutes.
        clock: of the times.
        background: with the grid of the strips.
    """
    units = pretty_units(units)
    truth, forecast = (np.stack([own[number] for own in strips.values()]) for number in range(2))
    low, high = limits([truth, forecast])
    widest = largest([forecast - truth])
    unit, hours = lead_unit(max(strips) / 60)
    edges = time_edges(np.array(list(strips)) / 60 / hours)
    figure = new_figure(11.0, 4.4)
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    field = _draw(axes[0], truth, edges, background, FIELD, low, high)
    _draw(axes[1], forecast, edges, background, FIELD, low, high)
    error = _draw(axes[2], forecast - truth, edges, background, ERROR, -widest, widest)
    for axis, title in zip(axes, ("Truth", forecast_name, "Error"), strict=True):
        axis.set_title(title)
        axis.set_xlabel("Longitude")
    axes[0].set_ylabel(f"Lead time ({unit})")
    axes[0].invert_yaxis()
    figure.colorbar(field, ax=axes[:2], label=f"{channel} ({units})", **WIDE_BAR)
    narrow_bar(figure, error, axes[2], f"forecast minus truth ({units})")
    between = " to ".join(f"{abs(value):g}°{'S' if value < 0 else 'N' if value > 0 else ''}" for value in band)
    figure.suptitle(f"{channel}, mean over {between}: forecast from {clock.format(initial).replace('T', ' ')} UTC")
    return figure


def time_edges(times: np.ndarray) -> np.ndarray:
    """Return (L + 1,) edges half way between increasing times (L,), the outermost as far out as the next is in."""
    middles = (times[:-1] + times[1:]) / 2
    return np.concatenate([[2 * times[0] - middles[0]], middles, [2 * times[-1] - middles[-1]]])


def _draw(
    axis: Axes, values: np.ndarray, edges: np.ndarray, background: Background, colours: str, low: float, high: float
) -> QuadMesh:
    palette = colormaps[colours].with_extremes(bad=MISSING)
    mesh = axis.pcolormesh(background.edges, edges, values[:, background.order], cmap=palette, vmin=low, vmax=high)
    axis.grid(False)
    degrees_east(axis, background)
    return mesh
