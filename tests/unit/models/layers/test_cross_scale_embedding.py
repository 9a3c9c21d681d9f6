"""Cross-scale embedding against plain strided convolutions."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from credit.models.kernels.dispatch import force_gpu_path
from credit.models.layers.cross_scale_embedding import CrossScaleEmbedding
from credit.models.layers.padding import SpherePadding


def embed_with_convolutions(embed: CrossScaleEmbedding, x: Tensor) -> Tensor:
    """Return the expected tokens: torch's own padded convolutions, concatenated along the channels."""
    x, scales = embed.padding.pad(x), []
    size = tuple(n // embed.stride for n in x.shape[2:])
    for conv in embed.convs:
        excess = conv.kernel_size[0] - embed.stride
        before, after = excess // 2, excess - excess // 2
        scale = F.conv2d(F.pad(x, (before, after, before, after)), conv.weight, conv.bias, embed.stride)
        scales.append(scale[:, :, : size[0], : size[1]])
    return torch.cat(scales, 1).permute(0, 2, 3, 1)


def assert_same_values_and_gradients(embed: CrossScaleEmbedding, x: Tensor) -> None:
    output, expected = embed(x), embed_with_convolutions(embed, x)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    inputs, weights = [x, *embed.parameters()], torch.randn_like(expected)
    gradients, expected_gradients = (torch.autograd.grad((y * weights).sum(), inputs) for y in (output, expected))
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kernels", "stride", "size"),
    [
        ((4, 8, 16, 32), 2, (36, 40)),
        ((2, 4), 2, (6, 8)),
        ((8,), 2, (2, 8)),  # one row
        ((4, 8), 2, (4, 6)),
        ((4, 8, 16), 2, (7, 6)),
        ((4, 8, 16), 2, (17, 21)),  # the last row and column get no token
        ((4, 16, 32), 4, (24, 32)),
        ((4, 16, 20), 4, (23, 22)),  # the large kernels read cells beyond the last token
        ((2, 10), 2, (21, 24)),
        ((3, 9, 15), 3, (18, 21)),
        ((3, 8), 2, (12, 10)),  # an odd excess: the extra cell of padding goes right and below
    ],
)
def test_values_and_gradients_equal_those_of_convolutions(
    kernels: tuple[int, ...], stride: int, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    embed = CrossScaleEmbedding(3, 16, kernels, stride)
    x = torch.randn(2, 3, *size, requires_grad=True)
    assert embed(x).shape == (2, size[0] // stride, size[1] // stride, 16)
    assert_same_values_and_gradients(embed, x)


@pytest.mark.parametrize("as_gpu", [False, True])
@pytest.mark.parametrize("kernels", [(4, 8, 16, 32), (3, 8, 16)])
@pytest.mark.parametrize(
    "padding",
    [
        SpherePadding("earth", (5, 3), (4, 6), 1, (0, 2, 3)),
        SpherePadding("earth", (0, 4), (0, 0), 0, (1, 2, 3, 4)),
        SpherePadding("mirror", (4, 2), (3, 1), 1, ()),
    ],
)
def test_padding_inside_the_embedding_equals_padding_before_it(
    padding: SpherePadding, kernels: tuple[int, ...], as_gpu: bool
) -> None:
    torch.manual_seed(0)
    embed = CrossScaleEmbedding(5, 16, kernels, 2, padding)
    x = torch.randn(2, 5, 18, 24, requires_grad=True)
    with force_gpu_path() if as_gpu else nullcontext():
        assert_same_values_and_gradients(embed, x)


def test_widths_halve_and_the_last_kernel_takes_the_rest() -> None:
    embed = CrossScaleEmbedding(3, 32, (32, 4, 16, 8), 2)
    assert [(conv.kernel_size[0], conv.out_channels) for conv in embed.convs] == [(4, 16), (8, 8), (16, 4), (32, 4)]


def test_large_kernels_have_the_accuracy_of_bfloat16() -> None:
    torch.manual_seed(0)
    embed = CrossScaleEmbedding(8, 8, (32,), 2)
    x = torch.randn(1, 8, 32, 32)
    with torch.no_grad():
        exact = embed(x)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = embed(x)
    assert rounded.dtype == torch.bfloat16
    # Input, weight, parts and result are each rounded to 8 bits: about 2^-9 of the field's size, in total.
    assert (rounded.float() - exact).std() < 4e-3 * exact.std()
