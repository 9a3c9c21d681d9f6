"""The attention kernel against its plain formulation, torch's scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from credit.models.kernels.attention import attention, attention_without_bias, sdpa, sdpa_cpu, softmax_
from credit.models.kernels.dispatch import ATTENTION, force_gpu_path, use_plain_formulations

from .gradients import bfloat16_autocast, collect_gradients


@pytest.mark.parametrize(("heads", "cells"), [(1, 16), (4, 9), (2, 4), (2, 1)])
def test_values_and_gradients(heads: int, cells: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(6, cells, heads, 3, 8, requires_grad=True)
    bias = torch.randn(cells, cells, requires_grad=True)
    permuted = qkv.permute(3, 0, 2, 1, 4)
    actual = collect_gradients(sdpa_cpu(permuted, bias), [qkv, bias])
    expected = collect_gradients(sdpa(permuted, bias), [qkv, bias])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_dispatch() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, 6, 2, 9, 8)
    bias = torch.randn(9, 9)
    kernel, plain = sdpa_cpu(qkv, bias), sdpa(qkv, bias)
    assert not torch.equal(kernel, plain)
    assert torch.equal(attention(qkv, bias), kernel)
    with use_plain_formulations(ATTENTION):
        assert torch.equal(attention(qkv, bias), plain)
    with force_gpu_path():
        assert torch.equal(attention(qkv, bias), plain)
    torch.manual_seed(1)
    dropped = attention(qkv, bias, dropout=0.5)
    assert (dropped - plain).std() > 0.1 * plain.std()


def test_float32_under_autocast() -> None:
    torch.manual_seed(0)
    qkv = (3 * torch.randn(5, 16, 2, 3, 8)).bfloat16()
    bias = torch.randn(16, 16).bfloat16()

    def attend(formulation: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (qkv, bias)]
        with bfloat16_autocast(dtype == torch.bfloat16):
            result = formulation(inputs[0].permute(3, 0, 2, 1, 4), inputs[1])
        return collect_gradients(result, inputs)

    def relative_errors(tensors: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(tensors, exact, strict=True)]

    exact = attend(sdpa, torch.float64)
    kernel_errors = relative_errors(attend(sdpa_cpu, torch.bfloat16), exact)
    plain_errors = relative_errors(attend(sdpa, torch.bfloat16), exact)
    for kernel_error, plain_error in zip(kernel_errors, plain_errors, strict=True):
        assert kernel_error < 1.2 * plain_error, (kernel_errors, plain_errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_pass_under_autocast_is_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, 6, 1, 4, 8, dtype=dtype, requires_grad=True)
    bias = torch.randn(4, 4, dtype=dtype, requires_grad=True)

    def compute_gradients(*, autocast: bool) -> tuple[Tensor, ...]:
        y = sdpa_cpu(qkv, bias)
        with bfloat16_autocast(autocast):
            return torch.autograd.grad(y.float().square().sum(), (qkv, bias))

    for actual, expected in zip(compute_gradients(autocast=True), compute_gradients(autocast=False), strict=True):
        assert actual.dtype == dtype
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("cells", [1, 4, 9, 16])
def test_softmax_of_rows_of_any_length(cells: int) -> None:
    scores = 100 * torch.randn(3, cells, cells, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(softmax_(scores.clone()), scores.softmax(-1))


@pytest.mark.parametrize("has_mask", [False, True])
def test_attention_without_bias_computes_in_float32_on_a_cpu(has_mask: bool) -> None:
    torch.manual_seed(0)
    qkv = (3 * torch.randn(3, 4, 2, 32, 8)).bfloat16()
    mask = torch.rand(2, 32, 32) > 0.3 if has_mask else None

    def attend(dtype: torch.dtype) -> list[Tensor]:
        inputs = qkv.to(dtype).requires_grad_()
        with bfloat16_autocast(dtype == torch.bfloat16):
            result = attention_without_bias(*inputs, mask)
        return collect_gradients(result, [inputs])

    exact = attend(torch.float32)
    actual = attend(torch.bfloat16)
    # The only differences are the roundings of the result, and of the gradient at the input and the output.
    assert actual[0].dtype == torch.bfloat16
    torch.testing.assert_close(actual[0], exact[0].bfloat16(), rtol=0, atol=0)
    error = (actual[1].float() - exact[1]).norm() / exact[1].norm()
    with use_plain_formulations(ATTENTION):
        plain = attend(torch.bfloat16)
    plain_error = (plain[1].float() - exact[1]).norm() / exact[1].norm()
    assert error < 5e-3 and error <= plain_error < 5e-2
