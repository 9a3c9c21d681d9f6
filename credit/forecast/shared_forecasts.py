"""Distribution of the batches of an ensemble over several ranks, which compute different batches at the same time.

Shape suffixes: B forecasts of a batch, C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from credit.forecast.rollout import ForecastStart

# (starts of a batch, number of steps) -> iterator over the outputs (B, C, H, W) of the steps in physical units. On a
# rank that does not receive an output, the item is None.
ForecastFunction = Callable[[Sequence[ForecastStart], int], Iterator[Tensor | None]]

# (starts of a batch, number of a step from 1) -> True if the output of the step is written or scored.
StepFilter = Callable[[Sequence[ForecastStart], int], bool]


class DistributedForecastFunction:
    """Forecast function that distributes batches over the ranks of an ensemble group.

    All ranks of the group must call this function for the same batches in the same order, and advance the returned
    iterators in the same order. The batches are distributed round-robin: the batch of the n-th call (from 0) is
    computed by the rank with the number n modulo the number of ranks.

    If `is_step_sent` is given, the first rank of the group receives the outputs of all batches, and the other ranks get
    None for every step. Use this if a single rank writes a file or computes scores. Without `is_step_sent`, each rank
    gets the outputs of the batches that it computes, and None for each step of the other batches.

    Each batch is computed on a single rank, so its output is bitwise identical on any number of ranks.

    Args:
        forecast_batch: function that makes the forecasts of a batch on this rank.
        group: ranks that share the members.
        output_shape: (C, H, W) of the output of one forecast.
        device: device of the output.
        is_step_sent: function that returns True for each step whose output is sent to the first rank. It must return
            the same value on all ranks. None to send no outputs.

    Attributes:
        num_ranks: number of ranks in `group`.
    """

    def __init__(
        self,
        forecast_batch: ForecastFunction,
        group: dist.ProcessGroup,
        output_shape: tuple[int, int, int],
        device: torch.device,
        is_step_sent: StepFilter | None,
    ) -> None:
        self._forecast_batch = forecast_batch
        self._group = group
        self._rank = dist.get_rank(group)
        self._output_shape = output_shape
        self._device = device
        self._is_step_sent = is_step_sent
        # Rank in the group that computes the next batch.
        self._next_rank = 0
        self.num_ranks = dist.get_world_size(group)

    def __call__(self, batch: Sequence[ForecastStart], num_steps: int) -> Iterator[Tensor | None]:
        """Return an iterator over the outputs of a batch of forecasts.

        Args:
            batch: starts of the forecasts of the batch.
            num_steps: number of steps.

        Returns:
            Iterator over the steps. Each item is the output (B, C, H, W) in physical units, or None if this rank does
            not receive the output.
        """
        computing_rank = self._next_rank
        self._next_rank = (computing_rank + 1) % self.num_ranks
        is_gathered = self._is_step_sent is not None
        if computing_rank == self._rank:
            outputs = self._forecast_batch(batch, num_steps)
            if is_gathered and self._rank != 0:
                return self._compute_and_send(batch, outputs)
            return outputs
        if is_gathered and self._rank == 0:
            return self._receive(computing_rank, batch, num_steps)
        # Another rank computes this batch, and this rank does not receive its outputs.
        return iter([None] * num_steps)

    def _compute_and_send(self, batch: Sequence[ForecastStart], outputs: Iterator[Tensor | None]) -> Iterator[None]:
        """Compute a batch, send the selected steps to the first rank, and yield None for every step."""
        for step, output in enumerate(outputs, start=1):
            if self._is_step_sent(batch, step):
                dist.send(output.contiguous(), group=self._group, group_dst=0)
            yield None

    def _receive(self, computing_rank: int, batch: Sequence[ForecastStart], num_steps: int) -> Iterator[Tensor | None]:
        """Receive the steps of a batch from the rank that computes it; yield None for a step that is not sent.

        Args:
            computing_rank: rank in the group that computes the batch.
            batch: starts of the B forecasts of the batch.
            num_steps: number of steps.

        Yields:
            (B, C, H, W) in physical units, or None.
        """
        for step in range(1, num_steps + 1):
            if not self._is_step_sent(batch, step):
                yield None
                continue
            output_BCHW = torch.empty(len(batch), *self._output_shape, device=self._device)
            dist.recv(output_BCHW, group=self._group, group_src=computing_rank)
            yield output_BCHW


def build_padding_batches(batches: Sequence[list[ForecastStart]], num_ranks: int) -> list[list[ForecastStart]]:
    """Return copies of the first batch that make the number of batches divisible by the number of ranks.

    Ranks with sharded weights must compute the same number of batches, because every step gathers the weights on all
    ranks. The caller appends the copies to `batches` and discards their outputs.

    Args:
        batches: batches of an ensemble group, at least one.
        num_ranks: number of ranks of the group.
    """
    # The smallest number of copies that makes the total divisible by the number of ranks.
    num_copies = -len(batches) % num_ranks
    return [list(batches[0]) for _ in range(num_copies)]
