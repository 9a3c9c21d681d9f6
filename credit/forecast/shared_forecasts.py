"""Forecasts of ensemble members that several ranks make at the same time, with the outputs sent to one of the ranks.

Shape suffixes: B forecasts of a batch, C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from credit.forecast.rollout import ForecastStart

# (starts of a batch, number of steps) -> output (B, C, H, W) of each step in physical units; None on a rank that does
# not get the output.
ForecastFunction = Callable[[Sequence[ForecastStart], int], Iterator[Tensor | None]]


class SharedForecasts:
    """Forecast function that distributes batches over the ranks of an ensemble group.

    All ranks of the group call it for the same batches in the same order, and advance the iterators that it returns in
    the same order. The batches go round the ranks: the n-th call (from 0) is computed by rank n modulo the number of
    ranks. The first rank of the group gets the outputs of all batches, for files and scores. The other ranks get None
    at each step.

    Each batch is computed on one rank alone, so its output is the same bit for bit on any number of ranks.

    Args:
        forecast_batch: makes the forecasts of a batch on this rank.
        group: ranks that share the members.
        output_shape: (C, H, W) of the output of one forecast.
        device: device of the output.

    Attributes:
        num_ranks: number of ranks of the group.
    """

    def __init__(
        self,
        forecast_batch: ForecastFunction,
        group: dist.ProcessGroup,
        output_shape: tuple[int, int, int],
        device: torch.device,
    ) -> None:
        self._forecast_batch = forecast_batch
        self._group = group
        self._rank = dist.get_rank(group)
        self._output_shape = output_shape
        self._device = device
        self._next_rank = 0
        self.num_ranks = dist.get_world_size(group)

    def __call__(self, batch: Sequence[ForecastStart], num_steps: int) -> Iterator[Tensor | None]:
        """Return an iterator over the steps of the next batch.

        Args:
            batch: starts of the forecasts of the batch.
            num_steps: number of steps.

        Returns:
            For each step (B, C, H, W) in physical units on the first rank, None on the other ranks.
        """
        rank = self._next_rank
        self._next_rank = (rank + 1) % self.num_ranks
        if rank == self._rank:
            outputs = self._forecast_batch(batch, num_steps)
            return outputs if rank == 0 else self._send(outputs)
        # Another rank computes this batch: the first rank receives its outputs, the others only count the steps.
        if self._rank == 0:
            return self._receive(rank, len(batch), num_steps)
        return iter([None] * num_steps)

    def _send(self, outputs: Iterator[Tensor | None]) -> Iterator[None]:
        """Compute a batch, send the output of each step to the first rank, and yield None for each step."""
        for output in outputs:
            dist.send(output.contiguous(), group=self._group, group_dst=0)
            yield None

    def _receive(self, rank: int, batch_size: int, num_steps: int) -> Iterator[Tensor]:
        """Yield the output (B, C, H, W) of each step of a batch that the rank `rank` of the group computes."""
        for _ in range(num_steps):
            output_BCHW = torch.empty(batch_size, *self._output_shape, device=self._device)
            dist.recv(output_BCHW, group=self._group, group_src=rank)
            yield output_BCHW


def pad_batches(batches: Sequence[list[ForecastStart]], num_ranks: int) -> list[list[ForecastStart]]:
    """Return copies of the first batch, as many as are needed so that all ranks compute equally many batches.

    Ranks with sharded weights need equal numbers, because every step gathers the weights on all ranks. The caller
    appends the copies to `batches` and discards their outputs.

    Args:
        batches: batches of an ensemble group, at least one.
        num_ranks: number of ranks of the group.
    """
    return [list(batches[0]) for _ in range(-len(batches) % num_ranks)]
