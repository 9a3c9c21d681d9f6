"""Time and peak memory of WXFormer's eval forward and training step, the 1 degree starter configuration by default.

Each case runs in a process of its own, so that peak memory (resident set, library and weights included) is its own.
A training step is forward, mean squared error, backward and a fused AdamW update; times are medians over steps
after a warm-up. CPU seconds (all threads, the least of the steps) tell more where other work shares the machine.

    python benchmarks/wxformer_step.py [--threads 2] [--steps 5] [--batch 1]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from credit.models import build_model

STARTER = {
    "image_height": 181,
    "image_width": 360,
    "in_channels": 80,
    "out_channels": 84,
    "dim": [32, 64, 128, 256],
    "depth": [2, 2, 8, 2],
    "dim_head": 32,
    "global_window_size": [8, 4, 2, 1],
    "local_window_size": 4,
    "decoder": "pixel_shuffle",
    "padding": {"mode": "mirror", "lat": [37, 38], "lon": [12, 12]},
}


def measure(mode: str, dtype: str, steps: int, batch: int) -> dict[str, float]:
    """Run one case in this process; return seconds, CPU seconds and the peak resident memory in GB."""
    torch.manual_seed(0)
    model = build_model("wxformer", **STARTER)
    x = torch.randn(batch, STARTER["in_channels"], 1, STARTER["image_height"], STARTER["image_width"])
    target = torch.randn(batch, STARTER["out_channels"], 1, *x.shape[-2:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.train(mode == "train")

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            y = model(x)
        if mode == "train":
            F.mse_loss(y.float(), target).backward()
            optimizer.step()
            optimizer.zero_grad()

    times, cpu_times = [], []
    with torch.set_grad_enabled(mode == "train"):
        for _ in range(steps + 1):
            start, cpu_start = time.perf_counter(), time.process_time()
            step()
            times.append(time.perf_counter() - start)
            cpu_times.append(time.process_time() - cpu_start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"time": statistics.median(times[1:]), "cpu": min(cpu_times[1:]), "peak": peak}


def main() -> None:
    """Print the table, or with --case measure one case and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--case", nargs=2, metavar=("MODE", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.case:
        print(json.dumps(measure(*args.case, args.steps, args.batch)))
        return
    print(f"torch {torch.__version__}, {args.threads} threads, batch {args.batch}, median of {args.steps}")
    print(f"{'mode':8}{'dtype':12}{'time [s]':>10}{'CPU [s]':>10}{'peak [GB]':>12}")
    for mode in ("eval", "train"):
        for dtype in ("float32", "bfloat16"):
            command = [sys.executable, __file__, *sys.argv[1:], "--case", mode, dtype]
            result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(f"{mode:8}{dtype:12}{result['time']:10.3f}{result['cpu']:10.3f}{result['peak']:12.2f}")


if __name__ == "__main__":
    main()
