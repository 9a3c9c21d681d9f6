"""Figures of scores: RMSE and anomaly correlation by lead time with intervals, and scorecards.

Shapes: L lead times, R regions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from credit.config.sections.verification import BEST_BASELINE
from credit.drawing.style import (
    LETTERS_PER_INCH,
    MIN_WIDTH,
    add_legend,
    add_title,
    create_figure,
    format_units,
    save_figure,
    wrap_text,
)
from credit.verify.table.scorecard import scorecard_rows, scorecard_values
from credit.verify.table.table import ScoreTable

_STYLES = {
    "model": {"color": "#0072B2", "linewidth": 2.2, "marker": "o", "markersize": 3.5, "zorder": 5},
    "persistence": {"color": "#D55E00", "linewidth": 1.4, "linestyle": "--"},
    "damped_persistence": {"color": "#E69F00", "linewidth": 1.6, "linestyle": "-."},
    "climatology": {"color": "#555555", "linewidth": 1.4, "linestyle": ":"},
}
_OTHER_COLORS = ("#009E73", "#CC79A7", "#56B4E9")
_OTHER_LINES = ("-", "--", ":")
# Curves of other forecasts are thinner than the curve of the model and are drawn above it. Both curves are then visible
# if the two runs hardly differ.
_OTHER_STYLE = {"linewidth": 1.1, "zorder": 6}
# Colours of scorecards, from blue over white to orange, also used in scores.css.j2; black text is readable on both.
_BETTER_COLOR = "#4D9DC9"
_WORSE_COLOR = "#E28E4D"
_MISSING_COLOR = "#CCCCCC"
_SCORECARD_COLORS = LinearSegmentedColormap.from_list(
    "scorecard", [_BETTER_COLOR, "white", _WORSE_COLOR]
).with_extremes(bad=_MISSING_COLOR)
# Largest number of panels in a row of a scorecard, largest height of its figure in inches, and largest number of
# letters in a line of a panel's title.
_MAX_PANEL_COLUMNS = 5
_MAX_HEIGHT_INCHES = 20.0
_PANEL_TITLE_LETTERS = 28


def plot_skill(table: ScoreTable, channels: Sequence[str]) -> Figure:
    """Return a figure of RMSE (top) and anomaly correlation (bottom) by lead time, one column for each channel.

    95 % intervals are shaded. All panels of correlations have the same axis, which starts at 0 (or at the smallest
    value if it is negative) and ends at 1. Without correlations, the figure only has the upper row.

    Args:
        table: the scores.
        channels: names of the channels.
    """
    has_correlations = "acc" in table.dataset
    num_rows = 2 if has_correlations else 1
    # A single row needs more than half the height of two rows, because legend and title have a fixed height.
    height = 5.4 if has_correlations else 3.0
    figure = create_figure(max(2.9 * len(channels) + 0.6, MIN_WIDTH), height)
    axes = figure.subplots(num_rows, len(channels), sharex=True, squeeze=False)
    leads, unit = lead_times_and_unit(table)
    styles = forecast_styles(table)
    for column, channel in enumerate(channels):
        rmse_axis, lowest_axis = axes[0, column], axes[-1, column]
        for name in table.forecasts:
            draw_curve(rmse_axis, leads, table, name, channel, "rmse", styles[name])
            if has_correlations:
                draw_curve(lowest_axis, leads, table, name, channel, "acc", styles[name])
        rmse_axis.set_xlim(0, leads[-1] * 1.02)
        rmse_axis.set_title(channel)
        rmse_axis.set_ylim(bottom=0)
        rmse_axis.set_ylabel(f"RMSE ({format_units(table.units(channel))})")
        lowest_axis.set_xlabel(f"Lead time ({unit})")
        set_lead_ticks(lowest_axis, leads[-1], unit)
    # The axis starts at 0, so that channels can be compared; it starts lower if a correlation is below 0.
    acc_axes = axes[1] if has_correlations else []
    smallest = min([0.0, *(axis.dataLim.y0 for axis in acc_axes)])
    for axis in acc_axes:
        axis.set_ylabel("Anomaly correlation")
        axis.set_ylim(smallest, 1.005)
    add_legend(figure, axes[0])
    add_title(figure, f"Global scores of {table.n_cases} forecasts from {table.dataset.attrs['initial_times']}")
    return figure


def forecast_styles(table: ScoreTable) -> dict[str, dict]:
    """Return name of a forecast or baseline -> matplotlib keyword arguments for its curves in every figure."""
    # The first three other forecasts have solid lines, the next dashed and dotted lines; then the styles repeat.
    other_styles = cycle(product(_OTHER_LINES, _OTHER_COLORS))
    styles = {}
    for name in table.forecasts:
        if name in _STYLES:
            styles[name] = _STYLES[name]
        else:
            line, color = next(other_styles)
            styles[name] = {"color": color, "linestyle": line, **_OTHER_STYLE}
    return styles


def lead_times_and_unit(table: ScoreTable) -> tuple[np.ndarray, str]:
    """Return the lead times of a table, (L,), in the unit of figures, and the name of this unit, "days" or "hours".

    The unit is days if the longest lead time is above 48 h, otherwise hours.
    """
    unit, hours = choose_lead_unit(table.lead_hours[-1])
    return np.array(table.lead_hours) / hours, unit


def choose_lead_unit(longest_hours: float) -> tuple[str, float]:
    """Return the unit in which figures show lead times, and its length in hours.

    Args:
        longest_hours: longest lead time in hours.

    Returns:
        ("days", 24.0) if the longest lead time is above 48 h, otherwise ("hours", 1.0).
    """
    if longest_hours > 48:
        return "days", 24.0
    return "hours", 1.0


def set_lead_ticks(axis: Axes, longest: float, unit: str) -> None:
    """Set the ticks of a lead time axis in hours to multiples of 1, 2, 3 or 6 h; leave an axis in days unchanged.

    Args:
        axis: axes of the panel.
        longest: longest lead time in `unit`; at most 48 if the unit is hours.
        unit: ``hours`` or ``days``.
    """
    if unit == "hours":
        # The step is the smallest one that gives at most eight intervals; 48 h have eight intervals of 6 h.
        step = next(step for step in (1, 2, 3, 6) if longest <= 8 * step)
        axis.xaxis.set_major_locator(MultipleLocator(step))


def draw_curve(
    axis: Axes, leads: np.ndarray, table: ScoreTable, forecast: str, channel: str, metric: str, style: dict
) -> None:
    """Plot the curve of one score by lead time and shade its interval, if any; do nothing if all values are NaN.

    Args:
        axis: axes of the panel.
        leads: (L,) lead times in the unit of the axis, see `lead_times_and_unit`.
        table: the scores.
        forecast: name of the forecast.
        channel: name of the channel.
        metric: name of the score.
        style: keyword arguments of matplotlib for the curve, see `forecast_styles`.
    """
    curve = table.scores_by_lead(forecast, channel, metric)
    if not np.isfinite(curve).any():
        return
    axis.plot(leads, curve, label=table.display_name(forecast), **style)
    low = table.scores_by_lead(forecast, channel, f"{metric}_low")
    if np.isfinite(low).any():
        high = table.scores_by_lead(forecast, channel, f"{metric}_high")
        axis.fill_between(leads, low, high, color=style["color"], alpha=0.15, linewidth=0)


def draw_scorecards(table: ScoreTable, folder: Path) -> list[tuple[str, Path]]:
    """Draw a scorecard of the model against each reference into a folder.

    A reference is the best baseline or another forecast. A scorecard that would be too tall is split into several
    files.

    Returns:
        (caption, path) of each file: ``scorecard.png``, ``scorecard_page2.png``, ... for the first reference,
        ``scorecard_1.png``, ``scorecard_1_page2.png``, ... for the second reference, and so on.

    Raises:
        CreditError: if a figure cannot be written.
    """
    figures = []
    for number, reference in enumerate(table.dataset["reference"].values.tolist()):
        opponent = "the best of the three baselines"
        if reference != BEST_BASELINE:
            opponent = table.display_name(reference)
        caption = (
            f"Scorecard: {table.display_name('model')} against {opponent}, by channel and lead time; RMSE, or the "
            f"score in the label of a row; blue is better. {table.describe_significance(reference)}"
        )
        for page, regions in enumerate(scorecard_pages(table)):
            # The first page of the first reference has no number.
            name = "scorecard"
            if number:
                name += f"_{number}"
            if page:
                name += f"_page{page + 1}"
            path = folder / f"{name}.png"
            figures.append((caption, save_figure(path, plot_scorecard, table, reference, regions)))
    return figures


def scorecard_pages(table: ScoreTable) -> list[list[str]]:
    """Divide the regions of a scorecard into figures, and return the region names of each figure.

    All regions are in one figure unless this figure would be too tall.
    """
    num_regions = len(table.regions)
    num_rows = math.ceil(num_regions / _MAX_PANEL_COLUMNS)
    # A figure has at least one row of panels, even if this row is too tall.
    rows_per_page = max(1, int(_MAX_HEIGHT_INCHES // _compute_panel_height(table)))
    regions_per_row = math.ceil(num_regions / num_rows)
    regions_per_page = regions_per_row * min(num_rows, rows_per_page)
    pages = []
    for start in range(0, num_regions, regions_per_page):
        pages.append(table.regions[start : start + regions_per_page])
    return pages


def plot_scorecard(table: ScoreTable, reference: str, regions: Sequence[str]) -> Figure:
    """Return a figure of a scorecard: relative differences between the scores of the model and of a reference.

    The figure has a panel for each region, with a row for each score and a column for each lead time. The rows are
    RMSE, then CRPS, SEEPS and Brier scores if there are any. Significant differences are hatched. All regions of the
    table have the same colour scale.

    Args:
        table: the scores.
        reference: name of the reference.
        regions: names of the regions of this figure.
    """
    rows = scorecard_rows(table)
    reference_index = table.dataset["reference"].values.tolist().index(reference)
    percent = 100 * scorecard_values(table, rows, "difference")[reference_index, 0]
    significant = scorecard_values(table, rows, "significant")[reference_index, 0]
    # The size of a panel is about the same for any number of panels.
    panel_rows = math.ceil(len(regions) / _MAX_PANEL_COLUMNS)
    panel_columns = math.ceil(len(regions) / panel_rows)
    height = _compute_panel_height(table) * panel_rows + 0.5
    width = max(2.5 * panel_columns + 1.6, MIN_WIDTH)
    figure = create_figure(width, height)
    axes = figure.subplots(panel_rows, panel_columns, sharey=True, squeeze=False)
    # The limit is at least 1 %, so that rounding does not look like a difference. It is at most 50 %, so that one cell
    # does not hide the differences of all other cells.
    largest = np.abs(percent[np.isfinite(percent)]).max(initial=0.0)
    color_limit = float(np.clip(largest, 1.0, 50.0))
    x_edges = np.arange(len(table.lead_hours) + 1)
    y_edges = np.arange(len(rows) + 1)
    for axis, region in zip(axes.flat, regions, strict=False):
        region_index = table.regions.index(region)
        values = np.ma.masked_invalid(percent[..., region_index])
        mesh = axis.pcolormesh(
            x_edges, y_edges, values, cmap=_SCORECARD_COLORS, vmin=-color_limit, vmax=color_limit, rasterized=True
        )
        hatched = np.ma.masked_where(significant[..., region_index] == 0, values)
        axis.pcolor(x_edges, y_edges, hatched, hatch="///", facecolor="none", edgecolor="black", linewidth=0)
        axis.set_title(wrap_text(table.display_name(region), _PANEL_TITLE_LETTERS))
        _label_leads(axis, table.lead_hours)
        axis.grid(False)
        axis.spines[["top", "right"]].set_visible(True)
    # The last row of panels may not be full.
    for axis in axes.flat[len(regions) :]:
        axis.set_visible(False)
    axes[0, 0].set_yticks(y_edges[:-1] + 0.5, [row.name for row in rows])
    axes[0, 0].invert_yaxis()
    score = "RMSE" if rows[-1].score == "rmse" else "RMSE or score named"
    figure.colorbar(
        mesh,
        ax=axes,
        label=f"{score}, difference (%)",
        anchor=(0.0, 1.0),
        extend="both",
        pad=0.01,
        shrink=min(1.0, 5 / height),
        aspect=7 * min(height, 5.0),
    )
    max_letters = int(LETTERS_PER_INCH * width)
    figure.suptitle(_format_scorecard_title(table, reference, bool(significant.any()), max_letters))
    return figure


def _format_scorecard_title(table: ScoreTable, reference: str, is_any_significant: bool, max_letters: int) -> str:
    """Return the title of a scorecard, divided into several lines if it has more than `max_letters` letters.

    Args:
        table: the scores.
        reference: name of the reference.
        is_any_significant: True if the figure shows a significant difference.
        max_letters: largest number of letters in a line.
    """
    opponent = "best baseline"
    if reference != BEST_BASELINE:
        opponent = table.display_name(reference)
    title = f"{table.display_name('model')} against {opponent}"
    hatching = "hatched: significant" if is_any_significant else "nothing is significant"
    note = f"(blue: better, orange: worse; {hatching})"
    if len(title) + len(note) < max_letters:
        return f"{title} {note}"
    return f"{wrap_text(title, max_letters)}\n{note}"


def _compute_panel_height(table: ScoreTable) -> float:
    """Return the height in inches of a panel of a scorecard, including its title and the labels of its lead times."""
    # 0.24 is the height of a row, and 1.2 is the height of all other parts.
    return 0.24 * len(scorecard_rows(table)) + 1.2


def _label_leads(axis: Axes, lead_hours: Sequence[float]) -> None:
    """Label about six columns of a scorecard in days; in hours if fewer than two columns are full days."""
    columns = [column for column, hours in enumerate(lead_hours) if hours % 24 == 0]
    unit = "days"
    unit_hours = 24.0
    if len(columns) < 2:
        columns = list(range(len(lead_hours)))
        unit = "hours"
        unit_hours = 1.0
    # More than about six labels would overlap.
    columns = columns[:: math.ceil(len(columns) / 6)]
    labels = [f"{lead_hours[column] / unit_hours:g}" for column in columns]
    axis.set_xticks([column + 0.5 for column in columns], labels)
    axis.set_xlabel(f"Lead time ({unit})")
