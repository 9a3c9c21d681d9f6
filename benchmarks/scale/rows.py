"""Rows of the scale model: a quantity for a number of ranks, its slope over them, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A curve may be this much steeper than log2(N), because a message has a head that does not grow.
SLOPE_TOLERANCE = 1.1
# Values that are too small to matter at any number of ranks, by unit.
NEGLIGIBLE = {"s": 0.1, "MB": 10.0}


@dataclass(frozen=True)
class Row:
    """Value of a quantity for one number of ranks.

    Attributes:
        quantity: name of the quantity, with the rank on which it was measured.
        unit: unit of the value; empty for a count.
        ranks: number of ranks.
        value: the value.
        reason: reason why the quantity may grow with the number of ranks; empty if it must not grow.
    """

    quantity: str
    unit: str
    ranks: int
    value: float
    reason: str = ""


@dataclass(frozen=True)
class Curve:
    """Values of a quantity over the numbers of ranks.

    Attributes:
        rows: rows of one quantity, by increasing number of ranks.
    """

    rows: Sequence[Row]

    @property
    def slope(self) -> float:
        """Slope of the straight line through the points (log N, log value), by least squares; 0 for zeros."""
        return _fit_slope([(row.ranks, row.value) for row in self.rows if row.value > 0])

    @property
    def verdict(self) -> str:
        """``constant or log N``, the reason for a faster growth, or ``GROWS``."""
        log_slope = _fit_slope([(row.ranks, math.log2(row.ranks)) for row in self.rows])
        if self.slope <= SLOPE_TOLERANCE * log_slope:
            return "constant or log N"
        last = self.rows[-1]
        if last.reason:
            return last.reason
        if last.value <= NEGLIGIBLE.get(last.unit, 0.0):
            return f"below {NEGLIGIBLE[last.unit]:g} {last.unit}"
        return "GROWS"


def _fit_slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of a line through the logarithms of positive coordinates; 0 for less than two points."""
    if len(points) < 2:
        return 0.0
    logarithms = [(math.log(x), math.log(y)) for x, y in points]
    mean_x = sum(x for x, _ in logarithms) / len(points)
    mean_y = sum(y for _, y in logarithms) / len(points)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in logarithms)
    return covariance / sum((x - mean_x) ** 2 for x, _ in logarithms)


def group_rows(rows: Iterable[Row]) -> list[Curve]:
    """Return the curve of each quantity, in the order of the quantities."""
    rows_of_quantity: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        rows_of_quantity.setdefault((row.quantity, row.unit), []).append(row)
    return [Curve(sorted(curve_rows, key=lambda row: row.ranks)) for curve_rows in rows_of_quantity.values()]


def format_table(part: str, curves: Sequence[Curve]) -> str:
    """Return a Markdown table of the curves of a part; all have the same numbers of ranks."""
    ranks = [row.ranks for row in curves[0].rows]
    lines = [
        f"| {part} | " + " | ".join(f"{number:,}" for number in ranks) + " | slope | verdict |",
        "|---|" + "---|" * (len(ranks) + 2),
    ]
    for curve in curves:
        unit = f" ({curve.rows[0].unit})" if curve.rows[0].unit else ""
        values = " | ".join(_format_value(row.value) for row in curve.rows)
        lines.append(f"| {curve.rows[0].quantity}{unit} | {values} | {curve.slope:.2f} | {curve.verdict} |")
    return "\n".join(lines)


def _format_value(value: float) -> str:
    """Return a number as a string with three digits, or with all digits for a whole number."""
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.3g}"
