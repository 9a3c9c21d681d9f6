"""Results that a recomputation takes from the first pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from credit.models.kernels.recompute_cache import cache_across_recompute, recompute_contexts
from credit.models.layers import spectral_norm
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks

from ..small import build, fields


class Counted(torch.autograd.Function):
    """The square, and how often it was computed."""

    calls = 0

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        def compute() -> tuple[Tensor]:
            Counted.calls += 1
            return (x.square(),)

        ctx.save_for_backward(x)
        return cache_across_recompute(compute)[0]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_a_recomputation_takes_what_was_computed_also_the_second_time() -> None:
    Counted.calls = 0
    x = torch.tensor([2.0, 3.0], requires_grad=True)

    def twice(x: Tensor) -> Tensor:
        return Counted.apply(Counted.apply(x.sin()))

    y = checkpoint(twice, x, use_reentrant=False, context_fn=recompute_contexts).sum()
    assert Counted.calls == 2
    for _ in range(2):
        (gradient,) = torch.autograd.grad(y, x, retain_graph=True)
        torch.testing.assert_close(gradient, 4 * x.sin() ** 3 * x.cos())
    assert Counted.calls == 2
    twice(x)
    assert Counted.calls == 4, "outside of a recomputation everything is computed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("blocks", [False, True, "selective"])
def test_a_rollout_has_the_same_gradients_for_fewer_operations(
    blocks: bool | str, frozen: bool, dtype: torch.dtype
) -> None:
    def rollout(**how) -> tuple[list[Tensor], int]:
        model = build(seed=3).train()
        model.stages[0].requires_grad_(not frozen)
        if blocks:
            checkpoint_blocks(model, blocks)
        spectral_norm.advance_power_iterations(model)

        def step(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                return model(x).float()

        with FlopCounterMode(display=False) as counter:
            x = fields(batch=2)
            for _ in range(2):
                x = checkpoint(step, x, use_reentrant=False, **how)
            x.square().mean().backward()
        return [p.grad for p in model.parameters() if p.requires_grad], counter.get_total_flops()

    plain, operations = rollout()
    recalled, fewer = rollout(context_fn=recompute_contexts)
    assert all(torch.equal(one, other) for one, other in zip(recalled, plain, strict=True))
    assert fewer < operations


def test_passes_that_differ_are_noticed() -> None:
    first, again = recompute_contexts()
    with first:
        for _ in range(2):
            cache_across_recompute(lambda: (torch.ones(1),))
    with pytest.raises(AssertionError), again:
        cache_across_recompute(lambda: (torch.ones(1),))
