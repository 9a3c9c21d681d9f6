"""Tests of `trainer.learning_rate_factors`: which weights are frozen, and which learn slowly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from credit.config.sections.trainer import TrainerConfig
from credit.errors import ConfigError
from credit.models.layers.spectral_norm import apply_spectral_norm
from credit.train.learning_rates import find_learning_rate_factors, select_trained_weights
from credit.train.optim import build_optimizer


def build_model() -> nn.ModuleDict:
    """Return two blocks, of which the second has spectral norm."""
    torch.manual_seed(0)
    blocks = {"first": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), "second": nn.Linear(3, 3)}
    apply_spectral_norm(blocks["second"])
    return nn.ModuleDict(blocks)


def build_trainer_config(**factors: float) -> TrainerConfig:
    """Return a trainer section with these factors; double underscores in names stand for dots."""
    renamed = {name.replace("__", "."): factor for name, factor in factors.items()}
    return TrainerConfig(max_steps=1, learning_rate=0.1, learning_rate_factors=renamed)


def test_the_first_matching_pattern_applies() -> None:
    factors = find_learning_rate_factors(build_model(), {"first.1": 0.5, "first": 0.0, "*.bias": 2.0})
    assert factors == {
        "first.0.weight": 0.0,
        "first.0.bias": 0.0,
        "first.1.weight": 0.5,
        "first.1.bias": 0.5,
        "second.bias": 2.0,
        "second.parametrizations.weight.original": 1.0,
    }


def test_patterns_match_the_path_of_a_weight_without_spectral_norm() -> None:
    factors = find_learning_rate_factors(build_model(), {"second.weight": 0.25})
    assert factors["second.parametrizations.weight.original"] == 0.25


def test_frozen_weights_stay_and_others_move_by_their_factor() -> None:
    model = build_model()
    conf = build_trainer_config(first__0=0.0, first__1=0.5)
    select_trained_weights(model, conf)
    optimizer = build_optimizer(model, conf)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    for group in optimizer.param_groups:
        # The training step sets the rate in this way.
        group["lr"] = 0.1 * group["lr_factor"]
    optimizer.step()
    # The first step of Adam moves each weight by its learning rate.
    expected_moves = {"first.0": 0.0, "first.1": 0.05, "second": 0.1}
    for name, parameter in model.named_parameters():
        [move] = [move for path, move in expected_moves.items() if name.startswith(path)]
        torch.testing.assert_close(before[name] - parameter.detach(), torch.full_like(parameter, move))
    assert len(optimizer.state) == 4


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"frist": 0.0}, r"'frist' matches no weight of ModuleDict; did you mean \"first\""),
        ({"first": 0.1, "first__0": 0.0}, "earlier patterns match all weights that 'first.0' matches"),
        ({"*": 0.0}, "freezes all weights"),
    ],
)
def test_patterns_without_effect_are_refused(factors: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_trained_weights(build_model(), build_trainer_config(**factors))
