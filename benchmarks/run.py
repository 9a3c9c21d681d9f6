"""Time of a run until the end of its first step, and the share of a step besides forward, backward and optimizer.

    python benchmarks/run.py CONFIG [key=value ...] [--steps 40] [--rounds 5]

Each round is two processes of `credit train` in a new folder. One takes a single step, and its clock begins before
Python starts. The other takes --steps. Its first quarter does not count, because memory is first touched and operations
are counted there. Its last step does not count either, because the run is validated and saved after it. The output is
medians (least to largest). `rest` is the time from step to step without forward pass with loss, backward pass and
optimizer; the lines below `rest` are parts of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any

from options import positive

# Parts of a step that are not its mathematics, and those that are.
OVERHEAD_PARTS = ("data", "norm", "average", "log")
CORE_PARTS = ("forward", "backward", "optimizer")


class Clock:
    """Sums of the time spent inside functions.

    Attributes:
        seconds: part -> seconds inside its functions.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count the calls of `owner.name` for `part`."""
        function = getattr(owner, name)

        def timed_function(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds[part] += time.perf_counter() - start

        setattr(owner, name, timed_function)


def measure_shares(arguments: list[str], steps: int) -> dict[str, float]:
    """Train in this process; return the share of each part in the time of the counted steps, and seconds of a step."""
    import torch

    from credit.forecast.objectives.deterministic import DeterministicRollout
    from credit.train import step
    from credit.train.ema import EMA
    from credit.train.prefetch import DevicePrefetcher
    from credit.train.trainer import Trainer

    clock = Clock()
    start_time = 0.0
    shares: dict[str, float] = {}
    # Indices, from 0, of the first step that counts, and of the last step, which does not count.
    first = max(1, steps // 4)
    last = steps - 1
    # The functions are replaced before training begins, in this process only.
    clock.watch(DeterministicRollout, "training_loss", "forward")
    clock.watch(torch.Tensor, "backward", "backward")
    clock.watch(torch.optim.AdamW, "step", "optimizer")
    clock.watch(DevicePrefetcher, "__next__", "data")
    clock.watch(step, "gradient_norm", "norm")
    clock.watch(EMA, "update", "average")
    clock.watch(Trainer, "_write_rows", "log")
    take_step = step.TrainingStep.__call__

    def take_counted_step(training_step: Any, batches: Any, number: int, *rest: Any) -> Any:
        nonlocal start_time
        now = time.perf_counter()
        if number == first:
            clock.seconds.clear()
            start_time = now
        elif number == last:
            total_seconds = now - start_time
            for part, seconds in clock.seconds.items():
                shares[part] = seconds / total_seconds
            shares["step"] = total_seconds / (last - first)
        return take_step(training_step, batches, number, *rest)

    step.TrainingStep.__call__ = take_counted_step
    _train(arguments)
    return shares


def measure_first_step(arguments: list[str]) -> float:
    """Return the seconds from the start of Python to the end of the first step, measured in a new process."""
    # The end is measured in another process, so both times are those of the system clock.
    start_time = time.time()
    command = [sys.executable, __file__, *arguments, "--steps", "1", "--first"]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        sys.exit(process.stderr[-2000:])
    return json.loads(process.stdout.splitlines()[-1]) - start_time


def find_first_step_end(arguments: list[str]) -> float:
    """Train in this process; return the time at which the first step ended, in seconds since 1970."""
    from credit.train.step import TrainingStep

    take_step = TrainingStep.__call__
    end_times = []

    def take_timed_step(training_step: Any, *step_arguments: Any) -> Any:
        result = take_step(training_step, *step_arguments)
        end_times.append(time.time())
        return result

    TrainingStep.__call__ = take_timed_step
    _train(arguments)
    return end_times[0]


def _train(arguments: list[str]) -> None:
    """Run ``credit train`` in this process, and end the process if it fails."""
    from credit.cli.main import main as credit

    sys.argv = ["credit", "train", *arguments]
    try:
        code = credit()
    except SystemExit as stop:
        code = stop.code
    if code:
        sys.exit(code)


def main() -> None:
    """Print the figures, or with --loop train in this process and print the shares as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=positive, default=40)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 3 and not args.first:
        parser.error("--steps: 3 or more are needed, as neither the first nor the last counts")
    arguments = [args.config, *args.settings]
    if args.loop or args.first:
        train_arguments = [
            *arguments,
            "trainer.num_epoch=null",
            f"trainer.max_steps={args.steps}",
            "trainer.valid_samples=1",
        ]
        # The result gets a line of its own, after whatever the training has printed.
        if args.loop:
            print("\n" + json.dumps(measure_shares(train_arguments, args.steps)))
        else:
            print("\n" + json.dumps(find_first_step_end(train_arguments)))
        return
    first_step_seconds = []
    round_shares = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            first_step_seconds.append(measure_first_step([*arguments, f"save_loc={folder}/one"]))
            command = [sys.executable, __file__, *arguments, f"save_loc={folder}/many"]
            command += ["--steps", str(args.steps), "--loop"]
            process = subprocess.run(command, capture_output=True, text=True)
            if process.returncode:
                sys.exit(process.stderr[-2000:])
            round_shares.append(json.loads(process.stdout.splitlines()[-1]))
    print(f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', '-')}, {args.rounds} rounds")
    _print("start to first step, s", first_step_seconds)
    _print("step, s", [shares["step"] for shares in round_shares])
    rest_percent = []
    for shares in round_shares:
        core_share = sum(shares[part] for part in CORE_PARTS)
        rest_percent.append(100 * (1 - core_share))
    _print("rest, % of a step", rest_percent)
    for part in OVERHEAD_PARTS:
        # A run without averaged weights, for example, has no such part.
        _print(f"  {part}", [100 * shares.get(part, 0.0) for shares in round_shares])


def _print(label: str, values: list[float]) -> None:
    """Print a line with the median of the values, the least and the largest."""
    print(f"{label:26}{statistics.median(values):8.2f} ({min(values):.2f} to {max(values):.2f})", flush=True)


if __name__ == "__main__":
    main()
