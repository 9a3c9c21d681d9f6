"""Training budget of a comparison (equal steps, time or operations) and the number of steps that it allows each run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from credit.calendar import parse_duration
from credit.config import Config
from credit.errors import ConfigError, did_you_mean

BUDGET_KINDS = ("steps", "time", "flops")
# Smallest number of optimizer steps of a run. With fewer steps, the learning-rate schedule is too coarse, and the
# start-up dominates the duration of the run.
MIN_STEPS = 5
# Number of validations of each run, at equal intervals. The weights of the best validation are used, so all runs must
# have the same number of validations.
NUM_VALIDATIONS = 5


@dataclass(frozen=True)
class StepCost:
    """Measured cost of one optimizer step of a run.

    Attributes:
        seconds: duration of a step in seconds, without validations and checkpoints.
        operations: number of floating-point operations of a step over all processes; None if it is unknown.
    """

    seconds: float
    operations: float | None = None


@dataclass(frozen=True)
class Budget:
    """Training budget that is the same for all runs of a comparison.

    Attributes:
        kind: ``steps``, ``time`` or ``flops``.
        amount: number of optimizer steps, total time of the steps in seconds, or number of floating-point operations.
        text: amount as the user wrote it, such as ``15min``.
    """

    kind: str
    amount: float
    text: str

    @property
    def needs_measurement(self) -> bool:
        """True if the number of steps depends on the measured cost of a step."""
        return self.kind != "steps"

    def count_steps(self, name: str, cost: StepCost | None) -> int:
        """Return the number of optimizer steps that the budget allows, rounded down.

        Args:
            name: name of the run, for messages.
            cost: measured cost of a step; None for a budget of the kind ``steps``.

        Raises:
            ConfigError: if the operations of a step are unknown, or the budget allows fewer than `MIN_STEPS` steps.
        """
        if cost is None:
            return int(self.amount)
        cost_per_step = cost.seconds
        if self.kind == "flops":
            if cost.operations is None:
                raise ConfigError(
                    f"--equal flops: the operations of {name} cannot be counted, because its network needs values of "
                    "tensors; use --equal time or --equal steps"
                )
            cost_per_step = cost.operations
        steps = math.floor(self.amount / cost_per_step)
        if steps < MIN_STEPS:
            unit = "s" if self.kind == "time" else "operations"
            raise ConfigError(
                f"--equal {self.kind} {self.text}: allows {steps} steps of {name}, but at least {MIN_STEPS} are "
                f"needed; a step takes {cost_per_step:.3g} {unit}, so give at least {MIN_STEPS * cost_per_step:.3g}"
            )
        return steps

    def describe(self) -> str:
        """Return sentences that describe the budget to readers of the page."""
        if self.kind == "steps":
            return f"Equal number of optimizer steps: {int(self.amount)}."
        if self.kind == "time":
            return (
                f"Equal time: {self.text} of optimizer steps. The number of steps is this time divided by the measured "
                "time of a step. The time includes no start, validation or checkpoint."
            )
        return f"Equal floating-point operations of training: {self.amount:.3g}, as counted by torch."


def parse_budget(kind: str, amount: str) -> Budget:
    """Return the `Budget` that the option ``--equal KIND AMOUNT`` describes.

    Args:
        kind: ``steps``, ``time`` or ``flops``.
        amount: number of steps, a duration such as ``15min``, or a number of operations such as ``2e15``.

    Raises:
        ConfigError: if the kind is unknown, the amount is not positive, or the steps are fewer than `MIN_STEPS`.
    """
    if kind == "time":
        return Budget(kind, 60.0 * parse_duration(amount, "--equal time"), amount)
    if kind not in BUDGET_KINDS:
        raise ConfigError(f"--equal {kind}: is not a kind of budget{did_you_mean(kind, BUDGET_KINDS)}")
    try:
        number = float(amount)
    except ValueError:
        number = math.nan
    is_whole = number == math.floor(number) if math.isfinite(number) else False
    if kind == "steps" and not (is_whole and number >= MIN_STEPS):
        raise ConfigError(f"--equal steps {amount}: must be a whole number of at least {MIN_STEPS}, for example 800")
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"--equal flops {amount}: must be a positive number of operations, for example 2e15")
    return Budget(kind, number, amount)


def build_training_overrides(config: Config, seed: int, steps: int, folder: str) -> list[str]:
    """Return the overrides of ``credit train`` that give a run of the comparison its seed and number of steps.

    The schedules of the learning rate and of the rollout length are defined by fractions of the run, so they are scaled
    to the new number of steps.

    Args:
        config: config of the run.
        seed: seed of the training run.
        steps: number of optimizer steps.
        folder: run folder of the training run.
    """
    validate_every = math.ceil(steps / NUM_VALIDATIONS)
    checkpoint_every = min(config.trainer.checkpoint_every or validate_every, validate_every)
    return [
        f"save_loc={folder}",
        f"seed={seed}",
        "trainer.num_epoch=null",
        f"trainer.max_steps={steps}",
        f"trainer.validate_every={validate_every}",
        f"trainer.checkpoint_every={checkpoint_every}",
        # A run that stops early would not use its budget.
        "trainer.patience=null",
    ]
