"""Tests of the moving average: the formula, and the exchange with the live weights and singular vectors."""

from __future__ import annotations

import torch
from torch import nn

from credit.models.layers import spectral_norm
from credit.train.ema import EMA


def test_average_follows_the_formula() -> None:
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    average = EMA(model, decay=0.5)
    expected = 1.0
    for step in range(20):
        with torch.no_grad():
            model.weight.fill_(float(step))
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert torch.allclose(average.average["weight"], torch.tensor(expected))


def test_applied_average_replaces_weights_and_restores_them() -> None:
    torch.manual_seed(0)
    model = spectral_norm.apply_spectral_norm(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)))
    average = EMA(model, decay=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    average.update(100)
    live_state = {name: value.clone() for name, value in model.state_dict().items()}
    average_before = {name: value.clone() for name, value in average.average.items()}
    with average.applied():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, average_before[name])
        for module in model:
            largest = torch.linalg.svdvals(module.parametrizations.weight.original)[0]
            normalised = torch.linalg.svdvals(module.weight)[0]
            assert 0.95 < normalised < 1.3, (normalised, largest)
    for name, value in model.state_dict().items():
        assert torch.equal(value, live_state[name]), name
