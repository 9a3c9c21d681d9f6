"""Time to read a sample, by the number of source files, of years in a store, and of threads or processes.

Fields of a simulated atmosphere on 32 x 64 cells are written into few and many netCDF files, and into stores of up to
40 years (copies of one year). The loader reads samples of two times in random order from the page cache. The last part
compares preprocessing with a copy of the finished store. The measurements alternate in rounds, and the results are
medians. The first two parts use one core; the other parts use two cores, if available. The script prints tables and
plots a figure.

    SPEEDY=FOLDER python benchmarks/loading_growth.py [--folder FOLDER] [--figure FILE.png]
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xarray as xr
import zarr
from loading import build_data_config, build_whole_period, read_dataset

from credit.config.sections.data import DataConfig, PreprocessConfig
from credit.data.reader import FieldReader, open_reader
from credit.data.samples.dataset import SampleDataset
from credit.data.samples.frames import FrameReader
from credit.data.sources.source_reader import open_sources
from credit.data.splits import find_initial_times
from credit.data.store.preprocess import write_training_store
from credit.data.store.store_reader import open_store

ROUNDS = 5
SAMPLES = 100
# Numbers of source files, and of years in a store.
FILES = (4, 40, 400, 1500)
YEARS = (1, 5, 20, 40)
# Minutes of a forecast step.
STEP = 360
# Cores that this process may use, before `pin` restricts it.
CORES = sorted(os.sched_getaffinity(0))
NAMES = ("t", "t2m", "msl")
VARIABLES = {"prognostic": {"vars_3D": ["t"], "vars_2D": ["t2m", "msl"]}}
# figure: title, horizontal axis, vertical axis, [(label, [x], [y])]
Panel = tuple[str, str, str, list[tuple[str, list, list]]]


def pin_to_cores(count: int) -> None:
    """Restrict this process to `count` of the cores that it may use."""
    os.sched_setaffinity(0, CORES[-count:])


def build_dataset(reader: FieldReader, conf: DataConfig) -> SampleDataset:
    """Return the dataset of all samples of one forecast step."""
    initial_times = find_initial_times(reader.times, build_whole_period(reader), STEP, 1, 1)
    return SampleDataset(FrameReader(reader, conf, None), initial_times, STEP, 1, 1)


def measure_seconds(run: Callable[[], object]) -> float:
    """Call a function and return the seconds that it took."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_medians(runs: dict, rounds: int = ROUNDS) -> dict:
    """Call each function once, then all functions in alternation; return name -> median seconds.

    Args:
        runs: name -> function.
        rounds: number of rounds, each with one call of every function.
    """
    # The first calls warm up.
    for run in runs.values():
        run()
    seconds: dict = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(measure_seconds(run))
    return {name: statistics.median(durations) for name, durations in seconds.items()}


def build_small_config(pattern: Path, store: Path | None = None) -> DataConfig:
    """Return the data section of the fields on 32 x 64 cells, with a year of training.

    Args:
        pattern: pattern of the source files.
        store: path of the training store, None without one.
    """
    splits = {"train": ["2000-01-01", "2000-12-29"], "valid": ["2000-12-30"] * 2, "test": ["2000-12-31"] * 2}
    return DataConfig.model_validate(
        {
            "sources": [{"path": str(pattern)}],
            "levels": [850, 500],
            "variables": VARIABLES,
            "splits": splits,
            "split_gap": "1min",
            "store": None if store is None else str(store),
        }
    )


def write_files(fields: xr.Dataset, folder: Path, count: int) -> DataConfig:
    """Write all times into `count` files of equal length, and return the data section that reads them."""
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(fields.sizes["time"]), count)):
        fields.isel(time=rows).to_netcdf(folder / f"f{number:05d}.nc")
    return build_small_config(folder / "*.nc")


def measure_by_files(fields: xr.Dataset, folder: Path) -> list[Panel]:
    """Measure the time to read samples from source files, by the number of files."""
    confs = {count: write_files(fields, folder / f"files{count}", count) for count in FILES}
    # The files are opened twice, the first time from the disk; the faster time counts.
    opening_seconds = {}
    for count, conf in confs.items():
        open_files = functools.partial(open_reader, conf)
        first_seconds = measure_seconds(open_files)
        opening_seconds[count] = min(first_seconds, measure_seconds(open_files))
    datasets = {count: build_dataset(open_reader(conf), conf) for count, conf in confs.items()}
    # The files hold the same times, so all datasets have the same samples.
    indices = np.random.default_rng(0).permutation(len(datasets[FILES[0]]))[:SAMPLES].tolist()
    runs = {count: functools.partial(read_dataset, dataset, indices, 0) for count, dataset in datasets.items()}
    seconds = measure_medians(runs)
    sample_milliseconds = [1e3 * seconds[count] / SAMPLES for count in FILES]
    file_milliseconds = [1e3 * opening_seconds[count] / count for count in FILES]
    print("\n| files of the same 1500 times | ms a sample | opening them all, s | ms a file |\n|---|---|---|---|")
    for count, per_sample, per_file in zip(FILES, sample_milliseconds, file_milliseconds, strict=True):
        print(f"| {count} | {per_sample:.2f} | {opening_seconds[count]:.2f} | {per_file:.1f} |", flush=True)
    return [
        ("samples from source files", "files", "ms a sample", [("", list(FILES), sample_milliseconds)]),
        ("opening the sources", "files", "ms a file", [("", list(FILES), file_milliseconds)]),
    ]


def write_longer_store(source: Path, path: Path, years: int) -> None:
    """Write a store of many years, which repeats the fields of a store of one year."""
    # Everything but the chunks, which zarr keeps in folders with the name c.
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("c"))
    year_group = zarr.open_group(source, mode="r")
    group = zarr.open_group(path, mode="r+")
    length = len(year_group["time"][:])
    count = round(years * 365.25 * 4)
    values_by_time = {
        "time": year_group["time"][0] + STEP * np.arange(count),
        "done": np.ones(count, np.uint8),
        "digest": np.zeros(count, np.uint64),
    }
    for name, values in values_by_time.items():
        chunk = count if name == "time" else year_group[name].chunks[0]
        array = group.create_array(name, shape=(count,), chunks=(chunk,), dtype=values.dtype, overwrite=True)
        array[...] = values
    for name in ("latitude", "longitude", "masks", "static_fields"):
        if (source / name / "c").exists():
            shutil.copytree(source / name / "c", path / name / "c")
    group["fields"].resize((count, *year_group["fields"].shape[1:]))
    for number in range(count):
        chunk_folder = path / "fields" / "c" / str(number)
        shutil.copytree(source / "fields" / "c" / str(number % length), chunk_folder, copy_function=shutil.copyfile)


def measure_by_years(fields: xr.Dataset, folder: Path) -> list[Panel]:
    """Measure the time to read samples from a store, by the number of years in the store."""
    conf = build_small_config(folder / "year.nc", folder / "year.zarr")
    fields.to_netcdf(folder / "year.nc")
    year_store = write_training_store(conf, progress=False)
    paths = {years: folder / f"{years}years.zarr" for years in YEARS}
    for years, path in paths.items():
        write_longer_store(year_store, path, years)

    def open_dataset(path: Path) -> SampleDataset:
        return build_dataset(open_store(path), conf)

    opening_runs = {years: functools.partial(open_dataset, path) for years, path in paths.items()}
    opening_seconds = measure_medians(opening_runs, 3)
    datasets = {years: open_dataset(path) for years, path in paths.items()}
    # Samples of a store are read faster than those of source files, so there are more of them.
    num_samples = 4 * SAMPLES
    rng = np.random.default_rng(1)
    runs = {}
    for years, dataset in datasets.items():
        indices = rng.permutation(len(dataset))[:num_samples].tolist()
        runs[years] = functools.partial(read_dataset, dataset, indices)
    seconds = measure_medians(runs)
    sample_milliseconds = [1e3 * seconds[years] / num_samples for years in YEARS]
    opening_milliseconds = [1e3 * opening_seconds[years] for years in YEARS]
    print("\n| years in the store | times | ms a sample | opening it, ms |\n|---|---|---|---|")
    for years, per_sample, opening in zip(YEARS, sample_milliseconds, opening_milliseconds, strict=True):
        # The last time begins no sample.
        count = len(datasets[years]) + 1
        print(f"| {years} | {count} | {per_sample:.3f} | {opening:.0f} |", flush=True)
    return [
        ("samples from a store", "years", "ms a sample", [("", list(YEARS), sample_milliseconds)]),
        ("opening a store", "years", "ms", [("", list(YEARS), opening_milliseconds)]),
    ]


def measure_by_workers(conf: DataConfig) -> list[Panel]:
    """Measure the time to read samples of 1 degree, by the number of loader threads (store) or processes (sources)."""
    print("\n| threads or processes | samples a second, 1 degree, 26 channels |\n|---|---|")
    lines = []
    # Name, reader, numbers of threads or processes, and number of samples.
    cases = (
        ("store, threads", open_reader(conf), (1, 2), SAMPLES),
        ("source files, processes", open_sources(conf), (0, 1, 2), 20),
    )
    for name, reader, worker_counts, num_samples in cases:
        dataset = build_dataset(reader, conf)
        indices = np.random.default_rng(2).permutation(len(dataset))[:num_samples].tolist()
        runs = {workers: functools.partial(read_dataset, dataset, indices, workers) for workers in worker_counts}
        seconds = measure_medians(runs)
        rates = [len(indices) / seconds[workers] for workers in worker_counts]
        for workers, rate in zip(worker_counts, rates, strict=True):
            print(f"| {name}: {workers} | {rate:.1f} |", flush=True)
        lines.append((name, list(worker_counts), rates))
    return [("loader, two cores", "threads or processes", "samples of 1 degree a second", lines)]


def measure_by_preprocess_workers(confs: dict[str, DataConfig], rounds: int) -> list[Panel]:
    """Measure preprocessing with one and two processes, compared with copying the finished store."""
    print(
        "\n| preprocessing | processes | s | MB/s written | copying the store, s | fraction of copying |\n"
        "|---|---|---|---|---|---|"
    )
    lines = []
    for name, conf in confs.items():
        path = Path(conf.store)
        copy = path.with_name("copy")
        write_seconds: dict[int, list[float]] = {1: [], 2: []}
        copy_seconds = []
        for _ in range(rounds):
            for workers in (1, 2):
                shutil.rmtree(path, ignore_errors=True)
                pin_to_cores(workers)
                settings = PreprocessConfig(workers=workers)
                write_store = functools.partial(write_training_store, conf, settings, progress=False)
                write_seconds[workers].append(measure_seconds(write_store))
            pin_to_cores(1)
            copy_seconds.append(measure_seconds(functools.partial(shutil.copytree, path, copy)))
            shutil.rmtree(copy)
        files = [file for file in path.rglob("*") if file.is_file()]
        megabytes = sum(file.stat().st_size for file in files) / 1e6
        copying = statistics.median(copy_seconds)
        rates = []
        for workers in (1, 2):
            writing = statistics.median(write_seconds[workers])
            rates.append(megabytes / writing)
            print(
                f"| {name} | {workers} | {writing:.1f} | {rates[-1]:.0f} | {copying:.2f} | {copying / writing:.3f} |",
                flush=True,
            )
        lines.append((name, [1, 2], rates))
    return [("preprocessing", "processes, a core each", "MB/s written", lines)]


def draw_panels(panels: list[Panel], path: Path) -> None:
    """Plot all panels; vertical axes begin at 0, so that small changes look small."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(11, 6), layout="constrained")
    for axis, (title, x_label, y_label, lines) in zip(axes.flat, panels, strict=True):
        for label, x, y in lines:
            axis.plot(x, y, "o-", label=label)
        _, first_x, _ = lines[0]
        _, last_x, _ = lines[-1]
        if max(first_x) > 10:
            axis.set_xscale("log")
            axis.set_xticks(first_x, [str(number) for number in first_x])
            axis.minorticks_off()
        else:
            # The last line has all numbers of workers, the first one may lack 0.
            axis.set_xticks(last_x)
        largest = max(max(y) for _, _, y in lines)
        axis.set(title=title, xlabel=x_label, ylabel=y_label, ylim=(0, 1.25 * largest))
        axis.grid(alpha=0.3)
        if any(label for label, _, _ in lines):
            axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def measure(folder: Path, figure: Path | None) -> None:
    """Run all parts (see the module docstring), and plot the figure if its path is given."""
    logging.disable(logging.WARNING)
    pin_to_cores(1)
    files = sorted(Path(os.environ["SPEEDY"]).glob("*.nc"))
    unused_variables = ["u", "v", "q", "z", "u10", "v10", "tp", "sst"]
    datasets = [xr.open_dataset(file, drop_variables=unused_variables, decode_times=False) for file in files]
    source = xr.concat(datasets, "time", data_vars="minimal")
    fields = source[list(NAMES)].sel(level=[850.0, 500.0]).isel(time=slice(0, 1500)).load().astype(np.float32)
    # Otherwise the new files would get the encoding of the source files, such as their chunks.
    for name in fields.variables:
        fields[name].encoding = {}
    panels = measure_by_files(fields, folder)
    panels += measure_by_years(fields, folder)
    # Without a grid in the config, the fields stay on the grid of their files.
    coarse = build_data_config(folder, "coarse.zarr", 1000).model_copy(update={"grid": None})
    fine = build_data_config(folder, "fine.zarr", 200)
    # The store that is written here is read below; its panel is the last one of the figure.
    preprocess_panels = measure_by_preprocess_workers(
        {"5.6 degrees as it is": coarse, "regridded to 1 degree": fine}, 2
    )
    pin_to_cores(2)
    panels += measure_by_workers(fine)
    panels += preprocess_panels
    if figure is not None:
        draw_panels(panels, figure)


def main() -> None:
    """Measure in a temporary folder and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        measure(folder, args.figure)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
