"""Norms: precision under autocast, and the scale and shift from a condition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from credit.models.initialise import initialise_
from credit.models.layers.norm import ConditionalScaleShift, ConditionDims, Conditions, GroupNorm, LayerNorm

DIMS = ConditionDims(vector=3, cells=2)


def test_group_norm_is_float32_under_autocast() -> None:
    torch.manual_seed(0)
    norm = GroupNorm(4, 16)
    x_BCHW = torch.randn(2, 16, 6, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y_BCHW = norm(x_BCHW)
    assert y_BCHW.dtype == torch.float32
    torch.testing.assert_close(y_BCHW, F.group_norm(x_BCHW.float(), 4, norm.weight, norm.bias))
    assert norm(x_BCHW.float()).dtype == torch.float32


def test_a_new_scale_and_shift_changes_nothing() -> None:
    torch.manual_seed(0)
    layer = ConditionalScaleShift(8, 3)
    x_BHWC = torch.randn(2, 4, 6, 8)
    assert torch.equal(layer(x_BHWC, torch.randn(2, 3)), x_BHWC)
    torch.nn.init.normal_(layer.weight)
    initialise_(layer, seed=0)
    assert not layer.weight.any()


@pytest.mark.parametrize(("shape", "channel_dim"), [((2, 5, 8), -1), ((2, 4, 6, 8), -1), ((2, 8, 4, 6), 1)])
def test_each_sample_has_its_own_scale_and_shift(shape: tuple[int, ...], channel_dim: int) -> None:
    torch.manual_seed(0)
    layer = ConditionalScaleShift(8, 3, channel_dim)
    torch.nn.init.normal_(layer.weight)
    condition_BK = torch.randn(2, 3)
    x = torch.randn(shape)
    y = layer(x, condition_BK)
    for sample in range(2):
        scale, shift = (layer.weight @ condition_BK[sample]).chunk(2)
        channels_last = x[sample].movedim(channel_dim if channel_dim < 0 else channel_dim - 1, -1)
        expected = channels_last * (1 + scale) + shift
        actual = y[sample].movedim(channel_dim if channel_dim < 0 else channel_dim - 1, -1)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("shape", "channel_dim"), [((2, 4, 6, 8), -1), ((2, 8, 4, 6), 1)])
def test_each_cell_has_its_own_scale_and_shift(shape: tuple[int, ...], channel_dim: int) -> None:
    torch.manual_seed(0)
    layer = ConditionalScaleShift(8, 3, channel_dim)
    torch.nn.init.normal_(layer.weight)
    condition_BHWK = torch.randn(2, 4, 6, 3)
    x = torch.randn(shape)
    y_BHWC = layer(x, condition_BHWK).movedim(channel_dim, -1)
    scale, shift = (layer.weight @ condition_BHWK[1, 2, 5]).chunk(2)
    torch.testing.assert_close(y_BHWC[1, 2, 5], x.movedim(channel_dim, -1)[1, 2, 5] * (1 + scale) + shift)


@pytest.mark.parametrize("norm", [LayerNorm(8, DIMS), GroupNorm(4, 8, DIMS)])
def test_norms_with_a_condition(norm: LayerNorm | GroupNorm) -> None:
    """A new norm ignores its condition, bit for bit. A trained norm without a condition equals a plain norm."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 4, 8)
    vector_BK, cells_BHWK = torch.randn(2, 3), torch.randn(2, 4, 8, 2)
    if isinstance(norm, LayerNorm):
        cells_BHWK = torch.randn(2, 8, 4, 2)
    conditions = Conditions(vector_BK, cells_BHWK)
    plain = norm(x)
    assert torch.equal(norm(x, conditions), plain)
    torch.nn.init.normal_(norm.scale_shift.weight)
    torch.nn.init.normal_(norm.cell_scale_shift.weight)
    expected = norm.cell_scale_shift(norm.scale_shift(plain, vector_BK), cells_BHWK)
    torch.testing.assert_close(norm(x, conditions), expected)
    torch.testing.assert_close(norm(x, Conditions(vector_BK)), norm.scale_shift(plain, vector_BK))
    assert torch.equal(norm(x), plain)
