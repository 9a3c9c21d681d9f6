"""Checkpointed blocks run again in the backward pass and give the same gradients, spectral norm on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from credit.errors import ConfigError
from credit.models.hardware import as_on_gpu
from credit.models.wxformer import spectral_norm
from credit.parallel.activation import checkpoint_blocks, plain_name
from tests.unit.models.small import build, fields


def gradients(mode: bool | str) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of a two-step rollout, and how often the last block ran."""
    model = build(seed=3).train()
    calls = []
    block = next(module for module in model.modules() if getattr(module, "_fsdp2_shard", False))
    inner = block.forward
    block.forward = lambda x: (calls.append(1), inner(x))[1]
    if mode:
        checkpoint_blocks(model, mode)
        checkpoint_blocks(model, mode)  # those that are wrapped stay as they are
    spectral_norm.iterate_per_step(model)
    spectral_norm.arm(model)
    model(model(fields())).square().mean().backward()
    return {plain_name(name): p.grad for name, p in model.named_parameters()}, len(calls)


@pytest.mark.parametrize("mode", [True, "selective"])
def test_same_gradients_more_forwards(mode: bool | str) -> None:
    plain, calls = gradients(False)
    again, more_calls = gradients(mode)
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-7)
    assert more_calls == calls + 2, "each of the two steps recomputes the block once"


def test_nothing_is_computed_three_times() -> None:
    """What blocks compute again by themselves to save memory, they do not once they are checkpointed."""

    def operations() -> int:
        # large kernels take fewer operations on a CPU
        model = checkpoint_blocks(build(seed=3, cross_embed_kernel_sizes=[[2, 4]] * 4).train())
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(fields()).square().mean().backward()
        return counter.get_total_flops()

    with as_on_gpu():  # where nothing is computed again by itself
        kept = operations()
    assert operations() == kept


def test_a_model_without_blocks() -> None:
    with pytest.raises(ConfigError, match="marks no block"):
        checkpoint_blocks(nn.Linear(1, 1))
