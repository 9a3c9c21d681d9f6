"""Norms: precision under autocast, and scale and shift from a condition."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from credit.models.initialise import initialise_
from credit.models.layers.norm import ConditionalLayerNorm, GroupNorm


def test_group_norm_is_float32_under_autocast() -> None:
    torch.manual_seed(0)
    norm = GroupNorm(4, 16)
    x_BCHW = torch.randn(2, 16, 6, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y_BCHW = norm(x_BCHW)
    assert y_BCHW.dtype == torch.float32
    torch.testing.assert_close(y_BCHW, F.group_norm(x_BCHW.float(), 4, norm.weight, norm.bias))
    assert norm(x_BCHW.float()).dtype == torch.float32


def test_a_new_conditional_norm_is_a_plain_layer_norm() -> None:
    torch.manual_seed(0)
    norm = ConditionalLayerNorm(8, 3)
    x_BHWC = torch.randn(2, 4, 6, 8)
    torch.testing.assert_close(norm(x_BHWC, torch.randn(2, 3)), F.layer_norm(x_BHWC, (8,)))
    torch.nn.init.normal_(norm.weight)
    initialise_(norm, seed=0)
    assert not norm.weight.any()


def test_each_sample_has_its_own_scale_and_shift() -> None:
    torch.manual_seed(0)
    norm = ConditionalLayerNorm(8, 3)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    condition_BK = torch.randn(2, 3)
    for shape in ((2, 5, 8), (2, 4, 6, 8)):
        x = torch.randn(shape)
        y = norm(x, condition_BK)
        for sample in range(2):
            scale, shift = (norm.weight @ condition_BK[sample] + norm.bias).chunk(2)
            expected = F.layer_norm(x[sample], (8,)) * (1 + scale) + shift
            torch.testing.assert_close(y[sample], expected)
