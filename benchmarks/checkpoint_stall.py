"""How long training stands still while a checkpoint is saved: asynchronous against synchronous saves.

The state is that of AdamW: weights, averaged weights, two moments and steps, sharded by rows over the ranks. The stall
is the time in `AsyncCheckpointer.save` on the slowest rank; medians over saves after a first one, whose host memory the
later ones use again. "complete" is the time from the call until the checkpoint is flushed, summed up and linked.

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

WIDTH = 768


def build_state(parameters: float, ranks: int) -> dict[str, dict[str, Tensor]]:
    """Return stem -> name -> tensor, with a weight of WIDTH x WIDTH and a bias a layer."""
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None

    def draw(*shape: int) -> Tensor:
        full_tensor = torch.randn(shape)
        return full_tensor if mesh is None else distribute_tensor(full_tensor, mesh, [Shard(0)], src_data_rank=None)

    layers = round(parameters / (WIDTH * WIDTH + WIDTH))
    shapes = {f"{n}.{kind}": shape for n in range(layers) for kind, shape in (("w", (WIDTH, WIDTH)), ("b", (WIDTH,)))}
    state = {stem: {name: draw(*shape) for name, shape in shapes.items()} for stem in ("model", "forecast")}
    moments = {f"{name}/{key}": draw(*shape) for name, shape in shapes.items() for key in ("exp_avg", "exp_avg_sq")}
    return {**state, "optimizer": moments | {f"{name}/step": torch.tensor(1.0) for name in shapes}}


def slowest(seconds: float, ranks: int) -> float:
    """Collective: return the largest of all ranks' values."""
    value = torch.tensor(seconds, dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def run(rank: int, ranks: int, parameters: float, saves: int, folder: Path) -> None:
    """Measure on one of the ranks; the first prints a row of the table."""
    torch.set_num_threads(1)
    if ranks > 1:
        meeting = f"file://{folder}/meeting"
        dist.init_process_group("gloo", meeting, timedelta(minutes=5), world_size=ranks, rank=rank)
    state = build_state(parameters, ranks)
    stall: dict[bool, list[float]] = {True: [], False: []}
    complete: dict[bool, list[float]] = {True: [], False: []}
    with AsyncCheckpointer(folder / "checkpoints") as store:
        for number in range(2 * saves + 1):
            synchronous = number % 2 == 1
            if ranks > 1:
                dist.barrier()
            began = time.perf_counter()
            store.save(number, state, {}, {}, keep=Retention(last=1), synchronous=synchronous)
            waited = time.perf_counter() - began
            store.wait()
            if number:
                stall[synchronous].append(slowest(waited, ranks))
                complete[synchronous].append(slowest(time.perf_counter() - began, ranks))
    slow, fast = (statistics.median(stall[key]) for key in (True, False))
    if rank == 0:
        files = [file for file in (folder / "checkpoints" / "latest").rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files) / 1e9
        print(
            f"| {ranks} | {size:.2f} | {slow:.2f} | {fast:.3f} | {fast / slow:.3f} | "
            f"{statistics.median(complete[False]):.2f} |",
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
