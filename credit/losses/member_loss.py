"""Loss of an ensemble whose members may be divided among several ranks, computed part by part.

Shape suffixes: B samples, M members, N forecasts (all B samples of one member, then those of the next member),
C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.losses.base import Loss
from credit.parallel.member_exchange import MemberExchange, PartExchange, WholeExchange

logger = logging.getLogger(__name__)

# A loss makes copies of its input; the CRPS of eight members makes about eight. With parts of a sixth of a field, they
# take less than two fields, if the rank has enough rows to divide.
_PARTS_PER_FIELD = 6
# Smaller parts save less memory than their kernels cost time: 2**20 float32 values are 4 MiB.
MIN_PART_VALUES = 2**20


@dataclass(frozen=True)
class LossPart:
    """Part of the output fields: a range of channels and a range of rows, with all columns.

    Attributes:
        channels: range of output channels.
        rows: range of latitude rows.
    """

    channels: slice
    rows: slice


# Function that returns the losses of some parts of the fields. The losses of parts that together cover the fields add
# up to the loss of the whole fields.
BuildPartLosses = Callable[[Sequence[LossPart]], list[Loss]]


class MemberLoss:
    """Loss of an ensemble of which a rank has computed some members.

    The loss and its gradient with respect to the outputs are computed together. If the loss couples neither cells nor
    channels (`Loss.coupled_dims`), they are computed for one part of the fields after the other. A loss makes copies of
    its input, and this way they are copies of one part only.

    With several ranks, each rank computes the loss of a part of the fields for all members. The parts are ranges of
    rows, or of channels if the loss couples cells. If it couples both cells and channels, every rank gathers all
    members and computes the whole loss.

    FSDP2 and DDP average gradients over all data-parallel ranks, but the gradients of the ranks of a group belong to
    different members and must be summed. So the gradients are multiplied by the number of ranks in the group. If a rank
    computes a part of the loss, the part is multiplied in the same way, so that its mean over the ranks is the loss.

    Args:
        loss: loss of whole fields.
        build_part_losses: function that builds the losses of parts of the fields.
        num_members: number of members of the ensemble on all ranks together.
        field_shape: (C, H, W) of the output.
        group: ranks that share the members of a sample; None if this rank computes all members.
    """

    def __init__(
        self,
        loss: Loss,
        build_part_losses: BuildPartLosses,
        num_members: int,
        field_shape: tuple[int, int, int],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        num_channels, num_rows, num_columns = field_shape
        # The range of the fields whose loss this rank computes: the whole fields, unless the ranks divide them.
        channels = slice(0, num_channels)
        rows = slice(0, num_rows)
        self._exchange: MemberExchange | None = None
        self._value_factor = 1.0
        self._gradient_factor = 1.0
        if group is not None:
            self._exchange = choose_exchange(loss, num_channels, num_rows, group)
            self._gradient_factor = float(self._exchange.num_ranks)
            if isinstance(self._exchange, PartExchange):
                self._value_factor = self._gradient_factor
                if self._exchange.dim == 1:
                    channels = self._exchange.part
                else:
                    rows = self._exchange.part

        # This rank divides its range into parts, which are computed one after another. A loss that couples cells or
        # channels may have large tables, of which each part would have a copy, so its range is a single part.
        num_parts = 1
        if not loss.coupled_dims:
            values_per_column = num_members * (channels.stop - channels.start) * (rows.stop - rows.start)
            # Size of the range for all members, in whole fields of one member.
            num_fields = math.ceil(values_per_column / (num_channels * num_rows))
            max_parts = math.ceil(values_per_column * num_columns / MIN_PART_VALUES)
            num_parts = min(_PARTS_PER_FIELD * num_fields, max_parts)
        # Rows of each part, counted from the first row of this rank's range. Rows are divided and not channels, because
        # there are more of them, so the parts can be smaller. If there are fewer channels or rows than ranks, the range
        # of this rank may be empty; it then has no parts.
        self._local_rows = []
        if channels.stop > channels.start:
            self._local_rows = split_slice(slice(0, rows.stop - rows.start), num_parts)
        self._field_parts = []
        for local_rows in self._local_rows:
            field_rows = slice(rows.start + local_rows.start, rows.start + local_rows.stop)
            self._field_parts.append(LossPart(channels, field_rows))
        # The loss of whole fields can be used only if there is a single part, which is the whole fields.
        self._losses = [loss]
        whole_fields = LossPart(slice(0, num_channels), slice(0, num_rows))
        if self._field_parts != [whole_fields]:
            self._losses = build_part_losses(self._field_parts)

    def __call__(self, output_NCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Collective over the group: return this rank's value of the loss, a float32 scalar with a gradient.

        The mean of the values over the ranks of the group is the loss; see the class for the gradient.

        Args:
            output_NCHW: (N, C, H, W) normalised output of this rank's members: all samples of one member, then those of
                the next.
            target_BCHW: (B, C, H, W) normalised truth of the B samples.
        """
        return _PartwiseLoss.apply(output_NCHW, target_BCHW, self)

    def compute(self, output_NCHW: Tensor, target_BCHW: Tensor, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """Collective over the group: return the loss, and its gradient (N, C, H, W) or None if it is not needed.

        Args:
            output_NCHW: normalised output of this rank's members, see `__call__`.
            target_BCHW: normalised truth.
            needs_gradient: True to compute the gradient with respect to `output_NCHW`.
        """
        part_NCHW = output_NCHW
        if self._exchange is not None:
            part_NCHW = self._exchange.collect(output_NCHW)
        gradient_NCHW = torch.empty_like(part_NCHW) if needs_gradient else None
        total = self._compute_parts(part_NCHW, target_BCHW, gradient_NCHW)
        # Free the collected fields before the gradient of the whole fields is put together.
        del part_NCHW
        if gradient_NCHW is not None:
            gradient_NCHW *= self._gradient_factor
            if self._exchange is not None:
                # Only `give_back` has the gradient then, and can free it before it puts the fields together.
                only_reference = [gradient_NCHW]
                del gradient_NCHW
                gradient_NCHW = self._exchange.give_back(only_reference.pop())
        return total * self._value_factor, gradient_NCHW

    def _compute_parts(self, part_NCHW: Tensor, target_BCHW: Tensor, gradient_NCHW: Tensor | None) -> Tensor:
        """Return the loss of this rank's part of the fields, which is computed in smaller parts.

        Args:
            part_NCHW: this rank's part of the normalised output of all members.
            target_BCHW: normalised truth, whole fields.
            gradient_NCHW: receives the gradient with respect to `part_NCHW`; None to compute no gradient.
        """
        needs_gradient = gradient_NCHW is not None
        part_BMCHW = part_NCHW.unflatten(0, (-1, len(target_BCHW))).transpose(0, 1)
        # The sum starts from a zero of its own, because a rank with an empty range has no losses to add up.
        dtype = torch.promote_types(part_NCHW.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=part_NCHW.device)
        for rows, field_part, loss in zip(self._local_rows, self._field_parts, self._losses, strict=True):
            members_BMCHW = part_BMCHW[..., rows, :].detach().requires_grad_(needs_gradient)
            target_part_BCHW = target_BCHW[:, field_part.channels, field_part.rows]
            with torch.set_grad_enabled(needs_gradient):
                value = loss(members_BMCHW, target_part_BCHW)
            total += value.detach()
            if gradient_NCHW is not None:
                # Differentiated here, so that what autograd saves for one part is freed before the next part.
                (members_gradient_BMCHW,) = torch.autograd.grad(value, members_BMCHW)
                gradient_NCHW[:, :, rows] = members_gradient_BMCHW.transpose(0, 1).flatten(0, 1)
        return total


class _PartwiseLoss(torch.autograd.Function):
    """Autograd function of `MemberLoss`, which computes loss and gradient together in the forward pass."""

    @staticmethod
    def forward(ctx: FunctionCtx, output_NCHW: Tensor, target_BCHW: Tensor, loss: MemberLoss) -> Tensor:
        value, ctx.gradient_NCHW = loss.compute(output_NCHW, target_BCHW, ctx.needs_input_grad[0])
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        # The loss is differentiated once, so its gradient may be scaled in place.
        return ctx.gradient_NCHW.mul_(grad_loss), None, None


def choose_exchange(loss: Loss, num_channels: int, num_rows: int, group: dist.ProcessGroup) -> MemberExchange:
    """Return the exchange that divides the fields between the ranks along a dimension that the loss does not couple.

    Args:
        loss: loss of whole fields.
        num_channels: number of output channels.
        num_rows: number of latitude rows.
        group: ranks that share the members of a sample.

    Returns:
        An exchange by rows, or by channels if the loss couples cells. If it couples both, an exchange that gives every
        rank all fields.
    """
    if "cells" not in loss.coupled_dims:
        return PartExchange(group, 2, num_rows)
    if "channels" not in loss.coupled_dims:
        return PartExchange(group, 1, num_channels)
    logger.warning(
        "loss.kind: %s compares all cells and all channels, so each rank of an ensemble group gathers the outputs of "
        "all members; this needs memory and communication",
        type(loss).__name__,
    )
    return WholeExchange(group)


def split_slice(indices: slice, num_parts: int) -> list[slice]:
    """Divide a slice into `num_parts` slices whose lengths differ by at most one, fewer if some would be empty."""
    length = indices.stop - indices.start
    num_parts = min(num_parts, length)
    parts = []
    for number in range(num_parts):
        start = number * length // num_parts
        stop = (number + 1) * length // num_parts
        parts.append(slice(indices.start + start, indices.start + stop))
    return parts
