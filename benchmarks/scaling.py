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
from memory import MESHES
from torch import nn

from credit.config.sections.trainer import ParallelismConfig, TrainerConfig
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
from credit.parallel.reduce import gradient_norm
from credit.parallel.state.materialise import allocate_, fill_
from credit.train.optim import build_optimizer

CHANNELS = 80
UNITS = {"layer": (TransformerLayer,), "stage": (EncoderStage,), "part": (WindowAttention, FeedForward)}


def mark(model: nn.Module, unit: str) -> None:
    """Make `unit` the sharding unit of the encoder."""
    for module in model.modules():
        for name, kinds in UNITS.items():
            if isinstance(module, kinds):
                module._fsdp2_shard = name == unit


def build(mesh: DeviceGrid, data: str, asked: argparse.Namespace) -> nn.Module:
    """Collective: return the network, distributed over a mesh, in training mode.

    Args:
        mesh: mesh of the ranks.
        data: value of ``trainer.parallelism.data``.
        asked: options of the command line.
    """
    with torch.device("meta"):
        model = WXFormer.from_kwargs(
            image_height=asked.grid[0], image_width=asked.grid[1],
            in_channels=CHANNELS, out_channels=CHANNELS,
            dim=[asked.dim * 2**i for i in range(4)], depth=[2, 2, 8, 2], dim_head=8, global_window_size=[4, 2, 2, 1],
            local_window_size=[4, 4, 2, 1], padding={"mode": "earth", "lat": [8, 8], "lon": [16, 16]},
            decoder="pixel_shuffle",
        )  # fmt: skip
    mark(model, asked.units)
    parallelize(model, mesh.device_mesh, shard=data != "none", checkpoint=asked.checkpoint)
    allocate_(model, torch.device("cpu"))
    fill_(model, initial_values(model, seed=0))
    return model.train()


def measure(mesh: DeviceGrid, data: str, asked: argparse.Namespace) -> tuple[float, CollectiveCounter, int]:
    """Collective: return the median seconds of a step, the collectives of a step, and its peak memory in bytes.

    The parameters are those of `build`.
    """
    model = build(mesh, data, asked)
    optimizer = build_optimizer(model, TrainerConfig(max_steps=1))
    fields = torch.randn(1, *model.spec.in_shape, generator=torch.Generator().manual_seed(mesh.data_rank))

    def step() -> None:
        spectral_norm.advance_power_iterations(model)
        (model(fields) - fields).square().mean().backward()
        norm, _ = gradient_norm([p.grad for p in model.parameters()])
        optimizer.grad_scale = norm.clamp(min=1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    times = []
    for _ in range(asked.steps):
        dist.barrier()
        began = time.perf_counter()
        step()
        taken = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        times.append(taken.item())
    # Tensors that exist from step to step are not part of the peak.
    staying = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        staying += state.values()
    with CollectiveCounter() as counted, LiveMemory(existing_tensors=map(local_shard, staying)) as live:
        step()
    return statistics.median(times), counted, live.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--grid", type=int, nargs=2, default=[48, 96])
    parser.add_argument("--dim", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--units", default="layer", choices=UNITS)
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    launch = read_process_info()
    if launch.world < 2:
        parser.error("start it with torchrun on two ranks or more")
    with process_group(launch, torch.device("cpu"), timeout_minutes=10):
        if launch.is_main:
            print("| data | replicate x shard x tensor | s | gathers | reduce-scatters | all-reduces | MB | peak MB |")
            print("|---|---|---|---|---|---|---|---|")
        for conf in MESHES if asked.units == "layer" else [{"data": "fsdp2"}]:
            degrees = plan_degrees(ParallelismConfig(**conf), launch.world)
            mesh = build_mesh(degrees, launch.rank, "cpu")
            seconds, counted, peak = measure(mesh, conf["data"], asked)
            if launch.is_main:
                calls = " | ".join(str(counted.calls[kind]) for kind in ("all-gather", "reduce-scatter", "all-reduce"))
                grid = f"{degrees.replicate} x {degrees.shard} x {degrees.tensor}"
                total = sum(counted.bytes.values()) / 1e6
                print(
                    f"| {conf['data']} | {grid} | {seconds:.2f} | {calls} | {total:.1f} | {peak / 1e6:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
