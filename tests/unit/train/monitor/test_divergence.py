"""Tests of rollbacks after streaks of non-finite steps or loss spikes, and of the stored counts of both."""

from __future__ import annotations

import json
import math

import pytest
from pydantic import ValidationError

from credit.config.sections.trainer import TrainerConfig
from credit.train.checkpoint.train_state import TrainState
from credit.train.monitor.divergence import DivergenceGuard, RollbackRequired


def build_guard(train_state: TrainState, **conf: object) -> DivergenceGuard:
    return DivergenceGuard(TrainerConfig(max_steps=9, **conf), train_state)


def test_consecutive_bad_steps_require_a_rollback() -> None:
    train_state = TrainState()
    check_step = build_guard(train_state, max_bad_steps=3).check_step
    for step, is_skipped in enumerate([True, True, False, True, True]):
        check_step(step, math.nan if is_skipped else 1.0, is_skipped)
    with pytest.raises(RollbackRequired) as caught:
        check_step(5, math.inf, True)
    assert (caught.value.steps, caught.value.is_finite) == ([3, 4, 5], False)
    assert "3 times in a row (trainer.max_bad_steps)" in caught.value.problem


def test_bad_steps_are_counted_across_an_interruption() -> None:
    train_state = TrainState()
    build_guard(train_state, max_bad_steps=2).check_step(7, math.nan, True)
    restored_state = TrainState()
    restored_state.restore(json.loads(json.dumps(train_state.to_meta())))
    with pytest.raises(RollbackRequired) as caught:
        build_guard(restored_state, max_bad_steps=2).check_step(8, math.nan, True)
    assert caught.value.steps == [7, 8]


def test_a_loss_spike_requires_a_rollback() -> None:
    train_state = TrainState()
    conf = {"loss_spike": {"factor": 3.0, "window": 5, "limit": 1}}
    check_step = build_guard(train_state, **conf).check_step
    for step in range(5):
        check_step(step, 9.0 if step == 0 else 1.0, False)  # no spike is detected before the window has five losses
    check_step(5, 2.9, False)
    with pytest.raises(RollbackRequired) as caught:
        check_step(6, 3.1, False)
    assert (caught.value.steps, caught.value.is_finite) == ([6], True)
    assert train_state.losses == [1.0, 1.0, 1.0, 1.0, 2.9], "the jump does not count as usual"
    train_state.spikes = 1
    check_step(6, 3.1, False)  # the limit is used up
    with pytest.raises(ValidationError, match="greater than 1"):
        build_guard(train_state, loss_spike={"factor": 1.0})


def test_state_of_an_older_version_is_restored() -> None:
    train_state = TrainState(step=3, skipped_blocks=[4], losses=[1.0])
    train_state.restore(
        {"step": 12, "best": 0.5, "best_step": 10, "worse": 1, "bad_steps": 2, "saved": 12, "validated": 10}
    )
    assert train_state == TrainState(step=12, best=0.5, best_step=10, validations_since_best=1, saved=12, validated=10)
