"""Tests of the RMSE metric against numpy, of ensembles and masks, and of the registry of metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from credit.channels import ChannelMap
from credit.errors import ConfigError
from credit.grid import LatLonGrid
from credit.metrics import Metric, MetricContext, find_metric_class, register_metric
from credit.metrics.rmse import RootMeanSquareError
from tests.registries import isolate

GRID = LatLonGrid.from_coords(np.linspace(90, -90, 9), np.arange(16) * 22.5)[0]
CHANNELS = ChannelMap.build(
    {"prognostic": {"vars_3D": ["z"], "vars_2D": []}, "diagnostic": {"vars_3D": [], "vars_2D": ["tp"]}}, [850, 500]
)


def build_weights() -> torch.Tensor:
    return torch.from_numpy(np.broadcast_to(GRID.area_weights(), (3, *GRID.shape)).copy())


def test_rmse_and_skill_equal_numpy() -> None:
    generator = np.random.default_rng(0)
    shape = (2, 7, 3, *GRID.shape)
    forecasts = generator.normal(size=shape).astype(np.float32)
    initial = generator.normal(size=shape).astype(np.float32)
    truth = generator.normal(size=shape).astype(np.float32)
    metric = RootMeanSquareError(MetricContext(CHANNELS, build_weights(), [6.0, 12.0]))
    for cases in (slice(0, 3), slice(3, 7)):
        for lead in range(2):
            forecast = torch.from_numpy(forecasts[lead, cases])
            persistence = torch.from_numpy(initial[lead, cases])
            metric.add(lead, forecast[:, None], persistence, torch.from_numpy(truth[lead, cases]))
    area = GRID.area_weights()

    def expected_rmse(fields: np.ndarray) -> np.ndarray:
        squared_error = (fields.astype(np.float64) - truth) ** 2
        return np.sqrt((squared_error * area).sum(axis=(-1, -2)).mean(axis=1))

    rmse = expected_rmse(forecasts)
    persistence_rmse = expected_rmse(initial)
    summary = metric.summary(7)
    assert summary["rmse/z850/6h"] == pytest.approx(rmse[0, 0], rel=1e-6)
    assert summary["rmse/z500/12h"] == pytest.approx(rmse[1, 1], rel=1e-6)
    assert summary["rmse/tp/12h"] == pytest.approx(rmse[1, 2], rel=1e-6)
    # A diagnostic variable has no persistence forecast and is not part of the skill.
    assert summary["skill"] == pytest.approx((rmse / persistence_rmse)[:, :2].mean(), rel=1e-6)
    assert list(summary) == RootMeanSquareError.names(CHANNELS, [6.0, 12.0])


def test_ensembles_are_scored_by_their_mean() -> None:
    members = torch.randn(2, 5, 3, *GRID.shape, generator=torch.Generator().manual_seed(1))
    zero = torch.zeros(2, 3, *GRID.shape)
    summaries = []
    for forecast in (members, members.mean(dim=1, keepdim=True)):
        metric = RootMeanSquareError(MetricContext(CHANNELS, build_weights(), [6.0]))
        metric.add(0, forecast, zero, zero)
        summaries.append(metric.summary(2))
    assert summaries[0] == pytest.approx(summaries[1], rel=1e-6)


def test_masked_cells_do_not_count() -> None:
    masked_weights = build_weights()
    masked_weights[:, :4] = 0
    masked_weights /= masked_weights.sum(dim=(1, 2), keepdim=True)
    metric = RootMeanSquareError(MetricContext(CHANNELS, masked_weights, [6.0]))
    error = torch.ones(1, 3, *GRID.shape)
    error[..., :4, :] = 1e6
    metric.add(0, error[:, None], 2 * error, torch.zeros_like(error))
    summary = metric.summary(1)
    assert summary["rmse/z500/6h"] == pytest.approx(1.0)
    assert summary["skill"] == pytest.approx(0.5)


def test_names_of_metrics_are_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)
    assert find_metric_class("rmse") is RootMeanSquareError
    with pytest.raises(ConfigError, match='trainer.metrics: "rsme" is not a metric; did you mean "rmse"'):
        find_metric_class("rsme")

    class OtherMetric(RootMeanSquareError):
        pass

    with pytest.raises(ConfigError, match='"rmse".*is taken by credit.metrics.rmse'):
        register_metric("rmse")(OtherMetric)
    with pytest.raises(ConfigError, match="must derive from credit.metrics.base.Metric"):
        register_metric("integer")(int)
    assert issubclass(register_metric("other")(OtherMetric), Metric)
