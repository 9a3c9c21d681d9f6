"""Cache with which a recomputation reuses results of the first pass."""

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


class CountedSquare(torch.autograd.Function):
    """Square of the input, which counts its computations in `calls`."""

    calls = 0

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        def compute() -> tuple[Tensor]:
            CountedSquare.calls += 1
            return (x.square(),)

        ctx.save_for_backward(x)
        return cache_across_recompute(compute)[0]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_every_recomputation_reuses_the_results_of_the_first_pass() -> None:
    CountedSquare.calls = 0
    x = torch.tensor([2.0, 3.0], requires_grad=True)

    def square_twice(x: Tensor) -> Tensor:
        return CountedSquare.apply(CountedSquare.apply(x.sin()))

    y = checkpoint(square_twice, x, use_reentrant=False, context_fn=recompute_contexts).sum()
    assert CountedSquare.calls == 2
    for _ in range(2):
        (gradient,) = torch.autograd.grad(y, x, retain_graph=True)
        torch.testing.assert_close(gradient, 4 * x.sin() ** 3 * x.cos())
    assert CountedSquare.calls == 2
    square_twice(x)
    assert CountedSquare.calls == 4, "outside of a recomputation everything is computed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("blocks", [False, True, "selective"])
def test_a_rollout_has_the_same_gradients_for_fewer_operations(
    blocks: bool | str, frozen: bool, dtype: torch.dtype
) -> None:
    def run_rollout(**checkpoint_options) -> tuple[list[Tensor], int]:
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
                x = checkpoint(step, x, use_reentrant=False, **checkpoint_options)
            x.square().mean().backward()
        return [p.grad for p in model.parameters() if p.requires_grad], counter.get_total_flops()

    expected, flops = run_rollout()
    gradients, flops_with_cache = run_rollout(context_fn=recompute_contexts)
    assert all(torch.equal(gradient, other) for gradient, other in zip(gradients, expected, strict=True))
    assert flops_with_cache < flops


def test_a_recomputation_that_differs_from_the_first_pass_is_an_error() -> None:
    first_pass, recomputation = recompute_contexts()
    with first_pass:
        for _ in range(2):
            cache_across_recompute(lambda: (torch.ones(1),))
    with pytest.raises(AssertionError), recomputation:
        cache_across_recompute(lambda: (torch.ones(1),))
