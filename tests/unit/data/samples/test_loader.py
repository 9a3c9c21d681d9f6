"""The order of samples is a function of seed, epoch and position, the same for any number of ranks."""

from __future__ import annotations

import itertools

import pytest

from credit.data.samples.loader import ResumableSampler, build_epoch_order, find_block_of_step
from credit.errors import ConfigError


def steps_of(batch: int, accumulation: int, ranks: int, first: int = 0, last: int = 9) -> list[set[int]]:
    """The union of samples of each optimizer step over ranks and micro-steps."""
    streams = [list(ResumableSampler(25, batch, accumulation, 7, first, last, rank, ranks)) for rank in range(ranks)]
    out = []
    for step in range(last - first):
        parts = [stream[step * accumulation : (step + 1) * accumulation] for stream in streams]
        batches = itertools.chain.from_iterable(parts)
        out.append(set(itertools.chain.from_iterable(batches)))
    return out


def test_the_global_batch_does_not_depend_on_ranks() -> None:
    alone = steps_of(8, 1, 1)
    assert all(len(step) == 8 for step in alone)
    assert steps_of(2, 1, 4) == steps_of(2, 2, 2) == steps_of(4, 2, 1) == alone


def test_a_restart_goes_on_with_the_next_batch() -> None:
    uninterrupted = list(ResumableSampler(25, 4, 1, 7, 0, 9))
    assert list(ResumableSampler(25, 4, 1, 7, 4, 9)) == uninterrupted[4:]


def test_an_epoch_meets_no_sample_twice_and_epochs_differ() -> None:
    batches = list(ResumableSampler(25, 8, 1, 7, 0, 6))
    for epoch in range(2):
        seen = sum(batches[3 * epoch : 3 * epoch + 3], [])
        assert len(set(seen)) == 24
    assert batches[:3] != batches[3:]
    assert (build_epoch_order(25, 7, 0) != build_epoch_order(25, 8, 0)).any()


def test_blocks_that_are_left_out() -> None:
    """The steps go on with the blocks behind them; everything else keeps its order."""
    uninterrupted = list(ResumableSampler(25, 4, 1, 7, 0, 12))
    left = [block for number, block in enumerate(uninterrupted) if number not in (3, 4, 8)]
    assert list(ResumableSampler(25, 4, 1, 7, 0, 9, skipped_blocks=[8, 3, 4])) == left
    assert list(ResumableSampler(25, 4, 1, 7, 5, 9, skipped_blocks=[3, 4, 8])) == left[5:]
    assert [find_block_of_step(step, [3, 4, 8]) for step in range(7)] == [0, 1, 2, 5, 6, 7, 9]


def test_a_batch_larger_than_the_data() -> None:
    with pytest.raises(ConfigError, match="32 samples per step, but the training period has 25"):
        ResumableSampler(25, 32, 1, 7, 0, 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("done", [1, 4])
def test_an_epoch_goes_on_with_another_number_of_ranks(done: int, ranks: int) -> None:
    """Begun on two ranks, broken off after some steps: what is left is met exactly once."""
    samples = 56
    block = 8
    before = [list(ResumableSampler(samples, 4, 1, 3, 0, done, rank, 2)) for rank in range(2)]
    after = [list(ResumableSampler(samples, block // ranks, 1, 3, done, 7, rank, ranks)) for rank in range(ranks)]
    batches = itertools.chain.from_iterable(before + after)
    read_samples = sorted(itertools.chain.from_iterable(batches))
    assert read_samples == list(range(samples))
