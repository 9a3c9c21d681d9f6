"""Steps that a profile measures, parsed from the value of the option ``--profile``."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from credit.errors import ConfigError

# Number of first steps of a start that are not measured, because they compile, fill caches and start the loader.
WARM_UP_STEPS = 5
# Number of steps after the measured steps that are recorded for the timeline; each step has thousands of events.
TRACED_STEPS = 2
DEFAULT_STEPS = 20
MAX_STEPS = 1000


@dataclass(frozen=True)
class ProfileRequest:
    """Steps to be measured, and the rank whose timeline is written.

    Attributes:
        num_steps: number of measured steps.
        first_step: number of the first measured step, from 1 as in metrics.jsonl; None for the step after the warm-up.
        trace_rank: rank whose timeline is written.
    """

    num_steps: int = DEFAULT_STEPS
    first_step: int | None = None
    trace_rank: int = 0

    def choose_first_step(self, steps_taken: int, total_steps: int, world: int) -> int:
        """Return the number of the first measured step, from 1.

        Args:
            steps_taken: optimizer steps before this start of the run.
            total_steps: optimizer steps of the whole run.
            world: number of ranks.

        Raises:
            ConfigError: if the run does not include all these steps, or has no rank `trace_rank`.
        """
        if self.trace_rank >= world:
            raise ConfigError(
                f"--profile-rank {self.trace_rank}: ranks are counted from 0, and the number of ranks is {world}; "
                f"choose at most {world - 1}"
            )
        first_step = self.first_step
        if first_step is None:
            first_step = steps_taken + WARM_UP_STEPS + 1
        elif first_step <= steps_taken + 1:
            raise ConfigError(
                f"--profile {first_step}:{first_step + self.num_steps - 1}: the first step of a start is never "
                f"measured, and this run continues after step {steps_taken}; begin at {steps_taken + 2} or later"
            )
        last_recorded = first_step + self.num_steps - 1 + TRACED_STEPS
        # The profile ends each step when the next step begins.
        if last_recorded >= total_steps:
            raise ConfigError(
                f"--profile measures steps {first_step} to {first_step + self.num_steps - 1} and records "
                f"{TRACED_STEPS} more for the timeline, and a further step must follow; the run ends at step "
                f"{total_steps}. Profile fewer or earlier steps, or raise trainer.max_steps"
            )
        return first_step


def parse_steps(text: str) -> ProfileRequest:
    """Return the `ProfileRequest` for the value of ``--profile`` on the command line.

    Args:
        text: number of steps such as ``20``, or first and last step such as ``100:119``.

    Raises:
        argparse.ArgumentTypeError: if `text` has a different form, or the numbers are out of range.
    """
    if "=" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} looks like an override; write overrides before --profile, or give the number of steps: "
            f"--profile {DEFAULT_STEPS} {text}"
        )
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a number of steps, such as 20, or the first and the last step, such as 100:119"
        )
    if match[2] is None:
        request = ProfileRequest(int(text))
    else:
        first, last = int(match[1]), int(match[2])
        if first < 1:
            raise argparse.ArgumentTypeError(f"{text!r}: steps are counted from 1, as in metrics.jsonl")
        if last < first:
            raise argparse.ArgumentTypeError(f"{text!r}: the last step must not be before the first one")
        request = ProfileRequest(last - first + 1, first)
    if not 1 <= request.num_steps <= MAX_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r}: a profile measures 1 to {MAX_STEPS} steps")
    return request


def parse_rank(text: str) -> int:
    """Return the rank for the value of ``--profile-rank`` on the command line.

    Raises:
        argparse.ArgumentTypeError: if `text` is not an integer of 0 or more.
    """
    if re.fullmatch(r"\d+", text, re.ASCII) is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be the number of a rank, from 0")
    return int(text)
