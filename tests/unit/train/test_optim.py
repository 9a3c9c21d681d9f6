"""The schedule fits the run's length; only matrices decay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from credit.config.schema_trainer import ScheduleConfig, TrainerConfig
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


def test_a_short_run_still_warms_up_and_ends() -> None:
    rates = [learning_rate(step, 3, 1.0, ScheduleConfig()) for step in range(3)]
    assert 0 < min(rates) <= max(rates) <= 1.0


def test_constant() -> None:
    conf = ScheduleConfig(kind="constant", warmup=0.0)
    assert {learning_rate(step, 10, 0.5, conf) for step in range(10)} == {0.5}


def test_the_rollout_lengthens() -> None:
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


def test_state_goes_out_and_comes_back() -> None:
    def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return model, build_optimizer(model, TrainerConfig(max_steps=1, learning_rate=0.1))

    first, one = trained()
    first(torch.ones(1, 3)).sum().backward()
    one.step()
    second, two = trained()
    second.load_state_dict(first.state_dict())
    state = optimizer_tensors(second, two)
    assert state.keys() == optimizer_tensors(first, one).keys(), "state is there before the first step"
    for name, value in optimizer_tensors(first, one).items():
        state[name].copy_(value)
    for model, optimizer in ((first, one), (second, two)):
        optimizer.zero_grad()
        (3 * model(torch.ones(1, 3))).sum().backward()
        optimizer.step()
    assert torch.equal(first.weight, second.weight)
