"""Reliability diagrams of events."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from credit.verify.plots import LEAST_WIDTH, new_figure
from credit.verify.table import ScoreTable

_MOST_POINTS = 11  # of large ensembles neighbouring probabilities are drawn as one


def reliability_diagrams(table: ScoreTable, leads: Sequence[float]) -> Figure:
    """Observed frequency by forecast probability of the model (top), and how often that was forecast; global.

    A column an event, a line a lead time (hours).
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
            p, frequency, observed = pooled_diagram(at["forecast_frequency"].values, at["observed_frequency"].values)
            upper.plot(p, observed, color=colour, marker="o", markersize=3.5, linewidth=1.6, label=f"{lead:g} h")
            lower.plot(p, frequency, color=colour, marker="o", markersize=3.5, linewidth=1.2)
        base = float(np.nansum(at["forecast_frequency"] * at["observed_frequency"]))
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
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle("Reliability diagrams, global")
    return figure


def pooled_diagram(frequency: np.ndarray, observed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return forecast probability, its frequency and the observed frequency, of at most 11 pools of neighbours.

    Args:
        frequency: (K,) how often each probability was forecast; NaN at the end where a larger ensemble has more.
        observed: (K,) how often the event then happened; NaN where it was never forecast.

    Returns:
        Three arrays; the first and the last are means over a pool, NaN of a pool that was never forecast.
    """
    count = int(np.isfinite(frequency).sum())
    frequency, happened = frequency[:count], frequency[:count] * np.nan_to_num(observed[:count])
    edges = np.unique(np.arange(min(count, _MOST_POINTS)) * count // min(count, _MOST_POINTS))
    weighted = np.arange(count) / (count - 1) * frequency
    total, p, hits = (np.add.reduceat(own, edges) for own in (frequency, weighted, happened))
    with np.errstate(invalid="ignore", divide="ignore"):
        return p / total, total, hits / total
