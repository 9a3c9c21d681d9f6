"""When a run goes back: streaks of steps that are not finite, jumps of the loss, and what is remembered of both."""

from __future__ import annotations

import json
import math

import pytest
from pydantic import ValidationError

from credit.config.sections.trainer import TrainerConfig
from credit.train.checkpoint.train_state import TrainState
from credit.train.monitor.divergence import DivergenceGuard, RollbackRequired


def guard(at: TrainState, **conf: object) -> DivergenceGuard:
    return DivergenceGuard(TrainerConfig(max_steps=9, **conf), at)


def test_a_streak_in_a_row() -> None:
    at = TrainState()
    judge = guard(at, max_bad_steps=3).judge
    for step, bad in enumerate([True, True, False, True, True]):
        judge(step, math.nan if bad else 1.0, bad)
    with pytest.raises(RollbackRequired) as caught:
        judge(5, math.inf, True)
    assert (caught.value.steps, caught.value.finite) == ([3, 4, 5], False)
    assert "3 times in a row (trainer.max_bad_steps)" in caught.value.problem


def test_an_interruption_forgets_nothing() -> None:
    at = TrainState()
    guard(at, max_bad_steps=2).judge(7, math.nan, True)
    again = TrainState()
    again.restore(json.loads(json.dumps(at.meta())))
    with pytest.raises(RollbackRequired) as caught:
        guard(again, max_bad_steps=2).judge(8, math.nan, True)
    assert caught.value.steps == [7, 8]


def test_a_jump_of_the_loss() -> None:
    at = TrainState()
    conf = {"loss_spike": {"factor": 3.0, "window": 5, "limit": 1}}
    judge = guard(at, **conf).judge
    for step in range(5):
        judge(step, 9.0 if step == 0 else 1.0, False)  # before there are five, nothing is a jump
    judge(5, 2.9, False)
    with pytest.raises(RollbackRequired) as caught:
        judge(6, 3.1, False)
    assert (caught.value.steps, caught.value.finite) == ([6], True)
    assert at.losses == [1.0, 1.0, 1.0, 1.0, 2.9], "the jump does not count as usual"
    at.spikes = 1
    judge(6, 3.1, False)  # the limit is used up
    with pytest.raises(ValidationError, match="greater than 1"):
        guard(at, loss_spike={"factor": 1.0})


def test_a_checkpoint_of_an_older_version() -> None:
    at = TrainState(step=3, left_out=[4], losses=[1.0])
    at.restore({"step": 12, "best": 0.5, "best_step": 10, "worse": 1, "bad_steps": 2, "saved": 12, "validated": 10})
    assert at == TrainState(step=12, best=0.5, best_step=10, worse=1, saved=12, validated=10)
