"""Memory of weights, gradients and optimizer state on each rank, by mesh.

The script builds every mesh of the ranks. As in training, the model is split and sharded on the meta device, and then
gets memory, weights, gradients and AdamW's state. The table shows the bytes of the tensors on the rank with the most
bytes. The saving is relative to ddp, with which every rank has all tensors. Meshes are replicate x shard x tensor.

    torchrun --standalone --nproc-per-node=4 benchmarks/memory.py [--decoder pixel_shuffle]
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from networks import PUBLISHED

from credit.config.sections.execution import ParallelismConfig
from credit.config.sections.trainer import TrainerConfig
from credit.models.initialise import initial_values
from credit.models.wxformer import WXFormer
from credit.parallel.dtensor import local_shard
from credit.parallel.mesh import DeviceGrid, build_mesh, plan_degrees
from credit.parallel.parallelize import parallelize
from credit.parallel.process_info import process_group, read_process_info
from credit.parallel.state.materialise import allocate_, fill_, require_filled
from credit.train.optim import build_optimizer

# Number of ranks of the meshes below.
NUM_RANKS = 4
# Sections `trainer.parallelism` of configs.
MESHES = [
    {"data": "ddp"},
    {"data": "fsdp2"},
    {"data": "fsdp2", "tensor": 2},
    {"data": "fsdp2", "tensor": 4},
    {"data": "none", "tensor": 4},
    {"data": "fsdp2", "replicate": 2},
    {"data": "fsdp2", "replicate": 2, "tensor": 2},
]


def measure_rank_bytes(mesh: DeviceGrid, data: str, decoder: str) -> tuple[int, int]:
    """Collective: return the number of parameters of the model, and the bytes of the tensors on this rank.

    Args:
        mesh: mesh of the ranks.
        data: value of ``trainer.parallelism.data``.
        decoder: value of ``model.decoder``.
    """
    with torch.device("meta"):
        model = WXFormer.from_kwargs(**PUBLISHED | {"decoder": decoder})
    # Counted before the model is split and sharded.
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    parallelize(model, mesh.device_mesh, shard=data != "none")
    allocate_(model, torch.device("cpu"))
    fill_(model, initial_values(model, seed=0))
    require_filled(model)
    optimizer = build_optimizer(model, TrainerConfig(max_steps=1))
    tensors = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        tensors.append(parameter.grad)
    for state in optimizer.state.values():
        tensors += state.values()
    num_bytes = 0
    for tensor in tensors:
        shard = local_shard(tensor)
        num_bytes += shard.numel() * shard.element_size()
    return num_parameters, num_bytes


def require_num_ranks(parser: argparse.ArgumentParser, num_ranks: int) -> None:
    """End the program with a command-line error if it was not started on `NUM_RANKS` ranks."""
    if num_ranks != NUM_RANKS:
        parser.error(
            f"its meshes are for {NUM_RANKS} ranks, and {num_ranks} were started; start it with torchrun "
            f"--standalone --nproc-per-node={NUM_RANKS}"
        )


def main() -> None:
    """Print a row for each mesh, with the bytes on the rank with the most bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoder", default="transposed", choices=("transposed", "pixel_shuffle"))
    decoder = parser.parse_args().decoder
    torch.set_num_threads(1)
    process_info = read_process_info()
    require_num_ranks(parser, process_info.world)
    with process_group(process_info, torch.device("cpu"), timeout_minutes=20):
        # The first mesh is ddp, to which the others are compared.
        ddp_bytes = 0
        for conf in MESHES:
            degrees = plan_degrees(ParallelismConfig(**conf), process_info.world)
            mesh = build_mesh(degrees, process_info.rank, "cpu")
            num_parameters, rank_bytes = measure_rank_bytes(mesh, conf["data"], decoder)
            largest = torch.tensor(rank_bytes)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            max_bytes = largest.item()
            if conf is MESHES[0]:
                ddp_bytes = max_bytes
            if process_info.is_main:
                if conf is MESHES[0]:
                    print(f"WXFormer, {num_parameters / 1e6:.1f} M parameters, float32, {process_info.world} ranks\n")
                    print("| data | replicate x shard x tensor | MB a rank | saved |\n|---|---|---|---|")
                grid = f"{degrees.replicate} x {degrees.shard} x {degrees.tensor}"
                saving = 1 - max_bytes / ddp_bytes
                print(f"| {conf['data']} | {grid} | {max_bytes / 1e6:.0f} | {100 * saving:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
