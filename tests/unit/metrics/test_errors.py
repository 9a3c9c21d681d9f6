"""Sums add up over batches, and a metric is a function of the sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from credit.channels import ChannelMap
from credit.grid import LatLonGrid
from credit.metrics import ErrorSums

GRID = LatLonGrid.from_coords(np.linspace(90, -90, 9), np.arange(16) * 22.5)[0]
CHANNELS = ChannelMap.build(
    {"prognostic": {"vars_3D": ["z"], "vars_2D": []}, "diagnostic": {"vars_3D": [], "vars_2D": ["tp"]}}, [850, 500]
)


def weights() -> torch.Tensor:
    return torch.from_numpy(np.broadcast_to(GRID.area_weights(), (3, *GRID.shape)).copy())


def test_against_numpy() -> None:
    generator = np.random.default_rng(0)
    model, start, truth = (generator.normal(size=(2, 7, 3, *GRID.shape)).astype(np.float32) for _ in range(3))
    sums = ErrorSums(weights(), steps=2)
    for part in (slice(0, 3), slice(3, 7)):
        for lead in range(2):
            sums.add(lead, *(torch.from_numpy(x[lead, part]) for x in (model, start, truth)))
    area = GRID.area_weights()
    rmse = np.sqrt(((model.astype(np.float64) - truth) ** 2 * area).sum(axis=(-1, -2)).mean(axis=1))
    persistence = np.sqrt(((start.astype(np.float64) - truth) ** 2 * area).sum(axis=(-1, -2)).mean(axis=1))
    summary = sums.summary(CHANNELS, [6.0, 12.0])
    assert sums.cases == 7
    assert summary["rmse/z850/6h"] == pytest.approx(rmse[0, 0], rel=1e-6)
    assert summary["rmse/z500/12h"] == pytest.approx(rmse[1, 1], rel=1e-6)
    assert summary["rmse/tp/12h"] == pytest.approx(rmse[1, 2], rel=1e-6)
    # the diagnostic has no persistence and is not part of the skill
    assert summary["skill"] == pytest.approx((rmse / persistence)[:, :2].mean(), rel=1e-6)


def test_masked_cells_do_not_count() -> None:
    weight = weights()
    weight[:, :4] = 0
    weight /= weight.sum(dim=(1, 2), keepdim=True)
    sums = ErrorSums(weight, steps=1)
    error = torch.ones(1, 3, *GRID.shape)
    error[..., :4, :] = 1e6
    sums.add(0, error, 2 * error, torch.zeros_like(error))
    summary = sums.summary(CHANNELS, [6.0])
    assert summary["rmse/z500/6h"] == pytest.approx(1.0)
    assert summary["skill"] == pytest.approx(0.5)
