"""The head computes only the cells inside the margins, with merged kernels where these need fewer operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from credit.models.kernels.merged_head import Margins
from credit.models.layers.up_sampling import SubpixelHead
from credit.models.wxformer.model import Decoder

MARGINS = [((3, 6), (1, 13)), ((1, 1), (1, 1)), ((8, 11), (10, 12)), ((2, 5), (5, 4))]
MARGINS_AT_THE_EDGE = [((0, 1), (1, 0)), ((0, 0), (5, 5)), ((0, 0), (0, 0))]


def count_flops(compute: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        compute()
    return counter.get_total_flops()


def compute_with_two_convolutions(head: SubpixelHead, x_BCHW: Tensor, margins: Margins) -> Tensor:
    """Return the expected output: two convolutions with torch's own pixel shuffle in between, then cropped."""
    first, second = head
    y_BCHW = F.conv2d(x_BCHW, first.weight, first.bias, padding=1)
    y_BCHW = F.conv2d(F.pixel_shuffle(y_BCHW, 2), second.weight, second.bias, padding=1)
    (north, south), (west, east) = margins
    return y_BCHW[..., north : y_BCHW.shape[2] - south, west : y_BCHW.shape[3] - east]


@pytest.mark.parametrize("kind", ["pixel_shuffle", "transposed"])
@pytest.mark.parametrize("margins", [*MARGINS, *MARGINS_AT_THE_EDGE])
def test_the_head_leaves_out_margins_and_their_operations(kind: str, margins: Margins) -> None:
    torch.manual_seed(0)
    head = Decoder(kind, (4, 8, 16, 32), 5).head
    x_BCHW = torch.randn(2, 8, 16, 24)
    full_output, cropped = head(x_BCHW), head(x_BCHW, margins)
    (north, south), (west, east) = margins
    torch.testing.assert_close(cropped, full_output[..., north : 32 - south, west : 48 - east], rtol=1e-5, atol=1e-6)
    # The convolutions read two more cells on each side, and a margin may end in the middle of an input cell.
    rows, columns = (
        min(num_cells / 2 + 5, n) for num_cells, n in zip(cropped.shape[2:], x_BCHW.shape[2:], strict=True)
    )
    share = rows * columns / (16 * 24)
    assert count_flops(lambda: head(x_BCHW, margins)) <= share * count_flops(lambda: head(x_BCHW))


@pytest.mark.parametrize("margins", [*MARGINS, *MARGINS_AT_THE_EDGE])
@pytest.mark.parametrize(("wide", "size"), [(False, (24, 30)), (True, (20, 24)), (True, (21, 27))])
def test_merged_kernels_equal_the_two_convolutions(margins: Margins, wide: bool, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    inner, outer = (6, 19) if wide else (32, 1)
    head = SubpixelHead(inner, outer).double()
    x_BCHW = torch.randn(2, inner, *size, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    x_BCHW.requires_grad_()
    tensors = [x_BCHW, *head.parameters()]
    output, expected = head(x_BCHW, margins), compute_with_two_convolutions(head, x_BCHW, margins)
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-12)
    gradient = torch.randn_like(output)
    for a, b in zip(*(torch.autograd.grad(y, tensors, gradient) for y in (output, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    shapes: list[torch.Size] = []
    second = head[1]
    second.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    head(x_BCHW, margins)
    # With merged kernels, the second convolution is not called separately.
    assert bool(shapes) == (not wide or margins in MARGINS_AT_THE_EDGE)


def test_merging_takes_fewer_products() -> None:
    """The sizes are those of the head in the 1 degree starter config."""
    margins = ((37, 38), (12, 12))
    with torch.device("meta"):
        head, x_BCHW = SubpixelHead(64, 84), torch.empty(1, 64, 128, 192)
    two_convolution_flops = count_flops(lambda: nn.Sequential.forward(head, x_BCHW[..., 16:111, 4:188]))
    assert count_flops(lambda: head(x_BCHW, margins)) < 0.8 * two_convolution_flops


def test_merged_kernels_are_more_accurate_under_autocast() -> None:
    """Merged kernels are rounded once and not in between, so the error is smaller than with two convolutions."""
    torch.manual_seed(0)
    head, margins = SubpixelHead(16, 32), ((3, 4), (5, 6))
    x_BCHW = torch.randn(1, 16, 24, 32)
    exact = compute_with_two_convolutions(head, x_BCHW, margins)
    with torch.autocast("cpu", torch.bfloat16):
        merged, unmerged = head(x_BCHW, margins), compute_with_two_convolutions(head, x_BCHW, margins)
    assert merged.dtype == torch.bfloat16
    assert (merged - exact).std() < (unmerged - exact).std() < 0.01 * exact.std()


def test_merged_kernels_can_be_precomputed() -> None:
    torch.manual_seed(0)
    head, margins, x_BCHW = SubpixelHead(6, 19), MARGINS[0], torch.randn(1, 6, 20, 24)
    expected = head(x_BCHW, margins)
    head.precompute()
    assert torch.equal(head(x_BCHW, margins), expected)
    precomputed_flops = count_flops(lambda: head(x_BCHW, margins))
    assert precomputed_flops < count_flops(lambda: SubpixelHead(6, 19)(x_BCHW, margins))
    assert {"0.weight", "0.bias", "1.weight", "1.bias"} == set(head.state_dict())
