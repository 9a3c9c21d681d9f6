"""Tests of the prefetcher: order of the batches, errors, shutdown, and the measured waiting time."""

from __future__ import annotations

import multiprocessing
import threading
import time

import numpy as np
import pytest
import torch

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.sections.data import DataConfig
from credit.data.samples.dataset import SampleDataset
from credit.data.samples.frames import FrameReader
from credit.data.samples.loader import Loader
from credit.errors import DataError
from credit.train.prefetch import DevicePrefetcher
from tests.unit.analytic_reader import AnalyticReader, make_grid

CPU = torch.device("cpu")
STEP = 360
SPLITS = {
    "train": ["1900-01-01", "1900-01-05"],
    "valid": ["1900-02-01", "1900-02-05"],
    "test": ["1900-03-01", "1900-03-05"],
}


def build_dataset(seconds: float = 0.0, unreadable_time: int | None = None, threads: bool = False) -> SampleDataset:
    """Return a dataset in which the value of each field is its time in minutes.

    Args:
        seconds: the duration of reading a field.
        unreadable_time: the time in minutes whose field cannot be read.
        threads: whether the reader may be used by several threads.
    """
    channels = ChannelMap.build({"prognostic": {"vars_3D": [], "vars_2D": ["a"]}}, [])

    def field(minutes: int, channel: int) -> np.ndarray:
        time.sleep(seconds)
        if minutes == unreadable_time:
            raise DataError("a is not there")
        return np.float64(minutes)

    reader = AnalyticReader(channels, make_grid(8, 16), Calendar(), STEP * np.arange(20), field)
    reader.is_thread_safe = threads
    conf = DataConfig.model_validate(
        {"sources": [{"path": "x.nc"}], "variables": {"prognostic": {"vars_2D": ["a"]}}, "splits": SPLITS}
    )
    return SampleDataset(FrameReader(reader, conf, None), STEP * np.arange(19), STEP, 1, 1)


# Batches are loaded by threads as from a store, by processes, or when they are needed.
LOADING_MODES = pytest.mark.parametrize(("threads", "workers"), [(True, 0), (True, 3), (False, 1), (False, 0)])


@LOADING_MODES
def test_batches_keep_their_order_and_end(threads: bool, workers: int) -> None:
    order = [[3], [11, 4], [0], [18], [7]]
    with DevicePrefetcher(Loader(build_dataset(0.01, threads=threads), order, workers), CPU) as prefetcher:
        initial_times = [list(batch.initial_minutes) for batch in prefetcher]
    assert initial_times == [[STEP * index for index in batch] for batch in order]


@LOADING_MODES
def test_an_error_is_raised_at_its_batch(threads: bool, workers: int) -> None:
    loader = Loader(build_dataset(unreadable_time=6 * STEP, threads=threads), [[1], [2], [5], [7]], workers)
    with DevicePrefetcher(loader, CPU) as prefetcher:
        assert [next(prefetcher).initial_minutes[0] for _ in range(2)] == [STEP, 2 * STEP]
        with pytest.raises(DataError, match="a is not there"):
            next(prefetcher)


@LOADING_MODES
def test_early_exit_stops_threads_and_processes(threads: bool, workers: int) -> None:
    """Loader processes ignore signals, so they would outlive the run."""
    with DevicePrefetcher(Loader(build_dataset(threads=threads), [[n] for n in range(19)], workers), CPU) as prefetcher:
        next(prefetcher)
    assert multiprocessing.active_children() == []
    assert [thread for thread in threading.enumerate() if thread.name.startswith("batches")] == []


def test_next_batches_are_read_ahead() -> None:
    """Two threads read exactly two batches ahead of the batch that the caller has."""
    dataset = build_dataset(threads=True)
    with DevicePrefetcher(Loader(dataset, [[2 * n] for n in range(9)], 2), CPU) as prefetcher:
        next(prefetcher)
        reader = dataset._frames.reader
        deadline = time.monotonic() + 30
        while reader.reads < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert reader.reads == 6


def test_waiting_is_measured() -> None:
    """Without threads and processes, the two fields of a sample are read when the batch is needed."""
    with DevicePrefetcher(Loader(build_dataset(seconds=0.05), [[n] for n in range(4)], 0), CPU) as prefetcher:
        next(prefetcher)
        assert 0.09 < prefetcher.pop_wait_seconds() < 5
        assert prefetcher.pop_wait_seconds() == 0
