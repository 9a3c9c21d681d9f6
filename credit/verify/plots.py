"""Figures of a verification, as PNG files. Colours are Okabe and Ito's, safe for the colour-blind.

Nothing but the files plots*.py imports matplotlib, so that commands that draw nothing start fast.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from credit.errors import CreditError
from credit.grid import LatLonGrid
from credit.times import Clock

_STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 5),
}
_DPI = 150
LEAST_WIDTH = 6.4  # inches; what the legend needs


@dataclass(frozen=True)
class Background:
    """What maps are drawn on.

    Attributes:
        grid: the grid.
        land: (H, W) land fraction for the coastline, None where the data have none.
    """

    grid: LatLonGrid
    land: np.ndarray | None


def draw(path: Path, maker: Callable[..., Figure], *arguments: object) -> Path:
    """Write the figure that ``maker(*arguments)`` returns.

    Raises:
        CreditError: if it cannot be written.
    """
    with rc_context(_STYLE):
        figure = maker(*arguments)
        beside = path.with_name(f".{path.name}.part")
        try:
            FigureCanvasAgg(figure).print_png(str(beside))
            os.replace(beside, path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise CreditError(f"{path}: cannot be written ({error.strerror}); is the disk full?") from error
    return path


def pretty_units(units: str, power: int = 1) -> str:
    """Return units with raised exponents: ``m2 s-2`` becomes m$^2$ s$^{-2}$, all of it to `power`."""
    parts = []
    for part in units.split():
        match = re.fullmatch(r"([A-Za-z%]+)(-?\d*)", part)
        if match is None:
            return units if power == 1 else f"({units})$^{power}$"
        exponent = int(match[2] or 1) * power
        parts.append(match[1] if exponent == 1 else f"{match[1]}$^{{{exponent}}}$")
    return " ".join(parts)


def label(name: str) -> str:
    """Return a forecast's name for people."""
    return name.replace("_", " ").capitalize()


def maps(
    channel: str, units: str, fields: Mapping[int, Sequence[np.ndarray]], initial: int, clock: Clock,
    background: Background,
) -> Figure:  # fmt: skip
    """Truth, forecast, error and, where it is given, spread at one initial time; a row a lead time (minutes)."""
    units = pretty_units(units)
    low, high = _limits([field for own in fields.values() for field in own[:2]])
    errors = {lead: own[1] - own[0] for lead, own in fields.items()}
    widest = max(np.nanpercentile(np.abs(error), 99.5) for error in errors.values()) or 1.0
    columns = 1 + len(next(iter(fields.values())))
    forecast_name = "Forecast" if columns == 3 else "Ensemble mean"
    figure = new_figure(11.0 / 3 * columns, 2.05 * len(fields) + 1.15)
    axes = figure.subplots(len(fields), columns, squeeze=False, sharex=True, sharey=True)
    area = background.grid.area_weights()
    for row, (lead, own) in enumerate(fields.items()):
        valid = clock.format(initial + lead).replace("T", " ")
        field = _draw_map(axes[row, 0], own[0], background, "viridis", low, high)
        _draw_map(axes[row, 1], own[1], background, "viridis", low, high)
        error = _draw_map(axes[row, 2], errors[lead], background, "RdBu_r", -widest, widest)
        axes[row, 0].set_title(f"Truth, {valid} UTC")
        axes[row, 1].set_title(f"{forecast_name} at {lead / 60:g} h")
        axes[row, 2].set_title(f"Error, RMSE {_root_mean_square(errors[lead], area):.3g} {units}")
        axes[row, 0].set_ylabel("Latitude")
        if columns == 4:
            spread = _draw_map(axes[row, 3], own[2], background, "magma_r", 0.0, widest)
            axes[row, 3].set_title(f"Spread, {_root_mean_square(own[2], area):.3g} {units}")
    for axis in axes[-1]:
        axis.set_xlabel("Longitude")
    bar = {"orientation": "horizontal", "shrink": 0.7, "aspect": 40, "pad": 0.02, "extend": "both"}
    figure.colorbar(field, ax=axes[:, :2], label=f"{channel} ({units})", **bar)
    bar |= {"aspect": 20}
    figure.colorbar(error, ax=axes[:, 2], label=f"forecast minus truth ({units})", **bar)
    if columns == 4:
        label = f"standard deviation over members ({units})"
        figure.colorbar(spread, ax=axes[:, 3], label=label, **bar | {"extend": "max"})
    figure.suptitle(f"{channel}: forecast from {clock.format(initial).replace('T', ' ')} UTC")
    return figure


def _root_mean_square(field: np.ndarray, area: np.ndarray) -> float:
    seen = np.isfinite(field)
    return float(np.sqrt((field[seen] ** 2 * area[seen]).sum() / area[seen].sum()))


def spectra(
    powers: Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]], units: Mapping[str, str], n_cases: int
) -> Figure:
    """Power by total wavenumber (top) and the forecast's over the truth's (bottom), a column a channel."""
    channels = [name for name in units if any(channel == name for channel, _ in powers)]
    leads = sorted({lead for _, lead in powers})
    shades = colormaps["viridis"](np.linspace(0.1, 0.75, len(leads)))
    figure = new_figure(max(2.9 * len(channels) + 0.6, LEAST_WIDTH), 5.2)
    axes = figure.subplots(2, len(channels), sharex=True, squeeze=False, height_ratios=[2, 1])
    for column, channel in enumerate(channels):
        upper, lower = axes[:, column]
        truth = np.mean([powers[channel, lead][0] for lead in leads], axis=0)
        number = np.arange(1, len(truth))  # the mean, wavenumber 0, would set the scale
        upper.loglog(number, truth[1:], color="black", linewidth=2.2, label="Truth")
        for lead, colour in zip(leads, shades, strict=True):
            own_truth, forecast = powers[channel, lead]
            upper.loglog(number, forecast[1:], color=colour, linewidth=1.5, label=f"Forecast at {lead / 60:g} h")
            present = own_truth[1:] > 0
            lower.semilogx(number[present], forecast[1:][present] / own_truth[1:][present], color=colour, linewidth=1.5)
        lower.axhline(1.0, color="black", linewidth=0.8)
        lower.set_ylim(0, 1.6)
        upper.set_title(channel)
        upper.set_ylabel(f"Power ({pretty_units(units[channel], 2)})")
        lower.set_ylabel("Forecast / truth")
        lower.set_xlabel("Total wavenumber")
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200) if tick <= number[-1]]
        lower.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        lower.tick_params(axis="x", which="minor", labelbottom=False)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(f"Power spectra, mean over {n_cases} forecasts")
    return figure


def loss_curve(train: Sequence[tuple[int, float]], valid: Sequence[tuple[int, float]]) -> Figure:
    """Training and validation loss by optimizer step; each is a list of (step, loss)."""
    figure = new_figure(6.4, 3.4)
    axis = figure.subplots()
    steps, losses = np.array(train, dtype=np.float64).T
    axis.plot(steps, losses, color="#56B4E9", linewidth=0.8, alpha=0.6, label="Training, each step")
    width = max(1, len(losses) // 50)
    if width > 1:
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        centre = width // 2
        axis.plot(
            steps[centre : centre + len(smooth)],
            smooth,
            color="#0072B2",
            linewidth=2.0,
            label=f"Training, mean of {width} steps",
        )
    if valid:
        where, values = np.array(valid, dtype=np.float64).T
        axis.plot(where, values, color="#D55E00", marker="o", linewidth=1.6, label="Validation")
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("Optimizer step")
    axis.set_ylabel("Loss (normalised)")
    axis.set_title("Loss")
    axis.legend()
    return figure


def portrait(field: np.ndarray, values: np.ndarray, background: Background, units: str) -> Figure:
    """A field (H, W) as a map, and how often each of `values` occurs, with a logarithmic count."""
    figure = new_figure(9.6, 2.9)
    left, right = figure.subplots(1, 2, width_ratios=[5, 3])
    mesh = _draw_map(left, field, background, "viridis", *_limits([field]))
    figure.colorbar(mesh, ax=left, shrink=0.9, pad=0.02)
    right.hist(values[np.isfinite(values)].ravel(), bins=60, color="#0072B2", log=True)
    right.set_xlabel(pretty_units(units))
    right.set_ylabel("cells")
    return figure


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, sizes in inches."""
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.07, h_pad=0.06)
    return figure


def _limits(fields: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the range of all but the outermost half percent."""
    low, high = np.nanpercentile(np.stack(fields), [0.5, 99.5])
    return float(low), float(high) if high > low else float(low) + 1.0


def _draw_map(axis: Axes, field: np.ndarray, background: Background, colours: str, low: float, high: float):
    """Draw a field with Greenwich in the middle."""
    grid = background.grid
    width = 360.0 / len(grid.lon)
    eastern = int((grid.lon >= 180.0 - width / 2).argmax())
    order = np.roll(np.arange(len(grid.lon)), -eastern)
    centres = np.where(grid.lon[order] >= 180.0 - width / 2, grid.lon[order] - 360.0, grid.lon[order])
    edges = np.append(centres - width / 2, centres[-1] + width / 2)
    palette = colormaps[colours].with_extremes(bad="#CCCCCC")
    mesh = axis.pcolormesh(edges, grid.lat_bounds, field[:, order], cmap=palette, vmin=low, vmax=high, rasterized=True)
    if background.land is not None:
        axis.contour(centres, grid.lat, background.land[:, order], [0.5], colors="black", linewidths=0.6)
    axis.set_xticks(range(-180, 181, 60))
    axis.set_xticklabels([_degrees(value, "W", "E") for value in range(-180, 181, 60)])
    axis.set_yticks(range(-60, 61, 30))
    axis.set_yticklabels([_degrees(value, "S", "N") for value in range(-60, 61, 30)])
    axis.set_xlim(edges[0], edges[-1])
    axis.set_ylim(-90, 90)
    axis.grid(False)
    axis.spines[["top", "right"]].set_visible(True)
    return mesh


def _degrees(value: int, negative: str, positive: str) -> str:
    side = "" if value % 180 == 0 else negative if value < 0 else positive
    return f"{abs(value)}°{side}"
