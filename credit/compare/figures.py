"""Figures of a comparison: curves of scores, spectra, and the variability of long forecasts.

Shapes: S seeds, L lead times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from credit.compare.results import ComparisonScores
from credit.compare.stability import EDDIES, FIELD, MAX_RATIO, MIN_RATIO, StabilityCurve
from credit.drawing.style import MIN_WIDTH, add_legend, add_title, create_figure, format_units, save_figure
from credit.verify.plots.scores import lead_times_and_unit, plot_scorecard, scorecard_pages, set_lead_ticks
from credit.verify.table.summary import headline_channels

# Colours of Okabe and Ito, which colour-blind readers can distinguish; further runs have different line styles.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_LINES = ("-", "--", "-.", ":")
_BASELINE_STYLES = {
    "persistence": {"color": "#555555", "linewidth": 1.2, "linestyle": "--"},
    "climatology": {"color": "#555555", "linewidth": 1.2, "linestyle": ":"},
}
_MAX_COLUMNS = 6
_WAVENUMBER_TICKS = (1, 2, 5, 10, 20, 50, 100, 200)


def draw_figures(
    scores: ComparisonScores, curves: Sequence[StabilityCurve], folder: Path
) -> dict[str, list[tuple[str, Path]]]:
    """Draw all figures of a comparison.

    Args:
        scores: scores of all runs and seeds.
        curves: stability curves of the long forecasts; empty without long forecasts.
        folder: folder for the figures; it must exist.

    Returns:
        Section of the page (``skill``, ``scorecards``, ``spectra``, ``stability``) -> (caption, path) of each figure.

    Raises:
        CreditError: if a figure cannot be written.
    """
    for path in folder.glob("*.png"):
        # Figures of an earlier call with other runs must not be mistaken for figures of this call.
        path.unlink()
    caption = "Root-mean-square error and anomaly correlation by lead time, mean over the seeds. Shaded: their range."
    figures = {"skill": [(caption, save_figure(folder / "skill.png", plot_skill, scores))], "scorecards": []}
    first = scores.names[0]
    for name in scores.names[1:]:
        table = scores.pairs.get((first, name))
        if table is None:
            continue
        caption = f"Scorecard: {name} against {first}; blue is better. {table.describe_significance(first)}"
        for page, regions in enumerate(scorecard_pages(table)):
            path = folder / f"scorecard_{name}_{page + 1}.png"
            figures["scorecards"].append((caption, save_figure(path, plot_scorecard, table, first, regions)))
    if "power_ratio" in scores.first_table.dataset:
        caption = (
            "Power of the forecast divided by the power of the truth, by total wavenumber, mean over cases and seeds. "
            "Below 1, the forecast is too smooth. For an ensemble, the first member is shown."
        )
        figures["spectra"] = [(caption, save_figure(folder / "spectra.png", plot_spectra, scores))]
    if curves:
        caption = (
            "Standard deviation over all cells in a long forecast, divided by its value in the truth: for the field "
            "(top), and for the eddies, the deviations from the zonal mean (bottom). Dashed lines: 0.5 and 2. One "
            "curve for each seed."
        )
        path = save_figure(folder / "stability.png", plot_stability, curves, scores.names)
        figures["stability"] = [(caption, path)]
    return figures


def choose_run_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return name of a run -> matplotlib keyword arguments for the curves of this run in every figure."""
    styles = {}
    for number, name in enumerate(names):
        line = _LINES[number // len(_COLORS) % len(_LINES)]
        styles[name] = {"color": _COLORS[number % len(_COLORS)], "linestyle": line, "linewidth": 1.7}
    return styles


def plot_skill(scores: ComparisonScores) -> Figure:
    """Return a figure of RMSE (top) and anomaly correlation (bottom) by lead time, one column for each channel."""
    table = scores.first_table
    channels = headline_channels(table)[:_MAX_COLUMNS]
    figure = create_figure(max(2.9 * len(channels) + 0.6, MIN_WIDTH), 5.4)
    axes = figure.subplots(2, len(channels), sharex=True, squeeze=False)
    leads, unit = lead_times_and_unit(table)
    styles = choose_run_styles(scores.names)
    for column, channel in enumerate(channels):
        for axis, metric in zip(axes[:, column], ("rmse", "acc"), strict=True):
            for baseline, style in _BASELINE_STYLES.items():
                curve = table.scores_by_lead(baseline, channel, metric)
                if np.isfinite(curve).any():
                    axis.plot(leads, curve, label=table.display_name(baseline), **style)
            for name in scores.names:
                _plot_seed_range(axis, leads, scores.scores_by_lead(name, channel, metric), name, styles[name])
        rmse_axis, acc_axis = axes[:, column]
        rmse_axis.set_title(channel)
        rmse_axis.set_xlim(0, leads[-1] * 1.02)
        rmse_axis.set_ylim(bottom=0)
        rmse_axis.set_ylabel(f"RMSE ({format_units(table.units(channel))})")
        acc_axis.set_ylabel("Anomaly correlation")
        acc_axis.set_xlabel(f"Lead time ({unit})")
        set_lead_ticks(acc_axis, leads[-1], unit)
    add_legend(figure, axes[0])
    add_title(figure, f"Global scores of {table.n_cases} forecasts from {table.dataset.attrs['initial_times']}")
    return figure


def _plot_seed_range(axis: Axes, leads: np.ndarray, curves_SL: np.ndarray, name: str, style: Mapping[str, Any]) -> None:
    """Plot the mean over seeds of a curve, and shade the range over the seeds if there are several seeds.

    Args:
        axis: axes of the panel.
        leads: (L,) values of the horizontal axis: lead times, or wavenumbers.
        curves_SL: (S, L) curve of each seed.
        name: name of the run.
        style: keyword arguments of matplotlib for the curve.
    """
    axis.plot(leads, curves_SL.mean(axis=0), label=name, **style)
    if len(curves_SL) > 1:
        low = curves_SL.min(axis=0)
        high = curves_SL.max(axis=0)
        axis.fill_between(leads, low, high, color=style["color"], alpha=0.2, linewidth=0)


def plot_spectra(scores: ComparisonScores) -> Figure:
    """Return a figure of the power of the forecasts divided by the power of the truth, by total wavenumber.

    The figure has a column for each channel with spectra and a row for each lead time.
    """
    # Wavenumber 0 is the mean, not a wave.
    data = scores.first_table.dataset.isel(wavenumber=slice(1, None))
    channels = data["spectrum_channel"].values.tolist()
    leads = data["spectrum_lead"].values.tolist()
    wavenumbers = data["wavenumber"].values
    styles = choose_run_styles(scores.names)
    figure = create_figure(max(2.9 * len(channels) + 0.6, MIN_WIDTH), 1.2 + 2.1 * len(leads))
    axes = figure.subplots(len(leads), len(channels), sharex=True, sharey=True, squeeze=False)
    for row, lead in enumerate(leads):
        for column, channel in enumerate(channels):
            axis = axes[row, column]
            axis.axhline(1.0, color="black", linewidth=0.8)
            for name in scores.names:
                curves = []
                for seed in scores.seeds_of(name):
                    ratio = scores.tables[name, seed].dataset["power_ratio"].isel(wavenumber=slice(1, None))
                    selected = ratio.sel(forecast="model", spectrum_channel=channel, spectrum_lead=lead)
                    curves.append(selected.values)
                _plot_seed_range(axis, wavenumbers, np.stack(curves), name, styles[name])
            axis.set_xscale("log")
            ticks = [tick for tick in _WAVENUMBER_TICKS if tick <= wavenumbers[-1]]
            axis.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
            axis.tick_params(axis="x", which="minor", labelbottom=False)
            # Ratios above 2 occur where the truth has hardly any power.
            axis.set_ylim(0, 2)
            if row == 0:
                axis.set_title(channel)
            if column == 0:
                axis.set_ylabel(f"Over truth, {lead:g} h")
            if row == len(leads) - 1:
                axis.set_xlabel("Total wavenumber")
    add_legend(figure, axes[0])
    return figure


def plot_stability(curves: Sequence[StabilityCurve], names: Sequence[str]) -> Figure:
    """Return a figure of the stability curves of long forecasts, with a column for each channel.

    Args:
        curves: stability curves of each run, seed, channel and measure.
        names: names of all runs, in the order of the command, which determines their colours.
    """
    channels = list(dict.fromkeys(curve.channel for curve in curves))[:_MAX_COLUMNS]
    styles = choose_run_styles(names)
    figure = create_figure(max(2.9 * len(channels) + 0.6, MIN_WIDTH), 5.0)
    axes = figure.subplots(2, len(channels), sharex=True, sharey=True, squeeze=False)
    for row, measure in enumerate((FIELD, EDDIES)):
        for axis, channel in zip(axes[row], channels, strict=True):
            for bound in (MIN_RATIO, MAX_RATIO):
                axis.axhline(bound, color="black", linewidth=0.8, linestyle="--")
            for curve in curves:
                if (curve.channel, curve.measure) == (channel, measure) and curve.name in styles:
                    style = {**styles[curve.name], "linewidth": 1.2}
                    axis.plot(curve.days, curve.ratios, label=curve.name, **style)
            axis.set_yscale("log", base=2)
            axis.set_ylim(0.25, 4)
            axis.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
            if row == 0:
                axis.set_title(channel)
            else:
                axis.set_xlabel("Lead time (days)")
        axes[row, 0].set_ylabel(f"Std. dev. of {measure} over truth")
    add_legend(figure, axes[0])
    return figure
