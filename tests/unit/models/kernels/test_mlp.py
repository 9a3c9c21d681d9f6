"""MLP kernels: values and gradients equal those of the plain formulation, and fewer bytes are saved."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from credit.models.kernels import mlp as kernel
from credit.models.kernels.dispatch import MLP, use_plain_formulations
from credit.models.kernels.recompute_linear import RecomputedNorm
from credit.models.layers.transformer_layer import FeedForward

from .gradients import assert_near, bfloat16_autocast, collect_gradients, count_saved_bytes


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("blocks", [1, 4])
def test_values_gradients_and_saved_bytes(
    autocast: bool, frozen: bool, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(kernel, "BYTES_PER_CORE", 4 * 32 * 15 * 2 // blocks // torch.get_num_threads() + 1)
    layer = FeedForward(8, 0.0)
    x = torch.randn(2, 3, 5, 8, requires_grad=True)
    torch.nn.init.normal_(layer.norm.weight)
    for linear in (layer.expand, layer.contract):
        linear.requires_grad_(not frozen)
    inputs = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]

    def compute_plain_mlp() -> Tensor:
        hidden = F.linear(layer.norm(x), layer.expand.weight, layer.expand.bias)
        return F.linear(F.gelu(hidden), layer.contract.weight, layer.contract.bias)

    with bfloat16_autocast(autocast):
        actual = collect_gradients(layer(x), inputs)
        expected = collect_gradients(compute_plain_mlp(), inputs)
        with use_plain_formulations(MLP):
            results_without_kernel = collect_gradients(layer(x), inputs)
    assert_near(actual, expected, 1e-2 if autocast else 1e-6)
    assert all(torch.equal(tensor, other) for tensor, other in zip(results_without_kernel, expected, strict=True))
    with bfloat16_autocast(autocast):
        fewer_bytes = count_saved_bytes(compute_plain_mlp) - count_saved_bytes(lambda: layer(x))
    # In float32 the kernel saves the first bias, but neither the norm's result nor the argument and value of GELU.
    # Under autocast it saves all but the value of GELU, which has two bytes. The plain formulation saves the norm's
    # result and the value of GELU only for weights that are trained.
    num_hidden_values = 4 * x.numel()
    if autocast:
        assert frozen or fewer_bytes == 2 * num_hidden_values
    else:
        num_fewer_values = num_hidden_values if frozen else x.numel() + 2 * num_hidden_values
        assert fewer_bytes == 4 * num_fewer_values - layer.expand.bias.nbytes


@pytest.mark.parametrize("autocast", [False, True])
def test_without_gradients_a_few_rows_are_computed_at_a_time(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BYTES_WITHOUT_GRADIENT", 2**12)
    layer = FeedForward(8, 0.0)
    x = torch.randn(2, 30, 50, 8)
    expected = layer(x).detach()
    hidden_bytes: list[int] = []

    def record_gelu(hidden: Tensor) -> Tensor:
        hidden_bytes.append(hidden.nbytes)
        return torch.ops.aten.gelu(hidden)

    monkeypatch.setattr(F, "gelu", record_gelu)
    with torch.no_grad(), bfloat16_autocast(autocast):
        actual = layer(x)
    assert_near([actual.float()], [expected], 1e-2 if autocast else 1e-6)
    assert len(hidden_bytes) > 1
    assert max(hidden_bytes) <= 2**12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recomputes_norm", [False, True])
def test_a_backward_pass_under_autocast_is_the_same(recomputes_norm: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4, 8, dtype=dtype, requires_grad=True)
    expand_weight = torch.randn(24, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(8, 24, dtype=dtype, requires_grad=True)
    norm = RecomputedNorm(torch.randn(6, 4, 8).to(dtype), torch.ones(8, dtype=dtype), torch.zeros(8, dtype=dtype), 1e-5)

    def compute_gradients(*, autocast: bool) -> tuple[Tensor, ...]:
        y = kernel.mlp((x, expand_weight, None), weight, None, norm if recomputes_norm else None)
        with bfloat16_autocast(autocast):
            return torch.autograd.grad(y.float().sum(), (x, expand_weight, weight))

    for actual, expected in zip(compute_gradients(autocast=True), compute_gradients(autocast=False), strict=True):
        assert actual.dtype == dtype
        assert torch.equal(actual, expected)
