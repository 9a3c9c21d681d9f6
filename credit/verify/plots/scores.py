"""Figures of scores: skill by lead time with its intervals, and scorecards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from credit.config.schema_verification import BEST_BASELINE
from credit.verify.plots.style import (
    LEAST_WIDTH,
    LETTERS_AN_INCH,
    add_legend,
    add_title,
    broken,
    draw,
    label,
    new_figure,
    pretty_units,
)
from credit.verify.table.scorecard import scorecard_rows, scorecard_values
from credit.verify.table.table import ScoreTable

_STYLES = {
    "model": {"color": "#0072B2", "linewidth": 2.2, "marker": "o", "markersize": 3.5, "zorder": 5},
    "persistence": {"color": "#D55E00", "linewidth": 1.4, "linestyle": "--"},
    "damped_persistence": {"color": "#E69F00", "linewidth": 1.6, "linestyle": "-."},
    "climatology": {"color": "#555555", "linewidth": 1.4, "linestyle": ":"},
}
_OTHER_COLOURS = ("#009E73", "#CC79A7", "#56B4E9")
_OTHER_LINES = ("-", "--", ":")
_OTHER = {"linewidth": 1.1, "zorder": 6}  # thinner than the model and above it: runs that hardly differ are both seen
# blue, white, orange: the scorecard of the page has them too, in scores.css.j2, so pale that black is read on them
_BETTER, _WORSE = "#4D9DC9", "#E28E4D"
_MISSING = "#CCCCCC"
_CARD = LinearSegmentedColormap.from_list("scorecard", [_BETTER, "white", _WORSE]).with_extremes(bad=_MISSING)
_MOST_PANELS = 5  # side by side
_TALLEST = 20.0  # inches of a figure
_LONGEST_TITLE = 28  # letters of a panel's


def skill_curves(table: ScoreTable, channels: Sequence[str]) -> Figure:
    """RMSE (top) and anomaly correlation (bottom) by lead time, with 95 % intervals; a column a channel.

    All correlations have one axis, from 0, or the least that is drawn, to 1.
    """
    figure = new_figure(max(2.9 * len(channels) + 0.6, LEAST_WIDTH), 5.4)
    axes = figure.subplots(2, len(channels), sharex=True, squeeze=False)
    leads, unit = lead_axis(table)
    styles = styles_of(table)
    for column, channel in enumerate(channels):
        for row, metric in enumerate(("rmse", "acc")):
            for name in table.forecasts:
                draw_curve(axes[row, column], leads, table, name, channel, metric, styles[name])
            axes[row, column].set_xlim(0, leads[-1] * 1.02)
        axes[0, column].set_title(channel)
        axes[0, column].set_ylim(bottom=0)
        axes[0, column].set_ylabel(f"RMSE ({pretty_units(table.units(channel))})")
        axes[1, column].set_ylabel("Anomaly correlation")
        axes[1, column].set_xlabel(f"Lead time ({unit})")
        tick_leads(axes[1, column], leads[-1], unit)
    least = min(0.0, *(axis.dataLim.y0 for axis in axes[1]))
    for axis in axes[1]:
        axis.set_ylim(least, 1.005)
    add_legend(figure, axes[0])
    add_title(figure, f"Global scores of {table.n_cases} forecasts from {table.dataset.attrs['initial_times']}")
    return figure


def styles_of(table: ScoreTable) -> dict[str, dict]:
    """Return forecast -> how its curves look in every figure."""
    others = cycle(product(_OTHER_LINES, _OTHER_COLOURS))
    styles = {}
    for name in table.forecasts:
        line, colour = ("", "") if name in _STYLES else next(others)
        styles[name] = _STYLES.get(name) or {"color": colour, "linestyle": line, **_OTHER}
    return styles


def lead_axis(table: ScoreTable) -> tuple[np.ndarray, str]:
    """Return the lead times and their unit, which suits their length."""
    unit, hours = lead_unit(table.lead_hours[-1])
    return np.array(table.lead_hours) / hours, unit


def lead_unit(longest: float) -> tuple[str, float]:
    """Return the unit that suits lead times up to `longest` hours, and its length in hours."""
    return ("days", 24.0) if longest > 48 else ("hours", 1.0)


def tick_leads(axis: Axes, longest: float, unit: str) -> None:
    """Put the ticks of lead times in hours where a day is divided evenly; days are divided as other numbers are."""
    if unit == "hours":
        step = next(step for step in (1, 2, 3, 6) if longest <= 8 * step)
        axis.xaxis.set_major_locator(MultipleLocator(step))


def draw_curve(
    axis: Axes, leads: np.ndarray, table: ScoreTable, forecast: str, channel: str, metric: str, style: dict
) -> None:
    """Draw one score by lead time and, where there is one, its interval."""
    curve = table.curve(forecast, channel, metric)
    if not np.isfinite(curve).any():
        return
    axis.plot(leads, curve, label=label(forecast), **style)
    low, high = (table.curve(forecast, channel, f"{metric}_{end}") for end in ("low", "high"))
    if np.isfinite(low).any():
        axis.fill_between(leads, low, high, color=style["color"], alpha=0.15, linewidth=0)


def draw_scorecards(table: ScoreTable, figures: Path) -> list[tuple[str, Path]]:
    """Draw the model against each reference into a folder, in several files where one were too tall.

    Returns:
        (caption, path) of ``scorecard.png``, ``scorecard_page2.png``, ..., and ``scorecard_1.png``, ... of the second
        reference.

    Raises:
        CreditError: if a figure cannot be written.
    """
    drawn = []
    for number, reference in enumerate(table.dataset["reference"].values.tolist()):
        against = "the best of the three baselines" if reference == BEST_BASELINE else reference
        caption = (
            f"Scorecard: the model against {against}, by channel and lead time, RMSE or the score that a row names; "
            f"blue is better. {table.explain_significance(reference)}"
        )
        for page, regions in enumerate(card_pages(table)):
            name = f"scorecard{f'_{number}' if number else ''}{f'_page{page + 1}' if page else ''}.png"
            drawn.append((caption, draw(figures / name, scorecard, table, reference, regions)))
    return drawn


def card_pages(table: ScoreTable) -> list[list[str]]:
    """Return the regions that each figure of a scorecard shows; all of them in one unless it were too tall."""
    count = len(table.regions)
    rows = -(-count // _MOST_PANELS)
    rows_of_a_page = max(1, int(_TALLEST // _panel_height(table)))
    own = -(-count // rows) * min(rows, rows_of_a_page)
    return [table.regions[first : first + own] for first in range(0, count, own)]


def scorecard(table: ScoreTable, reference: str, regions: Sequence[str]) -> Figure:
    """Relative difference of the model's RMSE to that of a reference, a row a channel or wind, a column a lead time.

    Below stand CRPS where a forecast is an ensemble, SEEPS of precipitation and Brier scores of events, where there are
    any. Hatched where it is significant; a panel a region. Colours reach as far as all regions of the table need.
    """
    rows, place = scorecard_rows(table), (table.dataset["reference"].values.tolist().index(reference), 0)
    names = [row.name for row in rows]
    differences, significant = (scorecard_values(table, rows, what)[place] for what in ("difference", "significant"))
    down = -(-len(regions) // _MOST_PANELS)
    across = -(-len(regions) // down)
    height = _panel_height(table) * down + 0.5
    width = max(2.5 * across + 1.6, LEAST_WIDTH)
    figure = new_figure(width, height)
    axes = figure.subplots(down, across, sharey=True, squeeze=False)
    seen = np.abs(differences[np.isfinite(differences)])
    widest = float(np.clip(seen.max(initial=0.0), 0.01, 0.5)) * 100
    edges, lines = np.arange(len(table.lead_hours) + 1), np.arange(len(names) + 1)
    for axis, region in zip(axes.flat, regions, strict=False):
        number = table.regions.index(region)
        own = np.ma.masked_invalid(differences[..., number] * 100)
        mesh = axis.pcolormesh(edges, lines, own, cmap=_CARD, vmin=-widest, vmax=widest, rasterized=True)
        hatched = np.ma.masked_where(significant[..., number] == 0, own)
        axis.pcolor(edges, lines, hatched, hatch="///", facecolor="none", edgecolor="black", linewidth=0)
        axis.set_title(broken(label(region), _LONGEST_TITLE))
        _label_leads(axis, table.lead_hours)
        axis.grid(False)
        axis.spines[["top", "right"]].set_visible(True)
    for axis in axes.flat[len(regions) :]:
        axis.set_visible(False)
    axes[0, 0].set_yticks(lines[:-1] + 0.5, names)
    axes[0, 0].invert_yaxis()
    what = "RMSE" if rows[-1].score == "rmse" else "RMSE or score named"
    bar = {"extend": "both", "pad": 0.01, "shrink": min(1.0, 5 / height), "aspect": 7 * min(height, 5.0)}
    figure.colorbar(mesh, ax=axes, label=f"{what}, difference (%)", anchor=(0.0, 1.0), **bar)
    hatching = "hatched: significant" if significant.any() else "nothing is significant"
    against = "best baseline" if reference == BEST_BASELINE else label(reference)
    title, note = f"Model against {against}", f"(blue: better, orange: worse; {hatching})"
    most = int(LETTERS_AN_INCH * width)
    figure.suptitle(f"{title} {note}" if len(title) + len(note) < most else f"{broken(title, most)}\n{note}")
    return figure


def _panel_height(table: ScoreTable) -> float:
    """Return the height of a panel of a scorecard with its title and its lead times, inches."""
    return 0.24 * len(scorecard_rows(table)) + 1.2


def _label_leads(axis: Axes, hours: Sequence[float]) -> None:
    """Name the columns of a scorecard by lead time: whole days where there are several, else about six."""
    days = [number for number, lead in enumerate(hours) if lead % 24 == 0]
    chosen, unit = (days, 24.0) if len(days) > 1 else (range(len(hours)), 1.0)
    chosen = chosen[:: -(-len(chosen) // 6)]
    axis.set_xticks([number + 0.5 for number in chosen], [f"{hours[number] / unit:g}" for number in chosen])
    axis.set_xlabel(f"Lead time ({'days' if unit == 24 else 'hours'})")
