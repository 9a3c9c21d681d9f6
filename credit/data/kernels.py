"""Compiled loops that compute the moments of fields.

Importing this module imports numba, and the first call loads or compiles the loop: 0.7 s, or 2 s without numba's cache.
Therefore only preprocessing, which processes many fields, uses this module. Training without a store uses the numpy
implementation, `credit.data.store.statistics.Moments.of_fields`.
"""

from __future__ import annotations

import math

import numpy as np

from credit.data.store.statistics import Moments
from credit.utils.compilation.kernels import compiled

# Number of partial sums and extremes that a loop computes in parallel, so that they fill the vector registers of the
# processor. With a single minimum, each comparison would wait for the previous comparison.
_LANES = 64


def compute_moments(fields_CHW: np.ndarray, valid_CHW: np.ndarray, before_CHW: np.ndarray | None = None) -> Moments:
    """Return the moments of fields, or of their differences from earlier fields.

    The result equals the result of `Moments.of_fields` up to rounding.

    Args:
        fields_CHW: (C, H, W) float32 fields.
        valid_CHW: (C, H, W) bool, True in the cells that are included in the moments.
        before_CHW: (C, H, W) earlier fields that are subtracted in float64; None to subtract nothing.
    """
    num_channels, *grid_shape = fields_CHW.shape
    fields_CP = np.ascontiguousarray(fields_CHW).reshape(num_channels, math.prod(grid_shape))
    # Subtracting zeros gives the field itself.
    before_NP = np.zeros_like(fields_CP[:1])
    if before_CHW is not None:
        before_NP = np.ascontiguousarray(before_CHW).reshape(fields_CP.shape)
    rows = _compute_moment_rows(fields_CP, before_NP)
    # Channels with masked cells are computed again, from the valid cells.
    valid_CP = valid_CHW.reshape(fields_CP.shape)
    for channel in np.flatnonzero(~valid_CP.all(axis=1)):
        valid_P = valid_CP[channel]
        before_P = before_NP[channel % len(before_NP)]
        rows[:, channel] = _compute_moment_rows(fields_CP[channel][None, valid_P], before_P[None, valid_P])[:, 0]
    return Moments.from_rows(rows)


def _compute_moment_rows(fields_CP: np.ndarray, before_NP: np.ndarray) -> np.ndarray:
    """Return the moments of differences of fields, (5, C) float64 with the rows that `Moments.to_rows` describes.

    Args:
        fields_CP: (C, P) float32 fields of C channels and P cells.
        before_NP: fields that are subtracted: (C, P), or (1, P) to subtract the same field from all channels.
    """
    num_channels, num_cells = fields_CP.shape
    if num_cells == 0:
        return Moments.empty(num_channels).to_rows()
    rows = np.empty((5, num_channels))
    rows[0] = num_cells
    compute_difference_moments(fields_CP, before_NP, rows[1:])
    return rows


@compiled
def compute_difference_moments(fields_CP: np.ndarray, before_NP: np.ndarray, moments_4C: np.ndarray) -> None:
    """Compute mean, sum of squared deviations from the mean, minimum and maximum of the differences of fields.

    Each channel is read twice; the second time, it is read from the processor's cache. If a value is not finite, the
    mean and the sum of squares are not finite either.

    Args:
        fields_CP: (C, P) float32 fields of C channels and P cells, P at least 1.
        before_NP: (C, P) float32 fields that are subtracted in float64; or (1, P), subtracted from each channel.
        moments_4C: output array, (4, C) float64: mean, sum of squares, minimum and maximum.
    """
    num_channels, num_cells = fields_CP.shape
    lows = np.empty(_LANES)
    highs = np.empty(_LANES)
    totals = np.empty(_LANES)
    for channel in range(num_channels):
        field = fields_CP[channel]
        before = before_NP[channel % len(before_NP)]
        for lane in range(_LANES):
            lows[lane] = np.inf
            highs[lane] = -np.inf
            totals[lane] = 0.0
        for start in range(0, num_cells - num_cells % _LANES, _LANES):
            for lane in range(_LANES):
                value = np.float64(field[start + lane]) - np.float64(before[start + lane])
                totals[lane] += value
                lows[lane] = min(lows[lane], value)
                highs[lane] = max(highs[lane], value)
        # The remaining cells are too few to fill a vector.
        for cell in range(num_cells - num_cells % _LANES, num_cells):
            value = np.float64(field[cell]) - np.float64(before[cell])
            totals[0] += value
            lows[0] = min(lows[0], value)
            highs[0] = max(highs[0], value)
        mean = 0.0
        for lane in range(_LANES):
            mean += totals[lane]
            lows[0] = min(lows[0], lows[lane])
            highs[0] = max(highs[0], highs[lane])
        mean /= num_cells
        squares = 0.0
        for cell in range(num_cells):
            deviation = np.float64(field[cell]) - np.float64(before[cell]) - mean
            squares += deviation * deviation
        moments_4C[0, channel] = mean
        moments_4C[1, channel] = squares
        moments_4C[2, channel] = lows[0]
        moments_4C[3, channel] = highs[0]
