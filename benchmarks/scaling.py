"""Time, collectives and memory of an optimizer step, by mesh.

The network is that of the 1 degree starter (or one of other widths, --dim) on a grid of 48 x 96 (or --grid), with one
sample per data rank, spectral norm and float32. Every mesh of the ranks trains in the same run, so their times can be
compared. If the ranks share cores, only the collectives tell something about a cluster. The time is the median over the
steps of the slowest rank. The peak is the memory of a step without weights and optimizer state. --units compares
sharding units: a transformer layer, as in the package, a whole stage, or each attention and feed-forward module (on the
mesh 4 x 1 only).

    torchrun --standalone --nproc-per-node=4 benchmarks/scaling.py [--steps 5] [--grid 48 96] [--checkpoint]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from collectives import CollectiveCounter
from live_memory import LiveMemory
from memory import MESHES, require_num_ranks
from torch import nn

from credit.config.sections.execution import ParallelismConfig
from credit.config.sections.trainer import TrainerConfig
from credit.models.initialise import initial_values
from credit.models.layers import spectral_norm
from credit.models.layers.transformer_layer import FeedForward, TransformerLayer
from credit.models.layers.window_attention import WindowAttention
from credit.models.wxformer import WXFormer
from credit.models.wxformer.model import EncoderStage
from credit.parallel.dtensor import local_shard
from credit.parallel.mesh import DeviceGrid, build_mesh, plan_degrees
from credit.parallel.parallelize import parallelize
from credit.parallel.process_info import process_group, read_process_info
from credit.parallel.reduce import reduce_norm_and_flags
from credit.parallel.state.materialise import allocate_, fill_
from credit.train.optim import build_optimizer

CHANNELS = 80
# Value of --units -> classes of modules that are sharding units.
UNITS = {"layer": (TransformerLayer,), "stage": (EncoderStage,), "part": (WindowAttention, FeedForward)}


def mark_sharding_units(model: nn.Module, unit: str) -> None:
    """Mark the modules of the encoder that are sharding units, according to a kind of unit in `UNITS`."""
    for module in model.modules():
        for name, classes in UNITS.items():
            if isinstance(module, classes):
                module._fsdp2_shard = name == unit


def build_distributed_network(mesh: DeviceGrid, data: str, args: argparse.Namespace) -> nn.Module:
    """Collective: return the network, distributed over a mesh, in training mode.

    Args:
        mesh: mesh of the ranks.
        data: value of ``trainer.parallelism.data``.
        args: options of the command line.
    """
    with torch.device("meta"):
        model = WXFormer.from_kwargs(
            image_height=args.grid[0], image_width=args.grid[1],
            in_channels=CHANNELS, out_channels=CHANNELS,
            dim=[args.dim * 2**stage for stage in range(4)], depth=[2, 2, 8, 2], dim_head=8,
            global_window_size=[4, 2, 2, 1], local_window_size=[4, 4, 2, 1],
            padding={"mode": "earth", "lat": [8, 8], "lon": [16, 16]}, decoder="pixel_shuffle",
        )  # fmt: skip
    mark_sharding_units(model, args.units)
    parallelize(model, mesh.device_mesh, shard=data != "none", checkpoint=args.checkpoint)
    allocate_(model, torch.device("cpu"))
    fill_(model, initial_values(model, seed=0))
    return model.train()


def measure(mesh: DeviceGrid, data: str, args: argparse.Namespace) -> tuple[float, CollectiveCounter, int]:
    """Collective: return the median seconds of a step, the collectives of a step, and its peak memory in bytes.

    The parameters are those of `build`.
    """
    model = build_distributed_network(mesh, data, args)
    optimizer = build_optimizer(model, TrainerConfig(max_steps=1))
    # Data-parallel ranks have different samples, tensor-parallel peers the same.
    fields = torch.randn(1, *model.spec.in_shape, generator=torch.Generator().manual_seed(mesh.data_rank))

    def step() -> None:
        spectral_norm.advance_power_iterations(model)
        (model(fields) - fields).square().mean().backward()
        norm, _ = reduce_norm_and_flags([p.grad for p in model.parameters()])
        optimizer.grad_scale = norm.clamp(min=1.0)
        optimizer.step()
        optimizer.zero_grad()

    # The first step warms up.
    step()
    times = []
    for _ in range(args.steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        slowest = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
    # Tensors that exist from step to step are not part of the peak.
    lasting_tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        lasting_tensors += state.values()
    with CollectiveCounter() as collectives, LiveMemory(existing_tensors=map(local_shard, lasting_tensors)) as live:
        step()
    return statistics.median(times), collectives, live.peak


def main() -> None:
    """Print a row for each mesh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--grid", type=int, nargs=2, default=[48, 96])
    parser.add_argument("--dim", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--units", default="layer", choices=UNITS)
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    process_info = read_process_info()
    require_num_ranks(parser, process_info.world)
    # Other sharding units are measured on one mesh only.
    meshes = MESHES if args.units == "layer" else [{"data": "fsdp2"}]
    with process_group(process_info, torch.device("cpu"), timeout_minutes=10):
        if process_info.is_main:
            print("| data | replicate x shard x tensor | s | gathers | reduce-scatters | all-reduces | MB | peak MB |")
            print("|---|---|---|---|---|---|---|---|")
        for conf in meshes:
            degrees = plan_degrees(ParallelismConfig(**conf), process_info.world)
            mesh = build_mesh(degrees, process_info.rank, "cpu")
            seconds, collectives, peak = measure(mesh, conf["data"], args)
            if process_info.is_main:
                kinds = ("all-gather", "reduce-scatter", "all-reduce")
                calls = " | ".join(str(collectives.calls[kind]) for kind in kinds)
                grid = f"{degrees.replicate} x {degrees.shard} x {degrees.tensor}"
                megabytes = sum(collectives.bytes.values()) / 1e6
                print(
                    f"| {conf['data']} | {grid} | {seconds:.2f} | {calls} | {megabytes:.1f} | {peak / 1e6:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
