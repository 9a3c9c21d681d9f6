"""Figure of the power spectra of the truth, the model and other forecasts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from credit.drawing.style import MIN_WIDTH, add_legend, create_figure, format_units
from credit.verify.plots.scores import forecast_styles
from credit.verify.table.table import ScoreTable

_TRUTH_STYLE = {"color": "black", "linewidth": 2.2}
# The upper end of the axis of ratios depends on the largest ratio, but is always between these two limits.
_MIN_RATIO_LIMIT = 1.6
_MAX_RATIO_LIMIT = 3.0


def plot_spectra(table: ScoreTable, channels: Sequence[str]) -> Figure:
    """Return a figure of power by total wavenumber, and of the ratio of this power to the power of the truth.

    The figure has a column for each channel. The top row shows the power at the last lead time with spectra. Each
    further row shows the ratio at one lead time. Curves have the same styles as in other figures.

    Args:
        table: the scores, including spectra.
        channels: names of the channels; channels without a spectrum are left out.
    """
    data = table.dataset
    channels = [name for name in channels if name in data["spectrum_channel"]]
    # Wavenumber 0 is left out, because the power of the mean would determine the scale of the axis.
    data = data[["power", "power_ratio", "power_truth"]].isel(wavenumber=slice(1, None))
    wavenumbers = data["wavenumber"].values
    leads = data["spectrum_lead"].values
    # The points of a curve are too close together for markers.
    styles = {name: {**style, "marker": ""} for name, style in forecast_styles(table).items()}
    figure = create_figure(max(2.9 * len(channels) + 0.6, MIN_WIDTH), 3.7 + 1.4 * len(leads))
    # The panel of the power is twice as high as a panel of a ratio.
    heights = [2] + [1] * len(leads)
    axes = figure.subplots(len(heights), len(channels), sharex=True, squeeze=False, height_ratios=heights)
    for (power_axis, *ratio_axes), channel in zip(axes.T, channels, strict=True):
        channel_data = data.sel(spectrum_channel=channel)
        last_data = channel_data.isel(spectrum_lead=-1)
        # The ratio is missing where the truth has no power, for example if precipitation is 0 in all cells.
        ratios = channel_data["power_ratio"].values
        largest_ratio = ratios[np.isfinite(ratios)].max(initial=0.0)
        power_axis.loglog(wavenumbers, last_data["power_truth"], label="Truth", **_TRUTH_STYLE)
        for name in table.forecasts:
            # Baselines, and forecasts without the channel, have no spectrum.
            if not np.isfinite(channel_data["power"].sel(forecast=name)).any():
                continue
            power = last_data["power"].sel(forecast=name)
            power_axis.loglog(wavenumbers, power, label=table.display_name(name), **styles[name])
            for axis, lead in zip(ratio_axes, leads, strict=True):
                ratio = channel_data["power_ratio"].sel(forecast=name, spectrum_lead=lead)
                axis.semilogx(wavenumbers, ratio, **styles[name])
        power_axis.set_title(channel)
        power_axis.set_ylabel(f"Power at {leads[-1]:g} h ({format_units(table.units(channel), 2)})")
        for axis, lead in zip(ratio_axes, leads, strict=True):
            axis.axhline(1.0, color="black", linewidth=0.8)
            ratio_limit = np.clip(1.05 * largest_ratio, _MIN_RATIO_LIMIT, _MAX_RATIO_LIMIT)
            axis.set_ylim(0, ratio_limit)
            axis.set_ylabel(f"Over truth, {lead:g} h")
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200) if tick <= wavenumbers[-1]]
        ratio_axes[-1].set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        ratio_axes[-1].tick_params(axis="x", which="minor", labelbottom=False)
        ratio_axes[-1].set_xlabel("Total wavenumber")
    add_legend(figure, axes[0])
    figure.suptitle(f"Power spectra, mean over {table.n_cases} forecasts")
    return figure
