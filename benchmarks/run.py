"""Time from the start of `credit train` to the end of its first step.

    python benchmarks/run.py CONFIG [key=value ...] [--rounds 5]

Each round starts a process of `credit train` in a new folder, which takes a single step. The time begins before Python
starts. The output is the median, the smallest and the largest time. `credit train --profile` shows later steps.
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
from typing import Any

from options import positive


def measure_first_step(arguments: list[str]) -> float:
    """Return the seconds from the start of Python to the end of the first step, measured in a new process."""
    # The end is measured in another process, so both times are those of the system clock.
    start_time = time.time()
    command = [sys.executable, __file__, *arguments, "--first"]
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
    """Print the seconds, or with --first train in this process and print when the first step ended, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    arguments = [args.config, *args.settings]
    if args.first:
        run_options = ["trainer.num_epoch=null", "trainer.max_steps=1", "trainer.valid_samples=1"]
        # The result gets a line of its own, after whatever the training has printed.
        print("\n" + json.dumps(find_first_step_end([*arguments, *run_options])))
        return
    seconds = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            seconds.append(measure_first_step([*arguments, f"save_loc={folder}/run"]))
    print(f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', '-')}, {args.rounds} rounds")
    print(f"start to first step, s {statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    main()
