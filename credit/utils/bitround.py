"""Rounding of float32 values to fewer bits, so that they compress better."""

from __future__ import annotations

import numpy as np

# Number of explicit mantissa bits of float32.
_MANTISSA_BITS = 23


def bitround(values: np.ndarray, keep_bits: int) -> np.ndarray:
    """Return float32 values rounded to fewer bits of the mantissa, ties to even.

    The relative error is at most 2^-(keep_bits + 1). The dropped bits become zeros, which compress well (Kloewer et al.
    2021, doi:10.1038/s43588-021-00156-2). NaN and infinity stay as they are. A number that would be rounded to infinity
    is truncated instead.

    Args:
        values: float32 array of any shape.
        keep_bits: number of mantissa bits to keep, 1 to 23.

    Returns:
        Array of the same shape; `values` itself if all bits are kept.
    """
    num_dropped = _MANTISSA_BITS - keep_bits
    if num_dropped == 0:
        return values
    shift = np.uint32(num_dropped)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Half of the value of the last remaining bit, minus 1 if this bit is 0, so that ties are rounded to even.
    last_kept_bit = (bits >> shift) & np.uint32(1)
    increment = np.uint32((1 << (num_dropped - 1)) - 1) + last_kept_bit
    # Shifting right and left again sets the dropped bits to zero.
    rounded = (((bits + increment) >> shift) << shift).view(np.float32)
    # Largest finite number after rounding: the largest float32 number with its dropped bits set to zero.
    largest_bits = np.finfo(np.float32).max.view(np.uint32) >> num_dropped << num_dropped
    largest = largest_bits.view(np.float32)
    return np.where(np.isfinite(values), np.clip(rounded, -largest, largest), values)
