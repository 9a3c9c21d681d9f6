"""Throughput of the loader compared with a plain read of the same bytes and with other packages; and of preprocessing.

Fields of one simulated atmosphere are interpolated to 1 degree. They are written into two stores, with and without
compression, and into one zarr store with an array for each variable, as other packages do. Then each method reads the
same samples, interleaved with the others. A sample is two times, and samples are in random order. They are read from
the page cache and, if the system drops it on request, from the disk. A last run takes samples while a step of 200 ms
sleeps. The folder is removed at the end.

    SPEEDY=FOLDER python benchmarks/loading.py [--times 1200] [--samples 60] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import xarray as xr

from credit.config import load_config
from credit.config.sections.data import DataConfig, PreprocessConfig
from credit.data.reader import FieldReader, open_reader
from credit.data.samples.dataset import ForecastDataset
from credit.data.samples.frames import FrameReader
from credit.data.samples.loader import Loader
from credit.data.splits import Split, find_initial_times
from credit.data.store.preprocess import write_training_store
from credit.train.prefetch import DevicePrefetcher

CONFIG = Path(__file__).parents[1] / "config" / "speedy_5p6deg.yml"
ROUNDS = 5


def build_data_config(folder: Path, name: str, times: int) -> DataConfig:
    """Return the data section of a store with `times` times at 1 degree.

    Args:
        folder: folder of the store.
        name: name of the store in the folder.
        times: number of times of 6 h.
    """
    split = "splits={{train: [2000-01-01, {}], valid: {}, test: {}}}"
    last = np.datetime64("2000-01-01") + np.timedelta64(max(1, times // 4 - 14), "D")
    other = [str(last + np.timedelta64(days, "D")) for days in (6, 12)]
    split = split.format(last, *([day, day] for day in other)).replace("'", "")
    return load_config(
        CONFIG,
        [
            f"data.{split}", "data.split_gap=1d", "data.grid={rows: 181, columns: 360, poles: true}",
            f"data.store={folder / name}", "data.forecast_len=1", "data.valid_forecast_len=1", "data.cache=none",
            "trainer.forecast_len_from=null", f"save_loc={folder / 'run'}",
        ],
    ).data  # fmt: skip


def chunk_files(conf: DataConfig, indices: list[int]) -> list[Path]:
    """Return the files with the fields of the samples that begin at these indices of a store's times."""
    chunks = Path(conf.store) / "fields" / "c"
    files = []
    for index in indices:
        for sample_index in (index, index + 1):
            files.append(chunks / str(sample_index) / "0" / "0" / "0")
    return files


def read_plain(conf: DataConfig, indices: list[int]) -> int:
    """Read the bytes of samples into one buffer, and return their number."""
    files = chunk_files(conf, indices)
    buffer = bytearray(max(file.stat().st_size for file in files))
    total = 0
    for file in files:
        with file.open("rb", buffering=0) as opened:
            total += opened.readinto(buffer)
    return total


def read_dataset(dataset: ForecastDataset, indices: list[int], threads: int = 1) -> int:
    """Read samples through the loader, one sample in a batch, and return the number of bytes."""
    total = 0
    with DevicePrefetcher(Loader(dataset, [[index] for index in indices], threads), torch.device("cpu")) as feed:
        for batch in feed:
            total += batch.history_BCTHW.nbytes + batch.target_BCTHW.nbytes
    return total


def write_layout(reader: FieldReader, path: Path, count: int) -> None:
    """Write the first `count` times as other packages do: a zarr store with an array per variable, a chunk per time."""
    fields = np.stack([reader.read(index) for index in range(count)])
    variables = {}
    row = 0
    for name in dict.fromkeys(channel.variable for channel in reader.channels.time_varying_stored):
        levels = [channel.level for channel in reader.channels.time_varying_stored if channel.variable == name]
        block = fields[:, row : row + len(levels)]
        row += len(levels)
        if levels[0] is None:
            variables[name] = (("time", "latitude", "longitude"), block[:, 0])
        else:
            variables[name] = (("time", "level", "latitude", "longitude"), block)
    dataset = xr.Dataset(variables, {"latitude": reader.grid.lat, "longitude": reader.grid.lon})
    encoding = {name: {"chunks": (1, *data.shape[1:])} for name, data in dataset.data_vars.items()}
    dataset.to_zarr(path, encoding=encoding, consolidated=True)


def read_with_open_zarr(path: Path, indices: list[int]) -> int:
    """Open the dataset for each sample, select its two times and join the variables; return the number of bytes."""
    total = 0
    for index in indices:
        with xr.open_zarr(path) as dataset:
            part = dataset.isel(time=slice(index, index + 2)).load()
        blocks = [part[name].values.reshape(2, -1, *part[name].shape[-2:]) for name in part.data_vars]
        total += torch.from_numpy(np.concatenate(blocks, axis=1)).nbytes
    return total


def build_xbatcher_reader(path: Path) -> Callable[[list[int]], int] | None:
    """Return a function that reads samples with xbatcher, None if it is not installed."""
    try:
        import xbatcher
    except ImportError:
        return None
    dataset = xr.open_zarr(path)
    generator = xbatcher.BatchGenerator(
        dataset, input_dims={**dataset.sizes, "time": 2}, input_overlap={"time": 1}, preload_batch=False
    )

    def read(indices: list[int]) -> int:
        total = 0
        for index in indices:
            part = generator[index].load()
            blocks = [part[name].values.reshape(2, -1, *part[name].shape[-2:]) for name in part.data_vars]
            total += torch.from_numpy(np.concatenate(blocks, axis=1)).nbytes
        return total

    return read


def drop_cache(paths: Iterator[Path]) -> None:
    """Ask the system to drop files from the page cache; they must have been written to the disk."""
    for path in paths:
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def time_read(run: Callable[[list[int]], int], indices: list[int]) -> float:
    """Return the seconds per sample of a method that reads samples."""
    began = time.perf_counter()
    run(indices)
    return (time.perf_counter() - began) / len(indices)


def measure_waiting_share(dataset: ForecastDataset, indices: list[int], threads: int, step: float = 0.2) -> float:
    """Return the share of the time that a training loop waits for data, without its first two samples.

    Args:
        dataset: the samples.
        indices: samples to read, in this order.
        threads: number of loader threads.
        step: seconds of a training step.
    """
    waited = []
    with DevicePrefetcher(Loader(dataset, [[index] for index in indices], threads), torch.device("cpu")) as feed:
        for _ in feed:
            waited.append(feed.take_wait())
            time.sleep(step)
    return sum(waited[2:]) / (sum(waited[2:]) + step * len(waited[2:]))


def main() -> None:
    """Measure in a temporary folder and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1200)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=asked.folder))
    try:
        measure(folder, asked.times, asked.samples)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, times: int, samples: int) -> None:
    """Compare preprocessing with copying its result, read samples by each method, and print the tables."""
    confs = {}
    for compression in ("lz4", "none"):
        confs[compression] = conf = build_data_config(folder, f"{compression}.zarr", times)
        began = time.perf_counter()
        write_training_store(conf, PreprocessConfig(compression=compression), progress=False)
        seconds = time.perf_counter() - began
        size = sum(file.stat().st_size for file in Path(conf.store).rglob("*") if file.is_file())
        os.sync()
        began = time.perf_counter()
        shutil.copytree(conf.store, folder / "copy")
        copied = time.perf_counter() - began
        shutil.rmtree(folder / "copy")
        print(f"preprocessing, {compression}: {seconds:.0f} s, {size / 1e9:.2f} GB; copying {copied:.0f} s", flush=True)
    readers = {name: open_reader(conf) for name, conf in confs.items()}
    reader = readers["lz4"]
    datasets = {}
    for name, conf in confs.items():
        initial = find_initial_times(readers[name].times, whole_period(readers[name]), 360, 1, 1)
        datasets[name] = ForecastDataset(FrameReader(readers[name], conf, None), initial, 360, 1, 1)
    num_layout_times = min(96, len(reader.times))
    write_layout(reader, folder / "layout.zarr", num_layout_times)
    os.sync()
    chosen = np.random.default_rng(0).permutation(num_layout_times - 1)[:samples].tolist()
    ways: dict[str, Callable[[list[int]], int]] = {
        "plain read, none": lambda i: read_plain(confs["none"], i),
        "plain read, lz4": lambda i: read_plain(confs["lz4"], i),
        "ours, none": lambda i: read_dataset(datasets["none"], i),
        "ours, lz4": lambda i: read_dataset(datasets["lz4"], i),
        "ours, none, 2 threads": lambda i: read_dataset(datasets["none"], i, 2),
        "ours, lz4, 2 threads": lambda i: read_dataset(datasets["lz4"], i, 2),
        "open_zarr + isel a sample": lambda i: read_with_open_zarr(folder / "layout.zarr", i),
    }
    other = build_xbatcher_reader(folder / "layout.zarr")
    if other is not None:
        ways["xbatcher"] = other
    # Read from the page cache, then from the disk; the methods alternate.
    size = 2 * 4 * len(reader.channels.time_varying_stored) * 181 * 360 / 1e6
    print(f"\n{len(chosen)} samples of {size:.1f} MB, ms a sample, median of {ROUNDS}")
    print("| | warm | from the disk |\n|---|---|---|")
    warm: dict[str, list[float]] = {name: [] for name in ways}
    cold: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run(chosen)
    for _ in range(ROUNDS):
        for name, run in ways.items():
            warm[name].append(time_read(run, chosen))
    for _ in range(2):
        for name, run in ways.items():
            drop_cache(folder.rglob("*"))
            cold[name].append(time_read(run, chosen))
    for name in ways:
        print(f"| {name} | {1e3 * statistics.median(warm[name]):.1f} | {1e3 * statistics.median(cold[name]):.1f} |")
    long = np.random.default_rng(1).permutation(len(datasets["lz4"]))[:60].tolist()
    for name, dataset in datasets.items():
        shares = ", ".join(
            f"{threads} threads {measure_waiting_share(dataset, long, threads):.4f}" for threads in (1, 2)
        )
        print(f"share of the time that steps of 200 ms wait, {name}: {shares}")


def whole_period(reader: FieldReader) -> Split:
    """Return a split with all times."""
    return Split("train", int(reader.times[0]), int(reader.times[-1]))


if __name__ == "__main__":
    main()
