"""Throughput of the loader, compared with a plain read of the same bytes and with other packages; also preprocessing.

Fields of a simulated atmosphere are interpolated to 1 degree. They are written into two stores, with and without
compression, and into one zarr store with an array for each variable, like in other packages. All methods then read the
same samples, in alternation. A sample has two times, and the order of samples is random. Samples are read from the page
cache and, if the system can drop the cache, from the disk. The last measurement reads samples during simulated training
steps of 200 ms. The folder is removed at the end.

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
from credit.data.samples.dataset import SampleDataset
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
    return load_config(
        CONFIG,
        [
            f"data.splits={choose_splits(times)}", "data.split_gap=1d", f"data.store={folder / name}",
            "data.grid={rows: 181, columns: 360, poles: true}", "data.forecast_len=1", "data.valid_forecast_len=1",
            "data.cache=none", "trainer.forecast_len_from=null", f"save_loc={folder / 'run'}",
        ],
    ).data  # fmt: skip


def choose_splits(times: int) -> str:
    """Return ``data.splits`` as YAML; the splits contain about `times` times of 6 h, from the year 2000."""
    # A day has four times; the last two weeks are for validation and test, of a day each.
    last_training_day = np.datetime64("2000-01-01") + np.timedelta64(max(1, times // 4 - 14), "D")
    valid_day = last_training_day + np.timedelta64(6, "D")
    test_day = last_training_day + np.timedelta64(12, "D")
    return (
        f"{{train: [2000-01-01, {last_training_day}], valid: [{valid_day}, {valid_day}], "
        f"test: [{test_day}, {test_day}]}}"
    )


def find_chunk_files(conf: DataConfig, indices: list[int]) -> list[Path]:
    """Return the files of a store with the fields of samples; `indices` are the indices of their first times."""
    chunks = Path(conf.store) / "fields" / "c"
    files = []
    for index in indices:
        # A sample is two consecutive times, and each time is a chunk of its own.
        for time_index in (index, index + 1):
            files.append(chunks / str(time_index) / "0" / "0" / "0")
    return files


def read_plain(conf: DataConfig, indices: list[int]) -> int:
    """Read the files of samples into one buffer, and return the number of bytes."""
    files = find_chunk_files(conf, indices)
    buffer = bytearray(max(file.stat().st_size for file in files))
    total = 0
    for file in files:
        with file.open("rb", buffering=0) as opened:
            total += opened.readinto(buffer)
    return total


def read_dataset(dataset: SampleDataset, indices: list[int], threads: int = 1) -> int:
    """Read samples through the loader, one sample in a batch, and return the number of bytes."""
    total = 0
    loader = Loader(dataset, [[index] for index in indices], threads)
    with DevicePrefetcher(loader, torch.device("cpu")) as batches:
        for batch in batches:
            total += batch.history_BCTHW.nbytes + batch.target_BCTHW.nbytes
    return total


def write_layout(reader: FieldReader, path: Path, count: int) -> None:
    """Write the first `count` times into a zarr store with one array per variable and one chunk per time."""
    fields_TCHW = np.stack([reader.read(index) for index in range(count)])
    # The channels of a variable follow one another.
    levels_of_variable: dict[str, list[float | None]] = {}
    for channel in reader.channels.time_varying_stored:
        levels_of_variable.setdefault(channel.variable, []).append(channel.level)
    variables = {}
    first_channel = 0
    for name, levels in levels_of_variable.items():
        block_TLHW = fields_TCHW[:, first_channel : first_channel + len(levels)]
        first_channel += len(levels)
        if levels[0] is None:
            variables[name] = (("time", "latitude", "longitude"), block_TLHW[:, 0])
        else:
            variables[name] = (("time", "level", "latitude", "longitude"), block_TLHW)
    dataset = xr.Dataset(variables, {"latitude": reader.grid.lat, "longitude": reader.grid.lon})
    encoding = {name: {"chunks": (1, *data.shape[1:])} for name, data in dataset.data_vars.items()}
    dataset.to_zarr(path, encoding=encoding, consolidated=True)


def read_with_open_zarr(path: Path, indices: list[int]) -> int:
    """Open the dataset for each sample, select its two times and join the variables; return the number of bytes."""
    total = 0
    for index in indices:
        with xr.open_zarr(path) as dataset:
            sample = dataset.isel(time=slice(index, index + 2)).load()
        total += _join_variables(sample).nbytes
    return total


def _join_variables(sample: xr.Dataset) -> torch.Tensor:
    """Return the fields of a sample as a tensor (2 times, channels, rows, columns)."""
    blocks = []
    for variable in sample.data_vars.values():
        blocks.append(variable.values.reshape(2, -1, *variable.shape[-2:]))
    return torch.from_numpy(np.concatenate(blocks, axis=1))


def build_xbatcher_reader(path: Path) -> Callable[[list[int]], int] | None:
    """Return a function that reads samples with xbatcher; None if xbatcher is not installed."""
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
            total += _join_variables(generator[index].load()).nbytes
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
    start = time.perf_counter()
    run(indices)
    return (time.perf_counter() - start) / len(indices)


def measure_waiting_share(dataset: SampleDataset, indices: list[int], threads: int, step: float = 0.2) -> float:
    """Return the fraction of the time in which a training loop waits for data, without its first two samples.

    Args:
        dataset: the samples.
        indices: samples to read, in this order.
        threads: number of loader threads.
        step: seconds of a training step.
    """
    wait_seconds = []
    loader = Loader(dataset, [[index] for index in indices], threads)
    with DevicePrefetcher(loader, torch.device("cpu")) as batches:
        for _ in batches:
            wait_seconds.append(batches.pop_wait_seconds())
            time.sleep(step)
    counted = wait_seconds[2:]
    return sum(counted) / (sum(counted) + step * len(counted))


def main() -> None:
    """Measure in a temporary folder and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1200)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        measure(folder, args.times, args.samples)
    finally:
        shutil.rmtree(folder)


def measure_preprocessing(conf: DataConfig, compression: str, copy: Path) -> None:
    """Write a store, compare the time with a copy of the finished store, and print a line.

    Args:
        conf: data section of the store.
        compression: compression of the chunks of the store.
        copy: path for a copy of the store, which is removed.
    """
    start = time.perf_counter()
    write_training_store(conf, PreprocessConfig(compression=compression), progress=False)
    seconds = time.perf_counter() - start
    files = [file for file in Path(conf.store).rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    os.sync()
    start = time.perf_counter()
    shutil.copytree(conf.store, copy)
    copy_seconds = time.perf_counter() - start
    shutil.rmtree(copy)
    print(
        f"preprocessing, {compression}: {seconds:.0f} s, {size / 1e9:.2f} GB; copying {copy_seconds:.0f} s", flush=True
    )


def measure(folder: Path, times: int, samples: int) -> None:
    """Compare preprocessing with copying its result, read samples by each method, and print the tables."""
    confs = {}
    for compression in ("lz4", "none"):
        confs[compression] = build_data_config(folder, f"{compression}.zarr", times)
        measure_preprocessing(confs[compression], compression, folder / "copy")
    readers = {name: open_reader(conf) for name, conf in confs.items()}
    reader = readers["lz4"]
    datasets = {}
    for name, conf in confs.items():
        # Samples of one input frame and one step of 360 minutes.
        initial_times = find_initial_times(readers[name].times, build_whole_period(readers[name]), 360, 1, 1)
        datasets[name] = SampleDataset(FrameReader(readers[name], conf, None), initial_times, 360, 1, 1)
    num_layout_times = min(96, len(reader.times))
    write_layout(reader, folder / "layout.zarr", num_layout_times)
    os.sync()
    sample_indices = np.random.default_rng(0).permutation(num_layout_times - 1)[:samples].tolist()
    methods: dict[str, Callable[[list[int]], int]] = {
        "plain read, none": lambda i: read_plain(confs["none"], i),
        "plain read, lz4": lambda i: read_plain(confs["lz4"], i),
        "ours, none": lambda i: read_dataset(datasets["none"], i),
        "ours, lz4": lambda i: read_dataset(datasets["lz4"], i),
        "ours, none, 2 threads": lambda i: read_dataset(datasets["none"], i, 2),
        "ours, lz4, 2 threads": lambda i: read_dataset(datasets["lz4"], i, 2),
        "open_zarr + isel a sample": lambda i: read_with_open_zarr(folder / "layout.zarr", i),
    }
    xbatcher_reader = build_xbatcher_reader(folder / "layout.zarr")
    if xbatcher_reader is not None:
        methods["xbatcher"] = xbatcher_reader

    # Two times of float32.
    size = 2 * 4 * len(reader.channels.time_varying_stored) * 181 * 360 / 1e6
    print(f"\n{len(sample_indices)} samples of {size:.1f} MB, ms a sample, median of {ROUNDS}")
    compare_methods(methods, sample_indices, folder)
    feed_indices = np.random.default_rng(1).permutation(len(datasets["lz4"]))[:60].tolist()
    for name, dataset in datasets.items():
        shares = []
        for threads in (1, 2):
            shares.append(f"{threads} threads {measure_waiting_share(dataset, feed_indices, threads):.4f}")
        print(f"share of the time that steps of 200 ms wait, {name}: {', '.join(shares)}")


def compare_methods(methods: dict[str, Callable[[list[int]], int]], indices: list[int], folder: Path) -> None:
    """Read samples from the page cache, then from the disk, with alternating methods, and print the table.

    Args:
        methods: name -> function that reads samples.
        indices: samples to read, in this order.
        folder: folder of all stores, whose files are dropped from the page cache.
    """
    print("| | warm | from the disk |\n|---|---|---|")
    warm: dict[str, list[float]] = {name: [] for name in methods}
    cold: dict[str, list[float]] = {name: [] for name in methods}
    # The first read brings the files into the page cache.
    for read in methods.values():
        read(indices)
    for _ in range(ROUNDS):
        for name, read in methods.items():
            warm[name].append(time_read(read, indices))
    for _ in range(2):
        for name, read in methods.items():
            drop_cache(folder.rglob("*"))
            cold[name].append(time_read(read, indices))
    for name in methods:
        print(f"| {name} | {1e3 * statistics.median(warm[name]):.1f} | {1e3 * statistics.median(cold[name]):.1f} |")


def build_whole_period(reader: FieldReader) -> Split:
    """Return a split that contains all times of a reader."""
    return Split("train", int(reader.times[0]), int(reader.times[-1]))


if __name__ == "__main__":
    main()
