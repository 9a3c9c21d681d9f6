"""Part of the scale model: how often the eight ranks of a host open chunks of the training store in ten steps.

The ranks are real processes that read a real store. N only determines which samples they read.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Sequence
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from benchmarks.scale.rows import Row
from benchmarks.scale.small_world import write_small_run
from credit.config.sections.data import DataConfig
from credit.data.reader import open_reader
from credit.data.samples.loader import ResumableSampler
from credit.data.store.preprocess import write_training_store

_RANKS_PER_HOST = 8
_NUM_STEPS = 10
# Times that a sample reads: the analysis and two steps of a rollout.
_TIMES_PER_SAMPLE = 3
_NUM_TIMES = 400


def measure(ranks: Sequence[int]) -> list[Row]:
    """Return rows with the opens on a host, for ranks with different samples and for ranks that divide the fields."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = str(folder / "store.zarr")
        conf = write_small_run(folder, _NUM_TIMES, f"data.store={store}").data
        write_training_store(conf)
        for world in ranks:
            for label, ranks_per_sample in (("a sample on each rank", 1), ("fields divided among 8 ranks", 8)):
                for cache in ("none", "disk"):
                    near = folder / f"near_{world}_{ranks_per_sample}"
                    update = {"cache": cache, "cache_folder": str(near) if cache == "disk" else None}
                    num_opens = _count_opens(conf.model_copy(update=update), world, ranks_per_sample)
                    rows.append(Row(f"{label}, data.cache: {cache}: opens of a host", "", world, num_opens))
    return rows


def _count_opens(conf: DataConfig, world: int, ranks_per_sample: int) -> int:
    """Return the number of times that the ranks of the first host open chunks of the store.

    Args:
        conf: the config of the data.
        world: number of ranks.
        ranks_per_sample: number of neighbouring ranks that read the same samples.
    """
    context = multiprocessing.get_context("fork")
    counts: SimpleQueue[int] = context.SimpleQueue()
    processes = []
    for rank in range(_RANKS_PER_HOST):
        arguments = (conf, rank // ranks_per_sample, world // ranks_per_sample, counts)
        processes.append(context.Process(target=_read_samples, args=arguments))
    for process in processes:
        process.start()
    total = sum(counts.get() for _ in processes)
    for process in processes:
        process.join()
    return total


def _read_samples(conf: DataConfig, group: int, num_groups: int, counts: SimpleQueue[int]) -> None:
    """Read the samples of ten steps, and put the number of opens of the store into `counts`."""
    opened: list[str] = []
    open_file, copy_file = os.open, shutil.copyfile

    def count_open(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).startswith(f"{conf.store}/fields/c/"):
            opened.append(str(path))
        return open_file(path, *arguments, **options)

    def count_copy(source: str, target: Path) -> None:
        opened.append(source)
        copy_file(source, target)

    reader = open_reader(conf)
    os.open, shutil.copyfile = count_open, count_copy
    num_samples = max(_NUM_TIMES, num_groups * _NUM_STEPS)
    sampler = ResumableSampler(
        num_samples, 1, 1, 0, first_step=0, last_step=_NUM_STEPS, sample_group_index=group, num_sample_groups=num_groups
    )
    for batch in sampler:
        for sample in batch:
            for offset in range(_TIMES_PER_SAMPLE):
                reader.read((sample + offset) % _NUM_TIMES)
    counts.put(len(opened))
