"""Division of the samples of an optimizer step (the global batch) among ranks and micro-steps."""

from __future__ import annotations

from credit.config.schema import Config
from credit.errors import ConfigError

# Largest number of divisors in an error message.
_MAX_LISTED = 8


def divide_global_batch(config: Config, num_sample_ranks: int) -> Config:
    """Set ``train_batch_size`` and ``grad_accum_every`` of a config such that they give ``trainer.global_batch_size``.

    Each rank gets an equal part of the global batch, divided into micro-batches of equal size. This size is the largest
    divisor of the part that does not exceed ``trainer.train_batch_size``. For example, 12 samples on three ranks with a
    ``train_batch_size`` of 3 give two micro-batches of 2 samples on each rank. Without ``trainer.global_batch_size``,
    the config is returned unchanged.

    Args:
        config: config of the run; its ``train_batch_size`` is the largest size of a micro-batch.
        num_sample_ranks: number of ranks, or groups of ranks, that work on different samples.

    Raises:
        ConfigError: if the number of ranks does not divide the global batch; the message lists suitable numbers.
    """
    trainer = config.trainer
    if trainer.global_batch_size is None:
        return config
    samples_per_rank, remainder = divmod(trainer.global_batch_size, num_sample_ranks)
    if remainder:
        raise ConfigError(
            f"trainer.global_batch_size: {trainer.global_batch_size} samples cannot be divided equally among "
            f"{num_sample_ranks} ranks with different samples; these numbers of ranks divide them: "
            f"{_list_divisors(trainer.global_batch_size)}"
        )
    micro_batch = trainer.train_batch_size
    while samples_per_rank % micro_batch:
        micro_batch -= 1
    divided_trainer = trainer.model_copy(
        update={"train_batch_size": micro_batch, "grad_accum_every": samples_per_rank // micro_batch}
    )
    return config.model_copy(update={"trainer": divided_trainer})


def _list_divisors(number: int) -> str:
    """Return a string with the largest divisors of a number, in descending order."""
    divisors = [str(divisor) for divisor in range(number, 0, -1) if number % divisor == 0]
    if len(divisors) > _MAX_LISTED:
        divisors = [*divisors[:_MAX_LISTED], "..."]
    return ", ".join(divisors)
