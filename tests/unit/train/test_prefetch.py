"""Batches arrive in order, with and without loader processes; errors arrive, too, and waiting is measured."""

from __future__ import annotations

import multiprocessing
import threading
import time

import numpy as np
import pytest
import torch

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.schema_data import DataConfig
from credit.data.samples.dataset import ForecastDataset
from credit.data.samples.frames import FrameReader
from credit.data.samples.loader import Loader
from credit.errors import DataError
from credit.train.prefetch import DevicePrefetcher
from tests.unit.analytic_reader import AnalyticReader, make_grid

CPU = torch.device("cpu")
STEP = 360
DAYS = {
    name: [f"1900-{month}-01", f"1900-{month}-05"] for name, month in (("train", "01"), ("valid", "02"), ("test", "03"))
}


def dataset(seconds: float = 0.0, bad: int | None = None, threads: bool = False) -> ForecastDataset:
    """Samples whose value is their time; reading a field takes `seconds`, one of them fails."""
    channels = ChannelMap.build({"prognostic": {"vars_3D": [], "vars_2D": ["a"]}}, [])

    def field(minutes: int, channel: int) -> np.ndarray:
        time.sleep(seconds)
        if minutes == bad:
            raise DataError("a is not there")
        return np.float64(minutes)

    reader = AnalyticReader(channels, make_grid(8, 16), Calendar(), STEP * np.arange(20), field)
    reader.is_thread_safe = threads
    conf = DataConfig.model_validate(
        {"sources": [{"path": "x.nc"}], "variables": {"prognostic": {"vars_2D": ["a"]}}, "splits": DAYS}
    )
    return ForecastDataset(FrameReader(reader, conf, None), STEP * np.arange(19), STEP, 1, 1)


# by threads as from a store, by processes, or when they are asked for
WAYS = pytest.mark.parametrize(("threads", "workers"), [(True, 0), (True, 3), (False, 1), (False, 0)])


@WAYS
def test_order_and_end(threads: bool, workers: int) -> None:
    order = [[3], [11, 4], [0], [18], [7]]
    with DevicePrefetcher(Loader(dataset(0.01, threads=threads), order, workers), CPU) as feed:
        met = [batch.initial_B.tolist() for batch in feed]
    assert met == [[STEP * index for index in batch] for batch in order]


@WAYS
def test_an_error_arrives_at_its_batch(threads: bool, workers: int) -> None:
    loader = Loader(dataset(bad=6 * STEP, threads=threads), [[1], [2], [5], [7]], workers)
    with DevicePrefetcher(loader, CPU) as feed:
        assert [next(feed).initial_B.item() for _ in range(2)] == [STEP, 2 * STEP]
        with pytest.raises(DataError, match="a is not there"):
            next(feed)


@WAYS
def test_left_before_the_end(threads: bool, workers: int) -> None:
    """Nothing is left running: neither threads nor processes, which ignore signals."""
    with DevicePrefetcher(Loader(dataset(threads=threads), [[n] for n in range(19)], workers), CPU) as feed:
        next(feed)
    assert multiprocessing.active_children() == []
    assert [thread for thread in threading.enumerate() if thread.name.startswith("batches")] == []


def test_the_next_batches_are_read_meanwhile() -> None:
    """Two threads: two batches are ahead of the one that was taken, and no more."""
    samples = dataset(threads=True)
    with DevicePrefetcher(Loader(samples, [[2 * n] for n in range(9)], 2), CPU) as feed:
        next(feed)
        reader, until = samples._frames.reader, time.monotonic() + 30
        while reader.reads < 6 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.1)
        assert reader.reads == 6


def test_waiting_is_measured() -> None:
    """Without threads and processes a sample is read when it is asked for, here two fields."""
    with DevicePrefetcher(Loader(dataset(seconds=0.05), [[n] for n in range(4)], 0), CPU) as feed:
        next(feed)
        assert 0.09 < feed.take_wait() < 5
        assert feed.take_wait() == 0
