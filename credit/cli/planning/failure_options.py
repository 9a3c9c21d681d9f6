"""Options of ``credit plan`` about failures and restarts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from credit.errors import ConfigError

if TYPE_CHECKING:
    from credit.hpc.planner.failures.failure_plan import FailureAssumptions


def add_failure_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options about failures of GPUs, the file system and restarts."""
    group = parser.add_argument_group("failures")
    group.add_argument(
        "--mtbf-per-gpu",
        metavar="TIME",
        help="mean time between failures for each GPU, such as 50000h (default: value of the Llama 3 training run)",
    )
    group.add_argument(
        "--file-system",
        type=float,
        metavar="GBS",
        help="bandwidth of the file system for all nodes, in GB/s; default 10",
    )
    group.add_argument(
        "--startup",
        type=float,
        metavar="S",
        help="seconds from the start of the processes to the first batch; default 60",
    )
    group.add_argument("--stall", type=float, metavar="S", help="measured seconds that training waits for a checkpoint")


def read_failure_assumptions(arguments: argparse.Namespace) -> FailureAssumptions:
    """Return the assumptions about failures, with the values that the options set.

    Raises:
        ConfigError: if a value is not positive, or a time has no unit.
    """
    from credit.calendar import parse_duration
    from credit.hpc.planner.failures.failure_plan import FailureAssumptions

    values: dict[str, float] = {}
    if arguments.mtbf_per_gpu is not None:
        if arguments.mtbf_per_gpu.isdigit():
            raise ConfigError(f"--mtbf-per-gpu: {arguments.mtbf_per_gpu} needs a unit, such as 50000h")
        try:
            values["mtbf_hours_per_gpu"] = parse_duration(arguments.mtbf_per_gpu) / 60
        except ConfigError as error:
            raise ConfigError(f"--mtbf-per-gpu: {error}") from error
    options = {
        "file_system_gbs": arguments.file_system,
        "startup_seconds": arguments.startup,
        "stall_seconds": arguments.stall,
    }
    values |= {name: value for name, value in options.items() if value is not None}
    return FailureAssumptions(**values)
