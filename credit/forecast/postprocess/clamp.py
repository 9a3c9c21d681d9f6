"""Post-process that limits variables to a minimum and a maximum.

Shape suffixes: B batch, C output channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from credit.forecast.postprocess.base import Postprocess, PostprocessContext, register_postprocess
from credit.forecast.postprocess.section import ClampSection


class ChannelBounds:
    """Lower and upper bounds of some channels; channels without a bound are not changed.

    Args:
        channel_index: indices of the channels with a bound, ascending.
        minimum_C: lower bound of each channel in the units of the fields; -inf if there is none.
        maximum_C: upper bound of each channel in the units of the fields; inf if there is none.
    """

    def __init__(self, channel_index: Sequence[int], minimum_C: Tensor, maximum_C: Tensor) -> None:
        # Adjacent channels are clamped by one kernel.
        slices: list[slice] = []
        for index in channel_index:
            if slices and slices[-1].stop == index:
                slices[-1] = slice(slices[-1].start, index + 1)
            else:
                slices.append(slice(index, index + 1))
        # Each item: a range of channels, the lower bounds of its channels, and the upper bounds of its channels.
        self._bounded_slices: list[tuple[slice, Tensor, Tensor]] = []
        for channels in slices:
            self._bounded_slices.append((channels, minimum_C[channels], maximum_C[channels]))

    def apply(self, fields: Tensor) -> Tensor:
        """Return fields (B, C, ...) limited to the bounds; NaN stays NaN.

        The fields are changed in place unless they require a gradient.
        """
        # All cells of a channel have the same bound, so the dimensions after the channels have length 1.
        shape = (-1,) + (1,) * (fields.dim() - 2)
        result = fields
        if self._bounded_slices and fields.requires_grad:
            result = fields.clone()
        for channels, minimum_C, maximum_C in self._bounded_slices:
            minimum = minimum_C.reshape(shape)
            maximum = maximum_C.reshape(shape)
            result[:, channels] = fields[:, channels].clamp(minimum, maximum)
        return result


@register_postprocess("clamp", ClampSection)
class Clamp(Postprocess):
    """Post-process that sets each value of a variable outside its bounds to the nearer bound.

    Adjacent clamps of the chain are merged and applied together.

    Args:
        context: channels, units and device of the run.
        section: variable, minimum and maximum.
    """

    supports_domain = True

    def __init__(self, context: PostprocessContext, section: ClampSection) -> None:
        super().__init__(context, section)
        minimum, maximum = _read_bounds(section)
        self._context = context
        self._corrected_later: frozenset[int] = frozenset()
        # Index of an output channel -> (minimum, maximum) in physical units.
        self._bounds: dict[int, tuple[float, float]] = {}
        for index, channel in enumerate(context.channels.output):
            if channel.variable == section.variable:
                self._bounds[index] = (minimum, maximum)
        self._build_bounds()

    def _build_bounds(self) -> None:
        """Set the bounds of normalised output, states and physical output from the bounds of this entry."""
        context = self._context
        bounded_channels = sorted(self._bounds)
        minimums = []
        maximums = []
        for index in range(len(context.channels.output)):
            minimum, maximum = self._bounds.get(index, (-math.inf, math.inf))
            minimums.append(minimum)
            maximums.append(maximum)
        minimum_C = torch.tensor(minimums, device=context.device)
        maximum_C = torch.tensor(maximums, device=context.device)
        normalized_minimum_C = context.normalizer.encode(minimum_C[None], "output")[0]
        normalized_maximum_C = context.normalizer.encode(maximum_C[None], "output")[0]
        self._normalized_bounds = ChannelBounds(bounded_channels, normalized_minimum_C, normalized_maximum_C)
        # The channels of a state are the first channels of the output.
        num_prognostic = context.channels.output_slice("prognostic").stop
        bounded_prognostic = [index for index in bounded_channels if index < num_prognostic]
        self._state_bounds = ChannelBounds(bounded_prognostic, normalized_minimum_C, normalized_maximum_C)
        # The correction of a later entry may move values beyond their bounds. But its factor is never negative, so
        # non-negative values keep a minimum of 0.
        corrected = sorted(self._corrected_later)
        minimum_C[corrected] = minimum_C[corrected].clamp(max=0)
        maximum_C[corrected] = torch.inf
        self._physical_bounds = ChannelBounds(bounded_channels, minimum_C, maximum_C)

    def forward(self, output_BCHW: Tensor, previous_BCHW: Tensor, forcing_BCHW: Tensor) -> Tensor:
        """Return the normalised output limited to the bounds of this clamp; see `Postprocess.forward`."""
        return self._normalized_bounds.apply(output_BCHW)

    def limit_state(self, state_BCTHW: Tensor) -> Tensor:
        """Return a perturbed initial state limited to the bounds of this clamp; see `Postprocess.limit_state`."""
        return self._state_bounds.apply(state_BCTHW)

    def limit_physical(self, output_BCHW: Tensor) -> Tensor:
        """Return an output in physical units limited to the bounds of this clamp; see `Postprocess.limit_physical`."""
        return self._physical_bounds.apply(output_BCHW)

    def set_corrected_later(self, channel_index: frozenset[int]) -> None:
        """Relax the bounds, in physical units, of output channels that later entries correct.

        A correction multiplies a channel by a non-negative factor. So after this call, these channels have no maximum,
        and their minimum is at most 0.

        Args:
            channel_index: indices of the output channels that any later entry corrects.
        """
        self._corrected_later = channel_index
        self._build_bounds()

    def merge(self, following: Postprocess) -> Postprocess | None:
        """Merge this clamp with the next entry, if that entry is also a clamp.

        For both clamps, `set_corrected_later` must have set the same channels.

        Returns:
            This clamp, with the tighter bounds of both clamps; None if the entries cannot be merged.
        """
        if type(following) is not Clamp or following._corrected_later != self._corrected_later:
            return None
        for index, (following_minimum, following_maximum) in following._bounds.items():
            minimum, maximum = self._bounds.get(index, (-math.inf, math.inf))
            self._bounds[index] = (max(minimum, following_minimum), min(maximum, following_maximum))
        self._build_bounds()
        return self


def _read_bounds(section: ClampSection) -> tuple[float, float]:
    """Return (minimum, maximum) of the config section of a clamp; -inf or inf for a bound that is not set."""
    minimum = -math.inf
    if section.minimum is not None:
        minimum = section.minimum
    maximum = math.inf
    if section.maximum is not None:
        maximum = section.maximum
    return minimum, maximum


def find_output_bounds(context: PostprocessContext, variable: str) -> tuple[float, float]:
    """Return the tightest lower and upper bound that the clamps of a run set for a variable.

    Args:
        context: context of an entry.
        variable: name of an output variable.

    Returns:
        (minimum, maximum) in the units of the variable; -inf or inf if no clamp sets the bound.
    """
    minimum = -math.inf
    maximum = math.inf
    for section in context.entries:
        if section.kind == "clamp" and section.variable == variable:
            section_minimum, section_maximum = _read_bounds(section)
            minimum = max(minimum, section_minimum)
            maximum = min(maximum, section_maximum)
    return minimum, maximum
