"""Tests of the search for the first layer with a non-finite output or gradient."""

from __future__ import annotations

import torch
from torch import nn

from credit.train.monitor.nonfinite import find_infinite_channels, find_nonfinite_layer


class Broken(nn.Module):
    """Identity with, on request, an infinite output or a NaN gradient."""

    def __init__(self, forward: bool = False, backward: bool = False) -> None:
        super().__init__()
        self.broken = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward, backward = self.broken
        if backward:
            # The derivative of the root at 0 is infinite, and multiplied by 0 it is NaN.
            x = x + 0 * torch.sqrt(x * 0)
        return x / 0 if forward else x


def build_network(broken_layer: int | None, **broken: bool) -> nn.Sequential:
    torch.manual_seed(0)
    last_layers = [Broken(**broken) if layer == broken_layer else Broken() for layer in range(3)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), last_layer) for last_layer in last_layers))


def find_layer(model: nn.Module) -> str | None:
    problem = find_nonfinite_layer(model, lambda: model(torch.ones(2, 3)).square().sum())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    return problem


def test_a_finite_network_has_no_problem() -> None:
    assert find_layer(build_network(None)) is None


def test_an_infinite_output_names_its_layer() -> None:
    assert find_layer(build_network(1, forward=True)) == "the output of 1.1 (Broken)"


def test_a_nan_gradient_names_the_layer_before_its_origin() -> None:
    assert find_layer(build_network(1, backward=True)) == "the gradient at the output of 1.0 (Linear)"


def test_an_infinite_loss_is_named() -> None:
    model = build_network(None)
    assert find_nonfinite_layer(model, lambda: model(torch.ones(2, 3)).sum() * torch.inf) == "the loss"


def test_a_nan_weight_names_its_layer() -> None:
    model = build_network(None)
    with torch.no_grad():
        model[2][0].weight[0, 0] = torch.nan
    assert find_layer(model) == "the output of 2.0 (Linear)"


def test_infinite_channels_are_named() -> None:
    values = torch.zeros(2, 3, 1, 4, 4)
    values[1, 2, 0, 3, 3] = -torch.inf
    values[0, 0, 0, 0, 0] = torch.nan  # NaN is a declared missing value
    assert find_infinite_channels(values, ["a", "b", "c"]) == ["c"]
