"""Worker of test_ensemble_axis: trains ensembles whose members are shared by ranks, and writes the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from benchmarks.collectives import CollectiveCounter
from benchmarks.live_memory import LiveMemory
from credit.grid import LatLonGrid
from credit.losses import member_loss as member_loss_module
from credit.losses.member_loss import MemberLoss
from credit.parallel.mesh import build_mesh, plan_degrees
from credit.parallel.process_info import process_group, read_process_info
from tests.parallel.training import cases
from tests.unit.losses.member_losses import NUM_CHANNELS, build_losses

MEMBERS_OF_MEMORY_TEST = 8
# A thread of gloo holds the tensors of a collective until shortly after its end. A late release can make a measured
# peak too large, but never too small, so the smallest of several peaks is the right one.
MEMORY_REPETITIONS = 5


def measure_loss_memory(num_members: int) -> dict[str, float]:
    """Return the memory of value and gradient of the CRPS, in whole fields of one member.

    The result has ``total``, which includes the members that this rank has computed, and ``largest``, the largest
    tensor.
    """
    group = dist.group.WORLD
    num_ranks = dist.get_world_size(group)
    grid = LatLonGrid.equiangular(65, 24, poles=True)
    loss, build_part_losses = build_losses({"kind": "crps"}, grid=grid)
    field_shape = (NUM_CHANNELS, *grid.shape)
    member_loss = MemberLoss(loss, build_part_losses, num_members, field_shape, group)
    local_members = torch.randn(num_members // num_ranks, *field_shape, requires_grad=True)
    truth = torch.randn(1, *field_shape)
    peaks = []
    for _ in range(MEMORY_REPETITIONS):
        with LiveMemory([local_members, truth]) as memory:
            member_loss.compute(local_members.detach(), truth, needs_gradient=True)
        peaks.append(memory.peak)
    field_bytes = truth.nbytes
    return {"total": min(peaks) / field_bytes + len(local_members), "largest": memory.largest / field_bytes}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # Compute losses in parts even though the fields of these tests are small.
    member_loss_module.MIN_PART_VALUES = 1
    process_info = read_process_info()
    facts: dict[str, dict] = {}
    with process_group(process_info, torch.device("cpu"), timeout_minutes=5):
        for name, mesh_config in cases.ENSEMBLE_MESHES[process_info.world].items():
            mesh = build_mesh(plan_degrees(cases.parallelism(name), process_info.world), process_info.rank, "cpu")
            for number in cases.ENSEMBLE_CASE_NUMBERS[name]:
                counter = CollectiveCounter()
                results = cases.train(cases.CASES[number], mesh, mesh_config["data"], counter)
                if number == cases.COUNTED_CASE:
                    facts[name] = {"calls": counter.calls, "bytes": counter.bytes}
                if process_info.is_main:
                    save_file(results, folder / f"{name}-{number}.safetensors")
        facts["loss memory"] = measure_loss_memory(MEMBERS_OF_MEMORY_TEST)
    if process_info.is_main:
        (folder / f"facts-{process_info.world}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
