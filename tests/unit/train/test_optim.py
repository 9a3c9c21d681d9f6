"""Tests of the schedules, of weight decay and of the optimizer's state."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from credit.config.sections.trainer import ScheduleConfig, TrainerConfig
from credit.train.optim import (
    build_optimizer,
    forecast_len_at,
    learning_rate,
    optimizer_tensors,
)


def test_warm_up_then_cosine() -> None:
    conf = ScheduleConfig(kind="cosine", warmup=0.1, final=0.01)
    rates = [learning_rate(step, 100, 2.0, conf) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (n + 1) for n in range(10)])
    assert rates[55] == pytest.approx(2.0 * (0.01 + 0.99 * 0.5), rel=1e-6)  # half way down
    assert rates[-1] == pytest.approx(0.02, rel=0.1)
    assert max(rates) == 2.0
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_a_short_run_warms_up() -> None:
    rates = [learning_rate(step, 3, 1.0, ScheduleConfig()) for step in range(3)]
    assert 0 < min(rates) <= max(rates) <= 1.0


def test_constant_schedule() -> None:
    conf = ScheduleConfig(kind="constant", warmup=0.0)
    assert {learning_rate(step, 10, 0.5, conf) for step in range(10)} == {0.5}


def test_warmup_stable_decay() -> None:
    conf = ScheduleConfig(kind="warmup_stable_decay", warmup=0.1, decay=0.2, final=0.01)
    rates = [learning_rate(step, 100, 2.0, conf) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (n + 1) for n in range(10)])
    assert set(rates[10:81]) == {2.0}
    # A quarter of the decay, 5 of its 20 steps, takes half of the fall, because sqrt(1/4) = 1/2.
    assert rates[85] == pytest.approx(2.0 * (0.01 + 0.99 * 0.5))
    assert rates[100] == pytest.approx(0.02)


def test_steps_before_the_decay_do_not_depend_on_the_length_of_the_run() -> None:
    short = [
        learning_rate(step, 100, 1.0, ScheduleConfig(kind="warmup_stable_decay", warmup=0.1)) for step in range(80)
    ]
    conf = ScheduleConfig(kind="warmup_stable_decay", warmup=0.05)
    assert short == [learning_rate(step, 200, 1.0, conf) for step in range(80)]


def test_warm_up_and_decay_must_fit_in_the_run() -> None:
    with pytest.raises(ValidationError, match=r"warmup \(0.5\) and decay \(0.6\) are fractions of the run"):
        ScheduleConfig(kind="warmup_stable_decay", warmup=0.5, decay=0.6)


def test_rollout_length_follows_the_ramp() -> None:
    ramp = {0.0: 1, 0.6: 2, 0.85: 4}
    assert [forecast_len_at(step, 100, 4, ramp) for step in (0, 59, 60, 84, 85, 99)] == [1, 1, 2, 2, 4, 4]
    assert forecast_len_at(0, 100, 3, None) == 3


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = build_optimizer(model, TrainerConfig(max_steps=1, learning_rate=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(model[0].weight, torch.tensor(0.95))
    assert model[0].bias.eq(1).all() and model[1].weight.eq(1).all() and model[1].bias.eq(1).all()


def test_state_round_trip() -> None:
    def build_model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return model, build_optimizer(model, TrainerConfig(max_steps=1, learning_rate=0.1))

    source_model, source_optimizer = build_model_and_optimizer()
    source_model(torch.ones(1, 3)).sum().backward()
    source_optimizer.step()
    copy_model, copy_optimizer = build_model_and_optimizer()
    copy_model.load_state_dict(source_model.state_dict())
    source_state = optimizer_tensors(source_model, source_optimizer)
    copy_state = optimizer_tensors(copy_model, copy_optimizer)
    assert copy_state.keys() == source_state.keys(), "the state must exist before the first step"
    for name, tensor in source_state.items():
        copy_state[name].copy_(tensor)
    for model, optimizer in ((source_model, source_optimizer), (copy_model, copy_optimizer)):
        optimizer.zero_grad()
        (3 * model(torch.ones(1, 3))).sum().backward()
        optimizer.step()
    assert torch.equal(source_model.weight, copy_model.weight)
