"""Linear layers that save less for the backward pass: the same values and gradients, fewer bytes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from credit.models.kernels.dispatch import RECOMPUTED_NORM, force_gpu_path, use_plain_formulations
from credit.models.kernels.recompute_linear import CustomProductLinear, RecomputedNorm, norm_linear
from credit.models.layers.window_attention import to_windows

from .gradients import assert_near, bfloat16_autocast, collect_gradients, count_saved_bytes


@pytest.mark.parametrize("strided", [False, True])
def test_norm_linear(strided: bool) -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(8)
    layer = CustomProductLinear(8, 24)
    x = torch.randn(2, 4, 6, 8, requires_grad=True)
    inputs = [x, *norm.parameters(), *layer.parameters()]
    arrange = partial(to_windows, window=2, strided=strided)

    def compute_plain() -> Tensor:
        return layer(arrange(norm(x)))

    def compute_with_recomputed_norm() -> Tensor:
        recomputed_norm = RecomputedNorm.build_if_worthwhile(norm, x)
        assert recomputed_norm is not None
        return layer(arrange(norm(x)), partial(norm_linear, norm=recomputed_norm, arrange=arrange))

    assert_near(
        collect_gradients(compute_with_recomputed_norm(), inputs), collect_gradients(compute_plain(), inputs), 1e-6
    )
    assert count_saved_bytes(compute_plain) - count_saved_bytes(compute_with_recomputed_norm) == 4 * x.numel()


def test_norms_are_recomputed_only_where_it_is_worthwhile() -> None:
    norm = nn.LayerNorm(8)
    x = torch.randn(3, 8)
    assert RecomputedNorm.build_if_worthwhile(norm, x) is not None
    with bfloat16_autocast(True):
        assert RecomputedNorm.build_if_worthwhile(norm, x) is None
    assert RecomputedNorm.build_if_worthwhile(norm, x.bfloat16()) is None
    assert RecomputedNorm.build_if_worthwhile(norm, x.to("meta")) is None
    with force_gpu_path():
        assert RecomputedNorm.build_if_worthwhile(norm, x) is None
    with torch.no_grad():
        assert RecomputedNorm.build_if_worthwhile(norm, x) is None
    with use_plain_formulations(RECOMPUTED_NORM):
        assert RecomputedNorm.build_if_worthwhile(norm, x) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_pass_under_autocast_is_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(24, 8, dtype=dtype, requires_grad=True)
    norm = RecomputedNorm(torch.randn(6, 4, 8).to(dtype), torch.ones(8, dtype=dtype), torch.zeros(8, dtype=dtype), 1e-5)

    def compute_gradients(*, autocast: bool) -> tuple[Tensor, ...]:
        y = norm_linear(x, weight, None, norm, lambda normed: normed)
        with bfloat16_autocast(autocast):
            return torch.autograd.grad(y.float().sum(), (x, weight))

    for actual, expected in zip(compute_gradients(autocast=True), compute_gradients(autocast=False), strict=True):
        assert actual.dtype == dtype
        assert torch.equal(actual, expected)
