"""Time of `credit preprocess` with statistics, compared with a copy of the finished store.

Each round writes one store and copies it. The copy is measured twice: within the page cache, and until its bytes are on
the disk (`os.sync`). Other work on the machine disturbs the processor time of this process less than the elapsed time.
The output is the median over the rounds, without the first round, which imports and compiles.

    SPEEDY=FOLDER python benchmarks/preprocessing.py [--grid 5p6|1deg] [--times 200] [--rounds 6] [--compression lz4]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from loading import CONFIG, build_data_config, choose_splits
from options import positive

from credit.config import load_config
from credit.config.sections.data import DataConfig, PreprocessConfig
from credit.data.store.preprocess import write_training_store


def time_call(function: Callable[[], object]) -> tuple[float, float]:
    """Call a function, and return (elapsed seconds, seconds of processor time)."""
    start = time.perf_counter()
    processor_start = time.process_time()
    function()
    return time.perf_counter() - start, time.process_time() - processor_start


def build_config(grid: str, folder: Path, times: int) -> DataConfig:
    """Return the data section of a store of SPEEDY's fields on their grid (``5p6``) or regridded (``1deg``)."""
    if grid == "1deg":
        return build_data_config(folder, "store.zarr", times)
    overrides = [
        f"data.splits={choose_splits(times)}", "data.split_gap=1d", f"data.store={folder / 'store.zarr'}",
        "data.forecast_len=1", "data.valid_forecast_len=1", "trainer.forecast_len_from=null",
        f"save_loc={folder / 'run'}",
    ]  # fmt: skip
    return load_config(CONFIG, overrides).data


def measure_round(conf: DataConfig, settings: PreprocessConfig, copy: Path) -> dict[str, float]:
    """Write a store, copy it, and remove both; return name of a measurement -> seconds."""
    seconds: dict[str, float] = {}

    def copy_to_disk() -> None:
        shutil.copytree(conf.store, copy)
        os.sync()

    seconds["writing"], seconds["writing, processor"] = time_call(
        lambda: write_training_store(conf, settings, progress=False)
    )
    os.sync()
    seconds["copy"], seconds["copy, processor"] = time_call(lambda: shutil.copytree(conf.store, copy))
    shutil.rmtree(copy)
    os.sync()
    seconds["copy to the disk"], _ = time_call(copy_to_disk)
    shutil.rmtree(copy)
    shutil.rmtree(conf.store)
    return seconds


def main() -> None:
    """Measure in a temporary folder and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", choices=["5p6", "1deg"], default="1deg")
    parser.add_argument("--times", type=positive, default=200)
    parser.add_argument("--rounds", type=positive, default=6)
    parser.add_argument("--compression", choices=["lz4", "none"], default="lz4")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        conf = build_config(args.grid, folder, args.times)
        settings = PreprocessConfig(compression=args.compression)
        rounds = [measure_round(conf, settings, folder / "copy") for _ in range(args.rounds + 1)][1:]
    finally:
        shutil.rmtree(folder)
    print("| | ms a time |\n|---|---|")
    for name in rounds[0]:
        print(f"| {name} | {1e3 * statistics.median(row[name] for row in rounds) / args.times:.2f} |")
    for name in ("copy", "copy to the disk"):
        ratio = statistics.median(row["writing"] / row[name] for row in rounds)
        print(f"writing over {name}: {ratio:.1f}")


if __name__ == "__main__":
    main()
