"""Noise in the U-Net: it changes the output only with trained weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .small import build, draw_condition, draw_fields, randomize_noise_weights

KINDS = [{"kind": "global", "channels": 3}, {"kind": "cell", "channels": 2}, {"kind": "spherical", "channels": 4}]


@pytest.mark.parametrize("entry", KINDS, ids=lambda entry: entry["kind"])
def test_noise_changes_the_output_only_after_training(entry: dict[str, Any]) -> None:
    plain = build().eval()
    network = build(noise=[entry]).eval()
    x_BCTHW = draw_fields(plain)
    condition = draw_condition(network, [entry])
    expected = plain(x_BCTHW)
    torch.testing.assert_close(network(x_BCTHW, condition), expected, rtol=0, atol=1e-6)
    randomize_noise_weights(network)
    y_BCTHW = network(x_BCTHW, condition)
    assert (y_BCTHW - expected).abs().max() > 1e-3
    # Noise of zeros, and no noise at all, give the output of the plain network.
    zeros = {kind: torch.zeros_like(noise) for kind, noise in condition.items()}
    torch.testing.assert_close(network(x_BCTHW, zeros), expected, rtol=0, atol=1e-6)
    assert torch.equal(network(x_BCTHW), expected)
    # Every weight through which the noise enters has a gradient.
    y_BCTHW.square().mean().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_noise_of_a_cell_acts_on_cells_around_it() -> None:
    entry = {"kind": "cell", "channels": 4}
    network = build(noise=[entry], attention_levels=0).eval()
    randomize_noise_weights(network)
    x_BCTHW = draw_fields(network, batch=1)
    condition = draw_condition(network, [entry], batch=1)
    y_BCTHW = network(x_BCTHW, condition)
    # The last row has an effect as well, although levels with an even number of rows leave it out.
    condition["cell"][..., 26, 3] = torch.tensor([3.0, -1.0, 2.0, -2.0])
    change_HW = (network(x_BCTHW, condition) - y_BCTHW).abs().sum((0, 1, 2))
    assert change_HW[26, 3] > 1e-3
    assert change_HW[26, 3] > 5 * change_HW[13].mean()


def test_dropout_as_noise() -> None:
    entry = {"kind": "dropout", "rate": 0.2}
    plain = build().eval()
    network = build(noise=[entry]).eval()
    x_BCTHW = draw_fields(plain)
    expected = plain(x_BCTHW)
    condition = draw_condition(network, [entry])
    y_BCTHW = network(x_BCTHW, condition)
    assert (y_BCTHW - expected).abs().max() > 1e-4
    assert torch.equal(network(x_BCTHW, condition), y_BCTHW)
    # Seed 0 stands for no dropout.
    zero_seeds = {"dropout": torch.zeros_like(condition["dropout"])}
    torch.testing.assert_close(network(x_BCTHW, zero_seeds), expected, rtol=0, atol=1e-6)


def test_torch_dropout_acts_in_training_alone() -> None:
    network = build(ff_dropout=0.3)
    x_BCTHW = draw_fields(network)
    assert not torch.equal(network(x_BCTHW), network(x_BCTHW))
    network.eval()
    assert torch.equal(network(x_BCTHW), network(x_BCTHW))
