"""Builds every mesh of four ranks, trains two steps and writes what the ranks held and sent; started by test_plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.collectives import CollectiveCounter
from credit.forecast.objectives.base import build_objective
from credit.models.initialise import initial_values
from credit.parallel.dtensor import local_shard
from credit.parallel.mesh import DeviceGrid, build_mesh
from credit.parallel.process_info import process_group, read_process_info
from credit.parallel.state.materialise import allocate_, fill_
from credit.train.build.stepper import build_objective_context, build_stepper
from credit.train.ema import EMA
from credit.train.optim import build_optimizer
from credit.train.step import StepSettings, TrainingStep
from tests.parallel.training.cases import MESHES
from tests.parallel.training.test_plan import CASES, config_of, degrees_of
from tests.unit.hpc.measured import allocations, step_builder_of


def held(tensors: Any) -> int:
    """Return the bytes of this rank's parts, on the rank that has most."""
    size = torch.tensor(sum(local_shard(t).numel() * t.element_size() for t in tensors))
    dist.all_reduce(size, dist.ReduceOp.MAX)
    return size.item()


def find_busiest(numbers: dict[str, int]) -> dict[str, int]:
    """Return the numbers of the rank whose sum is largest."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, numbers)
    return max(everyone, key=lambda each: sum(each.values()))


def measure(mesh: DeviceGrid, data: str, overrides: list[str]) -> dict[str, Any]:
    """Return bytes by kind, collectives of a step, and the most that a step's allocations came to."""
    config = config_of(data, overrides)
    conf, step_builder, rollout = config.trainer, step_builder_of(config), config.data.forecast_len
    model, autocast = step_builder.build_network(mesh, data != "none", conf.activation_checkpoint)
    allocate_(model, torch.device("cpu"))
    fill_(model, initial_values(model, seed=0))
    model.train()
    stepper = build_stepper(config, step_builder._assets, model, torch.device("cpu"), autocast)
    optimizer, average = build_optimizer(model, conf), EMA(model, conf.ema_decay)
    gradients: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(held(p.grad for p in model.parameters())))
    grid_shape = step_builder._assets.grid.shape if stepper.domain is None else stepper.domain.part.shape
    loss = step_builder._divide_loss(step_builder._real_loss, stepper.domain, grid_shape)
    context = build_objective_context(config, step_builder._assets, stepper, loss)
    settings = StepSettings(lambda _: rollout, 0, conf.grad_accum_every, conf.grad_max_norm, data_rank=mesh.data_rank)
    step = TrainingStep(build_objective(conf.objective, context), optimizer, average, settings)

    def take(number: int) -> None:
        step(step_builder._zero_batches(rollout, grid_shape, lambda: None), number, 1e-3)

    take(0)
    optimizer._optimizer_step_pre_hooks.clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, CollectiveCounter() as counted:
        take(1)
    return {
        "parameters": held(model.parameters()),
        "gradients": gradients[0],
        "optimizer": held(value for state in optimizer.state.values() for value in state.values()),
        "average": held(average.average.values()),
        "buffers": held(model.buffers()),
        "calls": find_busiest(counted.calls),
        "bytes": find_busiest(counted.bytes),
        "allocated": max(find_busiest({"step": allocations(profiled)}).values()),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    launch = read_process_info()
    facts = {}
    with process_group(launch, torch.device("cpu"), timeout_minutes=5):
        for number, (name, overrides) in enumerate(CASES):
            mesh = build_mesh(degrees_of(name, config_of(MESHES[name]["data"], overrides)), launch.rank, "cpu")
            facts[str(number)] = measure(mesh, MESHES[name]["data"], overrides)
    if launch.is_main:
        (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
