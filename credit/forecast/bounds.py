"""Least and largest values of channels."""

from __future__ import annotations

import numpy as np
import torch


class Bounds:
    """Holds channels within bounds; channels that have none cost nothing.

    Args:
        least_C: least value of each channel, -inf where there is none.
        most_C: largest value of each channel, inf where there is none.
    """

    def __init__(self, least_C: torch.Tensor, most_C: torch.Tensor) -> None:
        bounded = np.flatnonzero((least_C.isfinite() | most_C.isfinite()).cpu().numpy())
        side_by_side = [run for run in np.split(bounded, np.flatnonzero(np.diff(bounded) > 1) + 1) if len(run)]
        rows = [slice(int(run[0]), int(run[-1]) + 1) for run in side_by_side]
        self._runs = [(own, least_C[own], most_C[own]) for own in rows]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` (B, C, ...) within the bounds, in its own memory unless a gradient needs it; NaN stays."""
        shape = (-1,) + (1,) * (x.dim() - 2)
        given = x
        if self._runs and x.requires_grad:
            x = x.clone()
        for rows, least, most in self._runs:
            x[:, rows] = given[:, rows].clamp(least.reshape(shape), most.reshape(shape))
        return x
