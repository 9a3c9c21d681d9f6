"""Worker of test_plan: trains two steps on every mesh of four ranks and writes their memory and traffic."""

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
from tests.parallel.training.test_plan import CASES, build_case_config, build_degrees
from tests.unit.hpc.measured import allocations, step_builder_of


def count_local_bytes(tensors: Any) -> int:
    """Collective: return the bytes of the local parts of tensors, on the rank that has most."""
    size = torch.tensor(sum(local_shard(t).numel() * t.element_size() for t in tensors))
    dist.all_reduce(size, dist.ReduceOp.MAX)
    return size.item()


def find_busiest(numbers: dict[str, int]) -> dict[str, int]:
    """Collective: return the numbers of the rank whose sum is largest."""
    numbers_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers_by_rank, numbers)
    return max(numbers_by_rank, key=lambda rank_numbers: sum(rank_numbers.values()))


def measure(mesh: DeviceGrid, data: str, overrides: list[str]) -> dict[str, Any]:
    """Return the bytes of each kind of state, the collectives of a step, and the peak of its allocations."""
    config = build_case_config(data, overrides)
    trainer_config, step_builder, rollout = config.trainer, step_builder_of(config), config.data.forecast_len
    model, autocast = step_builder.build_network(mesh, data != "none", trainer_config.activation_checkpoint)
    allocate_(model, torch.device("cpu"))
    fill_(model, initial_values(model, seed=0))
    model.train()
    stepper = build_stepper(config, step_builder._assets, model, torch.device("cpu"), autocast)
    optimizer, average = build_optimizer(model, trainer_config), EMA(model, trainer_config.ema_decay)
    gradients: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(count_local_bytes(p.grad for p in model.parameters())))
    grid_shape = step_builder._assets.grid.shape if stepper.domain is None else stepper.domain.part.shape
    loss = step_builder._divide_loss(step_builder._real_loss, stepper.domain, grid_shape)
    context = build_objective_context(config, step_builder._assets, stepper, loss)
    settings = StepSettings(
        lambda _: rollout, 0, trainer_config.grad_accum_every, trainer_config.grad_max_norm, data_rank=mesh.data_rank
    )
    step = TrainingStep(build_objective(trainer_config.objective, context), optimizer, average, settings)

    def take_step(number: int) -> None:
        step(step_builder._zero_batches(rollout, grid_shape, lambda: None), number, 1e-3)

    take_step(0)
    optimizer._optimizer_step_pre_hooks.clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, CollectiveCounter() as counter:
        take_step(1)
    return {
        "parameters": count_local_bytes(model.parameters()),
        "gradients": gradients[0],
        "optimizer": count_local_bytes(value for state in optimizer.state.values() for value in state.values()),
        "average": count_local_bytes(average.average.values()),
        "buffers": count_local_bytes(model.buffers()),
        "calls": find_busiest(counter.calls),
        "bytes": find_busiest(counter.bytes),
        "allocated": max(find_busiest({"step": allocations(profiler)}).values()),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    process_info = read_process_info()
    facts = {}
    with process_group(process_info, torch.device("cpu"), timeout_minutes=5):
        for number, (name, overrides) in enumerate(CASES):
            mesh = build_mesh(
                build_degrees(name, build_case_config(MESHES[name]["data"], overrides)), process_info.rank, "cpu"
            )
            facts[str(number)] = measure(mesh, MESHES[name]["data"], overrides)
    if process_info.is_main:
        (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
