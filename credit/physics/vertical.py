"""Hybrid sigma-pressure levels, and interpolation from one set of levels to another, linear in ln p.

On hybrid levels pressure is a + b times surface pressure; a pressure level is one with b = 0. So one function goes
between any two sets: hybrid to pressure levels, back, and one model's levels to another's.

Letters of shapes: K are the levels of a source, L the levels to interpolate to, both from the top down; N stands for
the axes of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from credit.errors import DataError

# Relative tolerance for float32 pressures, by which a level may lie above the uppermost level of a source.
_TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class HybridLevels:
    """Levels at the pressure a + b * surface pressure.

    Attributes:
        values: (K,) values of the levels in data: their pressure or number.
        a: (K,) Pa, float64.
        b: (K,) float64.
        a_bounds: (K, 2) Pa, at the upper and lower edges of the layers; None if they are not known.
        b_bounds: (K, 2).
    """

    values: np.ndarray
    a: np.ndarray
    b: np.ndarray
    a_bounds: np.ndarray | None = None
    b_bounds: np.ndarray | None = None

    @classmethod
    def of_pressures(cls, values: Sequence[float] | np.ndarray, pascal: float) -> HybridLevels:
        """Return pressure levels with the given values, in a unit of `pascal` Pa."""
        values = np.asarray(values, dtype=np.float64)
        return cls(values, values * pascal, np.zeros(len(values)))

    def __len__(self) -> int:
        return len(self.a)

    def take(self, rows: Sequence[int] | np.ndarray) -> HybridLevels:
        """Return some of the levels."""
        rows = np.asarray(rows, dtype=np.int64)
        return HybridLevels(
            values=self.values[rows],
            a=self.a[rows],
            b=self.b[rows],
            a_bounds=None if self.a_bounds is None else self.a_bounds[rows],
            b_bounds=None if self.b_bounds is None else self.b_bounds[rows],
        )

    def pressure(self, surface_N: np.ndarray) -> np.ndarray:
        """Return pressure (K, N...) in Pa for a surface pressure (N...) in Pa."""
        return np.add.outer(self.a, 0.0 * surface_N) + np.multiply.outer(self.b, surface_N)

    def lower_edges(self) -> HybridLevels:
        """Return the uppermost level and the lower edges of all layers, as levels."""
        assert self.a_bounds is not None and self.b_bounds is not None
        a = np.concatenate([self.a[:1], self.a_bounds[:, 1]])
        b = np.concatenate([self.b[:1], self.b_bounds[:, 1]])
        return HybridLevels(np.arange(len(a)), a, b)

    def lowest(self, surface_N: np.ndarray) -> np.ndarray:
        """Return the pressure (N...) in Pa of the last level, next to the ground, for surface pressure (N...) in Pa."""
        return self.a[-1] + self.b[-1] * surface_N

    def edges(self, surface_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pressure at the layers' upper and lower edges, (K, N...) each, in Pa."""
        assert self.a_bounds is not None and self.b_bounds is not None
        upper = HybridLevels(self.values, self.a_bounds[:, 0], self.b_bounds[:, 0])
        lower = HybridLevels(self.values, self.a_bounds[:, 1], self.b_bounds[:, 1])
        return upper.pressure(surface_N), lower.pressure(surface_N)


@dataclass(frozen=True)
class Column:
    """Vertical interpolation from the levels of a file to those of the run.

    Attributes:
        levels: the K levels that are read, from the top down.
        target: levels of the run; None if `levels` contains them, so that nothing is interpolated.
        rows: indices of the run's levels in `levels`, if it contains them.
    """

    levels: HybridLevels
    target: HybridLevels | None
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class VerticalInterpolator:
    """Interpolation weights of levels between the levels of a source.

    Attributes:
        upper: (L, N...) index of the source level above.
        share: (L, N...) weight of the source level below; more than 1 below the lowest.
        step: (L, N...) distance of the two source levels in ln p.
        pressure: (L, N...) pressure of the levels, Pa.
    """

    upper: np.ndarray
    share: np.ndarray
    step: np.ndarray
    pressure: np.ndarray

    @property
    def below(self) -> np.ndarray:
        """Return whether a level is below the lowest level of the source, (L, N...) bool."""
        return self.share > 1.0

    def constant(self, fields_KN: np.ndarray) -> np.ndarray:
        """Return fields (L, N...) linear in ln p; below the lowest source level its value."""
        return self._between(fields_KN, np.minimum(self.share, 1.0))

    def linear(self, fields_KN: np.ndarray) -> np.ndarray:
        """Return fields (L, N...) linear in ln p; below the lowest source level with the slope of the last two."""
        return self._between(fields_KN, self.share)

    def _between(self, fields_KN: np.ndarray, share: np.ndarray) -> np.ndarray:
        above = np.take_along_axis(fields_KN, self.upper, axis=0)
        below = np.take_along_axis(fields_KN, self.upper + 1, axis=0)
        return above + share * (below - above)

    def hydrostatic(self, fields_KN: np.ndarray, slopes_KN: np.ndarray) -> np.ndarray:
        """Return fields (L, N...) whose derivative by ln p is linear in ln p, such as geopotential.

        Below the lowest source level they have its value.

        Args:
            fields_KN: fields on the levels of the source.
            slopes_KN: their derivatives by ln p there.
        """
        share = np.minimum(self.share, 1.0)
        slope_above = np.take_along_axis(slopes_KN, self.upper, axis=0)
        slope_below = np.take_along_axis(slopes_KN, self.upper + 1, axis=0)
        curvature = slope_below - slope_above
        return self._between(fields_KN, share) - 0.5 * curvature * self.step * share * (1.0 - share)


def interpolation_weights(source: HybridLevels, target: HybridLevels, surface_N: np.ndarray) -> VerticalInterpolator:
    """Return the interpolation from the levels of a source to target levels.

    Source level k lies above a target level if (b_k - b) ps <= a - a_k. How many levels do depends on surface pressure
    ps only, so their number is looked up among K thresholds, and no pressure of whole columns is computed.

    Args:
        source: at least two levels, from the top down.
        target: the levels to interpolate to.
        surface_N: surface pressure in Pa; its values do not matter if all levels are pressure levels.

    Raises:
        DataError: for a target level above the uppermost level of the source.
    """
    upper = np.empty((len(target), *surface_N.shape), dtype=np.int64)
    for row, (a, b) in enumerate(zip(target.a, target.b, strict=True)):
        upper[row] = _count_above(source, a, b, surface_N) - 1
    pressure = target.pressure(surface_N)
    is_above_source = (upper < 0).reshape(len(target), -1).any(axis=1)
    for row in np.flatnonzero(is_above_source):
        uppermost = source.a[0] + source.b[0] * surface_N
        if (pressure[row] < uppermost * (1.0 - _TOLERANCE)).any():
            raise DataError(
                f"level {target.values[row]:g} ({pressure[row].min() / 100:g} hPa) lies above the uppermost level of "
                f"the source ({uppermost.max() / 100:g} hPa), and nothing is extrapolated upwards; leave it out"
            )
    upper = np.clip(upper, 0, len(source) - 2)
    above = np.log(source.a[upper] + source.b[upper] * surface_N)
    below = np.log(source.a[upper + 1] + source.b[upper + 1] * surface_N)
    share = np.maximum((np.log(pressure) - above) / (below - above), 0.0)
    return VerticalInterpolator(upper, share, below - above, pressure)


def _count_above(source: HybridLevels, a: float, b: float, surface_N: np.ndarray) -> np.ndarray:
    """Return how many levels of the source lie above or at the level (a, b), (N...) int64."""
    # Level k lies above if slope_k * ps <= difference_k.
    slope_K = source.b - b
    difference_K = a - source.a
    num_always_above = int(((slope_K == 0) & (difference_K >= 0)).sum())
    count_N = np.full(surface_N.shape, num_always_above, dtype=np.int64)
    is_positive = slope_K > 0
    if is_positive.any():
        # The level lies above if ps is at most the threshold.
        thresholds = np.sort(difference_K[is_positive] / slope_K[is_positive])
        count_N += len(thresholds) - np.searchsorted(thresholds, surface_N, side="left")
    is_negative = slope_K < 0
    if is_negative.any():
        # The level lies above if ps is at least the threshold.
        thresholds = np.sort(difference_K[is_negative] / slope_K[is_negative])
        count_N += np.searchsorted(thresholds, surface_N, side="right")
    return count_N
