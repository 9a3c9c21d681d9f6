"""Loss of an ensemble whose members may be divided among several ranks, computed part by part.

Shape suffixes: B samples, M members, N forecasts (all B samples of the first member, then all B samples of the next
member, and so on), C output channels, H latitude rows, W longitude columns.
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

# A loss makes copies of its input; the CRPS of eight members makes about eight copies. With parts of one sixth of a
# field, all copies together are smaller than two fields, if the rank has enough rows to divide.
_PARTS_PER_FIELD = 6
# Smallest number of values in a part, 4 MiB in float32. Smaller parts would save little memory and need more time.
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


# Function that returns the loss of each of the given parts of the fields. If the parts cover the fields, their losses
# add up to the loss of the whole fields.
BuildPartLosses = Callable[[Sequence[LossPart]], list[Loss]]


class MemberLoss:
    """Loss of an ensemble whose members are computed by one rank or divided among the ranks of a group.

    The loss and its gradient with respect to the outputs are computed together. If the loss couples neither cells nor
    channels (`Loss.coupled_dims`), they are computed for one part of the fields after another. Copies that the loss
    makes of its input are then only as large as a part.

    With several ranks, each rank computes the loss of a part of the fields for all members. The parts are ranges of
    rows, or ranges of channels if the loss couples cells. If the loss couples both cells and channels, every rank
    gathers all members and computes the whole loss.

    FSDP2 and DDP average gradients over all data-parallel ranks, but the gradients of the ranks of a group belong to
    different members and must be summed. So the gradients are multiplied by the number of ranks in the group. If each
    rank computes a part of the loss, the value is also multiplied by this number, so that the mean of the values over
    the ranks is the loss.

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
        # Range of the fields for which this rank computes the loss. Without division among ranks: the whole fields.
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
        # channels may have large tables, which each part would copy, so its range is a single part.
        num_parts = 1
        if not loss.coupled_dims:
            values_per_column = num_members * (channels.stop - channels.start) * (rows.stop - rows.start)
            # Size of the range for all members, in whole fields of one member.
            num_fields = math.ceil(values_per_column / (num_channels * num_rows))
            max_parts = math.ceil(values_per_column * num_columns / MIN_PART_VALUES)
            num_parts = min(_PARTS_PER_FIELD * num_fields, max_parts)
        # Rows of each part, relative to the first row of this rank's range. Parts divide the rows and not the channels,
        # because there are more rows, so the parts can be smaller. If there are fewer channels or rows than ranks, the
        # range of this rank may be empty; it then has no parts.
        self._local_rows = []
        if channels.stop > channels.start:
            self._local_rows = split_slice(slice(0, rows.stop - rows.start), num_parts)
        self._field_parts = []
        for local_rows in self._local_rows:
            field_rows = slice(rows.start + local_rows.start, rows.start + local_rows.stop)
            self._field_parts.append(LossPart(channels, field_rows))
        # The loss of whole fields can be used only if the single part is the whole fields.
        self._losses = [loss]
        whole_fields = LossPart(slice(0, num_channels), slice(0, num_rows))
        if self._field_parts != [whole_fields]:
            self._losses = build_part_losses(self._field_parts)

    def __call__(self, output_NCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Collective over the group: return this rank's value of the loss, a float32 scalar with a gradient.

        The mean of the values over the ranks of the group is the loss. The docstring of `MemberLoss` describes the
        gradient.

        Args:
            output_NCHW: (N, C, H, W) normalised output of this rank's members: all samples of one member, then all
                samples of the next member.
            target_BCHW: (B, C, H, W) normalised truth of the B samples.
        """
        return _PartwiseLoss.apply(output_NCHW, target_BCHW, self)

    def compute(self, output_NCHW: Tensor, target_BCHW: Tensor, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """Collective over the group: return this rank's value of the loss and its gradient (N, C, H, W).

        Args:
            output_NCHW: normalised output of this rank's members, see `__call__`.
            target_BCHW: normalised truth.
            needs_gradient: True to compute the gradient with respect to `output_NCHW`; False to return None instead.
        """
        part_NCHW = output_NCHW
        if self._exchange is not None:
            part_NCHW = self._exchange.collect(output_NCHW)
        gradient_NCHW = torch.empty_like(part_NCHW) if needs_gradient else None
        total = self._compute_part_by_part(part_NCHW, target_BCHW, gradient_NCHW)
        # Free the collected fields before the gradient of the whole fields is assembled.
        del part_NCHW
        if gradient_NCHW is not None:
            gradient_NCHW *= self._gradient_factor
            if self._exchange is not None:
                # Pass the only reference to `undo_collect`, which can then free the gradient before it assembles the
                # gradient of the whole fields.
                only_reference = [gradient_NCHW]
                del gradient_NCHW
                gradient_NCHW = self._exchange.undo_collect(only_reference.pop())
        return total * self._value_factor, gradient_NCHW

    def _compute_part_by_part(self, part_NCHW: Tensor, target_BCHW: Tensor, gradient_NCHW: Tensor | None) -> Tensor:
        """Return the loss of this rank's rows (or channels), computed for one `LossPart` after another.

        Args:
            part_NCHW: normalised output of all members, for this rank's rows (or channels).
            target_BCHW: normalised truth, whole fields.
            gradient_NCHW: receives the gradient with respect to `part_NCHW`; None to compute no gradient.
        """
        needs_gradient = gradient_NCHW is not None
        part_BMCHW = part_NCHW.unflatten(0, (-1, len(target_BCHW))).transpose(0, 1)
        # The sum starts from zero, because a rank with an empty range has no losses to add.
        dtype = torch.promote_types(part_NCHW.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=part_NCHW.device)
        for rows, field_part, loss in zip(self._local_rows, self._field_parts, self._losses, strict=True):
            members_BMCHW = part_BMCHW[..., rows, :].detach().requires_grad_(needs_gradient)
            target_part_BCHW = target_BCHW[:, field_part.channels, field_part.rows]
            with torch.set_grad_enabled(needs_gradient):
                value = loss(members_BMCHW, target_part_BCHW)
            total += value.detach()
            if gradient_NCHW is not None:
                # Differentiate here, so that tensors that autograd saved for this part are freed before the next part.
                (members_gradient_BMCHW,) = torch.autograd.grad(value, members_BMCHW)
                gradient_NCHW[:, :, rows] = members_gradient_BMCHW.transpose(0, 1).flatten(0, 1)
        return total


class _PartwiseLoss(torch.autograd.Function):
    """Autograd function of `MemberLoss` that computes the loss and its gradient together in the forward pass."""

    @staticmethod
    def forward(ctx: FunctionCtx, output_NCHW: Tensor, target_BCHW: Tensor, loss: MemberLoss) -> Tensor:
        value, ctx.gradient_NCHW = loss.compute(output_NCHW, target_BCHW, ctx.needs_input_grad[0])
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        # The backward pass runs only once, so the gradient may be scaled in place.
        return ctx.gradient_NCHW.mul_(grad_loss), None, None


def choose_exchange(loss: Loss, num_channels: int, num_rows: int, group: dist.ProcessGroup) -> MemberExchange:
    """Return the exchange that divides the fields among ranks along a dimension that the loss does not couple.

    Args:
        loss: loss of whole fields.
        num_channels: number of output channels.
        num_rows: number of latitude rows.
        group: ranks that share the members of a sample.

    Returns:
        Exchange that divides the fields by rows, or by channels if the loss couples cells. If the loss couples both
        cells and channels, an exchange that gives every rank all fields.
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
    """Divide a slice into `num_parts` slices whose lengths differ by at most one; empty slices are omitted."""
    length = indices.stop - indices.start
    num_parts = min(num_parts, length)
    parts = []
    for number in range(num_parts):
        start = number * length // num_parts
        stop = (number + 1) * length // num_parts
        parts.append(slice(indices.start + start, indices.start + stop))
    return parts
