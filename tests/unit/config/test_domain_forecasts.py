"""Config keys of forecasts whose fields are divided among ranks."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch
from torch import nn

from credit.config import load_config
from credit.config.sections.inference import ForecastParallelismConfig
from credit.errors import ConfigError
from credit.parallel.mesh import DeviceGrid, ParallelDims
from credit.parallel.process_info import ProcessInfo
from credit.parallel.tensor.dropout import has_dropout, remove_dropout
from credit.train.build.model import build_forecast_mesh

QUICKSTART = str(files("credit.config") / "templates" / "quickstart.yml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["inference.parallelism.domain=0"], "inference.parallelism.domain: 0: must be 1 or more"),
        (
            ["inference.parallelism.domain=2", "inference.ensemble={members: 2, feature_noise: {std: 0.5}}"],
            "inference.ensemble.feature_noise: its random numbers would depend.*set domain to 1",
        ),
        (
            ["inference.parallelism.domain={lon: 2}", "inference.ensemble={members: 2, dropout: true}"],
            "inference.ensemble.dropout: its random numbers would depend",
        ),
    ],
)
def test_contradictions_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(QUICKSTART, overrides)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tensor": 4}, "inference.parallelism.tensor: tensor 4 does not divide the 6 ranks.*a multiple of 4"),
        ({"tensor": 2, "domain": 2}, "domain: tensor 2 x domain 2 does not divide the 6 ranks.*a multiple of 4"),
        ({"domain": {"lat": 3}, "ensemble": 4}, "ensemble: tensor 1 x domain 3 x ensemble 4.*a multiple of 12"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(degrees: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_forecast_mesh(ForecastParallelismConfig(**degrees), ProcessInfo(0, 6), "cpu")


def test_one_rank_of_each_group_gets_the_forecasts() -> None:
    """Groups of 8 of the 16 ranks compute a forecast together: ensemble 2 x domain 2 x tensor 2."""
    degrees = ParallelDims(replicate=4, tensor=2, ensemble=2, domain=2)
    grids = [DeviceGrid(degrees, rank) for rank in range(16)]
    assert [grid.rank for grid in grids if grid.gets_forecasts] == [0, 8]
    assert [grid.domain_rank for grid in grids[:8]] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [grid.sample_rank for grid in grids] == [0] * 8 + [1] * 8


def test_dropout_is_removed() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    assert has_dropout(module)
    remove_dropout(module)
    x = torch.ones(3, 4)
    assert not has_dropout(module)
    torch.testing.assert_close(module.train()(x), module[0](x))
