"""Hybrid sigma-pressure levels, and interpolation from one set of levels to another, linear in ln p.

On hybrid levels pressure is a + b times surface pressure; a pressure level is one with b = 0. So one function goes
between any two sets: hybrid to pressure levels, back, and one model's levels to another's.

Letters of shapes: K are the levels of a source, L those that are wanted, both from the top down; N stands for the axes
of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from credit.errors import DataError

# room for float32 pressures between a wanted level and the uppermost one of a source
_TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class HybridLevels:
    """Levels at the pressure a + b * surface pressure.

    Attributes:
        values: (K,) what the levels are called in data: their pressure or number.
        a: (K,) Pa, float64.
        b: (K,) float64.
        a_bounds: (K, 2) Pa, of the layers' upper and lower edges; None where they are not known.
        b_bounds: (K, 2).
    """

    values: np.ndarray
    a: np.ndarray
    b: np.ndarray
    a_bounds: np.ndarray | None = None
    b_bounds: np.ndarray | None = None

    @classmethod
    def of_pressures(cls, values: Sequence[float] | np.ndarray, pascal: float) -> HybridLevels:
        """Return pressure levels of values in units of so many Pa."""
        values = np.asarray(values, dtype=np.float64)
        return cls(values, values * pascal, np.zeros(len(values)))

    def __len__(self) -> int:
        return len(self.a)

    def take(self, rows: Sequence[int] | np.ndarray) -> HybridLevels:
        """Return some of the levels."""
        rows = np.asarray(rows, dtype=np.int64)
        bounds = (None if one is None else one[rows] for one in (self.a_bounds, self.b_bounds))
        return HybridLevels(self.values[rows], self.a[rows], self.b[rows], *bounds)

    def pressure(self, surface_N: np.ndarray) -> np.ndarray:
        """Return pressure (K, N...) in Pa over a surface pressure (N...) in Pa."""
        return np.add.outer(self.a, 0.0 * surface_N) + np.multiply.outer(self.b, surface_N)

    def lower_edges(self) -> HybridLevels:
        """Return the uppermost level and the lower edges of all layers, as levels."""
        assert self.a_bounds is not None and self.b_bounds is not None
        a, b = (
            np.concatenate([full[:1], edge[:, 1]]) for full, edge in ((self.a, self.a_bounds), (self.b, self.b_bounds))
        )
        return HybridLevels(np.arange(len(a)), a, b)

    def lowest(self, surface_N: np.ndarray) -> np.ndarray:
        """Return pressure (N...) of the lowest level in Pa."""
        return self.a[-1] + self.b[-1] * surface_N

    def edges(self, surface_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pressure at the layers' upper and lower edges, (K, N...) each, in Pa."""
        assert self.a_bounds is not None and self.b_bounds is not None
        upper, lower = (
            HybridLevels(self.values, self.a_bounds[:, side], self.b_bounds[:, side]).pressure(surface_N)
            for side in (0, 1)
        )
        return upper, lower


@dataclass(frozen=True)
class Column:
    """From the levels of a file to those of the run.

    Attributes:
        levels: (K) of the rows that are read, from the top down.
        wanted: the run's levels, to interpolate to; None where `rows` are the run's as they are.
        rows: places of the run's levels among `levels`.
    """

    levels: HybridLevels
    wanted: HybridLevels | None
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class VerticalInterpolator:
    """Where wanted levels lie between those of a source.

    Attributes:
        upper: (L, N...) the source level above.
        share: (L, N...) the weight of the one below; more than 1 below the lowest.
        step: (L, N...) the distance of the two in ln p.
        pressure: (L, N...) of the wanted levels, Pa.
    """

    upper: np.ndarray
    share: np.ndarray
    step: np.ndarray
    pressure: np.ndarray

    @property
    def below(self) -> np.ndarray:
        """Return where a level is below the lowest of the source, (L, N...) bool."""
        return self.share > 1.0

    def held(self, fields_KN: np.ndarray) -> np.ndarray:
        """Return fields (L, N...) linear in ln p; below the lowest level its value."""
        return self._between(fields_KN, np.minimum(self.share, 1.0))

    def continued(self, fields_KN: np.ndarray) -> np.ndarray:
        """Return fields (L, N...) linear in ln p; below the lowest level with the slope between the last two."""
        return self._between(fields_KN, self.share)

    def _between(self, fields_KN: np.ndarray, share: np.ndarray) -> np.ndarray:
        above = np.take_along_axis(fields_KN, self.upper, axis=0)
        return above + share * (np.take_along_axis(fields_KN, self.upper + 1, axis=0) - above)

    def curved(self, fields_KN: np.ndarray, slopes_KN: np.ndarray) -> np.ndarray:
        """Return fields (L, N...) whose derivative by ln p is linear in ln p between levels; held below the lowest.

        Args:
            fields_KN: fields on the source's levels.
            slopes_KN: their derivatives by ln p there.
        """
        share = np.minimum(self.share, 1.0)
        steps = np.take_along_axis(slopes_KN, self.upper + 1, axis=0) - np.take_along_axis(
            slopes_KN, self.upper, axis=0
        )
        return self._between(fields_KN, share) - 0.5 * steps * self.step * share * (1.0 - share)


def place(source: HybridLevels, wanted: HybridLevels, surface_N: np.ndarray) -> VerticalInterpolator:
    """Find wanted levels between those of a source.

    Source level k lies above the wanted one where (b_k - b) ps <= a - a_k: how many do is a question to ps alone, so it
    is looked up among the K thresholds, and no pressure of whole columns is computed.

    Args:
        source: at least two levels, from the top down.
        wanted: the levels to go to.
        surface_N: surface pressure in Pa; any where all levels are pressure levels.

    Raises:
        DataError: for a wanted level above the uppermost of the source.
    """
    upper = np.empty((len(wanted), *surface_N.shape), dtype=np.int64)
    for row, (a, b) in enumerate(zip(wanted.a, wanted.b, strict=True)):
        upper[row] = _count_above(source, a, b, surface_N) - 1
    pressure = wanted.pressure(surface_N)
    for row in np.flatnonzero((upper < 0).reshape(len(wanted), -1).any(axis=1)):
        first = source.a[0] + source.b[0] * surface_N
        if (pressure[row] < first * (1.0 - _TOLERANCE)).any():
            raise DataError(
                f"level {wanted.values[row]:g} ({pressure[row].min() / 100:g} hPa) lies above the uppermost level of "
                f"the source ({first.max() / 100:g} hPa), and nothing is extrapolated upwards; leave it out"
            )
    upper = np.clip(upper, 0, len(source) - 2)
    above, below = (np.log(source.a[k] + source.b[k] * surface_N) for k in (upper, upper + 1))
    share = np.maximum((np.log(pressure) - above) / (below - above), 0.0)
    return VerticalInterpolator(upper, share, below - above, pressure)


def _count_above(source: HybridLevels, a: float, b: float, surface_N: np.ndarray) -> np.ndarray:
    """Return how many levels of the source lie above or at the level (a, b)."""
    slope, room = source.b - b, a - source.a
    count = np.full(surface_N.shape, int(((slope == 0) & (room >= 0)).sum()), dtype=np.int64)
    steeper, flatter = slope > 0, slope < 0
    if steeper.any():  # ps is at most the threshold
        limits = np.sort(room[steeper] / slope[steeper])
        count += len(limits) - np.searchsorted(limits, surface_N, side="left")
    if flatter.any():  # ps is at least the threshold
        limits = np.sort(room[flatter] / slope[flatter])
        count += np.searchsorted(limits, surface_N, side="right")
    return count
