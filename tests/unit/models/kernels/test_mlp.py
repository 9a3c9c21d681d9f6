"""The MLP kernels: the values and gradients of the plain formulation, with fewer bytes kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from credit.models.kernels import mlp as kernel
from credit.models.kernels.dispatch import MLP, use_plain_formulations
from credit.models.kernels.recompute_linear import RecomputedNorm
from credit.models.layers.transformer_layer import FeedForward

from .gradients import assert_near, bfloat16_autocast, kept_bytes, with_gradients


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("blocks", [1, 4])
def test_values_gradients_and_kept_bytes(
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

    def plain() -> Tensor:
        hidden = F.linear(layer.norm(x), layer.expand.weight, layer.expand.bias)
        return F.linear(F.gelu(hidden), layer.contract.weight, layer.contract.bias)

    with bfloat16_autocast(autocast):
        actual = with_gradients(layer(x), inputs)
        expected = with_gradients(plain(), inputs)
        with use_plain_formulations(MLP):
            replaced = with_gradients(layer(x), inputs)
    assert_near(actual, expected, 1e-2 if autocast else 1e-6)
    assert all(torch.equal(tensor, other) for tensor, other in zip(replaced, expected, strict=True))
    with bfloat16_autocast(autocast):
        saved_bytes = kept_bytes(plain) - kept_bytes(lambda: layer(x))
    # In float32 the norm's result, GELU's argument and value are not kept, the first bias is; else GELU's value, in two
    # bytes, is not kept. The plain formulation keeps the norm's result and GELU's value for weights that train.
    hidden_bytes = 4 * x.numel()
    if autocast:
        assert frozen or saved_bytes == 2 * hidden_bytes
    else:
        kept_by_plain = hidden_bytes if frozen else x.numel() + 2 * hidden_bytes
        assert saved_bytes == 4 * kept_by_plain - layer.expand.bias.nbytes


@pytest.mark.parametrize("autocast", [False, True])
def test_without_gradient_some_rows_are_held_at_a_time(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BYTES_WITHOUT_GRADIENT", 2**12)
    layer = FeedForward(8, 0.0)
    x = torch.randn(2, 30, 50, 8)
    expected = layer(x).detach()
    hidden_bytes: list[int] = []

    def gelu(hidden: Tensor) -> Tensor:
        hidden_bytes.append(hidden.nbytes)
        return torch.ops.aten.gelu(hidden)

    monkeypatch.setattr(F, "gelu", gelu)
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

    def gradients(*, autocast: bool) -> tuple[Tensor, ...]:
        y = kernel.mlp((x, expand_weight, None), weight, None, norm if recomputes_norm else None)
        with bfloat16_autocast(autocast):
            return torch.autograd.grad(y.float().sum(), (x, expand_weight, weight))

    for actual, expected in zip(gradients(autocast=True), gradients(autocast=False), strict=True):
        assert actual.dtype == dtype
        assert torch.equal(actual, expected)
