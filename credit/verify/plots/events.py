"""Reliability diagrams of events."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.figure import Figure

from credit.drawing.style import MIN_WIDTH, add_legend, add_title, create_figure
from credit.verify.scores.reliability import OBSERVED_FREQUENCY, POINT_NAMES
from credit.verify.significance.bootstrap import interval_names
from credit.verify.table.table import ScoreTable


def plot_reliability_diagrams(table: ScoreTable, leads: Sequence[float]) -> Figure:
    """Return a figure of the model's global reliability diagrams.

    The upper panels show the observed frequency of the event by forecast probability; bars are its 95 % intervals. The
    lower panels show the frequency with which each probability was forecast. The figure has a column for each event and
    a line for each lead time.

    Args:
        table: the scores.
        leads: lead times in hours.
    """
    figure = create_figure(max(3.1 * len(table.events) + 0.6, MIN_WIDTH), 4.9)
    axes = figure.subplots(2, len(table.events), sharex=True, sharey="row", squeeze=False, height_ratios=[3, 1])
    # The lightest colours of the map are hard to see on white.
    colors = colormaps["viridis"](np.linspace(0.1, 0.75, len(leads)))
    data = table.dataset.sel(forecast="model", region="global")
    for column, event in enumerate(table.events):
        diagram_axis, frequency_axis = axes[:, column]
        diagram_axis.plot([0, 1], [0, 1], color="black", linewidth=0.8, label="Reliable")
        event_data = data.sel(event=event)
        for lead, color in zip(leads, colors, strict=True):
            lead_data = event_data.sel(lead=lead)
            # Points whose probabilities were never forecast are NaN and are not plotted.
            probability, frequency, observed = (lead_data[name].values for name in POINT_NAMES)
            low, high = (lead_data[name].values for name in interval_names([OBSERVED_FREQUENCY]))
            diagram_axis.plot(
                probability, observed, color=color, marker="o", markersize=3.5, linewidth=1.6, label=f"{lead:g} h"
            )
            diagram_axis.vlines(probability, low, high, color=color, linewidth=3.5, alpha=0.45)
            frequency_axis.plot(probability, frequency, color=color, marker="o", markersize=3.5, linewidth=1.2)
        base_rate = _compute_base_rate(event_data, leads)
        diagram_axis.axhline(base_rate, color="#888888", linewidth=0.8, linestyle="--", label="Base rate")
        # The definition of the event is written between its name and the panel.
        diagram_axis.set_title(event, pad=18)
        diagram_axis.annotate(
            event_data["event_definition"].item(),
            xy=(0.5, 1),
            xytext=(0, 4),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="center",
            va="bottom",
        )
        # The margin prevents that points at 0 and 1 are cut off.
        diagram_axis.set_xlim(-0.03, 1.03)
        diagram_axis.set_ylim(-0.03, 1.03)
        frequency_axis.set_ylim(0, 1.03)
        frequency_axis.set_xlabel("Forecast probability")
    axes[0, 0].set_ylabel("Observed frequency")
    axes[1, 0].set_ylabel("Forecast\nfrequency")
    add_legend(figure, axes[0])
    bars = ""
    if np.isfinite(data[f"{OBSERVED_FREQUENCY}_low"]).any():
        bars = "; bars: 95 % intervals"
    add_title(figure, f"Reliability diagrams of {table.display_name('model')}, global{bars}")
    return figure


def _compute_base_rate(event_data: xr.Dataset, leads: Sequence[float]) -> float:
    """Return the base rate of an event (its frequency regardless of the forecast), averaged over lead times.

    The base rate hardly depends on the lead time, so a diagram shows one line for all lead times.

    Args:
        event_data: points of the reliability diagrams of the event, by lead time.
        leads: lead times in hours.
    """
    data = event_data.sel(lead=list(leads))
    _, frequency, observed = (data[name] for name in POINT_NAMES)
    # A lead time without scores has NaN at all points and is left out of the mean.
    rates = (frequency * observed).sum("point", min_count=1)
    return float(rates.mean("lead"))
