"""Time and peak memory of WXFormer's forward and training step, the 1 degree starter, and of the published package's.

    python benchmarks/wxformer.py [--threads 2] [--rounds 5] [--steps 3] [--reference FOLDER] [--cases train eval ...]
                                  [--model starter|published]

FOLDER holds the unpacked wheel of the reference (``pip download --no-deps miles-credit``, then ``unzip -d FOLDER``),
whose model file needs torch and einops. Every measurement is a separate process, because peak memory (resident set,
with library and weights) is that of a process. The processes of one round follow one another. Ratios are taken within a
round, because the machine may be faster in the next one.

A training step is forward pass, mean squared error, backward pass and a fused AdamW update. The first step does not
count; of the others, the fastest counts. Our network is prepared as `credit train` and `credit rollout` prepare it,
with folded weights in evaluation. `tensors` is the largest memory, at a time, of the tensors that torch makes in a
step. It is counted in a separate step after the others, without weights, samples and optimizer.

`published` is the size of NCAR's published weights, 640 x 1280 cells and 124 million weights, for our network only. Its
training step needs `--cases checkpoint` on most machines.

Cases for our network only: `checkpoint` is a training step with activation checkpointing of every block. `rollout` is a
training step of two forecast steps, of which the first is computed again in the backward pass. `rollout-kept` is the
same without this recomputation.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from networks import PUBLISHED, REFERENCE_STARTER, STARTER
from options import add_counts, add_reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

REPOSITORY = Path(__file__).parents[1]
MODELS = {"starter": STARTER, "published": PUBLISHED}
# Modes of both packages; the others are for our network only.
SHARED = ("eval", "train")
ROLLOUTS = ("rollout", "rollout-kept")
MODES = (*SHARED, "checkpoint", *ROLLOUTS)


def build_ours(model: str = "starter") -> nn.Module:
    """Return our network, with the process settings of `credit train` and `credit rollout`."""
    from credit.cli.common import set_environment_defaults
    from credit.models.wxformer import WXFormer

    set_environment_defaults()
    return WXFormer.from_kwargs(**MODELS[model])


def build_reference() -> nn.Module:
    """Return the starter's network of the published package, which must be first on the path."""
    # The network's file imports a class that is not used here, and whose module imports many packages.
    postblock_module = types.ModuleType("credit.postblock.gen1")
    postblock_module.PostBlock = None
    sys.modules["credit.postblock"] = types.ModuleType("credit.postblock")
    sys.modules[postblock_module.__name__] = postblock_module
    from credit.models.wxformer.crossformer import CrossFormer

    return CrossFormer(**REFERENCE_STARTER)


def random_sample(settings: Mapping[str, Any], device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
    """Return a random input (1, C_in, 1, H, W) and a random target (1, C_out, 1, H, W) of a network.

    Args:
        settings: arguments of the network's constructor.
        device: device of the tensors.
    """
    cells = (settings["image_height"], settings["image_width"])
    x = torch.randn(1, settings["in_channels"], 1, *cells, device=device)
    target = torch.randn(1, settings["out_channels"], 1, *cells, device=device)
    return x, target


def measure(package: str, mode: str, dtype: str, steps: int, size: str = "starter") -> dict[str, float]:
    """Run one case in this process.

    Args:
        package: ``ours`` or ``reference``.
        mode: one of `MODES`.
        dtype: ``float32`` or ``bfloat16``.
        steps: number of steps, of which the fastest counts.
        size: name in `MODELS`.

    Returns:
        ``time`` and ``cpu`` -> seconds of the fastest step; ``peak`` (resident set) and ``tensors`` -> GB.
    """
    from live_memory import LiveMemory

    torch.manual_seed(0)
    model = build_ours(size) if package == "ours" else build_reference()
    x, target = random_sample(MODELS[size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.train(mode != "eval")
    if package == "ours":
        prepare(model, mode, dtype)
    if mode == "checkpoint":
        from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks

        checkpoint_blocks(model, True)
    # Our training advances the power iterations of spectral norm before each step.
    advances_iterations = package == "ours" and mode != "eval"

    def step() -> None:
        if advances_iterations:
            from credit.models.layers.spectral_norm import advance_power_iterations

            advance_power_iterations(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            if mode == "eval":
                model(x)
                return
            loss = _compute_loss(model, x, target, mode)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    times = []
    cpu_times = []
    with torch.set_grad_enabled(mode != "eval"):
        for _ in range(steps + 1):
            start = time.perf_counter()
            cpu_start = time.process_time()
            step()
            times.append(time.perf_counter() - start)
            cpu_times.append(time.process_time() - cpu_start)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        with LiveMemory([*model.parameters(), *model.buffers(), x, target]) as live:
            step()
    return {"time": min(times[1:]), "cpu": min(cpu_times[1:]), "peak": peak, "tensors": live.peak / 1e9}


def _compute_loss(model: nn.Module, x: Tensor, target: Tensor, mode: str) -> Tensor:
    """Return the loss of one forecast step or, in the modes of `ROLLOUTS`, the sum of the losses of two steps."""
    if mode not in ROLLOUTS:
        return mean_square(model(x), target)
    from credit.models.kernels.recompute_cache import recompute_contexts

    if mode == "rollout":
        first = checkpoint(model, x, use_reentrant=False, context_fn=recompute_contexts)
    else:
        first = model(x)
    # The first output channels serve as the next input.
    second = model(first[:, : x.shape[1]])
    return mean_square(first, target) + mean_square(second, target)


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of two tensors of one shape.

    torch's own mean would keep the memory of all its terms until the backward pass.
    """
    return F.mse_loss(y.float(), target, reduction="none").mean()


def prepare(model: nn.Module, mode: str, dtype: str) -> None:
    """Prepare the network like `credit train` or `credit rollout` before the first step."""
    from credit.models.inference import prepare_for_inference
    from credit.utils.malloc import retain_freed_memory

    retain_freed_memory(torch.device("cpu"))
    if mode == "eval":
        prepare_for_inference(model, torch.bfloat16 if dtype == "bfloat16" else None)


def main() -> None:
    """Print the tables, or with --case measure one case and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_counts(parser, rounds=5, steps=3)
    add_reference(parser)
    parser.add_argument("--cases", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--model", choices=MODELS, default="starter")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reference and args.model != "starter":
        parser.error("--reference: the published package is measured with --model starter only")
    torch.set_num_threads(args.threads)
    if args.case:
        print(json.dumps(measure(*args.case, args.steps, args.model)))
        return
    print(f"torch {torch.__version__}, {args.threads} threads, {args.rounds} rounds, median (least to most)")
    titles = "".join(f"{title:>24}" for title in ("time [s]", "CPU [s]", "peak [GB]", "tensors [GB]"))
    print(f"{'case':14}{'dtype':10}{'':10}{titles}", flush=True)
    results: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    cases = []
    for mode in args.cases:
        # The reference has no checkpointing and no rollouts.
        has_reference = args.reference and args.model == "starter" and mode in SHARED
        for dtype in ("float32", "bfloat16"):
            cases.append(("ours", mode, dtype))
            if has_reference:
                cases.append(("reference", mode, dtype))
    for _ in range(args.rounds):
        for case in cases:
            results.setdefault(case, []).append(run_script(Path(__file__), case, args))
    for case, case_results in results.items():
        package, mode, dtype = case
        _print(mode, dtype, package, case_results)
        if package == "reference":
            ratios = []
            for our_result, reference_result in zip(results["ours", mode, dtype], case_results, strict=True):
                ratios.append({key: reference_result[key] / our_result[key] for key in our_result})
            _print("", "", "ratio", ratios)


def run_script(script: Path, case: tuple[str, ...], args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON that `script` prints for --case in a separate process, which imports the package of the case.

    Args:
        script: a benchmark with the option --case.
        case: words after --case; the first is ``ours`` or ``reference``.
        args: options of this process, which are passed on.
    """
    # Both packages are called `credit`: the folder decides which of them the process imports.
    folder = REPOSITORY if case[0] == "ours" else args.reference.resolve()
    command = [sys.executable, str(script.resolve()), "--threads", str(args.threads), "--steps", str(args.steps)]
    # Not every script has this option.
    if hasattr(args, "model"):
        command += ["--model", args.model]
    command += ["--case", *case]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    process = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{' '.join(case)}: {process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def _print(mode: str, dtype: str, package: str, results: list[dict[str, float]]) -> None:
    """Print a row with the median, the smallest and the largest value of each quantity over the rounds."""
    cells = ""
    for key in ("time", "cpu", "peak", "tensors"):
        values = [result[key] for result in results]
        cell = f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        cells += f"{cell:>24}"
    print(f"{mode:14}{dtype:10}{package:10}{cells}", flush=True)


if __name__ == "__main__":
    main()
