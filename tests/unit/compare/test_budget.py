"""Tests of budgets: parsing, the number of steps, and the overrides of a training."""

from __future__ import annotations

import pytest

from credit.compare.budget import Budget, StepCost, build_training_overrides, parse_budget
from credit.config import load_config
from credit.errors import ConfigError
from tests.unit.compare.configs import QUICKSTART


@pytest.mark.parametrize(
    ("kind", "amount", "expected"), [("steps", "800", 800), ("time", "15min", 900), ("flops", "2e15", 2e15)]
)
def test_a_budget_is_read(kind: str, amount: str, expected: float) -> None:
    assert parse_budget(kind, amount) == Budget(kind, expected, amount)


@pytest.mark.parametrize(
    ("kind", "amount", "message"),
    [
        ("step", "800", 'did you mean "steps"'),
        ("steps", "4", "whole number of at least 5"),
        ("steps", "10.5", "whole number"),
        ("steps", "many", "whole number"),
        ("steps", "inf", "whole number"),
        ("time", "-3min", "is not a duration"),
        ("flops", "0", "positive number of operations"),
        ("flops", "nan", "positive number of operations"),
    ],
)
def test_a_wrong_budget_is_refused(kind: str, amount: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_budget(kind, amount)


def test_steps_follow_from_the_cost_of_a_step_and_are_rounded_down() -> None:
    cost = StepCost(seconds=0.7, operations=3e9)
    assert parse_budget("steps", "800").count_steps("a", None) == 800
    assert parse_budget("time", "1min").count_steps("a", cost) == 85
    assert parse_budget("flops", "1e11").count_steps("a", cost) == 33


def test_a_budget_of_few_steps_or_unknown_operations_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"allows 3 steps of a.* a step takes 20 s, so give at least 100"):
        parse_budget("time", "1min").count_steps("a", StepCost(seconds=20.0))
    with pytest.raises(ConfigError, match="operations of a cannot be counted"):
        parse_budget("flops", "1e11").count_steps("a", StepCost(seconds=1.0))


def test_a_training_of_the_comparison_has_the_length_of_the_budget() -> None:
    config = load_config(QUICKSTART, ["trainer.patience=3", "trainer.checkpoint_every=2"])
    overrides = build_training_overrides(config, seed=7, steps=42, folder="runs/a")
    trained = load_config(QUICKSTART, ["trainer.max_steps=null", "trainer.num_epoch=3", *overrides])
    assert (trained.seed, trained.save_loc) == (7, "runs/a")
    trainer = trained.trainer
    assert (trainer.max_steps, trainer.num_epoch, trainer.patience) == (42, None, None)
    # Five validations: at 9, 18, 27, 36 and at the last step.
    assert (trainer.validate_every, trainer.checkpoint_every) == (9, 2)
    assert trainer.schedule == config.trainer.schedule
