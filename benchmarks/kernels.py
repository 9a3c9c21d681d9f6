"""Time and memory of a network's steps, with all kernels, and with one kernel replaced with plain torch.

    python benchmarks/kernels.py [--network starter] [--threads 1] [--rounds 7] [--steps train forecast]
                                 [--dtypes float32 bfloat16] [--kernels attention mlp ...]

The network is WXFormer with the sizes of the 1 degree starter, and one sample in a step. With `--network unet`, or
another `model.type`, it is a network with its default keys and the channels of `config/speedy_5p6deg.yml`, and eight
samples in a step.

Each row is a kernel of `credit.models.kernels`. Its numbers are the costs of a step without the kernel, divided by the
costs of a step with all kernels: 1.05 means that the kernel saves 5 %. In each round, the two steps follow one another,
in alternating order. The tables show the median, the smallest and the largest ratio of the rounds. On a shared machine,
CPU time is more reliable than wall time. `peak` is the peak memory of tensors in a separate step, without weights,
samples and optimizer; it does not depend on the load of the machine.

A training step is forward, mean squared error, backward and a fused AdamW update. A forecast step is a forward pass
without gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from live_memory import LiveMemory
from networks import STARTER
from options import positive
from torch import Tensor, nn
from wxformer import build_ours, mean_square, prepare, random_sample

from credit.config.registry import MODELS
from credit.models.base import ModelSpec
from credit.models.initialise import initialise_
from credit.models.kernels.dispatch import KERNELS, Kernel, use_plain_formulations
from credit.models.registry import build_model, model_names

# Kinds of steps, and the dtypes of their products.
STEPS = ("train", "forecast")
DTYPES = ("float32", "bfloat16")
# Name of the default network on the command line.
STARTER_NAME = "starter"
# Grid and channels of `config/speedy_5p6deg.yml`, and number of samples in a step.
SMALL_SIZES = {"image_height": 32, "image_width": 64, "in_channels": 34, "out_channels": 25}
SMALL_BATCH = 8


@dataclass(frozen=True)
class Cost:
    """Cost of one step.

    Attributes:
        wall_s: elapsed seconds.
        cpu_s: seconds of processor time.
    """

    wall_s: float
    cpu_s: float


def build_small_network(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network with its default keys on fields of 5.6 degrees, and random input and target of a batch."""
    spec = ModelSpec.from_sizes(**SMALL_SIZES)
    model = build_model(spec, MODELS.find_section(name).model_validate({"type": name}))
    initialise_(model, 0)
    x = torch.randn(SMALL_BATCH, *spec.in_shape)
    with torch.no_grad():
        target = torch.randn_like(model(x))
    return model, x, target


def build_step(network: str, kind: str, dtype: str) -> tuple[Callable[[], None], list[Tensor]]:
    """Return a function that takes a step of a network, and the tensors that exist before the step."""
    torch.manual_seed(0)
    if network == STARTER_NAME:
        model = build_ours()
        x, target = random_sample(STARTER)
    else:
        model, x, target = build_small_network(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.train(kind == "train")
    mode = "eval" if kind == "forecast" else kind
    prepare(model, mode, dtype)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")

    def train() -> None:
        with autocast:
            loss = mean_square(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def forecast() -> None:
        with torch.inference_mode(), autocast:
            model(x)

    existing_tensors = [*model.parameters(), *model.buffers(), x, target]
    if kind == "train":
        return train, existing_tensors
    return forecast, existing_tensors


def measure(step: Callable[[], None]) -> Cost:
    """Take a step and return its cost."""
    wall_start = time.perf_counter()
    cpu_start = time.process_time()
    step()
    return Cost(time.perf_counter() - wall_start, time.process_time() - cpu_start)


def measure_peak(step: Callable[[], None], existing_tensors: list[Tensor]) -> int:
    """Take a step and return the peak memory of its new tensors in bytes."""
    with LiveMemory(existing_tensors) as live:
        step()
    return live.peak


def compare(step: Callable[[], None], kernel: Kernel, rounds: int) -> list[tuple[float, float]]:
    """Return the ratios of wall time and CPU time, without the kernel / with the kernel, for each round."""

    def step_without() -> None:
        with use_plain_formulations(kernel):
            step()

    # The caller has warmed up the step with the kernel.
    step_without()
    ratios = []
    for round_number in range(rounds):
        # The order alternates, in case the second step of a round is faster.
        if round_number % 2 == 1:
            cost_without = measure(step_without)
            cost_with = measure(step)
        else:
            cost_with = measure(step)
            cost_without = measure(step_without)
        wall_ratio = cost_without.wall_s / cost_with.wall_s
        cpu_ratio = cost_without.cpu_s / cost_with.cpu_s
        ratios.append((wall_ratio, cpu_ratio))
    return ratios


def format_ratios(ratios: list[float]) -> str:
    """Return the median, the smallest and the largest ratio as a string."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    names = [kernel.name for kernel in KERNELS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=[STARTER_NAME, *model_names()], default=STARTER_NAME)
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--kernels", nargs="+", choices=names, default=names)
    return parser.parse_args()


def main() -> None:
    """Print a table for each kind of step and dtype."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    kernels = [kernel for kernel in KERNELS if kernel.name in args.kernels]
    for kind in args.steps:
        for dtype in args.dtypes:
            step, existing_tensors = build_step(args.network, kind, dtype)
            # The first step warms up.
            step()
            cost = measure(step)
            peak = measure_peak(step, existing_tensors)
            print(f"\n{kind}, {dtype}: {cost.cpu_s:.2f} CPU s, {peak / 1e6:.0f} MB at the peak, with all kernels")
            print(f"{'without':20}{'CPU time':>26}{'wall time':>26}{'peak':>8}", flush=True)
            for kernel in kernels:
                with use_plain_formulations(kernel):
                    peak_without = measure_peak(step, existing_tensors)
                ratios = compare(step, kernel, args.rounds)
                wall = format_ratios([wall_ratio for wall_ratio, _ in ratios])
                cpu = format_ratios([cpu_ratio for _, cpu_ratio in ratios])
                print(f"{kernel.name:20}{cpu:>26}{wall:>26}{peak_without / peak:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
