"""Student's t distribution with whole degrees of freedom, and the false discovery rate."""

from __future__ import annotations

import numpy as np


def two_sided_p(t: np.ndarray, freedom: int) -> np.ndarray:
    """Return P(|T| >= |t|) by the finite series in the angle atan(t / sqrt(freedom)), to 1e-14; NaN stays NaN."""
    angle = np.arctan(np.abs(t) / np.sqrt(freedom))
    sine, cosine = np.sin(angle), np.cos(angle)
    odd = freedom % 2
    term = cosine if odd else np.ones_like(angle)
    total = np.zeros_like(angle)
    for power in range(odd, freedom - 1, 2):
        total = total + term
        term = term * cosine**2 * (power + 1) / (power + 2)
    inside = (angle + sine * total) * 2 / np.pi if odd else sine * total
    return np.clip(1.0 - inside, 0.0, 1.0)


def two_sided_quantile(inside: float, freedom: int) -> float:
    """Return the t that |T| stays below with probability `inside`, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(np.array(middle), freedom) > 1 - inside else (low, middle)
    return high


def false_discovery(p: np.ndarray) -> np.ndarray:
    """Return p-values adjusted for their number, any shape; NaN does not count and stays NaN.

    Among the tests whose adjusted value is at most q, a share of at most q is expected to be false (Benjamini and
    Hochberg 1995).
    """
    adjusted = np.full(p.shape, np.nan)
    known = ~np.isnan(p)
    values = p[known]
    order = np.argsort(values)
    scaled = values[order] * len(values) / np.arange(1, len(values) + 1)
    values[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    adjusted[known] = values
    return adjusted
