"""Preview figures of an active training run: RMSE by lead time, and maps of one forecast.

A preview scores a few forecasts with the weights at one optimizer step.

Shapes: H x W cells, L lead times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from credit.data.reader import FieldReader
from credit.drawing.maps import MapBackground
from credit.drawing.style import MIN_WIDTH, add_legend, add_title, create_figure, format_units, save_figure
from credit.verify.plots.maps import plot_maps
from credit.verify.plots.scores import choose_lead_unit, set_lead_ticks

# Name of a score, such as rmse/z500/24h -> value; None if it is not finite.
Scores = Mapping[str, float | None]
# Largest number of earlier previews in a figure; more curves could not be distinguished.
_MAX_EARLIER = 6
# The end of the RMSE axis is between these multiples of the largest RMSE of persistence, so that the large errors of an
# untrained network do not flatten all other curves.
_MIN_AXIS_FACTOR = 1.3
_MAX_AXIS_FACTOR = 2.5


def draw_preview(
    folder: Path, reader: FieldReader, history: Mapping[int, Scores], fields: Mapping[str, Sequence[np.ndarray]],
    initial_times: Sequence[int], lead: int,
) -> list[Path]:  # fmt: skip
    """Write ``figures/early_rmse.png`` and ``figures/early_map_CHANNEL.png`` of a run, and return their paths.

    Figures of an earlier preview are replaced.

    Args:
        folder: run folder.
        reader: reader of the data of the run.
        history: optimizer step -> scores of the preview at this step. The scores are a dict from names such as
            ``rmse/z500/24h`` and ``persistence/z500/24h`` to values. The current preview has the largest step.
        fields: channel name -> (truth, forecast), each (H, W), at the lead time `lead` from the first initial time.
        initial_times: initial times in minutes of the forecasts that the preview scores.
        lead: lead time of the maps in minutes.

    Raises:
        CreditError: if a figure cannot be written.
    """
    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    variables = {channel.name: channel.variable for channel in reader.channels.output}
    units = {}
    for name in fields:
        attributes = reader.attributes.get(variables[name], {})
        units[name] = str(attributes.get("units", "1"))
    paths = [save_figure(figures / "early_rmse.png", plot_rmse_history, history, units, len(initial_times))]
    background = MapBackground.build(reader)
    forecast_name = f"forecast at step {max(history)}"
    for name, (truth, forecast) in fields.items():
        # The forecast of an untrained network may be unstable, so values that are not finite are set to NaN.
        forecast = np.where(np.isfinite(forecast), forecast, np.nan)
        if not np.isfinite(forecast).any():
            continue
        path = save_figure(
            figures / f"early_map_{name}.png",
            plot_maps, name, units[name], {lead: (truth, forecast)}, initial_times[0], reader.calendar, background,
            forecast_name,
        )  # fmt: skip
        paths.append(path)
    return paths


def plot_rmse_history(history: Mapping[int, Scores], units: Mapping[str, str], num_cases: int) -> Figure:
    """Return a figure of the RMSE of previews by lead time, with a panel for each channel.

    The curve of the latest preview is bold, the curves of earlier previews are paler, and persistence is dashed.

    Args:
        history: optimizer step -> scores of the preview at this step, see `draw_preview`.
        units: channel name -> units, for the plotted channels.
        num_cases: number of forecasts that a preview scores.
    """
    # If there are many earlier previews, only some of them are plotted, at equal intervals.
    *earlier_steps, latest_step = sorted(history)
    if len(earlier_steps) > _MAX_EARLIER:
        selected = np.linspace(0, len(earlier_steps) - 1, _MAX_EARLIER).round().astype(int)
        earlier_steps = [earlier_steps[index] for index in selected]
    # The name of a score ends with the lead time, as in rmse/z500/24h.
    lead_names = [key.rpartition("/")[2] for key in history[latest_step]]
    longest = max(float(lead_name.removesuffix("h")) for lead_name in lead_names)
    time_unit, hours = choose_lead_unit(longest)
    colors = colormaps["Blues"](np.linspace(0.3, 0.6, len(earlier_steps)))
    figure = create_figure(max(2.9 * len(units) + 0.6, MIN_WIDTH), 3.4)
    axes = figure.subplots(1, len(units), sharex=True, squeeze=False)[0]
    for axis, (channel, unit) in zip(axes, units.items(), strict=True):
        _, persistence = _select_curve(history[latest_step], "persistence", channel, hours)
        largest_persistence = np.nanmax(persistence, initial=0.0)
        for step, color in zip(earlier_steps, colors, strict=True):
            step_leads, step_rmse = _select_curve(history[step], "rmse", channel, hours)
            axis.plot(step_leads, step_rmse, color=color, linewidth=1.2, label=f"Step {step}")
        leads, rmse = _select_curve(history[latest_step], "rmse", channel, hours)
        style = {"color": "#08306B", "linewidth": 2.4, "marker": "o", "markersize": 3.5, "zorder": 5}
        axis.plot(leads, rmse, label=f"Step {latest_step}", **style)
        axis.plot(leads, persistence, color="#D55E00", linewidth=1.4, linestyle="--", label="Persistence")
        # The large errors of an early preview must not flatten the latest curve.
        if largest_persistence > 0:
            latest_top = min(1.05 * np.nanmax(rmse, initial=0.0), _MAX_AXIS_FACTOR * largest_persistence)
            all_top = min(1.05 * axis.dataLim.y1, _MIN_AXIS_FACTOR * largest_persistence)
            axis.set_ylim(0, max(latest_top, all_top))
        axis.set_xlim(0, longest / hours * 1.03)
        axis.set_title(channel)
        axis.set_xlabel(f"Lead time ({time_unit})")
        set_lead_ticks(axis, longest / hours, time_unit)
        axis.set_ylabel(f"RMSE ({format_units(unit)})")
    add_legend(figure, axes)
    forecasts = f"{num_cases} forecasts"
    if num_cases == 1:
        forecasts = "one forecast"
    add_title(figure, f"Preview at step {latest_step}: RMSE of {forecasts} from the validation period")
    return figure


def _select_curve(scores: Scores, name: str, channel: str, hours: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the lead times and the values of a score of one channel.

    Args:
        scores: name such as ``rmse/z500/24h`` -> value; None if it is not finite.
        name: name of the score, ``rmse`` or ``persistence``.
        channel: name of the channel.
        hours: length in hours of the unit of the returned lead times: 1 for hours, 24 for days.

    Returns:
        (L,) lead times in this unit, increasing, and (L,) values, NaN where a value is not finite. Both arrays are
        empty if the channel does not have the score.
    """
    value_by_hour = {}
    for key, value in scores.items():
        score, score_channel, lead = key.split("/")
        if score == name and score_channel == channel:
            # Scores are logged as JSON, which has no NaN, so a missing score is None.
            if value is None:
                value = np.nan
            value_by_hour[float(lead.removesuffix("h"))] = value
    lead_hours = sorted(value_by_hour)
    values = [value_by_hour[lead] for lead in lead_hours]
    return np.array(lead_hours) / hours, np.array(values)
