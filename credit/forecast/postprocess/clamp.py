"""Least and largest values of channels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch


class Clamp:
    """Holds channels within bounds; channels that have none cost nothing.

    Args:
        rows: the channels that have a bound, increasing.
        least_C: least value of each channel, -inf where there is none.
        most_C: largest value of each channel, inf where there is none.
    """

    def __init__(self, rows: Iterable[int], least_C: torch.Tensor, most_C: torch.Tensor) -> None:
        side_by_side: list[slice] = []
        for row in rows:
            if side_by_side and side_by_side[-1].stop == row:
                side_by_side[-1] = slice(side_by_side[-1].start, row + 1)
            else:
                side_by_side.append(slice(row, row + 1))
        self._runs = [(run, least_C[run], most_C[run]) for run in side_by_side]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` (B, C, ...) within the bounds, in its own memory unless a gradient needs it; NaN stays."""
        shape = (-1,) + (1,) * (x.dim() - 2)
        given = x
        if self._runs and x.requires_grad:
            x = x.clone()
        for rows, least, most in self._runs:
            x[:, rows] = given[:, rows].clamp(least.reshape(shape), most.reshape(shape))
        return x


def bounded_channels(least: Sequence[float], most: Sequence[float]) -> list[int]:
    """Return the channels that have a bound."""
    return [row for row, pair in enumerate(zip(least, most, strict=True)) if any(map(math.isfinite, pair))]
