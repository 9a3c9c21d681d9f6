"""The first layer that is not finite, forward and backward."""

from __future__ import annotations

import torch
from torch import nn

from credit.train.monitor.nonfinite import find_infinite_channels, find_nonfinite_layer


class Broken(nn.Module):
    """Identity, with an infinite value forward or a NaN backward where told."""

    def __init__(self, forward: bool = False, backward: bool = False) -> None:
        super().__init__()
        self.broken = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward, backward = self.broken
        if backward:
            # the root's derivative at 0 is infinite, times 0 is NaN
            x = x + 0 * torch.sqrt(x * 0)
        return x / 0 if forward else x


def network(where: int | None, **broken: bool) -> nn.Sequential:
    torch.manual_seed(0)
    ends = [Broken(**broken) if layer == where else Broken() for layer in range(3)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), end) for end in ends))


def find(model: nn.Module) -> str | None:
    problem = find_nonfinite_layer(model, lambda: model(torch.ones(2, 3)).square().sum())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    return problem


def test_nothing() -> None:
    assert find(network(None)) is None


def test_forward() -> None:
    assert find(network(1, forward=True)) == "the output of 1.1 (Broken)"


def test_backward_names_the_layer_before_the_culprit() -> None:
    assert find(network(1, backward=True)) == "the gradient at the output of 1.0 (Linear)"


def test_the_loss() -> None:
    model = network(None)
    assert find_nonfinite_layer(model, lambda: model(torch.ones(2, 3)).sum() * torch.inf) == "the loss"


def test_weights() -> None:
    model = network(None)
    with torch.no_grad():
        model[2][0].weight[0, 0] = torch.nan
    assert find(model) == "the output of 2.0 (Linear)"


def test_channels() -> None:
    values = torch.zeros(2, 3, 1, 4, 4)
    values[1, 2, 0, 3, 3] = -torch.inf
    values[0, 0, 0, 0, 0] = torch.nan  # declared missing
    assert find_infinite_channels(values, ["a", "b", "c"]) == ["c"]
