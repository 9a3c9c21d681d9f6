"""Time and memory of one step on fields that are divided among ranks, compared with the same step on one rank.

    python benchmarks/domain.py [--model starter|published] [--case forecast|train] [--checkpoint] [--ranks 2]
                                [--parts LAT LON] [--rounds 5] [--steps 3] [--dtype float32|bfloat16]

Every rank is a process with one thread, and the ranks exchange cells with gloo. In each round, rank 0 first takes the
step on the whole field while the other ranks wait. Then all ranks take the step on their parts. The time of the divided
step is the time of the slowest rank. Ratios are computed within a round, because the machine may be faster in the next
round.

`forecast` is one forward pass of a network that is prepared as by `credit rollout`. `train` is forward pass, mean
squared error and backward pass; on several ranks, FSDP2 shards the weights over them. `tensors` is the peak
memory of the tensors that torch creates in a step, without weights and samples. It is measured in a separate step. With
--rounds 0, only this step is taken, which is enough for a large network; its seconds are also printed.

The column `difference` is the largest difference between the outputs of the two steps (`forecast`) or between their
losses (`train`), relative to the largest output or to the loss.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from live_memory import LiveMemory
from options import positive
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from wxformer import MODELS, build_ours, mean_square, prepare, random_sample

from credit.models.layers.spectral_norm import advance_power_iterations
from credit.parallel.domain.split import split_domain
from credit.parallel.parallelize import parallelize

# A step returns the output of a forecast, or the loss of a training step as a tensor without dimensions.
Step = Callable[[], Tensor]


def main() -> None:
    """Start the ranks; the first rank prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="starter")
    parser.add_argument("--case", choices=("forecast", "train"), default="forecast")
    parser.add_argument("--checkpoint", action="store_true", help="recompute every block in the backward pass")
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--parts", type=positive, nargs=2, metavar=("LAT", "LON"), help="parts of rows and of columns")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=positive, default=3, help="steps in a round, of which the fastest counts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run_rank, (args, f"file://{folder}/store"), args.ranks)


def _run_rank(rank: int, args: argparse.Namespace, init_method: str) -> None:
    """Measure the step on the whole field and the divided step, on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=args.ranks)
    torch.manual_seed(0)
    x, target = random_sample(MODELS[args.model])
    divided_model = _build_model(args)
    mesh = init_device_mesh("cpu", (1, args.ranks), mesh_dim_names=("dp", "domain"))
    plan = split_domain(divided_model, mesh["domain"].get_group(), args.parts and tuple(args.parts))
    divided_model = _finish_model(divided_model, args, mesh)
    part = plan.grid.owned(rank).slices
    divided = _make_step(divided_model, x[(..., *part)].contiguous(), target[(..., *part)].contiguous(), args)
    divided_memory, divided_time, divided_result = _measure_memory(divided)
    whole = None
    if rank == 0:
        whole_model = _finish_model(_build_model(args), args, None)
        whole = _make_step(whole_model, x, target, args)
    whole_memory, whole_time, whole_result = _measure_memory(whole)
    ratios = []
    times = []
    for _ in range(args.rounds):
        times.append((_time_step(whole, args.steps), _time_step(divided, args.steps)))
        ratios.append(times[-1][1] / times[-1][0])
    difference = _compare(whole_result, divided_result, part, args)
    if rank == 0:
        rows, columns = len(plan.grid.rows.owned), len(plan.grid.columns.owned)
        print(f"{args.model}, {args.case}, {args.dtype}, checkpointing {args.checkpoint}")
        print(f"{args.ranks} ranks, {rows} parts of the rows x {columns} parts of the columns")
        if ratios:
            whole_times, divided_times = zip(*times, strict=True)
            print(f"time, 1 rank     {statistics.median(whole_times):8.3f} s")
            print(f"time, divided    {statistics.median(divided_times):8.3f} s")
            print(f"ratio            {statistics.median(ratios):8.3f}   ({min(ratios):.3f} to {max(ratios):.3f})")
        print(f"tensors, 1 rank  {whole_memory / 1e9:8.3f} GB   ({whole_time:.1f} s)")
        print(f"tensors, divided {divided_memory / 1e9:8.3f} GB   ({divided_time:.1f} s)")
        print(f"difference       {difference:8.1e}")
    dist.destroy_process_group()


def _build_model(args: argparse.Namespace) -> nn.Module:
    """Return the network with the same random weights on every rank."""
    torch.manual_seed(1)
    return build_ours(args.model)


def _finish_model(model: nn.Module, args: argparse.Namespace, mesh: dist.DeviceMesh | None) -> nn.Module:
    """Prepare the network like `credit train` or `credit rollout`, and return it."""
    if args.case == "forecast":
        model.eval()
        prepare(model, "eval", args.dtype)
        return model
    # `credit train` keeps freed memory for the next step. Here several ranks share one machine, which it would fill.
    model.train()
    return parallelize(model, mesh, checkpoint=args.checkpoint)


def _make_step(model: nn.Module, x: Tensor, target: Tensor, args: argparse.Namespace) -> Step:
    """Return the function that takes one step."""

    def compute() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16"):
            return model(x)

    def forecast() -> Tensor:
        with torch.inference_mode():
            return compute()

    def train() -> Tensor:
        advance_power_iterations(model)
        loss = mean_square(compute(), target)
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return forecast if args.case == "forecast" else train


def _time_step(step: Step | None, steps: int) -> float:
    """Collective: return the seconds of the fastest step on the slowest rank; a rank with None takes no step."""
    seconds = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        if step is not None:
            step()
        elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        seconds.append(elapsed.item())
    return min(seconds)


def _measure_memory(step: Step | None) -> tuple[float, float, Tensor | None]:
    """Collective: return the peak memory of a step over all ranks in bytes, its seconds, and this rank's result."""
    result = None
    peak = 0
    dist.barrier()
    start = time.perf_counter()
    if step is not None:
        with LiveMemory() as live:
            result = step()
        peak = live.peak
    largest = torch.tensor([peak, time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    largest_peak, seconds = largest.tolist()
    return largest_peak, seconds, result


def _compare(whole: Tensor | None, divided: Tensor, part: tuple[slice, slice], args: argparse.Namespace) -> float:
    """Collective: return the relative difference of the results of both steps; `whole` is None except on rank 0."""
    if args.case == "train":
        # A field of equal parts, which the networks here have, has the mean of the losses of its parts.
        mean_loss = divided.clone()
        dist.all_reduce(mean_loss)
        mean_loss /= args.ranks
        return float("nan") if whole is None else abs(mean_loss.item() / whole.item() - 1)
    sent = [whole]
    dist.broadcast_object_list(sent)
    whole = sent[0]
    difference = (divided.float() - whole[(..., *part)].float()).abs().max() / whole.float().abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    return difference.item()


if __name__ == "__main__":
    # Spawned processes import this module by its name, for which the folder must be on the path.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    main()
