"""Part of the scale model: communicators of a rank, by the axes of the mesh.

The network is split and sharded as in a run, on the meta device, because this creates groups of several axes. Only
groups of at least two ranks are counted. A run also has the group of all ranks (two communicators on GPUs), and the
group of the thread that saves checkpoints.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.scale.meter import measure_usage
from benchmarks.scale.rows import Row
from benchmarks.scale.simulation import SimulatedRank
from benchmarks.scale.small_world import ATTRIBUTES, build_grid, write_small_run
from credit.config import Config
from credit.config.sections.execution import ParallelismConfig
from credit.parallel.mesh import build_mesh, plan_degrees
from credit.train.build.assets import ModelAssets
from credit.train.build.dry_run import build_placeholder_assets
from credit.train.build.model import build_parallel_model

# Communicators besides those of axes: that of all ranks for GPUs and for host memory, and that of the saving thread.
COMMON_COMMUNICATORS = 3
# Name of a mesh -> settings of ``trainer.parallelism``.
MESHES = {
    "dp": {},
    "replicate": {"data": "ddp"},
    "replicate x dp": {"replicate": 2},
    "dp x tensor": {"tensor": 2},
    "replicate x dp x tensor": {"replicate": 2, "tensor": 2},
    "replicate x dp x ensemble x tensor": {"replicate": 2, "tensor": 2, "ensemble": 2},
    "replicate x dp x domain x tensor": {"replicate": 2, "domain": 2, "tensor": 2},
}


def measure(ranks: Sequence[int]) -> list[Row]:
    """Return rows with the communicators of the last rank, the calls that create them, and time and memory."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_small_run(Path(folder), 8)
    grid = build_grid()
    config = config.model_copy(update={"model": config.model.resolve(grid.shape)})
    assets = build_placeholder_assets(config, grid, ATTRIBUTES)
    rows = []
    for world in ranks:
        for name, settings in MESHES.items():
            rows += _measure_mesh(name, settings, config, assets, world)
    return rows


def _measure_mesh(name: str, settings: Mapping[str, Any], config: Config, assets: ModelAssets, world: int) -> list[Row]:
    """Distribute the network over a mesh as the last of `world` ranks, and return its rows.

    Args:
        name: name of the mesh.
        settings: settings of ``trainer.parallelism``.
        config: config of the run, without these settings.
        assets: assets of the network.
        world: number of ranks.
    """
    parallelism = ParallelismConfig(**settings)
    trainer = config.trainer.model_copy(update={"parallelism": parallelism})
    config = config.model_copy(update={"trainer": trainer})
    simulation = SimulatedRank(world, world - 1)
    with simulation.run(), measure_usage() as usage:
        mesh = build_mesh(plan_degrees(parallelism, world), world - 1, "cpu")
        build_parallel_model(config, assets, mesh, torch.device("meta"))
    num_groups = sum(size > 1 for _, size in simulation.groups)
    reason = "torch's meshes list all ranks"
    return [
        Row(f"{name}: communicators", "", world, COMMON_COMMUNICATORS + num_groups),
        Row(f"{name}: groups of one rank", "", world, sum(size == 1 for _, size in simulation.groups)),
        Row(f"{name}: calls that create groups", "", world, simulation.group_calls),
        Row(f"{name}: time", "s", world, usage.seconds, reason),
        Row(f"{name}: memory", "MB", world, usage.megabytes, reason),
    ]
