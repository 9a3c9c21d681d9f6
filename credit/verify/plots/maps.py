"""Maps of one case of a verification (truth, forecast, error and spread), and map and histogram of a channel.

Shapes: H x W cells of the grid of the maps; rows are ordered from north to south, columns from west to east.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from credit.calendar import Calendar
from credit.drawing.maps import (
    ERROR_COLORMAP,
    FIELD_COLORMAP,
    SPREAD_COLORMAP,
    MapBackground,
    compute_robust_range,
    compute_symmetric_limit,
    create_map_axes,
    draw_map,
)
from credit.drawing.style import add_title, create_figure, find_display_units

# The spread has the colour scale of the error unless the spread is smaller than this fraction of the error.
_COMMON_SCALE = 1 / 3


def plot_maps(
    channel: str, units: str, fields: Mapping[int, Sequence[np.ndarray]], initial_time: int, calendar: Calendar,
    background: MapBackground, forecast_name: str = "Forecast",
) -> Figure:  # fmt: skip
    """Return a figure with maps of truth, forecast, error and, for an ensemble, spread of one case.

    The figure has a row for each lead time. Truth and forecast share one colour scale. Each error has a separate colour
    scale, because errors of the first day would be invisible in the colour scale of later errors.

    Args:
        channel: name of the channel.
        units: units of the fields; `credit.drawing.style.find_display_units` converts them for the figure.
        fields: lead time in minutes -> (truth, forecast) or (truth, ensemble mean, spread), each (H, W).
        initial_time: initial time in minutes.
        calendar: calendar of the times.
        background: grid and coastline.
        forecast_name: name of the forecast for the title.
    """
    # The common colour scale of truth and forecast is in the units of figures.
    factor, units = find_display_units(units)
    scaled_fields = {}
    truths_and_forecasts = []
    for lead, lead_fields in fields.items():
        scaled_fields[lead] = [factor * field for field in lead_fields]
        truths_and_forecasts += scaled_fields[lead][:2]
    low, high = compute_robust_range(truths_and_forecasts)
    columns = 1 + len(next(iter(fields.values())))
    has_spread = columns == 4
    # Maps are twice as wide as high; each error and each spread has a colour bar at its right side.
    figure = create_figure(11.0 / 3 * columns + 0.8 * (columns - 1), 2.05 * len(fields) + 0.45)
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
        error_limit = compute_symmetric_limit([error])
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
    """Draw a map of the spread (standard deviation) of an ensemble in the colour scale of the error.

    A spread far below the error would be invisible in the colour scale of the error, so it has a separate scale.

    Args:
        figure: figure of the map.
        axis: axes of the map, from `create_map_axes`.
        spread: (H, W) spread in the units of the figure.
        error_limit: largest value of the colour scale of the error, in the same units.
        background: grid and coastline.
        units: units of the figure.
    """
    spread_limit = compute_symmetric_limit([spread])
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
    # The aspect keeps the thickness of the bar equal for one row and for several rows.
    aspect = 15
    if isinstance(axes, np.ndarray):
        aspect *= len(axes)
    bar = figure.colorbar(mesh, ax=axes, ticks=MaxNLocator(5), shrink=0.85, aspect=aspect, pad=0.02, extend=extend)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _root_mean_square(field: np.ndarray, area: np.ndarray) -> float:
    """Return the area-weighted root mean square of the finite values of a field (H, W) with cell areas (H, W)."""
    is_valid = np.isfinite(field)
    return float(np.sqrt((field[is_valid] ** 2 * area[is_valid]).sum() / area[is_valid].sum()))


def plot_map_and_histogram(field: np.ndarray, values: np.ndarray, background: MapBackground, units: str) -> Figure:
    """Return a figure with a map of a field and a histogram of values; the axis of the counts is logarithmic.

    Args:
        field: (H, W) field of a channel; missing cells are NaN.
        values: values of the same channel for the histogram, of any shape; NaN is left out.
        background: grid and coastline.
        units: units of field and values; `credit.drawing.style.find_display_units` converts them for the figure.
    """
    factor, units = find_display_units(units)
    field = factor * field
    values = factor * values
    # The map is on the left, the histogram on the right.
    figure = create_figure(9.6, 2.9)
    left, right = figure.subplots(1, 2, width_ratios=[5, 3])
    mesh = draw_map(left, field, background, FIELD_COLORMAP, *compute_robust_range([field]))
    figure.colorbar(mesh, ax=left, shrink=0.9, pad=0.02)
    right.hist(values[np.isfinite(values)].ravel(), bins=60, color="#0072B2", log=True)
    right.set_xlabel(units)
    right.set_ylabel("cells")
    return figure
