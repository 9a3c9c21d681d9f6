"""Functions that start a command on several ranks without a launcher such as torchrun, which would end all ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from tests.parallel.forked import run_ranks

REPOSITORY = Path(__file__).parents[2]


def start_ranks(
    arguments: Sequence[str], ranks: int, log: Path | None = None, **environ: str
) -> list[subprocess.Popen]:
    """Start ``credit ARGUMENTS`` on `ranks` ranks of this host; the output goes to files ``LOG.RANK`` or to pipes."""
    command = [sys.executable, "-m", "credit.cli.main", *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **environ}
    if ranks > 1:
        variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost",
                      "MASTER_PORT": str(free_port())}  # fmt: skip
    processes = []
    for rank in range(ranks):
        rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        with nullcontext(subprocess.PIPE) if log is None else Path(f"{log}.{rank}").open("w") as out:
            processes.append(
                subprocess.Popen(
                    command, env=variables | rank_variables, stdout=out, stderr=subprocess.STDOUT, text=True
                )
            )
    return processes


def run_to_end(arguments: Sequence[str], ranks: int = 1, timeout: float = 300.0, **environ: str) -> tuple[int, str]:
    """Run the command on all ranks until they end; return the largest exit code and all output."""
    if ranks == 1:
        # One rank runs in a fork, which needs no imports. Several ranks are new processes, to see if they end alone.
        return run_ranks("credit.cli.main", 1, *arguments, timeout=timeout, environment=environ)
    processes = start_ranks(arguments, ranks, **environ)
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return max(process.returncode for process in processes), "\n".join(outputs)


def wait_for_end(processes: Sequence[subprocess.Popen], timeout: float) -> list[int]:
    """Wait for all processes, and kill those that run after `timeout` seconds. Return the exit codes."""
    deadline = time.monotonic() + timeout
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return [process.returncode for process in processes]


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
