"""Clamp: least and largest values of variables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from credit.forecast.postprocess.base import Postprocess, PostprocessContext, register_postprocess
from credit.forecast.postprocess.section import ClampSection


class ChannelBounds:
    """Holds channels within bounds; channels without a bound cost nothing.

    Args:
        rows: the channels that have a bound, increasing.
        minimum_C: least value of each channel, -inf where there is none.
        maximum_C: largest value of each channel, inf where there is none.
    """

    def __init__(self, rows: Sequence[int], minimum_C: Tensor, maximum_C: Tensor) -> None:
        adjacent: list[slice] = []
        for row in rows:
            if adjacent and adjacent[-1].stop == row:
                adjacent[-1] = slice(adjacent[-1].start, row + 1)
            else:
                adjacent.append(slice(row, row + 1))
        self._blocks = [(block, minimum_C[block], maximum_C[block]) for block in adjacent]

    def apply(self, fields: Tensor) -> Tensor:
        """Return fields (B, C, ...) within the bounds, in their own memory unless a gradient needs it; NaN stays."""
        shape = (-1,) + (1,) * (fields.dim() - 2)
        result = fields
        if self._blocks and fields.requires_grad:
            result = fields.clone()
        for rows, minimum, maximum in self._blocks:
            result[:, rows] = fields[:, rows].clamp(minimum.reshape(shape), maximum.reshape(shape))
        return result


@register_postprocess("clamp", ClampSection)
class Clamp(Postprocess):
    """Sets values outside the bounds of a variable to them; adjacent entries of the list are applied together.

    Args:
        context: of the run.
        section: variable, minimum, maximum.
    """

    def __init__(self, context: PostprocessContext, section: ClampSection) -> None:
        super().__init__(context, section)
        minimum = -math.inf if section.minimum is None else section.minimum
        maximum = math.inf if section.maximum is None else section.maximum
        self._context = context
        self._corrected_later: frozenset[int] = frozenset()
        # row of the output -> (least value, largest value) in physical units
        self._bounds = {
            row: (minimum, maximum)
            for row, channel in enumerate(context.channels.output)
            if channel.variable == section.variable
        }
        self._build()

    def _build(self) -> None:
        context = self._context
        rows = sorted(self._bounds)
        num_channels = len(context.channels.output)
        minimums = [self._bounds.get(row, (-math.inf, math.inf))[0] for row in range(num_channels)]
        maximums = [self._bounds.get(row, (-math.inf, math.inf))[1] for row in range(num_channels)]
        minimum_C = torch.tensor(minimums, device=context.device)
        maximum_C = torch.tensor(maximums, device=context.device)
        encoded = [context.normalizer.encode(bound_C[None], "output")[0] for bound_C in (minimum_C, maximum_C)]
        num_prognostic = context.channels.output_slice("prognostic").stop
        self._normalized_bounds = ChannelBounds(rows, *encoded)
        self._state_bounds = ChannelBounds([row for row in rows if row < num_prognostic], *encoded)
        # A later correction has the last word, but its factor cannot take a value below 0.
        corrected = sorted(self._corrected_later)
        minimum_C[corrected] = minimum_C[corrected].clamp(max=0)
        maximum_C[corrected] = torch.inf
        self._physical_bounds = ChannelBounds(rows, minimum_C, maximum_C)

    def forward(self, output_BCHW: Tensor, previous_BCHW: Tensor, forcing_BCHW: Tensor) -> Tensor:
        """See the base class."""
        return self._normalized_bounds.apply(output_BCHW)

    def limit_state(self, state_BCTHW: Tensor) -> Tensor:
        """See the base class."""
        return self._state_bounds.apply(state_BCTHW)

    def limit_physical(self, output_BCHW: Tensor) -> Tensor:
        """See the base class."""
        return self._physical_bounds.apply(output_BCHW)

    def set_corrected_later(self, rows: frozenset[int]) -> None:
        """See the base class; these rows keep their physical values but for a minimum of 0."""
        self._corrected_later = rows
        self._build()

    def merge(self, following: Postprocess) -> Postprocess | None:
        """See the base class; bounds of one variable do not stand in two entries, so the order does not matter."""
        if type(following) is not Clamp or following._corrected_later != self._corrected_later:
            return None
        for row, (minimum, maximum) in following._bounds.items():
            own_minimum, own_maximum = self._bounds.get(row, (-math.inf, math.inf))
            self._bounds[row] = (max(own_minimum, minimum), min(own_maximum, maximum))
        self._build()
        return self


def output_bounds(context: PostprocessContext, variable: str) -> tuple[float, float]:
    """Return the least and the largest value that the clamps of a list leave to a variable, -inf and inf without."""
    minimum, maximum = -math.inf, math.inf
    for section in context.entries:
        if section.kind == "clamp" and section.variable == variable:
            minimum = minimum if section.minimum is None else max(minimum, section.minimum)
            maximum = maximum if section.maximum is None else min(maximum, section.maximum)
    return minimum, maximum
