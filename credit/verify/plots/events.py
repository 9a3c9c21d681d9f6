"""Reliability diagrams of events."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from credit.verify.plots.style import LEAST_WIDTH, add_legend, new_figure
from credit.verify.scores.reliability import OBSERVED, POINTS
from credit.verify.significance.bootstrap import ends_of
from credit.verify.table.table import ScoreTable


def reliability_diagrams(table: ScoreTable, leads: Sequence[float]) -> Figure:
    """Observed frequency by forecast probability of the model (top), and how often that was forecast; global.

    A column an event, a line a lead time (hours), bars the 95 % intervals of the observed frequency.
    """
    figure = new_figure(max(3.1 * len(table.events) + 0.6, LEAST_WIDTH), 4.9)
    axes = figure.subplots(2, len(table.events), sharex=True, sharey="row", squeeze=False, height_ratios=[3, 1])
    shades = colormaps["viridis"](np.linspace(0.1, 0.75, len(leads)))
    data = table.dataset.sel(forecast="model", region="global")
    for column, event in enumerate(table.events):
        upper, lower = axes[:, column]
        upper.plot([0, 1], [0, 1], color="black", linewidth=0.8, label="Reliable")
        own = data.sel(event=event)
        for lead, colour in zip(leads, shades, strict=True):
            at = own.sel(lead=lead)
            p, frequency, observed = (at[name].values for name in POINTS)
            upper.plot(p, observed, color=colour, marker="o", markersize=3.5, linewidth=1.6, label=f"{lead:g} h")
            low, high = (at[name].values for name in ends_of([OBSERVED]))
            upper.vlines(p, low, high, color=colour, linewidth=3.5, alpha=0.45)
            lower.plot(p, frequency, color=colour, marker="o", markersize=3.5, linewidth=1.2)
        base = float(np.nansum(frequency * observed))
        upper.axhline(base, color="#888888", linewidth=0.8, linestyle="--", label="How often it happened")
        upper.set_title(event, pad=18)
        upper.annotate(
            own["event_definition"].item(), (0.5, 1), (0, 4), "axes fraction", "offset points", ha="center", va="bottom"
        )
        upper.set_xlim(-0.03, 1.03)
        upper.set_ylim(-0.03, 1.03)
        lower.set_ylim(0, 1.03)
        lower.set_xlabel("Forecast probability")
    axes[0, 0].set_ylabel("Observed frequency")
    axes[1, 0].set_ylabel("Forecast\nfrequency")
    add_legend(figure, axes[0])
    bars = "; bars: 95 % intervals" if np.isfinite(data[f"{OBSERVED}_low"]).any() else ""
    figure.suptitle(f"Reliability diagrams, global{bars}")
    return figure
