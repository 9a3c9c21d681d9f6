"""Part of the scale model: division of samples, validation cases and forecasts among the ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.scale.meter import measure_usage
from benchmarks.scale.rows import Row
from benchmarks.scale.simulation import SimulatedRank
from benchmarks.scale.small_world import write_small_run
from credit.cli.rollout.rank_work import plan_rank_work, shard_initial_times
from credit.data.samples.loader import ResumableSampler
from credit.parallel.mesh import DeviceGrid, ParallelDims
from credit.train.validate import shard_cases

# Samples of 80 years of hourly data, and initial times of 20 years of daily forecasts.
_NUM_SAMPLES = 700_000
_NUM_INITIAL_TIMES = 7_300
_NUM_STEPS = 10


def measure(ranks: Sequence[int]) -> list[Row]:
    """Return rows with the time in which the last rank computes its part, and the sizes of its parts."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        inference = write_small_run(Path(folder), 8).inference
    initial_times = (np.arange(_NUM_INITIAL_TIMES) * 1440).tolist()
    for world in ranks:
        with measure_usage() as sampling:
            sampler = ResumableSampler(
                _NUM_SAMPLES, 1, 1, 0, first_step=0, last_step=_NUM_STEPS, sample_group_index=world - 1,
                num_sample_groups=world,
            )  # fmt: skip
            batches = list(sampler)
        with measure_usage() as validation:
            share = shard_cases(_NUM_INITIAL_TIMES, 1, world - 1, world)
        simulation = SimulatedRank(world, world - 1)
        # The largest number of rounds is that of rank 0, which all ranks receive.
        mesh = DeviceGrid(ParallelDims(shard=world), world - 1)
        first = SimulatedRank(world, 0)
        with first.run():
            first_mesh = DeviceGrid(ParallelDims(shard=world), 0)
            groups = shard_initial_times(initial_times, inference, None, first.process_info, first_mesh)
            plan_rank_work(groups, 0, inference, lambda _: False, first.process_info, first_mesh)
        # Each rank is alone in its group of forecasts, so only the number of rounds is a message of all.
        simulation.recording = first.recording[-1:]
        with simulation.run(), measure_usage() as forecasting:
            groups = shard_initial_times(initial_times, inference, None, simulation.process_info, mesh)
            work = plan_rank_work(groups, 0, inference, lambda _: False, simulation.process_info, mesh)
        rows += [
            Row("samples of the loader: time of 10 steps", "s", world, sampling.seconds),
            Row("samples of the loader: batches", "", world, len(batches)),
            Row("validation: time", "s", world, validation.seconds),
            Row("validation: batches of a rank", "", world, len(share.batches)),
            Row("forecasts: time", "s", world, forecasting.seconds - simulation.seconds),
            Row("forecasts: rounds of a rank", "", world, len(work.rounds) + len(work.padding_rounds)),
            Row("forecasts: received", "bytes", world, simulation.received_bytes),
        ]
    return rows
