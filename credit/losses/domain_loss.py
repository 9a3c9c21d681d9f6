"""Losses of fields that are divided among the ranks of a domain group.

Shape suffixes: B batch, M ensemble members, C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn

from credit.losses.base import Loss, LossContext
from credit.losses.member_loss import LossPart
from credit.parallel.domain.domain import Domain

logger = logging.getLogger(__name__)


def build_domain_loss(
    context: LossContext,
    build: Callable[[LossContext], Loss],
    domain: Domain,
    part: LossPart | None = None,
) -> DomainLoss | GatheredLoss:
    """Build the loss of this rank's part of the fields.

    Args:
        context: weights, scales and grid of the whole fields.
        build: function that builds the loss from a context.
        domain: the ranks that share the fields.
        part: channels and rows, in this rank's part of the fields, for which the loss is computed. Row 0 is the first
            row of this rank. If the loss couples cells, the part must contain all rows. None for all channels and rows.
    """
    channels = slice(0, len(context.channels.output))
    if part is not None:
        channels = part.channels
    loss = build(context.select(channels, slice(0, len(context.grid.lat))))
    if "cells" in loss.coupled_dims:
        return GatheredLoss(loss, domain)
    rows, columns = domain.part.slices
    if part is not None:
        rows = slice(rows.start + part.rows.start, rows.start + part.rows.stop)
    return DomainLoss(build(context.select(channels, rows, columns)), domain)


class DomainLoss(nn.Module):
    """Loss of this rank's cells, multiplied by the number of ranks, so that the mean over ranks is the whole loss.

    FSDP2 averages the gradients over all ranks, but the gradients of a domain group must be summed. The multiplication
    makes the average equal to the sum.

    Args:
        loss: loss of this rank's cells, with the weights of these cells in the whole fields.
        domain: the ranks that share the fields.

    Attributes:
        coupled_dims: dimensions along which the fields of this rank cannot be divided further, see `Loss`.
    """

    def __init__(self, loss: Loss, domain: Domain) -> None:
        super().__init__()
        self.coupled_dims = loss.coupled_dims
        self._loss = loss
        self._num_ranks = domain.num_ranks

    def forward(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return the loss of this rank's cells times the number of ranks, a float32 scalar.

        Args:
            prediction_BMCHW: (B, M, C, H, W) this rank's part of the normalised output of each member.
            target_BCHW: (B, C, H, W) this rank's part of the normalised truth.
        """
        return self._loss(prediction_BMCHW, target_BCHW) * self._num_ranks


class GatheredLoss(nn.Module):
    """Loss that couples the cells of a field, so each rank gathers the whole fields and computes the whole loss.

    The backward pass of the gather sums the gradients of all ranks. The sum is the gradient of the loss multiplied by
    the number of ranks, like the gradient of `DomainLoss`.

    Args:
        loss: loss of the whole fields.
        domain: the ranks that share the fields.

    Attributes:
        coupled_dims: dimensions along which the fields cannot be divided, see `Loss`.
    """

    def __init__(self, loss: Loss, domain: Domain) -> None:
        super().__init__()
        if dist.get_rank() == 0:
            logger.warning(
                "loss.kind: %s couples the cells of a field, so each of the %d ranks that divide a field gathers whole "
                "output fields for it",
                type(loss).__name__,
                domain.num_ranks,
            )
        self.coupled_dims = loss.coupled_dims
        self._loss = loss
        self._gather = domain.build_gather()

    def forward(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Collective: return the loss, a float32 scalar that is the same on all ranks.

        Args:
            prediction_BMCHW: this rank's part of the normalised output of each member.
            target_BCHW: this rank's part of the normalised truth.
        """
        batch, members = prediction_BMCHW.shape[:2]
        whole_BMCHW = self._gather.exchange_fields(prediction_BMCHW.flatten(0, 1)).unflatten(0, (batch, members))
        whole_target_BCHW = self._gather.exchange_fields(target_BCHW)
        # The exchange returns tensors in channels-last memory format, but a loss may expect contiguous tensors.
        return self._loss(whole_BMCHW.contiguous(), whole_target_BCHW.contiguous())
