"""The order in which samples are met: a pure function of seed, epoch and position, dealt by data-parallel rank.

Nothing about the order is stored but the position, so a run that restarts anywhere goes on with the very next batch.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Collection, Iterator

import numpy as np
from torch.utils.data import DataLoader, Sampler

from credit.data.samples.batch import Batch
from credit.data.samples.dataset import ForecastDataset
from credit.errors import ConfigError


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of the samples in `epoch` (from 0)."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def block_at(step: int, left_out: Collection[int]) -> int:
    """Return the block of samples that optimizer step `step` takes: the step-th of those that are not left out."""
    block = step
    for one in sorted(left_out):
        block += one <= block
    return block


class ResumableSampler(Sampler[list[int]]):
    """Yields this rank's micro-batches from optimizer step `first_step` to `last_step`.

    Optimizer step s (from 0) takes the s-th block of ``batch_size * data_ranks * accumulation`` samples of the epochs
    laid end to end; a block never spans two epochs (the rest of an epoch is dropped), and those in `left_out` are
    passed over. Inside a block, micro-step m gives data rank r the samples
    ``[(m * data_ranks + r) * batch_size, ...)``, so that the union over ranks and micro-steps is the same for every
    number of ranks with the same global batch.
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
        left_out: Collection[int] = (),
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
        self._left_out = left_out
        self._last_order: tuple[int, np.ndarray] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass."""
        return self._num_samples // self.block

    def __len__(self) -> int:
        return (self._last - self._first) * self._accumulation

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._first, self._last):
            parts = self.samples(step).reshape(self._accumulation, self._ranks, self._batch)
            yield from (part[self._rank].tolist() for part in parts)

    def samples(self, step: int) -> np.ndarray:
        """Return the samples of optimizer step `step` over all ranks and micro-steps."""
        epoch, place = divmod(block_at(step, self._left_out), self.steps_per_epoch)
        return self._order(epoch)[place * self.block :][: self.block]

    def _order(self, epoch: int) -> np.ndarray:
        if self._last_order is None or self._last_order[0] != epoch:
            self._last_order = epoch, epoch_order(self._num_samples, self._seed, epoch)
        return self._last_order[1]


class SampleSchedule:
    """The samples of every optimizer step of a run, and loaders that bring them to this rank.

    Args:
        dataset: the samples.
        batch_size: samples a rank and micro-step.
        accumulation: micro-steps.
        seed: of the run.
        workers: of the loader.
        data_rank: of this process.
        data_ranks: how many there are.
    """

    def __init__(
        self,
        dataset: ForecastDataset,
        batch_size: int,
        accumulation: int,
        seed: int,
        workers: int,
        data_rank: int = 0,
        data_ranks: int = 1,
    ) -> None:
        self._dataset, self._workers = dataset, workers
        self._sampler = functools.partial(
            ResumableSampler,
            len(dataset),
            batch_size,
            accumulation,
            seed,
            data_rank=data_rank,
            data_ranks=data_ranks,
        )
        whole = self._sampler(first_step=0, last_step=0)
        self.steps_per_epoch = whole.steps_per_epoch
        self.samples_a_step = whole.block

    def loader(self, first_step: int, last_step: int, left_out: Collection[int] = ()) -> Loader:
        """Return this rank's batches of the optimizer steps from `first_step` to `last_step`."""
        sampler = self._sampler(first_step=first_step, last_step=last_step, left_out=left_out)
        return Loader(self._dataset, sampler, self._workers)

    def epoch(self, step: int, left_out: Collection[int] = ()) -> int:
        """Return the epoch (from 0) of optimizer step `step`."""
        return block_at(step, left_out) // self.steps_per_epoch

    def initial_times(self, step: int, left_out: Collection[int] = ()) -> list[int]:
        """Return the initial times of all samples of optimizer step `step`, minutes."""
        sampler = self._sampler(first_step=step, last_step=step + 1, left_out=left_out)
        return self._dataset.initial[sampler.samples(step)].tolist()


class Loader:
    """Brings batches of samples, in the order that is asked for.

    What a store holds is read by threads. Source files are not to be read by two threads at once, so they are read by
    processes, or when they are asked for.

    Args:
        dataset: the samples.
        order: the samples of each batch.
        workers: threads or processes; a store has at least one thread.
    """

    def __init__(self, dataset: ForecastDataset, order: Sampler[list[int]] | list[list[int]], workers: int) -> None:
        self._dataset, self._order, self._workers = dataset, order, workers

    def jobs(self) -> tuple[Iterator[Callable[[], Batch]], int, Callable[[], None]]:
        """Return what brings each batch, by how many threads that may be done (0: when it is asked for), and its end.

        The last is to be called in any case: processes that ignore signals would keep the interpreter from ending.
        """
        here = (functools.partial(self._dataset.__getitems__, indices) for indices in self._order)
        if self._dataset.is_thread_safe:
            return here, max(1, self._workers), here.close
        if not self._workers:
            return here, 0, here.close
        batches = iter(
            DataLoader(
                self._dataset,
                batch_sampler=self._order,
                num_workers=self._workers,
                collate_fn=_as_it_is,
                worker_init_fn=_ignore_signals,
            )
        )
        return (functools.partial(next, batches) for _ in self._order), 1, batches._shutdown_workers


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _ignore_signals(worker: int) -> None:
    """Workers leave the decision to stop to the training process, or its last checkpoint would die with them."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
