"""Time to read a sample by the number of source files, of years in a store, and of threads or processes.

Fields of one simulated atmosphere on 32 x 64 cells are written into few and many netCDF files, and into stores of up to
40 years (copies of one year). A sample is two times, read in random order by the loader, from the page cache (every
file was read before). The last part compares preprocessing with copying the finished store. Rounds are interleaved, and
medians count. The first two parts run on one core, the others on two if the system has them. The script prints tables
and draws a figure.

    SPEEDY=FOLDER python benchmarks/loading_growth.py [--folder FOLDER] [--figure FILE.png]
"""

from __future__ import annotations

import argparse
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
from loading import build_data_config, read_dataset, whole_period

from credit.config.sections.data import DataConfig, PreprocessConfig
from credit.data.reader import FieldReader, open_reader
from credit.data.samples.dataset import ForecastDataset
from credit.data.samples.frames import FrameReader
from credit.data.sources.source_reader import open_sources
from credit.data.splits import find_initial_times
from credit.data.store.preprocess import write_training_store
from credit.data.store.store_reader import open_store

ROUNDS, SAMPLES = 5, 100
FILES = (4, 40, 400, 1500)
YEARS = (1, 5, 20, 40)
STEP = 360
NAMES = ("t", "t2m", "msl")
VARIABLES = {"prognostic": {"vars_3D": ["t"], "vars_2D": ["t2m", "msl"]}}
# figure: title, horizontal axis, vertical axis, [(label, [x], [y])]
Panel = tuple[str, str, str, list[tuple[str, list, list]]]


def pin(count: int) -> None:
    """Restrict this process to `count` of the cores that it may use."""
    os.sched_setaffinity(0, CORES[-count:])


def make_dataset(reader: FieldReader, conf: DataConfig) -> ForecastDataset:
    """Return the dataset of all samples of one forecast step."""
    initial = find_initial_times(reader.times, whole_period(reader), STEP, 1, 1)
    return ForecastDataset(FrameReader(reader, conf, None), initial, STEP, 1, 1)


def measure_seconds(run: Callable[[], object]) -> float:
    """Call a function and return the seconds that it took."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure_medians(ways: dict, rounds: int = ROUNDS) -> dict:
    """Call each function once, then all in turns; return name -> median seconds.

    Args:
        ways: name -> function.
        rounds: number of turns.
    """
    for run in ways.values():
        run()
    taken: dict = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            taken[name].append(measure_seconds(run))
    return {name: statistics.median(durations) for name, durations in taken.items()}


def small_config(pattern: Path, store: Path | None = None) -> DataConfig:
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
    return small_config(folder / "*.nc")


def by_files(fields: xr.Dataset, folder: Path) -> list[Panel]:
    """Measure samples from the sources against the number of files that they are in."""
    confs = {count: write_files(fields, folder / f"files{count}", count) for count in FILES}
    # The files are opened twice, the first time from the disk; the faster time counts.
    opening = {}
    for count, conf in confs.items():
        first_seconds = measure_seconds(lambda c=conf: open_reader(c))
        opening[count] = min(first_seconds, measure_seconds(lambda c=conf: open_reader(c)))
    datasets = {count: make_dataset(open_reader(conf), conf) for count, conf in confs.items()}
    chosen = np.random.default_rng(0).permutation(len(datasets[FILES[0]]))[:SAMPLES].tolist()
    taken = measure_medians(
        {count: lambda d=dataset: read_dataset(d, chosen, 0) for count, dataset in datasets.items()}
    )
    each = {count: 1e3 * taken[count] / SAMPLES for count in FILES}
    print("\n| files of the same 1500 times | ms a sample | opening them all, s | ms a file |\n|---|---|---|---|")
    for count in FILES:
        print(
            f"| {count} | {each[count]:.2f} | {opening[count]:.2f} | {1e3 * opening[count] / count:.1f} |", flush=True
        )
    return [
        ("samples from source files", "files", "ms a sample", [("", list(FILES), list(each.values()))]),
        ("opening the sources", "files", "ms a file", [("", list(FILES), [1e3 * opening[n] / n for n in FILES])]),
    ]


def write_longer_store(source: Path, path: Path, years: int) -> None:
    """Write a store of many years that repeats the fields of a store of one year, at later and later times."""
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("c"))
    before, group = zarr.open_group(source, mode="r"), zarr.open_group(path, mode="r+")
    length = len(before["time"][:])
    count = round(years * 365.25 * 4)
    times = before["time"][0] + STEP * np.arange(count)
    for name, values in (("time", times), ("done", np.ones(count, np.uint8)), ("digest", np.zeros(count, np.uint64))):
        chunk = count if name == "time" else before[name].chunks[0]
        array = group.create_array(name, shape=(count,), chunks=(chunk,), dtype=values.dtype, overwrite=True)
        array[...] = values
    for name in ("latitude", "longitude", "masks", "static_fields"):
        if (source / name / "c").exists():
            shutil.copytree(source / name / "c", path / name / "c")
    group["fields"].resize((count, *before["fields"].shape[1:]))
    for number in range(count):
        chunk_folder = path / "fields" / "c" / str(number)
        shutil.copytree(source / "fields" / "c" / str(number % length), chunk_folder, copy_function=shutil.copyfile)


def measure_by_years(fields: xr.Dataset, folder: Path) -> list[Panel]:
    """Measure samples from a store against its length."""
    conf = small_config(folder / "year.nc", folder / "year.zarr")
    fields.to_netcdf(folder / "year.nc")
    year_store = write_training_store(conf, progress=False)
    paths = {years: folder / f"{years}years.zarr" for years in YEARS}
    for years, path in paths.items():
        write_longer_store(year_store, path, years)
    opening = measure_medians(
        {years: lambda p=path: make_dataset(open_store(p), conf) for years, path in paths.items()}, 3
    )
    datasets = {years: make_dataset(open_store(path), conf) for years, path in paths.items()}
    rng = np.random.default_rng(1)
    chosen = {years: rng.permutation(len(dataset))[: 4 * SAMPLES].tolist() for years, dataset in datasets.items()}
    taken = measure_medians(
        {years: lambda y=years, d=dataset: read_dataset(d, chosen[y]) for years, dataset in datasets.items()}
    )
    each = {years: 1e3 * taken[years] / (4 * SAMPLES) for years in YEARS}
    print("\n| years in the store | times | ms a sample | opening it, ms |\n|---|---|---|---|")
    for years in YEARS:
        count = len(datasets[years]) + 1
        print(f"| {years} | {count} | {each[years]:.3f} | {1e3 * opening[years]:.0f} |", flush=True)
    return [
        ("samples from a store", "years", "ms a sample", [("", list(YEARS), list(each.values()))]),
        ("opening a store", "years", "ms", [("", list(YEARS), [1e3 * opening[n] for n in YEARS])]),
    ]


def by_workers(conf: DataConfig) -> list[Panel]:
    """Measure samples of 1 degree against the number of loader threads (a store) or processes (sources)."""
    title = "loader, two cores", "threads or processes", "samples of 1 degree a second"
    print("\n| threads or processes | samples a second, 1 degree, 26 channels |\n|---|---|")
    lines = []
    for name, reader, numbers, most in (
        ("store, threads", open_reader(conf), (1, 2), SAMPLES),
        ("source files, processes", open_sources(conf), (0, 1, 2), 20),
    ):
        dataset = make_dataset(reader, conf)
        chosen = np.random.default_rng(2).permutation(len(dataset))[:most].tolist()
        taken = measure_medians(
            {number: lambda n=number, d=dataset, c=chosen: read_dataset(d, c, n) for number in numbers}
        )
        rates = [len(chosen) / taken[number] for number in numbers]
        for number, rate in zip(numbers, rates, strict=True):
            print(f"| {name}: {number} | {rate:.1f} |", flush=True)
        lines.append((name, list(numbers), rates))
    return [(*title, lines)]


def by_preprocess_workers(confs: dict[str, DataConfig], rounds: int) -> list[Panel]:
    """Measure preprocessing with one and two processes, compared with copying the finished store."""
    print(
        "\n| preprocessing | processes | s | MB/s written | copying the store, s | fraction of copying |\n"
        "|---|---|---|---|---|---|"
    )
    lines = []
    for name, conf in confs.items():
        path, taken = Path(conf.store), {1: [], 2: [], "copy": []}
        for _ in range(rounds):
            for workers in (1, 2):
                shutil.rmtree(path, ignore_errors=True)
                pin(workers)
                settings = PreprocessConfig(workers=workers)
                taken[workers].append(
                    measure_seconds(lambda c=conf, s=settings: write_training_store(c, s, progress=False))
                )
            pin(1)
            taken["copy"].append(measure_seconds(lambda p=path: shutil.copytree(p, p.with_name("copy"))))
            shutil.rmtree(path.with_name("copy"))
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6
        middle = {key: statistics.median(each) for key, each in taken.items()}
        for workers in (1, 2):
            row = (middle[workers], size / middle[workers], middle["copy"], middle["copy"] / middle[workers])
            print(f"| {name} | {workers} | {row[0]:.1f} | {row[1]:.0f} | {row[2]:.2f} | {row[3]:.3f} |", flush=True)
        lines.append((name, [1, 2], [size / middle[workers] for workers in (1, 2)]))
    return [("preprocessing", "processes, a core each", "MB/s written", lines)]


def draw(panels: list[Panel], path: Path) -> None:
    """Draw all panels; vertical axes begin at 0, so that small changes look small."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(11, 6), layout="constrained")
    for axis, (title, across, up, lines) in zip(axes.flat, panels, strict=True):
        for label, x, y in lines:
            axis.plot(x, y, "o-", label=label)
        if max(lines[0][1]) > 10:
            axis.set_xscale("log")
            axis.set_xticks(lines[0][1], [str(number) for number in lines[0][1]])
            axis.minorticks_off()
        else:
            axis.set_xticks(lines[-1][1])
        axis.set(title=title, xlabel=across, ylabel=up, ylim=(0, 1.25 * max(max(y) for _, _, y in lines)))
        axis.grid(alpha=0.3)
        if any(label for label, _, _ in lines):
            axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def measure(folder: Path, figure: Path | None) -> None:
    """Run all parts, which the docstring of this file describes, and draw the figure if its path is given."""
    logging.disable(logging.WARNING)
    pin(1)
    files = sorted(Path(os.environ["SPEEDY"]).glob("*.nc"))
    keep = {"drop_variables": ["u", "v", "q", "z", "u10", "v10", "tp", "sst"], "decode_times": False}
    source = xr.concat([xr.open_dataset(file, **keep) for file in files], "time", data_vars="minimal")
    fields = source[list(NAMES)].sel(level=[850.0, 500.0]).isel(time=slice(0, 1500)).load().astype(np.float32)
    for name in fields.variables:
        fields[name].encoding = {}
    panels = by_files(fields, folder)
    panels += measure_by_years(fields, folder)
    coarse, fine = build_data_config(folder, "coarse.zarr", 1000), build_data_config(folder, "fine.zarr", 200)
    coarse = coarse.model_copy(update={"grid": None})
    last = by_preprocess_workers({"5.6 degrees as it is": coarse, "regridded to 1 degree": fine}, 2)
    pin(2)
    panels += [*by_workers(fine), *last]
    if figure is not None:
        draw(panels, figure)


def main() -> None:
    """Measure in a temporary folder and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--figure", type=Path)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=asked.folder))
    try:
        measure(folder, asked.figure)
    finally:
        shutil.rmtree(folder)


CORES = sorted(os.sched_getaffinity(0))

if __name__ == "__main__":
    main()
