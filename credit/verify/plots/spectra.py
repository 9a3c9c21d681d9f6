"""Figure of power spectra: the truth's, the model's and those of other forecasts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from credit.verify.plots.scores import styles_of
from credit.verify.plots.style import LEAST_WIDTH, add_legend, label, new_figure, pretty_units
from credit.verify.table.table import ScoreTable

_TRUTH = {"color": "black", "linewidth": 2.2}
_RATIOS = 1.6, 3.0  # the axes of ratios go at least, at most so far


def spectra(table: ScoreTable, channels: Sequence[str]) -> Figure:
    """Power by total wavenumber at the last lead time (top); over the truth's, a row a lead time; a column a channel.

    Forecasts have the colours and lines of other figures.
    """
    data, styles = table.dataset, {name: {**own, "marker": ""} for name, own in styles_of(table).items()}
    channels = [name for name in channels if name in data["spectrum_channel"]]
    # the mean, wavenumber 0, would set the scale
    data = data[["power", "power_ratio", "power_truth"]].isel(wavenumber=slice(1, None))
    number, leads = data["wavenumber"].values, data["spectrum_lead"].values
    figure = new_figure(max(2.9 * len(channels) + 0.6, LEAST_WIDTH), 3.7 + 1.4 * len(leads))
    heights = [2, *[1] * len(leads)]
    axes = figure.subplots(len(heights), len(channels), sharex=True, squeeze=False, height_ratios=heights)
    for (upper, *lower), channel in zip(axes.T, channels, strict=True):
        own = data.sel(spectrum_channel=channel)
        ratios = own["power_ratio"].values
        # where the truth has no waves, as rain where it is dry everywhere, there is no ratio
        last, largest = own.isel(spectrum_lead=-1), ratios[np.isfinite(ratios)].max(initial=0.0)
        upper.loglog(number, last["power_truth"], label="Truth", **_TRUTH)
        for name in table.forecasts:
            if not np.isfinite(own["power"].sel(forecast=name)).any():
                continue
            upper.loglog(number, last["power"].sel(forecast=name), label=label(name), **styles[name])
            for axis, lead in zip(lower, leads, strict=True):
                axis.semilogx(number, own["power_ratio"].sel(forecast=name, spectrum_lead=lead), **styles[name])
        upper.set_title(channel)
        upper.set_ylabel(f"Power at {leads[-1]:g} h ({pretty_units(table.units(channel), 2)})")
        for axis, lead in zip(lower, leads, strict=True):
            axis.axhline(1.0, color="black", linewidth=0.8)
            axis.set_ylim(0, np.clip(1.05 * largest, *_RATIOS))
            axis.set_ylabel(f"Over truth, {lead:g} h")
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200) if tick <= number[-1]]
        lower[-1].set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        lower[-1].tick_params(axis="x", which="minor", labelbottom=False)
        lower[-1].set_xlabel("Total wavenumber")
    add_legend(figure, axes[0])
    figure.suptitle(f"Power spectra, mean over {table.n_cases} forecasts")
    return figure
