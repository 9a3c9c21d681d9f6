"""Figures of ensemble scores: CRPS, spread over error, rank histograms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from credit.drawing.style import MIN_WIDTH, add_legend, add_title, create_figure, format_units
from credit.verify.plots.scores import draw_curve, forecast_styles, lead_times_and_unit, set_lead_ticks
from credit.verify.table.table import ScoreTable


def plot_crps_and_spread_ratio(table: ScoreTable, channels: Sequence[str]) -> Figure:
    """Return a figure of CRPS (top) and spread / error (bottom) by lead time, with a column for each channel.

    The error is the RMSE of the ensemble mean.

    Args:
        table: the scores, which must contain ``crps``.
        channels: names of the channels.
    """
    figure = create_figure(max(2.9 * len(channels) + 0.6, MIN_WIDTH), 5.4)
    axes = figure.subplots(2, len(channels), sharex=True, squeeze=False)
    leads, unit = lead_times_and_unit(table)
    styles = forecast_styles(table)
    for column, channel in enumerate(channels):
        crps_axis, ratio_axis = axes[:, column]
        for name in table.forecasts:
            draw_curve(crps_axis, leads, table, name, channel, "crps", styles[name])
            draw_curve(ratio_axis, leads, table, name, channel, "spread_skill", styles[name])
        ratio_axis.axhline(1.0, color="black", linewidth=0.8)
        crps_axis.set_title(channel)
        crps_axis.set_xlim(0, leads[-1] * 1.02)
        crps_axis.set_ylim(bottom=0)
        crps_axis.set_ylabel(f"CRPS ({format_units(table.units(channel))})")
        # The line of a perfect ensemble, at 1, must not be at the edge.
        ratio_axis.set_ylim(bottom=0, top=max(1.2, ratio_axis.dataLim.y1 * 1.05))
        ratio_axis.set_ylabel("Spread / error of the mean")
        ratio_axis.set_xlabel(f"Lead time ({unit})")
        set_lead_ticks(ratio_axis, leads[-1], unit)
    add_legend(figure, axes[0])
    add_title(figure, f"Global scores of {table.n_cases} forecasts from {table.dataset.attrs['initial_times']}")
    return figure


def plot_rank_histograms(table: ScoreTable, channels: Sequence[str], leads: Sequence[float]) -> Figure:
    """Return a figure of the model's rank histograms: the frequency of each number of members below the truth.

    The figure has a column for each channel and a line for each lead time.

    Args:
        table: the scores.
        channels: names of the channels.
        leads: lead times in hours.
    """
    figure = create_figure(max(2.9 * len(channels) + 0.6, MIN_WIDTH), 3.2)
    axes = figure.subplots(1, len(channels), sharey=True, squeeze=False)[0]
    # The lightest colours of the map are hard to see on white.
    colors = colormaps["viridis"](np.linspace(0.1, 0.75, len(leads)))
    # The model may have fewer members, and therefore fewer ranks, than a different ensemble in the table.
    ranks = table.dataset["ranks"].sel(forecast="model", region="global").dropna("rank", how="all")
    # A line shows the frequency in a flat histogram. Ranks are integers in the middle of their bins.
    flat_frequency = 1.0 / ranks.sizes["rank"]
    edges = np.arange(ranks.sizes["rank"] + 1) - 0.5
    for axis, channel in zip(axes, channels, strict=True):
        for lead, color in zip(leads, colors, strict=True):
            axis.stairs(ranks.sel(channel=channel, lead=lead), edges, color=color, linewidth=1.6, label=f"{lead:g} h")
        axis.axhline(flat_frequency, color="black", linewidth=0.8)
        axis.set_title(channel)
        axis.set_xlabel("Members below the truth")
    axes[0].set_ylabel("Relative frequency")
    axes[0].set_ylim(bottom=0)
    add_legend(figure, axes)
    name = table.display_name("model")
    add_title(figure, f"Rank histograms of {name}, global; flat if truth and members are statistically equal")
    return figure
