"""Batches arrive in order, with and without loader processes; errors arrive, too, and waiting is measured."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from credit.channels import ChannelMap
from credit.config.schema_data import DataConfig
from credit.data.dataset import ForecastDataset
from credit.data.frames import Frames
from credit.data.loader import Loader
from credit.errors import DataError
from credit.times import Clock
from credit.train.feed import BatchFeed
from tests.unit.analytic_reader import AnalyticReader, make_grid

CPU = torch.device("cpu")
STEP = 360
DAYS = {
    name: [f"1900-{month}-01", f"1900-{month}-05"] for name, month in (("train", "01"), ("valid", "02"), ("test", "03"))
}


def dataset(seconds: float = 0.0, bad: int | None = None) -> ForecastDataset:
    """Samples whose value is their time; reading a field takes `seconds`, one of them fails."""
    channels = ChannelMap.build({"prognostic": {"vars_3D": [], "vars_2D": ["a"]}}, [])

    def field(minutes: int, channel: int) -> np.ndarray:
        time.sleep(seconds)
        if minutes == bad:
            raise DataError("a is not there")
        return np.float64(minutes)

    reader = AnalyticReader(channels, make_grid(8, 16), Clock(), STEP * np.arange(20), field)
    conf = DataConfig.model_validate(
        {"sources": [{"path": "x.nc"}], "variables": {"prognostic": {"vars_2D": ["a"]}}, "splits": DAYS}
    )
    return ForecastDataset(Frames(reader, conf, None), STEP * np.arange(19), STEP, 1, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_order_and_end(workers: int) -> None:
    order = [[3], [11, 4], [0]]
    with BatchFeed(Loader(dataset(), order, workers), CPU) as feed:
        met = [batch.initial_B.tolist() for batch in feed]
    assert met == [[STEP * index for index in batch] for batch in order]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_arrives_at_its_batch(workers: int) -> None:
    with BatchFeed(Loader(dataset(bad=6 * STEP), [[1], [2], [5], [7]], workers), CPU) as feed:
        assert [next(feed).initial_B.item() for _ in range(2)] == [STEP, 2 * STEP]
        with pytest.raises(DataError, match="a is not there"):
            next(feed)


def test_left_before_the_end() -> None:
    with BatchFeed(Loader(dataset(), [[n] for n in range(19)], 2), CPU) as feed:
        next(feed)
    assert feed.take_wait() > 0


def test_waiting_is_measured() -> None:
    """Reading in this process takes two fields a sample; what is read during a step does not count."""
    with BatchFeed(Loader(dataset(seconds=0.05), [[n] for n in range(4)], 0), CPU) as feed:
        next(feed)
        assert 0.09 < feed.take_wait() < 5
        assert feed.take_wait() == 0
