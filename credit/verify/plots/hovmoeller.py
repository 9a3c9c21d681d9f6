"""Hovmoeller diagrams of truth, forecast and error.

A longitude-time diagram shows the mean over a latitude band; moving waves appear as slanted stripes. A latitude-time
diagram shows the zonal mean.

Shapes: L lead times, H rows and W columns of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from credit.calendar import Calendar
from credit.drawing.maps import (
    ERROR_COLORMAP,
    FIELD_COLORMAP,
    MISSING_COLOR,
    WIDE_COLORBAR,
    MapBackground,
    add_narrow_colorbar,
    compute_robust_range,
    compute_symmetric_limit,
    format_latitude_axis,
    format_longitude_axis,
)
from credit.drawing.style import add_title, create_figure, find_display_units
from credit.grid import LatLonGrid
from credit.verify.plots.scores import choose_lead_unit


def plot_hovmoeller(
    channel: str, units: str, band_means: Mapping[int, Sequence[np.ndarray]], band: tuple[float, float],
    forecast_name: str, initial_time: int, calendar: Calendar, background: MapBackground,
) -> Figure:  # fmt: skip
    """Return a figure of the latitude-band mean of truth, forecast and error by longitude (x) and lead time (y).

    Lead time increases downwards.

    Args:
        channel: name of the channel.
        units: units of the means.
        band_means: lead time in minutes -> (truth, forecast), each (W,); at least two lead times, increasing.
        band: (southern, northern) edge of the latitude band in degrees north.
        forecast_name: name of the forecast for the title.
        initial_time: initial time in minutes.
        calendar: calendar of the times.
        background: grid of the W columns, and the order of the columns in maps.
    """
    lead_edges, unit = _compute_lead_edges(band_means)
    south, north = band
    band_name = f"{_format_latitude(south)} to {_format_latitude(north)}"
    start = calendar.format(initial_time).replace("T", " ")
    title = f"{channel}, mean over {band_name}: {forecast_name} from {start} UTC"
    # The values are (2, time, longitude), with the columns in the order of `background.edges`.
    values = _stack_truth_and_forecast(band_means)[..., background.column_order]
    figure, axes = _draw_panels(channel, units, background.edges, lead_edges, values, title)
    for axis in axes:
        format_longitude_axis(axis, background)
        axis.set_xlabel("Longitude")
    axes[0].set_ylabel(f"Lead time ({unit})")
    # The panels share their axes, so this call inverts the axes of all panels.
    axes[0].invert_yaxis()
    return figure


def plot_latitude_time(
    channel: str, units: str, zonal_means: Mapping[int, Sequence[np.ndarray]], forecast_name: str, initial_time: int,
    calendar: Calendar, grid: LatLonGrid,
) -> Figure:  # fmt: skip
    """Return a figure of the zonal mean of truth, forecast and error by lead time (x) and latitude (y).

    Args:
        channel: name of the channel.
        units: units of the means.
        zonal_means: lead time in minutes -> (truth, forecast), each (H,); at least two lead times, increasing.
        forecast_name: name of the forecast for the title.
        initial_time: initial time in minutes.
        calendar: calendar of the times.
        grid: grid of the H rows.
    """
    lead_edges, unit = _compute_lead_edges(zonal_means)
    start = calendar.format(initial_time).replace("T", " ")
    title = f"{channel}, zonal mean: {forecast_name} from {start} UTC"
    # The values are (2, latitude, time), because time is on the horizontal axis.
    values = _stack_truth_and_forecast(zonal_means).swapaxes(1, 2)
    figure, axes = _draw_panels(channel, units, lead_edges, grid.lat_bounds, values, title)
    for axis in axes:
        format_latitude_axis(axis)
        axis.set_xlabel(f"Lead time ({unit})")
    axes[0].set_ylabel("Latitude")
    return figure


def _format_latitude(value: float) -> str:
    """Return a latitude in degrees north as a string, for example 30°S for -30."""
    if value == 0:
        return "0°"
    side = "S" if value < 0 else "N"
    return f"{abs(value):g}°{side}"


def _compute_lead_edges(pairs: Mapping[int, Sequence[np.ndarray]]) -> tuple[np.ndarray, str]:
    """Return the edges of the time intervals around the lead times, and their unit.

    Args:
        pairs: lead time in minutes -> (truth, forecast); only the lead times are used.

    Returns:
        (L + 1,) edges in hours or days, and the name of the unit, "hours" or "days".
    """
    # Minutes are converted to hours, then to the unit of the figure.
    unit, unit_hours = choose_lead_unit(max(pairs) / 60)
    return time_edges(np.array(list(pairs)) / 60 / unit_hours), unit


def time_edges(times: np.ndarray) -> np.ndarray:
    """Return the edges, (L + 1,), of intervals around L increasing times, L >= 2.

    Inner edges are half-way between two times. The outer edges are chosen so that the first and the last time are in
    the middle of their intervals.
    """
    middles = (times[:-1] + times[1:]) / 2
    # An outer edge has the same distance from the outer time as the nearest inner edge.
    first_edge = 2 * times[0] - middles[0]
    last_edge = 2 * times[-1] - middles[-1]
    return np.concatenate([[first_edge], middles, [last_edge]])


def _stack_truth_and_forecast(pairs: Mapping[int, Sequence[np.ndarray]]) -> np.ndarray:
    """Return truth and forecast as one array (2, L, N).

    Args:
        pairs: lead time -> (truth, forecast), each (N,) values along a line of longitude or latitude.
    """
    truth = np.stack([fields[0] for fields in pairs.values()])
    forecast = np.stack([fields[1] for fields in pairs.values()])
    return np.stack([truth, forecast])


def _draw_panels(
    channel: str, units: str, x_edges: np.ndarray, y_edges: np.ndarray, values: np.ndarray, title: str
) -> tuple[Figure, Sequence[Axes]]:
    """Draw three panels next to each other: truth and forecast with one colour scale, and the error with another.

    Args:
        channel: name of the channel.
        units: units of the values.
        x_edges: (X + 1,) edges of the X cells along the horizontal axis.
        y_edges: (Y + 1,) edges of the Y cells along the vertical axis.
        values: (2, Y, X) truth and forecast.
        title: title of the figure.

    Returns:
        The figure and its three axes.
    """
    # Truth and forecast share a colour scale; the colour scale of the error is symmetric about 0.
    factor, units = find_display_units(units)
    truth, forecast = factor * values
    error = forecast - truth
    low, high = compute_robust_range([truth, forecast])
    error_limit = compute_symmetric_limit([error])
    figure = create_figure(11.0, 4.4)
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    meshes = []
    panels = [
        ("Truth", truth, FIELD_COLORMAP, low, high),
        ("Forecast", forecast, FIELD_COLORMAP, low, high),
        ("Error", error, ERROR_COLORMAP, -error_limit, error_limit),
    ]
    for axis, (panel_title, field, colormap, smallest, largest) in zip(axes, panels, strict=True):
        colors = colormaps[colormap].with_extremes(bad=MISSING_COLOR)
        meshes.append(axis.pcolormesh(x_edges, y_edges, field, cmap=colors, vmin=smallest, vmax=largest))
        axis.grid(False)
        axis.set_title(panel_title)
    # Truth and forecast share one colour bar; the error has a second colour bar.
    figure.colorbar(meshes[0], ax=axes[:2], label=f"{channel} ({units})", **WIDE_COLORBAR)
    add_narrow_colorbar(figure, meshes[2], axes[2], f"forecast minus truth ({units})")
    add_title(figure, title)
    return figure, axes
