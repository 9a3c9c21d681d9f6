"""Division of the global batch into equal micro-batches on every rank."""

from __future__ import annotations

import pytest

from credit.config.batch_division import divide_global_batch
from credit.data.samples.loader import ResumableSampler
from credit.errors import ConfigError
from tests.unit.hpc.measured import small_config


@pytest.mark.parametrize(
    ("limit", "ranks", "division"),
    [(3, 4, (3, 1)), (3, 3, (2, 2)), (3, 2, (3, 2)), (3, 1, (3, 4)), (1, 3, (1, 4)), (100, 1, (12, 1)), (5, 2, (3, 2))],
)
def test_micro_batch_is_largest_divisor_within_limit(limit: int, ranks: int, division: tuple[int, int]) -> None:
    config = small_config("trainer.global_batch_size=12", f"trainer.train_batch_size={limit}")
    trainer = divide_global_batch(config, ranks).trainer
    assert (trainer.train_batch_size, trainer.grad_accum_every) == division
    assert trainer.train_batch_size * trainer.grad_accum_every * ranks == 12
    # Each step has the same samples as on four ranks.
    samples = []
    for num_groups, batch, accumulation in ((4, 3, 1), (ranks, *division)):
        sampler = ResumableSampler(100, batch, accumulation, 7, 0, 20, num_sample_groups=num_groups)
        samples.append([sorted(sampler.list_samples(step)) for step in range(20)])
    assert samples[0] == samples[1]


def test_without_a_global_batch_nothing_changes() -> None:
    config = small_config("trainer.train_batch_size=2", "trainer.grad_accum_every=3")
    assert divide_global_batch(config, 5) is config


def test_unequal_division_is_refused() -> None:
    config = small_config("trainer.global_batch_size=12")
    with pytest.raises(ConfigError, match="12 samples cannot be divided equally among 5 ranks .* 12, 6, 4, 3, 2, 1"):
        divide_global_batch(config, 5)
    with pytest.raises(ConfigError, match="grad_accum_every: 2 is computed from global_batch_size"):
        small_config("trainer.global_batch_size=12", "trainer.grad_accum_every=2")
