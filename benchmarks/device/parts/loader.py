"""Loader: rate of samples from a training store on this machine to the device, by number of threads."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.device.cases import CONFIGS
from benchmarks.device.context import Context
from benchmarks.device.parts import Row
from credit.config import Config, load_config
from credit.data.samples.dataset import SampleDataset
from credit.data.samples.frames import FrameReader
from credit.data.samples.loader import Loader
from credit.data.splits import find_initial_times
from credit.data.store.preprocess import write_training_store
from credit.train.build.open_data import open_data_and_splits
from credit.train.prefetch import DevicePrefetcher

_THREADS = (1, 4, 8)
_BATCH_SIZE = 4
# Days of the sample data that are interpolated to the grid of the loader.
_DAYS = 20
_FAST_DAYS = 2


def run(context: Context) -> Iterator[Row]:
    """Yield the rate of the loader for each number of threads."""
    with tempfile.TemporaryDirectory() as folder:
        config = _load_loader_config(Path(folder), context.fast)
        start = time.perf_counter()
        write_training_store(config.data, progress=False)
        yield {"case": "writing the store", "seconds": time.perf_counter() - start}
        cases = []
        for num_threads in context.select(_THREADS):
            cases.append((f"{num_threads} threads", partial(_measure_loader, context, config, num_threads)))
        yield from context.measure_cases(cases)


def _load_loader_config(folder: Path, fast: bool) -> Config:
    """Return the quickstart config with some days of the sample data at 1 degree; `fast` keeps their original grid."""
    last_day = _FAST_DAYS if fast else _DAYS
    valid_and_test = "valid: [2000-02-10, 2000-02-10], test: [2000-03-10, 2000-03-10]"
    splits = f"{{train: [2000-01-01, 2000-01-{last_day:02}], {valid_and_test}}}"
    overrides = [f"data.splits={splits}", f"data.store={folder / 'store.zarr'}", "data.cache=none"]
    overrides += ["data.valid_forecast_len=1", f"save_loc={folder / 'run'}"]
    if not fast:
        overrides.append("data.grid={rows: 181, columns: 360, poles: true}")
    return load_config(CONFIGS / "quickstart.yml", overrides)


def _measure_loader(context: Context, config: Config, num_threads: int) -> Row:
    """Return samples per second and GB/s with a number of threads, from the page cache to the device."""
    device = context.accelerator.device
    reader, splits = open_data_and_splits(config)
    data = config.data
    initial_times = find_initial_times(reader.times, splits["train"], data.step_minutes, 1, 1)
    dataset = SampleDataset(FrameReader(reader, data, None), initial_times, data.step_minutes, 1, 1)
    num_batches = 4 if context.fast else 60
    order = []
    for batch in range(num_batches):
        order.append([(batch * _BATCH_SIZE + sample) % len(dataset) for sample in range(_BATCH_SIZE)])
    num_bytes = 0
    with DevicePrefetcher(Loader(dataset, order, num_threads), device) as batches:
        # The first batch starts the threads.
        next(batches)
        context.accelerator.synchronize()
        start = time.perf_counter()
        for batch in batches:
            num_bytes += sum(tensor.nbytes for tensor in batch.tensors())
        context.accelerator.synchronize()
        seconds = time.perf_counter() - start
    samples = (num_batches - 1) * _BATCH_SIZE
    return {"samples/s": samples / seconds, "GB/s": num_bytes / seconds / 1e9, "MB a sample": num_bytes / samples / 1e6}
