"""Figures of a run that is still training: RMSE by lead time at each view so far, and maps of one forecast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from credit.data.reader import FieldReader
from credit.verify.plots.maps import Background, maps
from credit.verify.plots.scores import lead_unit, tick_leads
from credit.verify.plots.style import LEAST_WIDTH, add_legend, add_title, draw, new_figure, pretty_units

Scores = Mapping[str, float | None]
_MOST_EARLIER = 6  # curves of a panel that can be told apart
# ends of the axis over persistence's largest: errors of a young network would press the rest flat
_ROOM, _MOST_ROOM = 1.3, 2.5


def draw_preview(
    folder: Path, reader: FieldReader, history: Mapping[int, Scores], fields: Mapping[str, Sequence[np.ndarray]],
    initial: Sequence[int], lead: int,
) -> list[Path]:  # fmt: skip
    """Replace ``figures/early_rmse.png`` and ``figures/early_map_CHANNEL.png`` in the run's folder, and return them.

    Args:
        folder: the run's.
        reader: of its data.
        history: step -> ``rmse/z500/24h`` and ``persistence/z500/24h`` of each view, the last one now.
        fields: channel -> (truth, forecast), each (H, W), at `lead`.
        initial: initial times in minutes; the maps are of the first.
        lead: lead time of the maps in minutes.

    Raises:
        CreditError: if a figure cannot be written.
    """
    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    variables = {channel.name: channel.variable for channel in reader.channels.output}
    units = {name: str(reader.attributes.get(variables[name], {}).get("units", "1")) for name in fields}
    drawn = [draw(figures / "early_rmse.png", rmse_history, history, units, len(initial))]
    background, step = Background.of(reader), max(history)
    for name, (truth, forecast) in fields.items():
        # a network that has only begun may run away
        shown = {lead: (truth, np.where(np.isfinite(forecast), forecast, np.nan))}
        if not np.isfinite(shown[lead][1]).any():
            continue
        arguments = (step, name, units[name], shown, initial[0], reader.calendar, background)
        drawn.append(draw(figures / f"early_map_{name}.png", _map_at, *arguments))
    return drawn


def rmse_history(history: Mapping[int, Scores], units: Mapping[str, str], cases: int) -> Figure:
    """RMSE by lead time, a panel a channel: the latest view bold, earlier ones paler, persistence dashed."""
    steps = sorted(history)
    latest, earlier = steps[-1], steps[:-1]
    if len(earlier) > _MOST_EARLIER:
        earlier = [earlier[i] for i in np.linspace(0, len(earlier) - 1, _MOST_EARLIER).round().astype(int)]
    longest = max(float(key.rpartition("/")[2][:-1]) for key in history[latest])
    unit_of_time, hours = lead_unit(longest)
    shades = colormaps["Blues"](np.linspace(0.3, 0.6, len(earlier)))
    figure = new_figure(max(2.9 * len(units) + 0.6, LEAST_WIDTH), 3.4)
    axes = figure.subplots(1, len(units), sharex=True, squeeze=False)[0]
    for axis, (channel, unit) in zip(axes, units.items(), strict=True):
        _, persistence = _curve(history[latest], "persistence", channel, hours)
        highest = np.nanmax(persistence, initial=0.0)
        for step, shade in zip(earlier, shades, strict=True):
            axis.plot(*_curve(history[step], "rmse", channel, hours), color=shade, linewidth=1.2, label=f"Step {step}")
        leads, rmse = _curve(history[latest], "rmse", channel, hours)
        style = {"color": "#08306B", "linewidth": 2.4, "marker": "o", "markersize": 3.5, "zorder": 5}
        axis.plot(leads, rmse, label=f"Step {latest}", **style)
        axis.plot(leads, persistence, color="#D55E00", linewidth=1.4, linestyle="--", label="Persistence")
        if highest > 0:
            top = min(1.05 * np.nanmax(rmse, initial=0.0), _MOST_ROOM * highest)
            axis.set_ylim(0, max(top, min(1.05 * axis.dataLim.y1, _ROOM * highest)))
        axis.set_xlim(0, longest / hours * 1.03)
        axis.set_title(channel)
        axis.set_xlabel(f"Lead time ({unit_of_time})")
        tick_leads(axis, longest / hours, unit_of_time)
        axis.set_ylabel(f"RMSE ({pretty_units(unit)})")
    add_legend(figure, axes)
    of = "one forecast" if cases == 1 else f"{cases} forecasts"
    add_title(figure, f"Early view at step {latest}: RMSE of {of} from the validation period")
    return figure


def _curve(scores: Scores, name: str, channel: str, hours: float) -> tuple[np.ndarray, np.ndarray]:
    """Return lead times in units of `hours` and values, NaN where not finite; empty where there is no such channel."""
    found = {}
    for key, value in scores.items():
        what, of, hour = key.split("/")
        if (what, of) == (name, channel):
            found[float(hour.removesuffix("h"))] = np.nan if value is None else value
    return np.array(sorted(found)) / hours, np.array([found[hour] for hour in sorted(found)])


def _map_at(step: int, *arguments: object) -> Figure:
    """Maps of one forecast, with the step in their title."""
    figure = maps(*arguments)
    figure.suptitle(f"{figure.get_suptitle()}, step {step}")
    return figure
