"""Tests of the sampler: the order depends on seed, epoch and position, and not on the number of ranks."""

from __future__ import annotations

import itertools

import pytest

from credit.data.samples.loader import ResumableSampler, build_epoch_order, find_block_of_step
from credit.errors import ConfigError


def collect_steps(batch: int, accumulation: int, ranks: int, first: int = 0, last: int = 9) -> list[set[int]]:
    """Return the samples of each optimizer step, over all ranks and micro-steps."""
    streams = [list(ResumableSampler(25, batch, accumulation, 7, first, last, rank, ranks)) for rank in range(ranks)]
    samples_of_steps = []
    for step in range(last - first):
        parts = [stream[step * accumulation : (step + 1) * accumulation] for stream in streams]
        batches = itertools.chain.from_iterable(parts)
        samples_of_steps.append(set(itertools.chain.from_iterable(batches)))
    return samples_of_steps


def test_the_global_batch_does_not_depend_on_ranks() -> None:
    single_rank = collect_steps(8, 1, 1)
    assert all(len(step) == 8 for step in single_rank)
    assert collect_steps(2, 1, 4) == collect_steps(2, 2, 2) == collect_steps(4, 2, 1) == single_rank


def test_restart_continues_with_the_next_batch() -> None:
    uninterrupted = list(ResumableSampler(25, 4, 1, 7, 0, 9))
    assert list(ResumableSampler(25, 4, 1, 7, 4, 9)) == uninterrupted[4:]


def test_epoch_reads_no_sample_twice_and_epochs_differ() -> None:
    batches = list(ResumableSampler(25, 8, 1, 7, 0, 6))
    for epoch in range(2):
        epoch_samples = sum(batches[3 * epoch : 3 * epoch + 3], [])
        assert len(set(epoch_samples)) == 24
    assert batches[:3] != batches[3:]
    assert (build_epoch_order(25, 7, 0) != build_epoch_order(25, 8, 0)).any()


def test_skipped_blocks_do_not_change_the_order() -> None:
    """Steps continue with the blocks after the skipped ones. All other blocks keep their order."""
    uninterrupted = list(ResumableSampler(25, 4, 1, 7, 0, 12))
    remaining_blocks = [block for number, block in enumerate(uninterrupted) if number not in (3, 4, 8)]
    assert list(ResumableSampler(25, 4, 1, 7, 0, 9, skipped_blocks=[8, 3, 4])) == remaining_blocks
    assert list(ResumableSampler(25, 4, 1, 7, 5, 9, skipped_blocks=[3, 4, 8])) == remaining_blocks[5:]
    assert [find_block_of_step(step, [3, 4, 8]) for step in range(7)] == [0, 1, 2, 5, 6, 7, 9]


def test_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="32 samples per step, but the training period has 25"):
        ResumableSampler(25, 32, 1, 7, 0, 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("done", [1, 4])
def test_epoch_continues_with_another_number_of_ranks(done: int, ranks: int) -> None:
    """An epoch starts on two ranks and stops after some steps. The remaining samples are read exactly once."""
    samples = 56
    block = 8
    before = [list(ResumableSampler(samples, 4, 1, 3, 0, done, rank, 2)) for rank in range(2)]
    after = [list(ResumableSampler(samples, block // ranks, 1, 3, done, 7, rank, ranks)) for rank in range(ranks)]
    batches = itertools.chain.from_iterable(before + after)
    read_samples = sorted(itertools.chain.from_iterable(batches))
    assert read_samples == list(range(samples))
