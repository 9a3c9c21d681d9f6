"""Calls into the package's own Python functions during one optimizer step of the quickstart, by file.

    python benchmarks/step_calls.py [--step 4] [--lines 40]

If a step makes many calls, a GPU waits for Python. A reader of the code must also read the files of these calls. Python
3.11 counts list comprehensions and generators as calls.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import credit


class CallCounter(AbstractContextManager):
    """Context manager that counts calls of functions of the package.

    Attributes:
        calls: (file, function) -> number of calls.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self._root = f"{Path(credit.__file__).parent}/"

    def __enter__(self) -> CallCounter:
        sys.setprofile(self._count_call)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(None)

    @property
    def calls_by_file(self) -> Counter[str]:
        """Path of a file in the package -> number of calls."""
        by_file: Counter[str] = Counter()
        for (file, _), count in self.calls.items():
            by_file[file] += count
        return by_file

    def _count_call(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count one call; the parameters are those of a profile function of `sys.setprofile`."""
        file = frame.f_code.co_filename
        # Other events are returns, and calls of C functions.
        if event == "call" and file.startswith(self._root):
            self.calls[file.removeprefix(self._root), frame.f_code.co_name] += 1


def count_step(number: int) -> CallCounter:
    """Train the quickstart until optimizer step `number` (from 1), and return the counter of the calls in this step."""
    from credit.cli.train import run_command
    from credit.train.step import TrainingStep

    counter = CallCounter()
    take_step = TrainingStep.__call__
    steps_taken = 0

    def take_counted_step(training_step: TrainingStep, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps_taken
        steps_taken += 1
        if steps_taken != number:
            return take_step(training_step, *args, **kwargs)
        with counter:
            return take_step(training_step, *args, **kwargs)

    template = Path(credit.__file__).parent / "config" / "templates" / "quickstart.yml"
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(TrainingStep, "__call__", take_counted_step):
        overrides = [f"save_loc={folder}/run", f"trainer.max_steps={number}", "trainer.valid_samples=2"]
        run_command(argparse.Namespace(config=str(template), overrides=overrides))
    return counter


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, default=4, help="which optimizer step is counted; the first ones warm up")
    parser.add_argument("--lines", type=int, default=40, help="how many files, and how many functions, are listed")
    args = parser.parse_args()
    counter = count_step(args.step)
    print(f"{sum(counter.calls.values())} calls in {len(counter.calls_by_file)} files")
    for file, count in counter.calls_by_file.most_common(args.lines):
        print(f"{count:6} {file}")
    print()
    for (file, function), count in counter.calls.most_common(args.lines):
        print(f"{count:6} {file} {function}")


if __name__ == "__main__":
    main()
