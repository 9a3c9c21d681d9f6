"""Figures of a verification: how they are written, and loss. Colours are Okabe and Ito's, safe for the
colour-blind.

Nothing but the files plots*.py imports matplotlib, so that commands that draw nothing start fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from credit.config.schema_verification import OWN_NAMES, REGIONS
from credit.data.formats.units import plain
from credit.utils.atomic import atomic_write

STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 5),
}
_PROPER_NAMES = {
    "ausnz": "Australia and New Zealand",
    "east_asia": "East Asia",
    "north_america": "North America",
    "north_atlantic": "North Atlantic",
    "north_pacific": "North Pacific",
}
_DPI = 150
LEAST_WIDTH = 6.4  # inches
_LONGEST_NAME = 44  # letters of a line of a legend
_LEGEND_ROW = 0.2  # inches, by which figures with further ones are taller
LETTERS_AN_INCH = 9  # of the title of a figure


def draw(path: Path, maker: Callable[..., Figure], *arguments: object) -> Path:
    """Write the figure that ``maker(*arguments)`` returns as a PNG.

    Raises:
        CreditError: if it cannot be written.
    """
    with rc_context(STYLE):
        figure = maker(*arguments)
        return atomic_write(path, lambda beside: FigureCanvasAgg(figure).print_png(str(beside)))


def pretty_units(units: str, power: int = 1) -> str:
    """Return units, all of them to `power`, with raised exponents: ``m2 s-2`` or ``m**2 s**-2`` is m$^2$ s$^{-2}$."""
    parts, units = [], plain(units)
    for part in units.split():
        match = re.fullmatch(r"([A-Za-z%]+)(-?\d*)", part)
        if match is None:
            return units if power == 1 else f"({units})$^{power}$"
        exponent = int(match[2] or 1) * power
        parts.append(match[1] if exponent == 1 else f"{match[1]}$^{{{exponent}}}$")
    return " ".join(parts)


def label(name: str) -> str:
    """Return the name of a forecast or region for people: ours in words, a user's as it was written."""
    if name in OWN_NAMES or name in REGIONS:
        return _PROPER_NAMES.get(name) or name.replace("_", " ").capitalize()
    return name


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


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, sizes in inches."""
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.07, h_pad=0.06)
    return figure


def add_legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """Put one legend below all panels: what any of `axes` shows, in as many columns as are not cut off."""
    named = {name: line for axis in axes for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    names = [broken(name, _LONGEST_NAME) for name in named]
    renderer, room = FigureCanvasAgg(figure).get_renderer(), figure.bbox.width
    for columns in range(len(names), 0, -1):
        legend = figure.legend(named.values(), names, loc="outside lower center", ncols=columns)
        if columns == 1 or legend.get_window_extent(renderer).width <= room:
            figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * (-(-len(names) // columns) - 1))
            return
        legend.remove()


def add_title(figure: Figure, text: str) -> None:
    """Put a title over all panels, in lines that are not cut off."""
    figure.suptitle(broken(text, int(LETTERS_AN_INCH * figure.get_figwidth())))


def broken(text: str, most: int) -> str:
    """Return text in lines of at most so many letters, broken behind blanks or underscores where there are any."""
    return fill(text.replace("_", "_ "), most).replace("_ ", "_")
