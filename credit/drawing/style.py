"""Common functions for all figures (style, units, legend, title, saving), and the figure of the loss.

The colours are from the palette of Okabe and Ito, which colour-blind readers can distinguish. Only modules that plot
import matplotlib, so commands that do not plot start fast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from credit.data.formats.units import normalise_units
from credit.utils.atomic import atomic_write

# Settings of matplotlib for every figure.
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
    # Tick labels contain the complete number, because a factor like 1e5 at the end of an axis is easily overlooked.
    "axes.formatter.limits": (-7, 9),
}
# Units of the data -> (factor, units in figures). The units in figures give fields short tick labels.
_DISPLAY_UNITS = {
    "Pa": (0.01, "hPa"),
    "kg kg-1": (1000.0, "g kg-1"),
    "J m-2": (1e-6, "MJ m-2"),
}
# Resolution of figures in pixels per inch.
_DPI = 150
# Smallest width of a figure in inches.
MIN_WIDTH = 6.4
# Largest number of characters in a line of a legend, and height in inches of each additional row of the legend.
_LEGEND_LETTERS = 44
_LEGEND_ROW_INCHES = 0.2
# Number of characters of a figure title per inch.
LETTERS_PER_INCH = 9


def save_figure(path: Path, build_figure: Callable[..., Figure], *arguments: object) -> Path:
    """Write the figure that ``build_figure(*arguments)`` returns as a PNG file, and return its path.

    Args:
        path: path of the file.
        build_figure: function that returns the figure. It runs with the common style of all figures.
        arguments: arguments of `build_figure`.

    Raises:
        CreditError: if the file cannot be written.
    """
    with rc_context(STYLE):
        figure = build_figure(*arguments)
        return atomic_write(path, lambda temporary: FigureCanvasAgg(figure).print_png(str(temporary)))


def format_units(units: str, power: int = 1) -> str:
    """Return units, raised to a power, with superscript exponents in the markup of matplotlib.

    For example, ``m2 s-2`` and ``m**2 s**-2`` become ``m$^{2}$ s$^{-2}$``.

    Args:
        units: units of a variable.
        power: exponent of the units, such as 2 for the power of a spectrum.
    """
    units = normalise_units(units)
    factors = []
    for factor in units.split():
        # A factor is a name and an optional exponent, such as s-2. Other strings are not changed.
        match = re.fullmatch(r"([A-Za-z%]+)(-?\d*)", factor)
        if match is None:
            # If units cannot be parsed, the power is applied to the complete string.
            return units if power == 1 else f"({units})$^{power}$"
        exponent = int(match[2] or 1) * power
        if exponent == 1:
            factors.append(match[1])
        else:
            factors.append(f"{match[1]}$^{{{exponent}}}$")
    return " ".join(factors)


def find_display_units(units: str) -> tuple[float, str]:
    """Return the factor that converts a field to the units of figures, and the name of these units.

    Figures show pressure in hPa, specific humidity in g/kg, and energy in MJ per square metre. Other units are
    unchanged, with the factor 1.
    """
    factor, name = _DISPLAY_UNITS.get(normalise_units(units), (1.0, units))
    return factor, format_units(name)


def plot_loss(train: Sequence[tuple[int, float]], valid: Sequence[tuple[int, float]]) -> Figure:
    """Plot training loss and validation loss against the optimizer step, and return the figure.

    Args:
        train: (optimizer step, training loss) of each logged step; at least one.
        valid: (optimizer step, validation loss) of each validation; may be empty.
    """
    figure = create_figure(6.4, 3.4)
    axis = figure.subplots()
    steps, losses = np.array(train, dtype=np.float64).T
    axis.plot(steps, losses, color="#56B4E9", linewidth=0.8, alpha=0.6, label="Training, each step")
    # Losses of single steps vary strongly, so the figure also shows their running mean.
    window = max(1, len(losses) // 50)
    if window > 1:
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        center = window // 2
        axis.plot(
            steps[center : center + len(smooth)],
            smooth,
            color="#0072B2",
            linewidth=2.0,
            label=f"Training, mean of {window} steps",
        )
    if valid:
        valid_steps, valid_losses = np.array(valid, dtype=np.float64).T
        axis.plot(valid_steps, valid_losses, color="#D55E00", marker="o", linewidth=1.6, label="Validation")
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("Optimizer step")
    axis.set_ylabel("Loss (normalised)")
    axis.set_title("Loss")
    axis.legend()
    return figure


class DisplayedFigure(Figure):
    """Figure that notebooks display as an image.

    Without this class, notebooks display only figures of pyplot. Figures of pyplot stay in memory until they are
    closed, so this package creates its figures without pyplot.
    """

    def _repr_png_(self) -> bytes:
        """Return the content of a PNG file of the figure, for the rich display of IPython."""
        content = BytesIO()
        self.savefig(content, format="png")
        return content.getvalue()


def create_figure(width: float, height: float) -> DisplayedFigure:
    """Create an empty figure; width and height are in inches."""
    figure = DisplayedFigure(figsize=(width, height), dpi=_DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.07, h_pad=0.06)
    return figure


def add_legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """Add a common legend below all panels; it has each label of `axes` once, in as many columns as fit the figure."""
    # A curve has the same style in all panels, so the legend shows the line of the last panel.
    lines_by_name = {}
    for axis in axes:
        for line, name in zip(*axis.get_legend_handles_labels(), strict=True):
            lines_by_name[name] = line
    names = [wrap_text(name, _LEGEND_LETTERS) for name in lines_by_name]
    # Find the largest number of columns with which the legend is not wider than the figure. Additional rows of the
    # legend make the figure taller.
    renderer = FigureCanvasAgg(figure).get_renderer()
    for columns in range(len(names), 0, -1):
        legend = figure.legend(lines_by_name.values(), names, loc="outside lower center", ncols=columns)
        if columns == 1 or legend.get_window_extent(renderer).width <= figure.bbox.width:
            rows = math.ceil(len(names) / columns)
            figure.set_figheight(figure.get_figheight() + _LEGEND_ROW_INCHES * (rows - 1))
            return
        legend.remove()


def add_title(figure: Figure, text: str) -> None:
    """Add a title above all panels; its lines are wrapped to the width of the figure."""
    figure.suptitle(wrap_text(text, int(LETTERS_PER_INCH * figure.get_figwidth())))


def wrap_text(text: str, max_letters: int) -> str:
    """Wrap a string to lines of at most `max_letters` characters, which end at spaces or underscores if possible."""
    # `fill` wraps lines at spaces, so a space is added after each underscore and removed again.
    return fill(text.replace("_", "_ "), max_letters).replace("_ ", "_")
