"""Meteograms: figures of the time series at stations, with ensembles as boxes or as plumes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from credit.calendar import Calendar
from credit.drawing.style import add_title, create_figure, find_display_units, save_figure
from credit.forecast.io.schema import MEMBER
from credit.products.base import ProductCase, ProductContext, ProductOutput, register_product
from credit.products.description import FieldInfo
from credit.products.points.series import StationProduct, StationSeries
from credit.products.points.stations import Station
from credit.products.section import MeteogramSection

_LINE_COLOR = "#0072B2"
_MEDIAN_COLOR = "#D55E00"
_DAY_MINUTES = 1440
# Width of a box as a fraction of the interval between lead times, and largest number of labels on the time axis.
_BOX_WIDTH = 0.6
_MAX_DAY_LABELS = 12
# Height of a panel in inches.
_PANEL_INCHES = 1.75


@register_product("meteogram", MeteogramSection)
class Meteogram(StationProduct):
    """Figure of the time series at each station, with a panel for each variable."""

    def __init__(self, section: MeteogramSection, context: ProductContext) -> None:
        super().__init__(section, context)
        # If the names of two stations give the same file name, a number makes the file names different.
        self.file_names = _build_file_names(section.name, self.stations)

    def open(self, case: ProductCase) -> ProductOutput:
        """Return a writer of the figures of one forecast."""
        return _Meteograms(self, case)


class _Meteograms(StationSeries):
    """Writer of the figures of all stations."""

    def finish(self) -> list[Path]:
        """Plot a figure for each station, and return the paths of the files."""
        all_series = self.stack_series()
        paths = []
        for number, station in enumerate(self.product.stations):
            series = {name: values_LNS[:, :, number] for name, values_LNS in all_series.items()}
            path = self.case.folder / self.product.file_names[number]
            paths.append(save_figure(path, plot_meteogram, station, self.product.infos, series, self.case, self._style))
        return paths

    @property
    def _style(self) -> str:
        return self.product.section.style


def _build_file_names(name: str, stations: list[Station]) -> list[str]:
    """Return a unique file name, ``NAME_STATION.png``, for the figure of each station."""
    names: list[str] = []
    for station in stations:
        stem = f"{name}_{re.sub(r'[^A-Za-z0-9.+-]+', '_', station.name).strip('_') or 'station'}"
        file_name = f"{stem}.png"
        number = 2
        while file_name in names:
            file_name = f"{stem}_{number}.png"
            number += 1
        names.append(file_name)
    return names


def plot_meteogram(
    station: Station, infos: list[FieldInfo], series: dict[str, np.ndarray], case: ProductCase, style: str
) -> Figure:
    """Return a figure of the time series at a station, with a panel for each field.

    Args:
        station: the station.
        infos: descriptions of the fields.
        series: name of a field -> values (L, N) at L lead times, with N members or quantiles (1 for a single field).
        case: the forecast.
        style: ``box`` or ``plume``, the style of fields with members.
    """
    figure = create_figure(8.0, _PANEL_INCHES * len(infos) + 0.9)
    axes = figure.subplots(len(infos), 1, sharex=True, squeeze=False)[:, 0]
    lead_hours = case.forecasts.lead_minutes / 60.0
    for axis, info in zip(axes, infos, strict=True):
        factor, units = find_display_units(info.units)
        _draw_series(axis, lead_hours, factor * series[info.name], info, style)
        axis.set_title(info.title, loc="left", fontsize=9.5)
        if units not in ("", "1"):
            axis.set_ylabel(units)
        if info.is_probability:
            axis.set_ylim(0, 1)
    _label_days(axes[-1], case.forecasts.calendar, case.initial_minutes, lead_hours)
    position = f"{abs(station.latitude):.2f}°{'N' if station.latitude >= 0 else 'S'}"
    position += f" {abs(station.longitude):.2f}°{'E' if station.longitude >= 0 else 'W'}"
    add_title(figure, f"{station.name} ({position}), forecast from {case.initial_text.replace('T', ' ')} UTC")
    return figure


def _draw_series(axis: Axes, lead_hours: np.ndarray, series_LN: np.ndarray, info: FieldInfo, style: str) -> None:
    """Plot the time series of one field in a panel."""
    if info.dim is None:
        axis.plot(lead_hours, series_LN[:, 0], color=_LINE_COLOR, marker=".", linewidth=1.5)
        return
    if info.dim != MEMBER:
        for index, value in enumerate(info.coordinate):
            axis.plot(lead_hours, series_LN[:, index], color=_LINE_COLOR, alpha=0.4 + 0.6 * (value == 0.5))
        return
    if style == "plume":
        axis.plot(lead_hours, series_LN, color=_LINE_COLOR, linewidth=0.6, alpha=0.5)
        axis.plot(lead_hours, np.median(series_LN, axis=1), color=_MEDIAN_COLOR, linewidth=2.0)
        return
    # A box needs the values of all members. A sum over hours has missing values at the first lead times.
    is_complete = np.isfinite(series_LN).all(axis=1)
    if not is_complete.any():
        return
    interval = _shortest_interval(lead_hours)
    axis.boxplot(
        list(series_LN[is_complete]),
        positions=lead_hours[is_complete],
        widths=_BOX_WIDTH * interval,
        whis=(0, 100),
        manage_ticks=False,
        patch_artist=True,
        boxprops={"facecolor": "#9ecae9", "edgecolor": _LINE_COLOR, "linewidth": 0.8},
        whiskerprops={"color": _LINE_COLOR, "linewidth": 0.8},
        capprops={"color": _LINE_COLOR, "linewidth": 0.8},
        medianprops={"color": _MEDIAN_COLOR, "linewidth": 1.4},
    )


def _shortest_interval(lead_hours: np.ndarray) -> float:
    """Return the shortest interval between lead times in hours; 6 if there is a single lead time."""
    return float(np.diff(lead_hours).min()) if len(lead_hours) > 1 else 6.0


def _label_days(axis: Axes, calendar: Calendar, initial_minutes: int, lead_hours: np.ndarray) -> None:
    """Label the time axis with dates at 00 UTC; the axis is in hours after the initial time."""
    last_hours = float(lead_hours[-1])
    first_midnight = -(-initial_minutes // _DAY_MINUTES) * _DAY_MINUTES
    last = initial_minutes + int(60 * last_hours)
    num_days = (last - first_midnight) // _DAY_MINUTES + 1
    # Interval of whole days between labels, large enough that the labels do not overlap.
    step = _DAY_MINUTES * max(1, -(-num_days // _MAX_DAY_LABELS))
    midnights = list(range(first_midnight, last + 1, step))
    ticks = [(midnight - initial_minutes) / 60.0 for midnight in midnights]
    axis.set_xticks(ticks, [calendar.datetime(midnight).strftime("%d %b") for midnight in midnights])
    # A margin keeps the boxes of the first and the last lead time inside the axis.
    margin = max(0.02 * last_hours, 0.5 * _shortest_interval(lead_hours))
    axis.set_xlim(-margin, last_hours + margin)
    axis.set_xlabel("Valid time (UTC; labels at 00)")
