"""The order in which samples are met: a pure function of seed, epoch and position, dealt by data-parallel rank.

Nothing about the order is stored but the position, so a run that restarts anywhere goes on with the very next batch.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from credit.data.batch import collate
from credit.data.dataset import ForecastDataset
from credit.errors import ConfigError


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of the samples in `epoch` (from 0)."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


class PositionSampler(Sampler[list[int]]):
    """Yields this rank's micro-batches from optimizer step `first_step` to `last_step`.

    Optimizer step s (from 0) takes the s-th block of ``batch_size * data_ranks * accumulation`` samples of the epochs
    laid end to end; a block never spans two epochs (the rest of an epoch is left out). Inside a block, micro-step m
    gives data rank r the samples ``[(m * data_ranks + r) * batch_size, ...)``, so that the union over ranks and
    micro-steps is the same for every number of ranks with the same global batch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        accumulation: int,
        seed: int,
        first_step: int,
        last_step: int,
        data_rank: int = 0,
        data_ranks: int = 1,
    ) -> None:
        self.block = batch_size * accumulation * data_ranks
        if self.block > num_samples:
            raise ConfigError(
                f"trainer.train_batch_size {batch_size} x grad_accum_every {accumulation} x {data_ranks} data ranks = "
                f"{self.block} samples a step, but the training period has {num_samples}; lower one of them"
            )
        self._num_samples, self._batch, self._accumulation = num_samples, batch_size, accumulation
        self._seed, self._first, self._last = seed, first_step, last_step
        self._rank, self._ranks = data_rank, data_ranks

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass."""
        return self._num_samples // self.block

    def __len__(self) -> int:
        return (self._last - self._first) * self._accumulation

    def __iter__(self) -> Iterator[list[int]]:
        epoch, order = -1, np.empty(0, dtype=np.int64)
        for step in range(self._first, self._last):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = epoch_order(self._num_samples, self._seed, epoch)
            block = order[(step % self.steps_per_epoch) * self.block :][: self.block]
            parts = block.reshape(self._accumulation, self._ranks, self._batch)
            yield from (part[self._rank].tolist() for part in parts)


def build_loader(dataset: ForecastDataset, batches: Sampler[list[int]] | list[list[int]], workers: int) -> DataLoader:
    """Return a loader of `Batch` objects in the order that `batches` gives."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_ignore_signals if workers else None,
        persistent_workers=False,
    )


def _ignore_signals(worker: int) -> None:
    """Workers leave the decision to stop to the training process, or its last checkpoint would die with them."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
