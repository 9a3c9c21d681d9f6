"""Time that training waits while a checkpoint is saved: asynchronous against synchronous saves.

The state has weights, averaged weights, and the moments and step counts of AdamW, sharded by rows over the ranks. The
stall is the time in `AsyncCheckpointer.save` on the slowest rank. The first save is not part of the medians, because
later saves use its host memory again. "complete" is the time from the call until the checkpoint is flushed to the disk,
has its checksums and is linked.

    python benchmarks/checkpoint_stall.py [--ranks 1 4] [--parameters 60e6] [--saves 5] [--folder DIR]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from credit.train.checkpoint.async_writer import AsyncCheckpointer
from credit.train.checkpoint.retention import Retention

# Inputs and outputs of a layer.
WIDTH = 768


def build_state(parameters: float, ranks: int) -> dict[str, dict[str, Tensor]]:
    """Return file of the checkpoint -> name -> tensor; each layer has a weight (WIDTH, WIDTH) and a bias (WIDTH,).

    Args:
        parameters: approximate number of parameters.
        ranks: number of ranks over which tensors are sharded by rows.
    """
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None

    def sample_tensor(shape: tuple[int, ...]) -> Tensor:
        full_tensor = torch.randn(shape)
        if mesh is None:
            return full_tensor
        return distribute_tensor(full_tensor, mesh, [Shard(0)], src_data_rank=None)

    model: dict[str, Tensor] = {}
    forecast: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    layers = round(parameters / (WIDTH * WIDTH + WIDTH))
    for layer in range(layers):
        for kind, shape in (("w", (WIDTH, WIDTH)), ("b", (WIDTH,))):
            name = f"{layer}.{kind}"
            model[name] = sample_tensor(shape)
            forecast[name] = sample_tensor(shape)
            optimizer[f"{name}/exp_avg"] = sample_tensor(shape)
            optimizer[f"{name}/exp_avg_sq"] = sample_tensor(shape)
            optimizer[f"{name}/step"] = torch.tensor(1.0)
    return {"model": model, "forecast": forecast, "optimizer": optimizer}


def max_over_ranks(seconds: float, ranks: int) -> float:
    """Collective: return the largest value of all ranks."""
    value = torch.tensor(seconds, dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def run(rank: int, ranks: int, parameters: float, saves: int, folder: Path) -> None:
    """Measure the saves on one rank; rank 0 prints a row of the table.

    Args:
        rank: number of this rank.
        ranks: number of ranks.
        parameters: approximate number of parameters.
        saves: number of measured saves of each kind.
        folder: folder of the checkpoints.
    """
    torch.set_num_threads(1)
    if ranks > 1:
        rendezvous_url = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", rendezvous_url, timedelta(minutes=5), world_size=ranks, rank=rank)
    state = build_state(parameters, ranks)
    # True for synchronous saves -> seconds of each save. The two kinds alternate; the first save does not count.
    stall: dict[bool, list[float]] = {True: [], False: []}
    complete: dict[bool, list[float]] = {True: [], False: []}
    with AsyncCheckpointer(folder / "checkpoints") as store:
        for number in range(2 * saves + 1):
            synchronous = number % 2 == 1
            if ranks > 1:
                dist.barrier()
            start = time.perf_counter()
            store.save(number, state, {}, {}, keep=Retention(last=1), synchronous=synchronous)
            stall_seconds = time.perf_counter() - start
            # An asynchronous save goes on in the background.
            store.wait()
            if number > 0:
                stall[synchronous].append(max_over_ranks(stall_seconds, ranks))
                complete[synchronous].append(max_over_ranks(time.perf_counter() - start, ranks))
    synchronous_stall = statistics.median(stall[True])
    asynchronous_stall = statistics.median(stall[False])
    asynchronous_complete = statistics.median(complete[False])
    if rank == 0:
        checkpoint = folder / "checkpoints" / "latest"
        files = [file for file in checkpoint.rglob("*") if file.is_file()]
        gigabytes = sum(file.stat().st_size for file in files) / 1e9
        ratio = asynchronous_stall / synchronous_stall
        print(
            f"| {ranks} | {gigabytes:.2f} | {synchronous_stall:.2f} | {asynchronous_stall:.3f} | {ratio:.3f} | "
            f"{asynchronous_complete:.2f} |",
            flush=True,
        )
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--parameters", type=float, default=60e6)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    arguments = parser.parse_args()
    print(f"{arguments.parameters / 1e6:.0f} M parameters, median of {arguments.saves}\n")
    print("| ranks | GB | synchronous s | asynchronous s | ratio | complete s |\n|---|---|---|---|---|---|")
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            mp.spawn(run, (ranks, arguments.parameters, arguments.saves, Path(folder)), nprocs=ranks)


if __name__ == "__main__":
    main()
