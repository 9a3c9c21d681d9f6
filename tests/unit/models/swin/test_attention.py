"""Window attention compared with a computation for every pair of tokens, by the definition of shifted windows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from credit.models.initialise import initialise_
from credit.models.layers.norm import Conditions
from credit.models.layers.seeded_dropout import SeededDropout
from credit.models.swin.attention import ContinuousPositionBias, ShiftedWindowAttention

DIM = 8
HEADS = 2


def build(window: int, grid: tuple[int, int], **options: bool) -> ShiftedWindowAttention:
    """Return a layer in float64 whose heads have different logit scales, one of them beyond the largest."""
    layer = ShiftedWindowAttention(DIM, HEADS, window, grid, **options).double()
    initialise_(layer, 0)
    with torch.no_grad():
        layer.logit_scale.logarithm.copy_(torch.tensor([1.0, 5.0]))
    return layer


def find_window(row: int, column: int, layer: ShiftedWindowAttention) -> tuple[int, int]:
    """Return the window of a token, with negative numbers for windows that lie across an edge.

    Windows begin at the shift, and at multiples of the window from there. Along a periodic axis, the last window ends
    in the first cells of the axis.
    """
    window_row = (row - layer.shift[0]) // layer.window
    window_column = (column - layer.shift[1]) // layer.window
    if layer.wraps_columns:
        window_column %= layer.grid[1] // layer.window
    return window_row, window_column


def log_offset(offset: int, window: int) -> float:
    """Return the log-spaced offset of equation 4 of arXiv 2111.09883, of an offset that is scaled to -8 ... 8."""
    scaled = 8.0 * offset / max(window - 1, 1)
    return math.copysign(math.log2(1 + abs(scaled)) / math.log2(8), scaled)


@torch.no_grad()
def attend_by_pairs(layer: ShiftedWindowAttention, x_HWC: torch.Tensor) -> torch.Tensor:
    """Return the output (H, W, C), computed in a loop over queries, keys and heads."""
    H, W = layer.grid
    tokens = [(row, column) for row in range(H) for column in range(W)]
    qkv = layer.to_qkv(x_HWC).view(H, W, HEADS, 3, DIM // HEADS)
    scales = [math.exp(1.0), 100.0]
    bias = layer.position_bias
    y_HWC = torch.empty_like(x_HWC)
    for row, column in tokens:
        window = find_window(row, column, layer)
        keys = [key for key in tokens if find_window(*key, layer) == window]
        head_values = []
        for head in range(HEADS):
            scores = []
            for key_row, key_column in keys:
                q = qkv[row, column, head, 0]
                k = qkv[key_row, key_column, head, 1]
                # Take the shorter way around the globe.
                column_offset = column - key_column
                if layer.wraps_columns and abs(column_offset) >= layer.window:
                    column_offset -= int(math.copysign(W, column_offset))
                offset = [log_offset(row - key_row, layer.window), log_offset(column_offset, layer.window)]
                hidden = F.relu(bias.expand(torch.tensor(offset, dtype=torch.float64)))
                cosine = q @ k / (q.norm() * k.norm())
                scores.append(scales[head] * cosine + 16 * torch.sigmoid(bias.contract(hidden)[head]))
            weights = torch.stack(scores).softmax(0)
            values = torch.stack([qkv[key_row, key_column, head, 2] for key_row, key_column in keys])
            head_values.append(weights @ values)
        y_HWC[row, column] = layer.to_out(torch.cat(head_values))
    return y_HWC


@pytest.mark.parametrize("wraps_columns", [True, False])
@pytest.mark.parametrize("is_shifted", [True, False])
@pytest.mark.parametrize(("window", "grid"), [(2, (4, 6)), (3, (6, 6)), (3, (3, 9)), (3, (6, 3)), (1, (2, 3))])
def test_every_pair(window: int, grid: tuple[int, int], is_shifted: bool, wraps_columns: bool) -> None:
    layer = build(window, grid, is_shifted=is_shifted, wraps_columns=wraps_columns)
    x_BHWC = torch.randn(2, *grid, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y_BHWC = layer(x_BHWC)
    for x_HWC, y_HWC in zip(x_BHWC, y_BHWC, strict=True):
        torch.testing.assert_close(y_HWC, attend_by_pairs(layer, x_HWC), rtol=0, atol=1e-12)


@pytest.mark.parametrize("wraps_columns", [True, False])
def test_which_tokens_a_token_reads(wraps_columns: bool) -> None:
    """The gradient of an output with respect to the input is zero outside its window, and nonzero inside."""
    layer = build(2, (4, 6), is_shifted=True, wraps_columns=wraps_columns)
    x_BHWC = torch.randn(1, 4, 6, DIM, dtype=torch.float64, requires_grad=True)
    y_BHWC = layer(x_BHWC)
    for row in range(4):
        for column in range(6):
            (gradient,) = torch.autograd.grad(y_BHWC[0, row, column].sum(), x_BHWC, retain_graph=True)
            reads = gradient[0].abs().amax(-1) > 0
            window = find_window(row, column, layer)
            for other_row in range(4):
                for other_column in range(6):
                    is_same_window = find_window(other_row, other_column, layer) == window
                    assert reads[other_row, other_column] == is_same_window


def test_seeded_dropout_drops_weights_in_masked_windows() -> None:
    layer = build(2, (4, 6), is_shifted=True)
    x_BHWC = torch.randn(2, 4, 6, DIM, dtype=torch.float64)
    y_BHWC = layer(x_BHWC)
    layer.seeded_dropout = SeededDropout(0.5, 0)
    without_dropout = layer(x_BHWC, Conditions(dropout_seeds_BM=torch.zeros(2, 1, dtype=torch.int64)))
    torch.testing.assert_close(without_dropout, y_BHWC, rtol=0, atol=1e-12)
    dropped = layer(x_BHWC, Conditions(dropout_seeds_BM=torch.tensor([[0], [9]])))
    torch.testing.assert_close(dropped[0], y_BHWC[0], rtol=0, atol=1e-12)
    assert (dropped[1] - y_BHWC[1]).abs().max() > 1e-3


def test_precomputed_bias() -> None:
    bias = ContinuousPositionBias(HEADS, 3)
    expected = bias()
    bias.precompute()
    with torch.no_grad():
        bias.contract.weight.zero_()
    assert torch.equal(bias(), expected)
    assert expected.shape == (HEADS, 9, 9)
    assert expected.min() > 0 and expected.max() < 16
