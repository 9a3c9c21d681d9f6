"""Compiled kernels that sum fields over segments of cells; they use most of the time of scoring.

A segment is a sequence of cells that are adjacent in memory. `Segments` contains the index of the first cell of each
segment and the index after its last cell. Fields are float32 or float64 in native byte order. Differences, squares and
sums are float64, in the units of the field or in squared units. Each kernel writes its sums into an output array; the
last dimension of this array is the S segments. If a value is not finite, the sum of its segment is not finite. No
kernel raises an error.

The kernels release the global interpreter lock, so threads can work on different channels at the same time.
`credit.verify.statistics.area_mean` turns the sums over segments into area means, and
`credit.verify.statistics.ensemble_kernels` contains the kernels of ensemble scores.

Numba compiles a kernel in this process or loads it from a cache; both kernels must give the same result. If a compiled
function calls a second function, the compiler may change the order of additions. All functions that add numbers and are
called by a kernel are therefore inlined.

Shapes: C channels, P cells, S segments, R regions, F forecasts, K sums of each channel, L sums of each wind vector.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from credit.utils.compilation.kernels import OPTIONS, compiled

# Index of the first cell of each segment, and index after its last cell, (S,) integers each.
Segments = tuple[np.ndarray, np.ndarray]

# Numbers of sums that `error_sums` writes. For the truth, it sums the anomaly, the squared and the absolute anomaly.
NUM_TRUTH_SUMS = 3
# For each forecast, it sums the error, the squared error, the product of error and truth's anomaly, the absolute error.
NUM_FORECAST_SUMS = 4
# For damped persistence, it sums the product of initial and truth's anomaly, the squared error, the absolute error.
NUM_DAMPED_SUMS = 3
# For each wind vector of a forecast, it sums the forecast length minus the true length, and the length of the error.
NUM_LENGTH_SUMS = 2

# Cells per block, chosen so that a block of all fields fits in the CPU cache.
_BLOCK_CELLS = 1024


# Helper functions are inlined into `error_sums`. As separate functions, they could be compiled in two versions: one in
# the process that compiles, and one in processes that load the cache. The sums would then differ in the last digits.
_inlined = njit(forceinline=True, **OPTIONS)


@compiled
def weighted_sums(sums_KS: np.ndarray, weights_SR: np.ndarray, out_KR: np.ndarray) -> None:
    """Write the weighted sums over each region into `out_KR`.

    The sum of each segment is multiplied by the weight of the segment, and the products are added in the order of the
    segments. A segment with the weight 0 is left out even if its sum is not finite. The matrix product of a library is
    not used, because its last digits depend on K and on the number of threads.

    Args:
        sums_KS: sums of K quantities over segments.
        weights_SR: weight of one cell of each segment in each region, 0 outside the region.
        out_KR: output: weighted sums over each region.
    """
    for k in range(len(sums_KS)):
        total_R = out_KR[k]
        total_R[:] = 0.0
        for s in range(len(weights_SR)):
            value = sums_KS[k, s]
            weights_R = weights_SR[s]
            for r in range(len(weights_R)):
                total_R[r] += value * weights_R[r] if weights_R[r] != 0.0 else 0.0


@compiled
def field_sums(values_P: np.ndarray, segments: Segments, out: np.ndarray) -> None:
    """Write the sums of a float or bool field over the S segments into `out` (1, S)."""
    segment_starts, segment_stops = segments
    for s in range(len(segment_starts)):
        values = values_P[segment_starts[s] : segment_stops[s]]
        total = 0.0
        for i in range(len(values)):
            total += np.float64(values[i])
        out[0, s] = total


@compiled
def product_sums(x_P: np.ndarray, y_P: np.ndarray, segments: Segments, out: np.ndarray) -> None:
    """Write the sums of the products of two fields over the S segments into `out` (1, S)."""
    segment_starts, segment_stops = segments
    for s in range(len(segment_starts)):
        x = x_P[segment_starts[s] : segment_stops[s]]
        y = y_P[segment_starts[s] : segment_stops[s]]
        total = 0.0
        for i in range(len(x)):
            total += np.float64(x[i]) * np.float64(y[i])
        out[0, s] = total


@compiled
def anomaly_sums(field_P: np.ndarray, climatology_P: np.ndarray, segments: Segments, out: np.ndarray) -> None:
    """Write the sums of the anomaly of a field, and of the squared anomaly, over the S segments into `out` (2, S)."""
    segment_starts, segment_stops = segments
    for s in range(len(segment_starts)):
        field = field_P[segment_starts[s] : segment_stops[s]]
        climatology = climatology_P[segment_starts[s] : segment_stops[s]]
        total = 0.0
        square = 0.0
        for i in range(len(field)):
            anomaly = np.float64(field[i]) - np.float64(climatology[i])
            total += anomaly
            square += anomaly * anomaly
        out[0, s] = total
        out[1, s] = square


class ErrorInputs(NamedTuple):
    """Fields that `error_sums` reads.

    Masked cells may contain any value. All fields of one attribute have the same float dtype.

    Attributes:
        truth: (C, P) truth at the valid time.
        climatology_weights: (T,) weight of each of the T `climatology_terms`.
        climatology_terms: T fields (C, P); their weighted sum is the climatology at the valid time.
        forecasts: F forecasts (C, P), at least one.
        initial_anomaly: (C, P) anomaly at the initial time; (0, P) if the baselines are not scored. Damped persistence
            is the climatology plus `damping` times this anomaly.
        damping: (C,) factor of damped persistence.
        valid: (C, P) bool, False in masked cells.
        is_masked: (C,) bool, True for a channel with masked cells.
    """

    truth: np.ndarray
    climatology_weights: np.ndarray
    climatology_terms: tuple[np.ndarray, ...]
    forecasts: tuple[np.ndarray, ...]
    initial_anomaly: np.ndarray
    damping: np.ndarray
    valid: np.ndarray
    is_masked: np.ndarray


@compiled
def error_sums(
    inputs: ErrorInputs, channels: np.ndarray, scale: np.float32, segments: Segments, out: np.ndarray,
    lengths: np.ndarray,
) -> None:  # fmt: skip
    """Write the error sums of one channel, or of a wind vector and its two components.

    One loop sums all forecasts and baselines, so each field is read from memory only once. The comments at
    NUM_TRUTH_SUMS, NUM_FORECAST_SUMS, NUM_DAMPED_SUMS and NUM_LENGTH_SUMS list the sums.

    Args:
        inputs: fields of truth, climatology, forecasts and baselines.
        channels: (1,) index of a channel, or (2,) indices of the two components of a wind vector.
        scale: power of two by which winds are multiplied, so that their squares do not overflow in float32.
        segments: the S segments.
        out: (1 or 2, K, S) output for each channel: sums of truth, each forecast and, if scored, damped persistence.
        lengths: (L, S) output for the wind vector: sums of each forecast and scored baseline; (0, S) for one channel.
    """
    truth, weights, terms, forecasts, initial_anomaly, damping, valid, is_masked = inputs
    segment_starts, segment_stops = segments
    num_forecasts = len(forecasts)
    has_baselines = len(initial_anomaly) > 0
    num_fields = num_forecasts + 2 if has_baselines else num_forecasts
    damped_row = NUM_TRUTH_SUMS + NUM_FORECAST_SUMS * num_forecasts
    # Blocks of cells, (component, cell), which fit in the CPU cache. Scored baselines are the last fields.
    truth_block = np.empty((2, _BLOCK_CELLS), truth.dtype)
    climatology_block = np.empty((2, _BLOCK_CELLS), truth.dtype)
    forecast_block = np.empty((num_fields, 2, _BLOCK_CELLS), forecasts[0].dtype)
    truth_length = np.empty(_BLOCK_CELLS, truth.dtype)
    out[:] = 0.0
    lengths[:] = 0.0
    for s in range(len(segment_starts)):
        for start in range(segment_starts[s], segment_stops[s], _BLOCK_CELLS):
            stop = min(start + _BLOCK_CELLS, segment_stops[s])
            cells = stop - start
            for k, c in enumerate(channels):
                y = truth_block[k, :cells]
                climatology = climatology_block[k, :cells]
                is_valid = valid[c, start:stop]
                _copy_valid_cells(truth[c, start:stop], is_valid, is_masked[c], y)
                _load_climatology(weights, terms, c, start, is_valid, is_masked[c], climatology)
                _add_anomaly(y, climatology, out[k, :, s])
                for f in range(num_forecasts):
                    x = forecast_block[f, k, :cells]
                    _copy_valid_cells(forecasts[f][c, start:stop], is_valid, is_masked[c], x)
                    _add_error(x, y, climatology, out[k, NUM_TRUTH_SUMS + NUM_FORECAST_SUMS * f :, s])
                if has_baselines:
                    damped = forecast_block[num_forecasts, k, :cells]
                    anomaly = initial_anomaly[c, start:stop]
                    _add_damped_persistence(anomaly, damping[c], y, climatology, damped, out[k, damped_row:, s])
                    _copy_valid_cells(climatology, is_valid, False, forecast_block[num_forecasts + 1, k, :cells])
            # The blocks now contain both components, so the lengths of the vectors can be computed.
            if len(lengths) > 0:
                truth_u, truth_v = truth_block[0, :cells], truth_block[1, :cells]
                _set_length(truth_u, truth_v, scale, truth_length[:cells])
                for f in range(num_fields):
                    u, v = forecast_block[f, 0, :cells], forecast_block[f, 1, :cells]
                    length_sums = lengths[NUM_LENGTH_SUMS * f :, s]
                    _add_lengths(u, v, truth_u, truth_v, truth_length[:cells], scale, length_sums)
    lengths /= scale


@_inlined
def _copy_valid_cells(field: np.ndarray, is_valid: np.ndarray, is_masked: bool, out: np.ndarray) -> None:
    """Copy a field into `out` and set masked cells to 0."""
    for i in range(len(out)):
        out[i] = field[i]
    if is_masked:
        _set_masked_to_zero(is_valid, out)


@_inlined
def _load_climatology(
    weights: np.ndarray, terms: tuple[np.ndarray, ...], c: int, start: int, is_valid: np.ndarray, is_masked: bool,
    out: np.ndarray,
) -> None:  # fmt: skip
    """Write the climatology of channel `c` into `out`, for the `len(out)` adjacent cells from cell `start` on.

    The climatology is the weighted sum of its terms. Masked cells are set to 0.
    """
    # The first term overwrites the values of the previous block in `out`, and the other terms are added.
    weight = weights[0]
    term = terms[0][c, start : start + len(out)]
    for i in range(len(out)):
        out[i] = weight * term[i]
    for k in range(1, len(terms)):
        weight = weights[k]
        term = terms[k][c, start : start + len(out)]
        for i in range(len(out)):
            out[i] += weight * term[i]
    if is_masked:
        _set_masked_to_zero(is_valid, out)


@_inlined
def _set_masked_to_zero(is_valid: np.ndarray, field: np.ndarray) -> None:
    """Set a field in place to 0 in cells that are not valid."""
    for i in range(len(field)):
        if not is_valid[i]:
            field[i] = 0.0


@_inlined
def _add_anomaly(truth: np.ndarray, climatology: np.ndarray, out: np.ndarray) -> None:
    """Add the sums over cells of the truth's anomaly, squared anomaly and absolute anomaly to `out`."""
    total = square = absolute = 0.0
    for i in range(len(truth)):
        anomaly = np.float64(truth[i]) - np.float64(climatology[i])
        total += anomaly
        square += anomaly * anomaly
        absolute += abs(anomaly)
    out[0] += total
    out[1] += square
    out[2] += absolute


@_inlined
def _add_error(forecast: np.ndarray, truth: np.ndarray, climatology: np.ndarray, out: np.ndarray) -> None:
    """Add the sums over cells of error, squared error, error times truth's anomaly, and absolute error to `out`."""
    total = square = product = absolute = 0.0
    for i in range(len(forecast)):
        y = np.float64(truth[i])
        error = np.float64(forecast[i]) - y
        total += error
        square += error * error
        product += error * (y - np.float64(climatology[i]))
        absolute += abs(error)
    out[0] += total
    out[1] += square
    out[2] += product
    out[3] += absolute


@_inlined
def _add_damped_persistence(
    initial_anomaly: np.ndarray, damping: float, truth: np.ndarray, climatology: np.ndarray, damped: np.ndarray,
    out: np.ndarray,
) -> None:  # fmt: skip
    """Add the sums over cells of damped persistence (see NUM_DAMPED_SUMS) to `out`; write its field into `damped`."""
    product = square = absolute = 0.0
    for i in range(len(initial_anomaly)):
        first_anomaly = np.float64(initial_anomaly[i])
        anomaly = np.float64(truth[i]) - np.float64(climatology[i])
        error = damping * first_anomaly - anomaly
        product += first_anomaly * anomaly
        square += error * error
        absolute += abs(error)
    # The forecast of damped persistence is needed for the lengths of wind vectors.
    for i in range(len(initial_anomaly)):
        damped[i] = damping * initial_anomaly[i] + climatology[i]
    out[0] += product
    out[1] += square
    out[2] += absolute


@_inlined
def _set_length(u: np.ndarray, v: np.ndarray, scale: np.float32, length: np.ndarray) -> None:
    """Write the lengths of the vectors (u, v), multiplied by `scale`, into `length`."""
    for i in range(len(length)):
        scaled_u = scale * u[i]
        scaled_v = scale * v[i]
        length[i] = np.sqrt(scaled_u * scaled_u + scaled_v * scaled_v)


@_inlined
def _add_lengths(
    u: np.ndarray, v: np.ndarray, truth_u: np.ndarray, truth_v: np.ndarray, truth_length: np.ndarray,
    scale: np.float32, out: np.ndarray,
) -> None:  # fmt: skip
    """Add two sums over cells to `out`: forecast length minus true length, and length of the error vector.

    Lengths are multiplied by `scale`. Square roots are computed in the precision of the fields, because square roots in
    float64 would take most of the time.
    """
    longer = error_length = 0.0
    for i in range(len(truth_length)):
        x = scale * u[i]
        y = scale * v[i]
        longer += np.float64(np.sqrt(x * x + y * y)) - np.float64(truth_length[i])
        error_x = x - scale * truth_u[i]
        error_y = y - scale * truth_v[i]
        error_length += np.float64(np.sqrt(error_x * error_x + error_y * error_y))
    out[0] += longer
    out[1] += error_length
