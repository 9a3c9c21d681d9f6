"""Figures of ensembles: spread and skill, CRPS, rank histograms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from credit.verify.plots.scores import draw_curve, lead_axis, styles_of, tick_leads
from credit.verify.plots.style import LEAST_WIDTH, add_legend, add_title, label, new_figure, pretty_units
from credit.verify.table.table import ScoreTable


def spread_and_skill(table: ScoreTable, channels: Sequence[str]) -> Figure:
    """CRPS (top) and spread over error (bottom) by lead time, with 95 % intervals; a column a channel."""
    figure = new_figure(max(2.9 * len(channels) + 0.6, LEAST_WIDTH), 5.4)
    axes = figure.subplots(2, len(channels), sharex=True, squeeze=False)
    leads, unit = lead_axis(table)
    styles = styles_of(table)
    for column, channel in enumerate(channels):
        upper, lower = axes[:, column]
        for name in table.forecasts:
            draw_curve(upper, leads, table, name, channel, "crps", styles[name])
            draw_curve(lower, leads, table, name, channel, "spread_skill", styles[name])
        lower.axhline(1.0, color="black", linewidth=0.8)
        upper.set_title(channel)
        upper.set_xlim(0, leads[-1] * 1.02)
        upper.set_ylim(bottom=0)
        upper.set_ylabel(f"CRPS ({pretty_units(table.units(channel))})")
        lower.set_ylim(bottom=0, top=max(1.2, lower.dataLim.y1 * 1.05))
        lower.set_ylabel("Spread / error of the mean")
        lower.set_xlabel(f"Lead time ({unit})")
        tick_leads(lower, leads[-1], unit)
    add_legend(figure, axes[0])
    add_title(figure, f"Global scores of {table.n_cases} forecasts from {table.dataset.attrs['initial_times']}")
    return figure


def rank_histograms(table: ScoreTable, channels: Sequence[str], leads: Sequence[float]) -> Figure:
    """Relative frequency of the truth's rank among the model's members; a column a channel, a line a lead (hours)."""
    figure = new_figure(max(2.9 * len(channels) + 0.6, LEAST_WIDTH), 3.2)
    axes = figure.subplots(1, len(channels), sharey=True, squeeze=False)[0]
    shades = colormaps["viridis"](np.linspace(0.1, 0.75, len(leads)))
    ranks = table.dataset["ranks"].sel(forecast="model", region="global").dropna("rank", how="all")
    flat = 1.0 / ranks.sizes["rank"]
    edges = np.arange(ranks.sizes["rank"] + 1) - 0.5
    for axis, channel in zip(axes, channels, strict=True):
        for lead, colour in zip(leads, shades, strict=True):
            axis.stairs(ranks.sel(channel=channel, lead=lead), edges, color=colour, linewidth=1.6, label=f"{lead:g} h")
        axis.axhline(flat, color="black", linewidth=0.8)
        axis.set_title(channel)
        axis.set_xlabel("Members below the truth")
    axes[0].set_ylabel("Relative frequency")
    axes[0].set_ylim(bottom=0)
    add_legend(figure, axes)
    add_title(figure, f"Rank histograms, {label('global').lower()}; flat if the truth could be one more member")
    return figure
