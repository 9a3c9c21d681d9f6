"""A training step on a GPU: time, samples/s, MFU and peak memory, by precision, compilation and checkpointing.

    python benchmarks/device.py CONFIG --grid 181x360 [key=value ...] [--device cuda] [--rounds 5] [--steps 20]
                                [--cases bfloat16 compiled] [--kernels 15] [--reference FOLDER]

The step is the trainer's own, with CONFIG's network, batch, accumulation and rollout. The fields are random and are on
the device already; no data are opened. Cases alternate, and the table has the medians over the rounds (least to
largest). On a GPU, this process measures all cases but those of the published package. On a CPU, each measurement is a
separate process, because memory is its resident set there. Half of --steps are taken first and do not count, because
kernels are chosen and compiled there. The time is that from the first counted step until the device has finished the
last one. Memory is the peak of torch's allocator on a GPU. MFU is as in metrics.jsonl.

Besides training steps there are steps of an ensemble of four members with noise, trained on the CRPS, and steps of a
forecast with ``inference.batch_size`` states.

--cases selects the cases whose names contain all of these words. --kernels lists the kernels that take most of the
device's time in one step of each case. --json appends every measurement to a file as soon as it is there. FOLDER is as
in ``wxformer.py``; its network runs on the same device, on the grid of the 1 degree starter. On a machine without a
GPU, ``--device cpu`` tries the script.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from networks import STARTER
from options import add_counts, add_reference
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from wxformer import REPOSITORY, build_reference, mean_square, random_sample

if TYPE_CHECKING:
    from credit.config import Config
    from credit.data.samples.batch import Batch
    from credit.train.build.assets import ModelAssets

# Parts of the names of cases -> overrides of the config.
PRECISIONS = {
    "float32": ("trainer.amp=false", "trainer.tf32=false"),
    "tf32": ("trainer.amp=false", "trainer.tf32=true"),
    "bfloat16": ("trainer.amp=true",),
}
COMPILED = {"eager": ("trainer.compile=false",), "compiled": ("trainer.compile=true",)}
KEPT = {
    "all-kept": ("trainer.activation_checkpoint=false",),
    "selective": ("trainer.activation_checkpoint=selective",),
    "checkpointed": ("trainer.activation_checkpoint=true",),
}
# Name of a case -> overrides of the config: every combination of precision, compilation and checkpointing.
CASES = {
    f"{precision} {compiled} {kept}": PRECISIONS[precision] + COMPILED[compiled] + KEPT[kept]
    for precision, compiled, kept in itertools.product(PRECISIONS, COMPILED, KEPT)
}
ENSEMBLE = ("loss={kind: crps}", "trainer.members=4", "model.noise={kind: global, memory: [24h, forecast]}")
MEMBERS = {"one-by-one": ("trainer.members_at_once=1",), "at-once": ("trainer.members_at_once=4",)}
CASES |= {
    f"{precision} eager ensemble {order}": PRECISIONS[precision] + KEPT["all-kept"] + ENSEMBLE + MEMBERS[order]
    for precision, order in itertools.product(PRECISIONS, MEMBERS)
}
# Case of a forecast -> overrides of the config.
FORECASTS = {
    "forecast float32": ("inference.amp=false", "trainer.tf32=false"),
    "forecast tf32": ("inference.amp=false", "trainer.tf32=true"),
    "forecast bfloat16": ("inference.amp=true",),
}
# Case of the published package -> True for bfloat16.
REFERENCE = {"reference float32": False, "reference bfloat16": True}


def build_step(
    config: str, grid: str, settings: Sequence[str], device: torch.device
) -> tuple[Callable[[], object], int, float | None, float | None]:
    """Return the training step of a config and its amount of work.

    Args:
        config: path of the config file.
        grid: ``ROWSxCOLUMNS`` of a global grid.
        settings: overrides ``section.key=value``.
        device: device of the step.

    Returns:
        Function that takes a step; samples of a step; its TFLOP, None if they cannot be counted; the seconds of these
        operations at the peak rate of the device, None if that is not known.
    """
    # Imported here, because in a process of the published package `credit` is that package.
    from credit.cli.plan import build_grid, load_config_without_paths
    from credit.forecast.objectives.base import build_objective
    from credit.models.initialise import initial_values
    from credit.parallel.mesh import DeviceGrid
    from credit.parallel.state.materialise import fill_
    from credit.train.build.dry_run import dummy_assets
    from credit.train.build.model import build_parallel_model
    from credit.train.build.stepper import build_objective_context, build_run_loss, build_stepper
    from credit.train.build.training import build_step as build_training_step
    from credit.train.ema import EMA
    from credit.train.optim import build_optimizer
    from credit.utils.malloc import retain_freed_memory

    retain_freed_memory(device)
    conf = load_config_without_paths(config, settings)
    assets = dummy_assets(conf, build_grid(grid), {})
    model, autocast = build_parallel_model(conf, assets, DeviceGrid(), device)
    fill_(model, initial_values(model, conf.seed))
    stepper = build_stepper(conf, assets, model.train(), device, autocast)
    loss = build_run_loss(conf, assets, device)
    steps = conf.data.forecast_len
    optimizer = build_optimizer(model, conf.trainer)
    average = EMA(model, conf.trainer.ema_decay) if conf.trainer.use_ema else None
    objective = build_objective(conf.trainer.objective, build_objective_context(conf, assets, stepper, loss))
    step = build_training_step(conf, objective, optimizer, average, lambda _: steps, 0)
    batch = _random_batch(conf, assets, device)
    tflop, ideal_seconds = _count_operations(conf, assets, device)
    samples = conf.trainer.train_batch_size * conf.trainer.grad_accum_every
    # Step number 0 with a small learning rate; each micro-step takes the same batch.
    return lambda: step(itertools.repeat(batch), 0, 1e-6), samples, tflop, ideal_seconds


def _random_batch(conf: Config, assets: ModelAssets, device: torch.device) -> Batch:
    """Return a batch of random fields on `device`, of the size of a micro-step."""
    from credit.data.samples.batch import Batch

    samples = conf.trainer.train_batch_size
    history = conf.data.history_len
    steps = conf.data.forecast_len
    cells = assets.grid.shape
    num_prognostic = len(assets.channels.group("prognostic"))
    num_forcing = len(assets.channels.group("dynamic_forcing"))
    return Batch(
        torch.randn(samples, num_prognostic, history, *cells, device=device),
        # Each step after the first needs the forcing of one more time.
        torch.randn(samples, num_forcing, history + steps - 1, *cells, device=device),
        torch.randn(samples, len(assets.channels.output), steps, *cells, device=device),
        (0,) * samples,
    )


def _count_operations(conf: Config, assets: ModelAssets, device: torch.device) -> tuple[float | None, float | None]:
    """Return the TFLOP of an optimizer step and their seconds at the device's peak rate; None for what is unknown."""
    from credit.hpc.planner.gpus import find_peak_rates
    from credit.train.monitor.flops import FlopCounter

    # Kind of peak rate (such as that of a dtype) -> operations of a micro-step.
    counts = FlopCounter(conf, assets).operations(conf.data.forecast_len)
    if counts is None:
        return None, None
    micro_steps = conf.trainer.grad_accum_every
    tflop = sum(counts.values()) * micro_steps / 1e12
    peaks = find_peak_rates(torch.cuda.get_device_name(device)) if device.type == "cuda" else {}
    if not peaks:
        return tflop, None
    ideal_seconds = sum(count * micro_steps / 1e12 / peaks[rate] for rate, count in counts.items())
    return tflop, ideal_seconds


def build_forecast_step(
    config: str, grid: str, settings: Sequence[str], device: torch.device
) -> tuple[Callable[[], object], int, None, None]:
    """Return a step of forecasts with random weights, decoded to physical units, as `build_step` does."""
    from credit.cli.plan import build_grid, load_config_without_paths
    from credit.models.inference import prepare_for_inference
    from credit.models.initialise import initial_values
    from credit.parallel.mesh import DeviceGrid
    from credit.parallel.state.materialise import fill_
    from credit.train.build.dry_run import dummy_assets
    from credit.train.build.model import build_parallel_model
    from credit.train.build.stepper import build_stepper

    conf = load_config_without_paths(config, settings)
    assets = dummy_assets(conf, build_grid(grid), {})
    # Sets the precision of products, too.
    model, _ = build_parallel_model(conf, assets, DeviceGrid(), device)
    fill_(model, initial_values(model, conf.seed))
    prepare_for_inference(model.eval(), torch.bfloat16 if conf.inference.amp else None)
    stepper = build_stepper(conf, assets, model, device, conf.inference.amp)
    states = conf.inference.batch_size
    history = conf.data.history_len
    cells = assets.grid.shape
    num_prognostic = len(assets.channels.group("prognostic"))
    num_forcing = len(assets.channels.group("dynamic_forcing"))
    state = torch.randn(states, num_prognostic, history, *cells, device=device)
    forcing = torch.randn(states, num_forcing, history, *cells, device=device)

    @torch.inference_mode()
    def step() -> Tensor:
        return stepper.decode(stepper.step(state, forcing))

    return step, states, None, None


def build_reference_step(half: bool, device: torch.device) -> tuple[Callable[[], object], int, None, None]:
    """Return a step of the published package's network with torch's defaults, as `build_step` does."""
    model = build_reference().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    x, target = random_sample(STARTER, device)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = mean_square(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, 1, None, None


def measure(case: str, args: argparse.Namespace) -> dict[str, float | str | None]:
    """Take the steps of a case in this process.

    Args:
        case: name in `CASES`, `FORECASTS` or `REFERENCE`.
        args: options of the command line.

    Returns:
        ``ms`` a step, ``samples`` a second, ``gb`` of peak memory, ``tflops``, ``mfu`` (None if unknown) and a table of
        ``kernels``.
    """
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    if case in REFERENCE:
        step, samples, tflop, ideal_seconds = build_reference_step(REFERENCE[case], device)
    elif case in FORECASTS:
        settings = [*args.settings, *FORECASTS[case]]
        step, samples, tflop, ideal_seconds = build_forecast_step(args.config, args.grid, settings, device)
    else:
        settings = [*args.settings, *CASES[case]]
        step, samples, tflop, ideal_seconds = build_step(args.config, args.grid, settings, device)

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    # Half of the steps, rounded up, warm up.
    for _ in range((args.steps + 1) // 2):
        step()
    wait()
    start = time.perf_counter()
    for _ in range(args.steps):
        step()
    wait()
    seconds = (time.perf_counter() - start) / args.steps

    result = {"ms": seconds * 1e3, "samples": samples / seconds, "gb": _peak_gb(device)}
    result["tflops"] = None if tflop is None else tflop / seconds
    result["mfu"] = None if ideal_seconds is None else ideal_seconds / seconds
    result["kernels"] = ""
    if args.kernels:
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiled:
            step()
            wait()
        sort_key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        result["kernels"] = profiled.key_averages().table(sort_by=sort_key, row_limit=args.kernels)
    return result


def _peak_gb(device: torch.device) -> float:
    """Return the peak memory of this process in GB: of torch's allocator on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def run_case(case: str, args: argparse.Namespace) -> dict[str, float | str | None]:
    """Return the result of `measure`; the published package, and everything on a CPU, has a process of its own."""
    if args.device == "cuda":
        # Memory of the last case would be missing here, or in the process of the published package.
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if args.device == "cuda" and case not in REFERENCE:
        try:
            return measure(case, args)
        except torch.OutOfMemoryError:
            return {"kernels": "out of memory"}
    folder = args.reference.resolve() if case in REFERENCE else REPOSITORY
    command = [sys.executable, str(Path(__file__).resolve()), str(Path(args.config).resolve()), *args.settings]
    command += ["--grid", args.grid, "--device", args.device, "--threads", str(args.threads)]
    command += ["--steps", str(args.steps), "--kernels", str(args.kernels), "--case", case]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    process = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{case}: {process.stderr[-2000:]}")
    # The last line is the result; libraries may print before it.
    return json.loads(process.stdout.splitlines()[-1])


def show(case: str, results: list[dict[str, float | str | None]]) -> None:
    """Print the row of a case, and its kernels."""
    cells = []
    for name, digits in (("ms", 1), ("samples", 2), ("tflops", 2), ("mfu", 3), ("gb", 2)):
        values = [result[name] for result in results if result.get(name) is not None]
        if not values:
            cells.append("")
            continue
        median = statistics.median(values)
        cells.append(f"{median:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})")
    print(f"| {case} | {' | '.join(cells)} |")
    if results[-1]["kernels"]:
        print(results[-1]["kernels"])


def main() -> None:
    """Print the table, or with --case measure one case and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--grid", required=True, metavar="ROWSxCOLUMNS")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cases", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--kernels", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    add_counts(parser, rounds=5, steps=20)
    add_reference(parser)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    torch.set_num_threads(args.threads)
    if args.case:
        print(json.dumps(measure(args.case, args)))
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu tries the script")
    all_cases = [*CASES, *FORECASTS]
    if args.reference:
        all_cases += REFERENCE
    cases = [case for case in all_cases if set(args.cases) <= set(case.split())]
    if not cases:
        all_words: set[str] = set()
        for case in (*CASES, *FORECASTS, *REFERENCE):
            all_words.update(case.split())
        listed = ", ".join(sorted(all_words))
        parser.error(f"--cases {' '.join(args.cases)}: no case has all of these words; there are {listed}")
    results: dict[str, list[dict[str, float | str | None]]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for case in cases:
            result = run_case(case, args)
            results[case].append(result)
            if args.json is not None:
                with args.json.open("a") as json_lines:
                    json_lines.write(json.dumps({"case": case, **result}) + "\n")
    device_name = f"CPU, {args.threads} threads"
    if args.device == "cuda":
        device_name = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {device_name}, {args.rounds} rounds")
    print("| case | ms a step | samples/s | TFLOP/s | MFU | peak GB |")
    print("|---|---|---|---|---|---|")
    for case, case_results in results.items():
        show(case, case_results)


if __name__ == "__main__":
    main()
