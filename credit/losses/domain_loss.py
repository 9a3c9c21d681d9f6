"""Loss of fields that are divided among the ranks of a domain group.

Shape suffixes: B batch, M ensemble members, C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor, nn

from credit.losses.base import Loss, LossContext
from credit.losses.member_loss import FieldPart
from credit.parallel.domain.domain import Domain

logger = logging.getLogger(__name__)


class DomainLoss(nn.Module):
    """This rank's part of a loss, times the number of ranks, so that the mean over the ranks is the loss.

    FSDP2 averages the gradients over all ranks, but those of a domain group must be summed; the factor does that, too.

    A loss that couples cells is computed from the whole fields, which every rank then gathers.

    Args:
        context: weights, scales and grid of the whole fields.
        build: function that builds the loss from a context.
        domain: the ranks.
        part: channels and rows of this rank's part of the fields that the loss is computed for; the rows are counted
            from the first row of this rank, and are all of them if the loss couples cells. None for all channels and
            rows.

    Attributes:
        coupled_dims: dimensions along which the fields of this rank cannot be divided further, see `Loss`.
    """

    def __init__(
        self,
        context: LossContext,
        build: Callable[[LossContext], Loss],
        domain: Domain,
        part: FieldPart | None = None,
    ) -> None:
        super().__init__()
        channels = slice(0, len(context.channels.output))
        if part is not None:
            channels = part.channels
        whole_rows = slice(0, len(context.grid.lat))
        loss = build(context.select(channels, whole_rows))
        self.coupled_dims = loss.coupled_dims
        self._num_ranks = domain.num_ranks
        self._gather = None
        if "cells" in loss.coupled_dims:
            logger.warning(
                "loss.kind: %s couples the cells of a field, so each of the %d ranks that divide a field gathers whole "
                "output fields for it",
                type(loss).__name__,
                domain.num_ranks,
            )
            self._gather = domain.build_gather()
        else:
            rows, columns = domain.part.slices
            if part is not None:
                rows = slice(rows.start + part.rows.start, rows.start + part.rows.stop)
            loss = build(context.select(channels, rows, columns))
        self._loss = loss

    def forward(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Collective: return this rank's part of the loss times the number of ranks, a float32 scalar.

        Args:
            prediction_BMCHW: (B, M, C, H, W) this rank's part of the normalised output of each member.
            target_BCHW: (B, C, H, W) this rank's part of the normalised truth.
        """
        if self._gather is None:
            return self._loss(prediction_BMCHW, target_BCHW) * self._num_ranks
        # Every rank computes the same loss. In the backward pass the gather adds up the gradients of all ranks, which
        # is the factor above.
        batch, members = prediction_BMCHW.shape[:2]
        whole_BMCHW = self._gather.exchange_fields(prediction_BMCHW.flatten(0, 1)).unflatten(0, (batch, members))
        return self._loss(whole_BMCHW, self._gather.exchange_fields(target_BCHW))
