"""Hybrid sigma-pressure levels, and interpolation from one set of levels to another, linear in ln p.

On a hybrid level, pressure is a + b * surface pressure. A pressure level is a hybrid level with b = 0. So one function
interpolates between any two sets of levels: from hybrid to pressure levels, from pressure to hybrid levels, and between
the levels of two models.

Shape suffixes: K levels of a source and L target levels, both from the top down; N is one or more axes of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from credit.errors import DataError

# Tolerance, as a fraction of pressure, by which a target level may be above the uppermost source level, because files
# store pressures as float32.
_TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class HybridLevels:
    """Levels at the pressure a + b * surface pressure, from the top down.

    Attributes:
        values: (K,) values of the level coordinate in the data: pressures in the units of the coordinate, or numbers of
            model levels.
        a: (K,) coefficient a of each level in Pa, float64.
        b: (K,) coefficient b of each level, dimensionless, float64.
        a_bounds: (K, 2) coefficient a in Pa at the upper and lower edge of each layer; None if the edges are unknown.
        b_bounds: (K, 2) coefficient b at the upper and lower edge of each layer; None if the edges are unknown.
    """

    values: np.ndarray
    a: np.ndarray
    b: np.ndarray
    a_bounds: np.ndarray | None = None
    b_bounds: np.ndarray | None = None

    @classmethod
    def from_pressures(cls, values: Sequence[float] | np.ndarray, pascal: float) -> HybridLevels:
        """Return pressure levels, which are hybrid levels with b = 0.

        Args:
            values: (K,) pressures of the levels, in any units.
            pascal: number of Pa per unit of `values`, for example 100 for hPa.
        """
        values = np.asarray(values, dtype=np.float64)
        return cls(values, values * pascal, np.zeros(len(values)))

    def __len__(self) -> int:
        return len(self.a)

    def select(self, indices: Sequence[int] | np.ndarray) -> HybridLevels:
        """Return the levels with the indices `indices`, in this order."""
        indices = np.asarray(indices, dtype=np.int64)
        selected = HybridLevels(self.values[indices], self.a[indices], self.b[indices])
        if self.a_bounds is None or self.b_bounds is None:
            return selected
        return replace(selected, a_bounds=self.a_bounds[indices], b_bounds=self.b_bounds[indices])

    def pressure(self, surface_N: np.ndarray) -> np.ndarray:
        """Return pressure (K, N...) in Pa for a surface pressure (N...) in Pa; NaN if surface pressure is NaN."""
        # The product with 0 gives `a` the shape (K, N...) and keeps NaN.
        return np.add.outer(self.a, 0.0 * surface_N) + np.multiply.outer(self.b, surface_N)

    def lower_edges(self) -> HybridLevels:
        """Return K + 1 levels: the lower edge of each of the K layers, preceded by the uppermost full level as the top.

        The method needs `a_bounds` and `b_bounds`. The `values` of the returned levels are the numbers 0 to K.
        """
        assert self.a_bounds is not None and self.b_bounds is not None
        a = np.concatenate([self.a[:1], self.a_bounds[:, 1]])
        b = np.concatenate([self.b[:1], self.b_bounds[:, 1]])
        return HybridLevels(np.arange(len(a)), a, b)

    def lowest_pressure(self, surface_N: np.ndarray) -> np.ndarray:
        """Return the pressure (N...) in Pa of the lowest (last) level, for a surface pressure (N...) in Pa."""
        return self.a[-1] + self.b[-1] * surface_N

    def edge_pressures(self, surface_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pressure at the upper edges and at the lower edges of the layers, (K, N...) each, in Pa.

        The method needs `a_bounds` and `b_bounds`.

        Args:
            surface_N: (N...) surface pressure in Pa.
        """
        assert self.a_bounds is not None and self.b_bounds is not None
        upper = HybridLevels(self.values, self.a_bounds[:, 0], self.b_bounds[:, 0])
        lower = HybridLevels(self.values, self.a_bounds[:, 1], self.b_bounds[:, 1])
        return upper.pressure(surface_N), lower.pressure(surface_N)


@dataclass(frozen=True)
class LevelMapping:
    """Mapping from the levels of a file to the levels of the run, by interpolation or by selection.

    Attributes:
        levels: the K levels to read, from the top down.
        target_levels: the L levels of the run, for interpolation; None for selection.
        level_indices: (L,) indices in `levels` of the levels of the run, for selection; empty for interpolation.
    """

    levels: HybridLevels
    target_levels: HybridLevels | None
    level_indices: tuple[int, ...] = ()


@dataclass(frozen=True)
class VerticalInterpolator:
    """Interpolator of fields from source levels to target levels, for a given field of surface pressure.

    Each target level is interpolated from the source levels above and below it. For target levels below the lowest
    source level, `interpolate_and_extrapolate` extrapolates, and the other methods hold the lowest value.

    Attributes:
        upper_index: (L, N...) int64 index of the upper of the two source levels.
        lower_weight: (L, N...) weight of the lower of the two source levels, 0 to 1; more than 1 for a target level
            below the lowest source level.
        log_distance: (L, N...) difference of ln p between the lower and the upper source level, positive.
        pressure: (L, N...) pressure of the target levels, Pa.
    """

    upper_index: np.ndarray
    lower_weight: np.ndarray
    log_distance: np.ndarray
    pressure: np.ndarray

    @property
    def is_below_source(self) -> np.ndarray:
        """Mask of the target levels below the lowest level of the source, (L, N...) bool."""
        return self.lower_weight > 1.0

    def interpolate_and_hold(self, fields_KN: np.ndarray) -> np.ndarray:
        """Interpolate fields (K, N...) linearly in ln p to the L target levels.

        Target levels below the lowest source level get the values of the lowest source level.
        """
        return self._interpolate(fields_KN, np.minimum(self.lower_weight, 1.0))

    def interpolate_and_extrapolate(self, fields_KN: np.ndarray) -> np.ndarray:
        """Interpolate fields (K, N...) linearly in ln p to the L target levels.

        Below the lowest source level, extrapolate the fields linearly from the two lowest source levels.
        """
        return self._interpolate(fields_KN, self.lower_weight)

    def _interpolate(self, fields_KN: np.ndarray, lower_weight: np.ndarray) -> np.ndarray:
        """Return the weighted mean (L, N...) of the two source levels of each target level.

        Args:
            fields_KN: (K, N...) fields on the source levels.
            lower_weight: (L, N...) weight of the lower of the two source levels.
        """
        above = np.take_along_axis(fields_KN, self.upper_index, axis=0)
        below = np.take_along_axis(fields_KN, self.upper_index + 1, axis=0)
        return above + lower_weight * (below - above)

    def interpolate_hydrostatic(self, fields_KN: np.ndarray, slopes_KN: np.ndarray) -> np.ndarray:
        """Interpolate fields whose derivative with respect to ln p is linear in ln p, such as geopotential.

        Args:
            fields_KN: (K, N...) fields on the levels of the source.
            slopes_KN: (K, N...) derivatives of the fields with respect to ln p on the levels of the source.

        Returns:
            Fields (L, N...) on the target levels. Below the lowest source level, they have the values of that level.
        """
        lower_weight = np.minimum(self.lower_weight, 1.0)
        slope_above = np.take_along_axis(slopes_KN, self.upper_index, axis=0)
        slope_below = np.take_along_axis(slopes_KN, self.upper_index + 1, axis=0)
        slope_change = slope_below - slope_above
        # The integral of a linear slope is a parabola; it differs from the straight line by this quadratic term.
        parabola = 0.5 * slope_change * self.log_distance * lower_weight * (1.0 - lower_weight)
        return self._interpolate(fields_KN, lower_weight) - parabola


def build_interpolator(source: HybridLevels, target: HybridLevels, surface_N: np.ndarray) -> VerticalInterpolator:
    """Build the interpolator from source levels to target levels.

    Source level k, with the coefficients a_k and b_k, is above the target level with a and b if
    (b_k - b) ps <= a - a_k. So the number of source levels above a target level depends only on surface pressure ps. A
    search among K thresholds of ps finds this number without computing the pressure of all source levels in all
    columns.

    Args:
        source: the K levels of the source, at least two, from the top down.
        target: the L target levels, from the top down.
        surface_N: (N...) surface pressure in Pa; its values have no effect if all levels are pressure levels.

    Raises:
        DataError: if a target level is above the uppermost level of the source.
    """
    # Index of the lowest source level above each target level; -1 if no source level is above the target level.
    upper_index = np.empty((len(target), *surface_N.shape), dtype=np.int64)
    for row, (a, b) in enumerate(zip(target.a, target.b, strict=True)):
        upper_index[row] = _count_levels_above(source, a, b, surface_N) - 1
    pressure = target.pressure(surface_N)
    # A target level that is above the source only because of rounding gets the values of the uppermost source level.
    is_above_source = (upper_index < 0).reshape(len(target), -1).any(axis=1)
    for row in np.flatnonzero(is_above_source):
        uppermost = source.a[0] + source.b[0] * surface_N
        is_beyond_rounding = pressure[row] < uppermost * (1.0 - _TOLERANCE)
        if is_beyond_rounding.any():
            raise DataError(
                f"level {target.values[row]:g} ({pressure[row].min() / 100:g} hPa) is above the uppermost level of "
                f"the source ({uppermost.max() / 100:g} hPa), and fields are not extrapolated upwards; remove the level"
            )
    # A target level below the source uses the two lowest source levels.
    upper_index = np.clip(upper_index, 0, len(source) - 2)
    log_above = np.log(source.a[upper_index] + source.b[upper_index] * surface_N)
    log_below = np.log(source.a[upper_index + 1] + source.b[upper_index + 1] * surface_N)
    lower_weight = np.maximum((np.log(pressure) - log_above) / (log_below - log_above), 0.0)
    return VerticalInterpolator(upper_index, lower_weight, log_below - log_above, pressure)


def _count_levels_above(source: HybridLevels, a: float, b: float, surface_N: np.ndarray) -> np.ndarray:
    """Return the number of source levels above or at the level with the coefficients a and b, (N...) int64.

    Args:
        source: the K levels of the source.
        a: coefficient a of the level, Pa.
        b: coefficient b of the level, dimensionless.
        surface_N: (N...) surface pressure ps in Pa.
    """
    # Source level k is above the level if slope_k * ps <= difference_k. The threshold of ps is difference_k / slope_k.
    # The sign of the slope decides whether ps must be below or above the threshold. If the slope is 0, the result does
    # not depend on ps.
    slope_K = source.b - b
    difference_K = a - source.a
    num_always_above = int(((slope_K == 0) & (difference_K >= 0)).sum())
    count_N = np.full(surface_N.shape, num_always_above, dtype=np.int64)
    is_positive = slope_K > 0
    if is_positive.any():
        # These source levels are above the level if ps is at most their threshold. Count the thresholds from ps
        # upwards.
        thresholds = np.sort(difference_K[is_positive] / slope_K[is_positive])
        count_N += len(thresholds) - np.searchsorted(thresholds, surface_N, side="left")
    is_negative = slope_K < 0
    if is_negative.any():
        # These source levels are above the level if ps is at least their threshold. Count the thresholds up to ps.
        thresholds = np.sort(difference_K[is_negative] / slope_K[is_negative])
        count_N += np.searchsorted(thresholds, surface_N, side="right")
    return count_N
