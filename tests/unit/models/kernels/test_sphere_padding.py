"""Padding with one copy of the field: values and gradients are those of the plain formulation."""

from __future__ import annotations

import pytest
import torch

from credit.models.kernels.dispatch import SPHERE_PADDING, use_plain_formulations
from credit.models.layers.padding import SpherePadding

PADDINGS = {
    "one cell on each side": SpherePadding("earth", (1, 1), (1, 1)),
    "different sides and poles": SpherePadding("earth", (2, 3), (4, 1), (1, 0)),
    "vectors": SpherePadding("earth", (2, 1), (1, 2), 1, (0, 2, 3)),
    "columns only": SpherePadding("earth", (0, 0), (1, 2)),
    "rows of one pole only": SpherePadding("earth", (1, 0), (0, 0), 1, (1,)),
    "half of the field": SpherePadding("earth", (8, 8), (16, 16), 0, (1, 2)),
}


def pad_and_differentiate(padding: SpherePadding, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the padded field, and the gradient of a random linear function of the padded field."""
    padded = padding.pad(x)
    weights = torch.randn(padded.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    return padded, torch.autograd.grad(padded, x, weights)[0]


@pytest.mark.parametrize("name", PADDINGS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 5, 16, 32), (2, 5, 3, 16, 32)])
def test_kernel_equals_plain_formulation(name: str, memory_format: torch.memory_format, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if len(shape) == 4:
        x = x.to(memory_format=memory_format)
    x.requires_grad_()
    before = x.detach().clone()
    padded, gradient = pad_and_differentiate(PADDINGS[name], x)
    with use_plain_formulations(SPHERE_PADDING):
        expected, expected_gradient = pad_and_differentiate(PADDINGS[name], x)
    assert torch.equal(padded, expected)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-14)
    assert torch.equal(x, before)


def test_kernel_is_used_for_training_and_keeps_the_layout() -> None:
    x = torch.zeros(1, 4, 6, 8).to(memory_format=torch.channels_last).requires_grad_()
    padded = PADDINGS["one cell on each side"].pad(x)
    assert padded.grad_fn is not None and padded.grad_fn.name() == "_PadSphereBackward"
    assert padded.is_contiguous(memory_format=torch.channels_last)


def test_padding_without_cells_returns_the_field() -> None:
    x = torch.zeros(1, 1, 4, 8, requires_grad=True)
    assert SpherePadding("earth").pad(x) is x
