"""Operations that keep less for the backward pass than torch's own: the same values and gradients, fewer bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from credit.models.wxformer.attention import attend_fused, attend_on_cpu
from credit.models.wxformer.decoder import GroupNorm
from credit.models.wxformer.embed import CrossScaleEmbedding
from credit.models.wxformer.gelu_linear import ProductLinear, gelu_linear


def kept_bytes(compute: Callable[[], Tensor]) -> int:
    """Return the bytes of all storages that the graph of what `compute` returns keeps."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    return sum(storage.nbytes() for storage in storages.values())


def with_gradients(result: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    return [result, *torch.autograd.grad((result.float() * weights).sum(), inputs)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_linear_of_gelu(autocast: bool, frozen: bool) -> None:
    torch.manual_seed(0)
    layer, x = ProductLinear(32, 8).requires_grad_(not frozen), torch.randn(2, 3, 5, 32, requires_grad=True)
    inputs = [x] if frozen else [x, layer.weight, layer.bias]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = with_gradients(layer(x, gelu_linear), inputs)
        expected = with_gradients(layer(F.gelu(x)), inputs)
    assert ours[0].dtype == expected[0].dtype
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine - theirs).norm() < (1e-2 if autocast else 1e-6) * theirs.norm()
    fewer = kept_bytes(lambda: layer(x, gelu_linear)), kept_bytes(lambda: layer(F.gelu(x)))
    # without a trained weight torch does not keep GELU's value either
    assert fewer[1] - fewer[0] == (0 if frozen else 4 * x.numel())


@pytest.mark.parametrize(("heads", "cells"), [(1, 16), (4, 9), (2, 1)])
def test_attention_on_a_cpu(heads: int, cells: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(6, cells, heads, 3, 8, requires_grad=True)
    bias = torch.randn(cells, cells, requires_grad=True)
    ours, expected = (
        with_gradients(attend(qkv.permute(3, 0, 2, 1, 4), bias, 0.0), [qkv, bias])
        for attend in (attend_on_cpu, attend_fused)
    )
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_attention_on_a_cpu_is_float32_under_autocast() -> None:
    torch.manual_seed(0)
    qkv, bias = (3 * torch.randn(5, 16, 2, 3, 8)).bfloat16(), torch.randn(16, 16).bfloat16()
    qkv, bias = qkv.requires_grad_(), bias.requires_grad_()

    def relative(found: list[Tensor], exact: list[Tensor]) -> list[float]:
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]

    def attended(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [one.detach().to(dtype).requires_grad_() for one in (qkv, bias)]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            result = attend(inputs[0].permute(3, 0, 2, 1, 4), inputs[1], 0.0)
        return with_gradients(result, inputs)

    exact = attended(attend_fused, torch.float64)
    ours, theirs = (relative(attended(attend, torch.bfloat16), exact) for attend in (attend_on_cpu, attend_fused))
    assert all(a < 1.2 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


def test_group_norm_is_float32_under_autocast() -> None:
    torch.manual_seed(0)
    norm, x = GroupNorm(4, 16), torch.randn(2, 16, 6, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.group_norm(x.float(), 4, norm.weight, norm.bias))
    assert norm(x.float()).dtype == torch.float32


def test_attention_on_a_cpu_drops_weights() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, 64, 2, 16, 8)
    bias = torch.randn(16, 16)
    exact = attend_on_cpu(qkv, bias, 0.0)
    dropped = torch.stack([attend_on_cpu(qkv, bias, 0.3) for _ in range(100)])
    assert not torch.equal(dropped[0], dropped[1])
    assert (dropped.mean(0) - exact).std() < 0.1 * exact.std()


def test_wide_kernels_keep_the_field_alone() -> None:
    embed, x = CrossScaleEmbedding(8, 16, (4, 8, 16, 32), 2), torch.randn(1, 8, 64, 64)
    x = x.contiguous(memory_format=torch.channels_last)
    assert kept_bytes(lambda: embed(x)) - sum(4 * conv.weight.numel() for conv in embed.convs) == 4 * x.numel()
