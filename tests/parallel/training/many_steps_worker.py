"""Worker of test_many_steps: two ranks train for many steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from credit.config.sections.execution import ParallelismConfig
from credit.parallel.dtensor import local_shard, shard_dim
from credit.parallel.mesh import DeviceGrid, build_mesh, plan_degrees
from credit.parallel.process_info import process_group, read_process_info
from tests.parallel.training import cases

LOW_PRECISION = cases.Case(amp=True, steps=50)
DROPOUT = cases.Case(spectral_norm=False, steps=200, dropout=0.1)


def compare_replicas(mesh: DeviceGrid) -> dict[str, bool]:
    """Train with dropout and return, for each parameter that is not split, True if it is equal on all tensor peers."""
    model, autocast = cases.build(DROPOUT, mesh, "none")
    step, *_ = cases.build_step(DROPOUT, model, autocast, mesh)
    batch_iterator = cases.batches(DROPOUT, mesh)
    for number in range(DROPOUT.steps):
        step(batch_iterator, number, 1e-3)
    equality_by_name = {}
    for name, p in model.named_parameters():
        if any(shard_dim(placement) is not None for placement in getattr(p, "placements", ())):
            continue
        local_part = local_shard(p).contiguous()
        rank0_part = local_part.clone()
        dist.broadcast(rank0_part, 0)
        is_equal = torch.tensor(float(torch.equal(rank0_part, local_part)))
        dist.all_reduce(is_equal, dist.ReduceOp.MIN)
        equality_by_name[name] = bool(is_equal)
    return equality_by_name


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    process_info = read_process_info()
    with process_group(process_info, torch.device("cpu"), timeout_minutes=2):
        meshes = {
            tensor: build_mesh(
                plan_degrees(ParallelismConfig(tensor=tensor), process_info.world), process_info.rank, "cpu"
            )
            for tensor in (1, 2)
        }
        losses = cases.train(LOW_PRECISION, meshes[1])["loss"].tolist()
        equality_by_name = compare_replicas(meshes[2])
    if process_info.is_main:
        (folder / "facts.json").write_text(json.dumps({"losses": losses, "equal": equality_by_name}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
