"""Operations that keep less for the backward pass than torch's own: the same values and gradients, fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit.models.kernels import recompute_linear
from credit.models.kernels.dispatch import force_gpu_path
from credit.models.kernels.recompute_linear import RecomputedNorm, RecomputeLinear, norm_linear
from credit.models.layers.cross_scale_embedding import CrossScaleEmbedding
from credit.models.layers.up_sampling import GroupNorm
from credit.models.layers.window_attention import (
    Attention,
    FeedForward,
    attend_fused,
    attend_on_cpu,
    softmax_,
    to_windows,
)


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


def narrow(enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def assert_near(ours: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert [one.dtype for one in ours] == [one.dtype for one in expected]
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine - theirs).norm() < tolerance * theirs.norm()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("blocks", [1, 4])
def test_perceptron(autocast: bool, frozen: bool, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(recompute_linear, "IN_CACHE", 4 * 32 * 15 * 2 // blocks // torch.get_num_threads() + 1)
    layer, x = FeedForward(8, 0.0), torch.randn(2, 3, 5, 8, requires_grad=True)
    torch.nn.init.normal_(layer.norm.weight)
    for inner in (layer.expand, layer.contract):
        inner.requires_grad_(not frozen)
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]

    def plain() -> Tensor:
        return F.linear(F.gelu(F.linear(layer.norm(x), *of(layer.expand))), *of(layer.contract))

    with narrow(autocast):
        ours, expected = with_gradients(layer(x), inputs), with_gradients(plain(), inputs)
    assert_near(ours, expected, 1e-2 if autocast else 1e-6)
    with narrow(autocast):
        fewer = kept_bytes(plain) - kept_bytes(lambda: layer(x))
    # in float32 the norm's result, GELU's argument and value, for the first bias; else the value, in two bytes; torch
    # itself keeps the result and the value for weights that train
    wide = 4 * x.numel()
    if autocast:
        assert frozen or fewer == 2 * wide
    else:
        assert fewer == 4 * (wide if frozen else x.numel() + 2 * wide) - layer.expand.bias.nbytes


@pytest.mark.parametrize("autocast", [False, True])
def test_a_perceptron_without_gradient_holds_some_rows_at_a_time(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute_linear, "WITHOUT_GRADIENT", 2**12)
    layer, x, widest = FeedForward(8, 0.0), torch.randn(2, 30, 50, 8), []
    expected = layer(x).detach()
    monkeypatch.setattr(F, "gelu", lambda y: widest.append(y.nbytes) or torch.ops.aten.gelu(y))
    with torch.no_grad(), narrow(autocast):
        ours = layer(x)
    assert_near([ours.float()], [expected], 1e-2 if autocast else 1e-6)
    assert len(widest) > 1 and max(widest) <= 2**12


def of(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    return layer.weight, layer.bias


@pytest.mark.parametrize("strided", [False, True])
def test_linear_of_norm(strided: bool) -> None:
    torch.manual_seed(0)
    norm, layer = nn.LayerNorm(8), RecomputeLinear(8, 24)
    x = torch.randn(2, 4, 6, 8, requires_grad=True)
    inputs = [x, *norm.parameters(), *layer.parameters()]
    arrange = partial(to_windows, window=2, strided=strided)

    def leaner() -> Tensor:
        again = RecomputedNorm.where_it_pays(norm, x)
        assert again is not None
        return layer(arrange(norm(x)), partial(norm_linear, again=again, arrange=arrange))

    assert_near(with_gradients(leaner(), inputs), with_gradients(layer(arrange(norm(x))), inputs), 1e-6)
    assert kept_bytes(lambda: layer(arrange(norm(x)))) - kept_bytes(leaner) == 4 * x.numel()


def test_norms_are_kept_where_that_is_better() -> None:
    norm, x = nn.LayerNorm(8), torch.randn(3, 8)
    with narrow(True):
        assert RecomputedNorm.where_it_pays(norm, x) is None
    assert RecomputedNorm.where_it_pays(norm, x.bfloat16()) is None
    assert RecomputedNorm.where_it_pays(norm, x.to("meta")) is None
    with force_gpu_path():
        assert RecomputedNorm.where_it_pays(norm, x) is None


@pytest.mark.parametrize(("heads", "cells"), [(1, 16), (4, 9), (2, 1)])
def test_attention_on_a_cpu(heads: int, cells: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(6, cells, heads, 3, 8, requires_grad=True)
    bias = torch.randn(cells, cells, requires_grad=True)
    permuted = qkv.permute(3, 0, 2, 1, 4)
    ours, expected = (
        with_gradients(result, [qkv, bias])
        for result in (attend_on_cpu(permuted, bias), attend_fused(permuted, bias, 0.0))
    )
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cells", [1, 4, 9, 16])
def test_softmax_of_rows_of_any_length(cells: int) -> None:
    scores = 100 * torch.randn(3, cells, cells, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(softmax_(scores.clone()), scores.softmax(-1))


def test_attention_on_a_cpu_is_float32_under_autocast() -> None:
    torch.manual_seed(0)
    qkv, bias = (3 * torch.randn(5, 16, 2, 3, 8)).bfloat16(), torch.randn(16, 16).bfloat16()
    qkv, bias = qkv.requires_grad_(), bias.requires_grad_()

    def relative(found: list[Tensor], exact: list[Tensor]) -> list[float]:
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]

    def attended(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [one.detach().to(dtype).requires_grad_() for one in (qkv, bias)]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            result = attend(inputs[0].permute(3, 0, 2, 1, 4), inputs[1])
        return with_gradients(result, inputs)

    fused = partial(attend_fused, dropout=0.0)
    exact = attended(fused, torch.float64)
    ours, theirs = (relative(attended(attend, torch.bfloat16), exact) for attend in (attend_on_cpu, fused))
    assert all(a < 1.2 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", ["attention", "perceptron", "perceptron again", "linear of norm"])
def test_a_backward_pass_under_autocast_is_the_same(operation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, first, second = (torch.randn(shape, dtype=dtype) for shape in ((6, 4, 8), (24, 8), (8, 24)))
    inputs = [one.requires_grad_() for one in (x, first, second)]
    again = RecomputedNorm(
        torch.randn(6, 4, 8).to(dtype), torch.ones(8, dtype=dtype), torch.zeros(8, dtype=dtype), 1e-5
    )

    def result() -> Tensor:
        if operation == "attention":
            return attend_on_cpu(x.view(6, 4, 1, 1, 8).expand(6, 4, 1, 3, 8).permute(3, 0, 2, 1, 4), second[:4, :4])
        if operation == "linear of norm":
            return norm_linear(x, first, None, again, lambda y: y)
        return recompute_linear.perceptron((x, first, None), second, None, again if "again" in operation else None)

    def gradients(*, autocast: bool) -> list[Tensor]:
        y = result()
        with narrow(autocast):
            return [g for g in torch.autograd.grad(y.float().sum(), inputs, allow_unused=True) if g is not None]

    ours, expected = gradients(autocast=True), gradients(autocast=False)
    assert len(ours) >= 2
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.dtype == dtype and torch.equal(mine, theirs)


def test_group_norm_is_float32_under_autocast() -> None:
    torch.manual_seed(0)
    norm, x = GroupNorm(4, 16), torch.randn(2, 16, 6, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.group_norm(x.float(), 4, norm.weight, norm.bias))
    assert norm(x.float()).dtype == torch.float32


def test_attention_drops_weights_in_training() -> None:
    torch.manual_seed(0)
    attention = Attention(16, 8, 4, strided=False, dropout=0.3, bias_index="exact")
    x = torch.randn(1, 32, 32, 16)
    exact = attention.eval()(x)
    attention.train()
    dropped = torch.stack([attention(x) for _ in range(100)])
    assert not torch.equal(dropped[0], dropped[1])
    assert (dropped.mean(0) - exact).std() < 0.1 * exact.std()


def test_wide_kernels_keep_the_field_alone() -> None:
    embed, x = CrossScaleEmbedding(8, 16, (4, 8, 16, 32), 2), torch.randn(1, 8, 64, 64)
    x = x.contiguous(memory_format=torch.channels_last)
    assert kept_bytes(lambda: embed(x)) - sum(4 * conv.weight.numel() for conv in embed.convs) == 4 * x.numel()
