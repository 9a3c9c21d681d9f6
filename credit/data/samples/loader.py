"""Order of the samples in training, and distribution of the samples over data-parallel ranks.

The order depends only on seed, epoch and position. Therefore a checkpoint needs only the position, and a restarted run
continues with exactly the next batch.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Collection, Iterator

import numpy as np
from torch.utils.data import DataLoader, Sampler

from credit.data.samples.batch import Batch
from credit.data.samples.dataset import SampleDataset
from credit.errors import ConfigError


def build_epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the samples in an epoch, a permutation (num_samples,) of their indices.

    Args:
        num_samples: number of samples of the dataset.
        seed: seed of the permutation; equal seeds give equal orders.
        epoch: number of the epoch, from 0.
    """
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def find_block_of_step(step: int, skipped_blocks: Collection[int]) -> int:
    """Return the index of the block of samples that an optimizer step uses.

    Step s uses the s-th of the blocks that are not in `skipped_blocks`; see `ResumableSampler`. Steps and blocks are
    counted from 0.

    Args:
        step: number of the optimizer step.
        skipped_blocks: indices of the blocks that no step uses.
    """
    # Each skipped block that is not after the block of this step increases the index of this block by one.
    block = step
    for skipped_block in sorted(skipped_blocks):
        if skipped_block <= block:
            block += 1
    return block


class ResumableSampler(Sampler[list[int]]):
    """Sampler of the micro-batches of this rank; each micro-batch is a list of sample indices.

    Each epoch is a permutation of all samples, divided into blocks of ``batch_size * num_sample_groups *
    accumulation`` samples. Remaining samples that do not fill a block are dropped at the end of the epoch. Blocks are
    counted from 0 over all epochs. Optimizer step s (from 0) uses the s-th block that is not skipped. In micro-step m,
    group r uses `batch_size` samples of this block, beginning at position ``(m * num_sample_groups + r) *
    batch_size``. Therefore a step uses the same samples for every number of ranks with the same global batch.

    Args:
        num_samples: number of samples of the dataset.
        batch_size: number of samples per rank and micro-step.
        accumulation: number of micro-steps (for gradient accumulation) per optimizer step.
        seed: seed of the order.
        first_step: index of the first optimizer step, counted from 0.
        last_step: index after the last optimizer step.
        sample_group_index: index of the group of ranks, from 0, to which this process belongs. The ranks of a group
            have the same samples; without tensor or ensemble parallelism, each rank is a group.
        num_sample_groups: number of groups with different samples.
        skipped_blocks: indices of the blocks that no step uses.

    Attributes:
        block_size: number of samples per optimizer step on all ranks together.

    Raises:
        ConfigError: if a step needs more samples than there are.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        accumulation: int,
        seed: int,
        first_step: int,
        last_step: int,
        sample_group_index: int = 0,
        num_sample_groups: int = 1,
        skipped_blocks: Collection[int] = (),
    ) -> None:
        self.block_size = batch_size * accumulation * num_sample_groups
        if self.block_size > num_samples:
            raise ConfigError(
                f"trainer.train_batch_size {batch_size} x grad_accum_every {accumulation} x {num_sample_groups} ranks "
                f"with different samples = {self.block_size} samples per step, but the training period has "
                f"{num_samples}; lower one of them"
            )
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._accumulation = accumulation
        self._seed = seed
        self._first_step = first_step
        self._last_step = last_step
        self._sample_group_index = sample_group_index
        self._num_sample_groups = num_sample_groups
        self._skipped_blocks = skipped_blocks
        # The most recent epoch and its order. All steps of an epoch use the same permutation.
        self._cached_order: tuple[int, np.ndarray] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in one pass over the samples."""
        return self._num_samples // self.block_size

    def __len__(self) -> int:
        return (self._last_step - self._first_step) * self._accumulation

    def __iter__(self) -> Iterator[list[int]]:
        # Suffixes: M micro-steps, R groups of ranks, B samples of a group in a micro-step.
        for step in range(self._first_step, self._last_step):
            samples_MRB = self.list_samples(step).reshape(self._accumulation, self._num_sample_groups, self._batch_size)
            for samples_RB in samples_MRB:
                yield samples_RB[self._sample_group_index].tolist()

    def list_samples(self, step: int) -> np.ndarray:
        """Return the indices (block_size,) of all samples of an optimizer step, over all ranks and micro-steps."""
        block = find_block_of_step(step, self._skipped_blocks)
        epoch, block_in_epoch = divmod(block, self.steps_per_epoch)
        start = block_in_epoch * self.block_size
        return self._order(epoch)[start : start + self.block_size]

    def _order(self, epoch: int) -> np.ndarray:
        """Return the order of the samples in an epoch. The order is cached for the next steps of the same epoch."""
        if self._cached_order is None or self._cached_order[0] != epoch:
            order = build_epoch_order(self._num_samples, self._seed, epoch)
            self._cached_order = (epoch, order)
        return self._cached_order[1]


class SampleSchedule:
    """Schedule of the samples of every optimizer step of a training run, and builder of the loaders of this rank.

    Args:
        dataset: dataset of the samples.
        batch_size: number of samples per rank and micro-step.
        accumulation: number of micro-steps per optimizer step.
        seed: seed of the run.
        workers: number of threads or processes of a loader.
        sample_group_index: index of the group of ranks, from 0, to which this process belongs. The ranks of a group
            have the same samples; without tensor or ensemble parallelism, each rank is a group.
        num_sample_groups: number of groups with different samples.

    Attributes:
        steps_per_epoch: number of optimizer steps in one pass over the samples.
        samples_per_step: number of samples per optimizer step on all ranks together.
        bytes_per_step: size in bytes of the float32 fields that this rank reads per optimizer step.

    Raises:
        ConfigError: if a step needs more samples than there are.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        batch_size: int,
        accumulation: int,
        seed: int,
        workers: int,
        sample_group_index: int = 0,
        num_sample_groups: int = 1,
    ) -> None:
        self._dataset = dataset
        self._workers = workers
        self._build_sampler = functools.partial(
            ResumableSampler,
            len(dataset),
            batch_size,
            accumulation,
            seed,
            sample_group_index=sample_group_index,
            num_sample_groups=num_sample_groups,
        )
        # A sampler without steps checks the sizes, and provides the numbers that do not depend on the steps.
        sampler = self._build_sampler(first_step=0, last_step=0)
        self.steps_per_epoch = sampler.steps_per_epoch
        self.samples_per_step = sampler.block_size
        self.bytes_per_step = dataset.sample_bytes * batch_size * accumulation

    def build_loader(self, first_step: int, last_step: int, skipped_blocks: Collection[int] = ()) -> Loader:
        """Return this rank's loader for optimizer steps `first_step` to `last_step` - 1; see `ResumableSampler`."""
        sampler = self._build_sampler(first_step=first_step, last_step=last_step, skipped_blocks=skipped_blocks)
        return Loader(self._dataset, sampler, self._workers)

    def find_epoch(self, step: int, skipped_blocks: Collection[int] = ()) -> int:
        """Return the epoch of optimizer step `step`. Epochs and steps are counted from 0."""
        return find_block_of_step(step, skipped_blocks) // self.steps_per_epoch

    def list_initial_times(self, step: int, skipped_blocks: Collection[int] = ()) -> list[int]:
        """Return the initial times, in minutes since 1900, of all samples of optimizer step `step` on all ranks."""
        sampler = self._build_sampler(first_step=step, last_step=step + 1, skipped_blocks=skipped_blocks)
        return self._dataset.initial_minutes[sampler.list_samples(step)].tolist()


class Loader:
    """Loader of batches in a given order.

    A training store is read by threads. Source files must not be read by two threads at once, so worker processes read
    them. Without worker processes, the caller reads source files when it needs a batch.

    Args:
        dataset: dataset of the samples.
        order: lists of sample indices, one list per batch.
        workers: number of threads or processes. If it is 0, one thread still reads a training store.
    """

    def __init__(self, dataset: SampleDataset, order: Sampler[list[int]] | list[list[int]], workers: int) -> None:
        self._dataset = dataset
        self._order = order
        self._workers = workers

    def create_jobs(self) -> tuple[Iterator[Callable[[], Batch]], int, Callable[[], None]]:
        """Return the functions that a prefetcher must call to load the batches.

        Returns:
            Three values:

            - an iterator over functions without arguments, each of which returns the next batch;
            - the number of threads in which to call these functions. If it is 0, the caller must call each function
              when it needs the batch;
            - a function that ends the loading. It must always be called, because worker processes ignore signals and
              otherwise prevent the interpreter from exiting.
        """
        # A generator creates the calls one by one, because the order of a complete run may be long.
        calls = (functools.partial(self._dataset.__getitems__, indices) for indices in self._order)
        if self._dataset.is_thread_safe:
            return calls, max(1, self._workers), calls.close
        if not self._workers:
            return calls, 0, calls.close
        # Worker processes read the source files and return complete batches; a single thread waits for the batches.
        batches = iter(
            DataLoader(
                self._dataset,
                batch_sampler=self._order,
                num_workers=self._workers,
                collate_fn=_identity_collate,
                worker_init_fn=_ignore_signals,
            )
        )
        next_batch_calls = (functools.partial(next, batches) for _ in self._order)
        # torch has no public method that ends the workers before the last batch.
        return next_batch_calls, 1, batches._shutdown_workers


def _identity_collate(batch: Batch) -> Batch:
    """Return a batch unchanged; used as ``collate_fn``, because the dataset already returns complete batches."""
    return batch


def _ignore_signals(worker: int) -> None:
    """Ignore SIGTERM and SIGINT in a worker process of the loader.

    The training process ends the workers itself, because it needs them until its last checkpoint.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
