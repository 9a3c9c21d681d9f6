"""Checkpointed blocks run again in the backward pass and give the same gradients, spectral norm on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from credit.errors import ConfigError
from credit.models.wxformer import spectral_norm
from credit.parallel.activation import apply_activation_checkpointing
from tests.unit.models.small import build, fields


def gradients(checkpointed: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of a two-step rollout, and how often the last block ran."""
    model = build(seed=3).train()
    calls = []
    block = next(module for module in model.modules() if getattr(module, "_fsdp2_shard", False))
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    inner = block.forward
    block.forward = lambda x: (calls.append(1), inner(x))[1]
    if checkpointed:
        apply_activation_checkpointing(model)
    spectral_norm.iterate_per_step(model)
    spectral_norm.arm(model)
    model(model(fields())).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}, len(calls)


def test_same_gradients_more_forwards() -> None:
    plain, calls = gradients(False)
    again, more_calls = gradients(True)
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-7)
    assert more_calls == calls + 2, "each of the two steps recomputes the block once"


def test_a_model_without_blocks() -> None:
    with pytest.raises(ConfigError, match="marks no block"):
        apply_activation_checkpointing(nn.Linear(1, 1))
