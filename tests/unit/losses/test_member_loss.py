"""Tests of losses that are computed part by part: the parts add up to the whole, in values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from credit.losses import member_loss
from credit.losses.base import PointwiseLoss
from credit.losses.member_loss import LossPart, MemberLoss, split_slice
from tests.unit.losses.member_losses import NUM_CHANNELS, build_losses
from tests.unit.losses.test_crps import draw_members
from tests.unit.losses.test_losses import CHANNELS, GRID


@pytest.fixture(autouse=True)
def _divide_small_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the losses in parts, although the fields of these tests are small."""
    monkeypatch.setattr(member_loss, "MIN_PART_VALUES", 1)


NUM_ROWS = GRID.shape[0]
ALL_ROWS = slice(0, NUM_ROWS)
MASK = np.zeros(GRID.shape, dtype=bool)
MASK[2:4, 1:3] = True
LOSS_CONFIGS = [
    {"kind": "crps", "alpha": 0.95},
    {"kind": "crps", "global_mean": 0.5},
    {"kind": "mae"},
    {"kind": "spectral_crps"},
    {"kind": "multiscale_crps", "scales": ["5000km", "0km"]},
    {"kind": "amse"},
    {"kind": "sum", "terms": [{"kind": "crps"}, {"kind": "spectral_crps", "weight": 0.1}]},
]


@pytest.mark.parametrize("conf", LOSS_CONFIGS, ids=lambda conf: conf["kind"])
def test_losses_of_parts_add_up(conf: dict) -> None:
    """Channels may be divided if a loss does not couple them, and rows if it does not couple cells."""
    loss, build_part_losses = build_losses(conf)
    members, truth = draw_members(3)
    divisions = []
    if "channels" not in loss.coupled_dims:
        divisions.append([LossPart(channels, ALL_ROWS) for channels in split_slice(slice(0, NUM_CHANNELS), 2)])
    if "cells" not in loss.coupled_dims:
        divisions.append([LossPart(slice(0, NUM_CHANNELS), rows) for rows in split_slice(ALL_ROWS, 3)])
    assert divisions
    for parts in divisions:
        total = 0.0
        for part, part_loss in zip(parts, build_part_losses(parts), strict=True):
            total += part_loss(members[:, :, part.channels, part.rows], truth[:, part.channels, part.rows])
        torch.testing.assert_close(total, loss(members, truth), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masks", [{}, {CHANNELS.output[0].variable: MASK}])
@pytest.mark.parametrize("num_members", [2, 5])
def test_value_and_gradient_equal_the_undivided_loss(num_members: int, masks: dict) -> None:
    loss, build_part_losses = build_losses({"kind": "crps", "alpha": 0.95}, masks)
    members, truth = draw_members(num_members)
    members.requires_grad_()
    expected_value = loss(members, truth)
    (expected_gradient,) = torch.autograd.grad(2.0 * expected_value, members)

    loss_in_parts = MemberLoss(loss, build_part_losses, num_members, (NUM_CHANNELS, *GRID.shape))
    # All samples of the first member, then those of the next.
    output = members.detach().transpose(0, 1).flatten(0, 1).requires_grad_()
    value = loss_in_parts(output, truth)
    (gradient,) = torch.autograd.grad(2.0 * value, output)
    torch.testing.assert_close(value, expected_value, rtol=1e-6, atol=0)
    gradient_by_member = gradient.unflatten(0, (num_members, -1)).transpose(0, 1)
    torch.testing.assert_close(gradient_by_member, expected_gradient, rtol=1e-6, atol=1e-9)


def test_value_without_gradient_equals_the_undivided_loss() -> None:
    loss, build_part_losses = build_losses({"kind": "crps"})
    members, truth = draw_members(2)
    loss_in_parts = MemberLoss(loss, build_part_losses, 2, (NUM_CHANNELS, *GRID.shape))
    value = loss_in_parts(members.transpose(0, 1).flatten(0, 1), truth)
    assert not value.requires_grad
    torch.testing.assert_close(value, loss(members, truth))


def test_split_slice() -> None:
    assert split_slice(slice(2, 9), 3) == [slice(2, 4), slice(4, 6), slice(6, 9)]
    assert split_slice(slice(0, 2), 5) == [slice(0, 1), slice(1, 2)]
    assert split_slice(slice(4, 4), 3) == []


def test_pointwise_loss_with_custom_forward_couples_all_dimensions_by_default() -> None:
    class CostOnly(PointwiseLoss):
        """Loss that changes only the cost."""

    class CustomForward(PointwiseLoss):
        """Loss that combines the costs in another way."""

        def forward(self, prediction_BMCHW: torch.Tensor, target_BCHW: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    class CustomForwardWithDeclaration(CustomForward):
        """Loss that declares its coupled dimensions."""

        coupled_dims = frozenset({"channels"})

    assert CostOnly.coupled_dims == frozenset()
    assert CustomForward.coupled_dims == {"cells", "channels"}
    assert CustomForwardWithDeclaration.coupled_dims == {"channels"}
