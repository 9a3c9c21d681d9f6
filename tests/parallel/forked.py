"""Launch of ranks as forks of a process that has imported torch, because the imports of a new process take 4 s.

For tests of the start of processes, of their launcher or of their end by signals, use `tests.parallel.torchrun`. Its
ranks also have different hash seeds, so that their sets differ in order. The ranks here share one hash seed.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.parallel.torchrun import REPOSITORY


@functools.cache
def start_server() -> subprocess.Popen:
    """Start the server of this process. The server ends when its standard input is closed."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.parallel.fork_server"],
        cwd=REPOSITORY, env=rank_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    atexit.register(stop_server, server)
    return server


def rank_environment() -> dict[str, str]:
    """Return the environment variables of the server and of the ranks."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


def stop_server(server: subprocess.Popen) -> None:
    """Close the standard input of the server and wait until the server has ended."""
    server.stdin.close()
    server.wait()
    server.stdout.close()


def run_ranks(
    module: str,
    ranks: int,
    *arguments: str,
    timeout: float = 500.0,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run ``python -m module arguments`` on several ranks and return the exit code and the output.

    If a rank fails or `timeout` seconds have passed, all ranks are ended. The exit code is that of the first rank in
    order whose exit code is not 0; it is 0 if there is none.

    Args:
        module: module with a main program.
        ranks: number of ranks; a single rank gets no variables of a launcher, so it has no process group.
        arguments: arguments of the program.
        timeout: longest time in seconds.
        folder: working folder; by default, that of this process.
        environment: environment variables that are added to those of this process, or replace them.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".log", errors="replace") as output:
        request = {
            "module": module, "arguments": arguments, "ranks": ranks, "timeout": timeout, "output": output.name,
            "folder": str(folder or Path.cwd()), "environment": {**rank_environment(), **(environment or {})},
        }  # fmt: skip
        server = start_server()
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            exit_codes = json.loads(server.stdout.readline())
        except BaseException:
            # For instance, the test has timed out. A late answer would be read as that of the next request, so end the
            # server and its ranks.
            start_server.cache_clear()
            os.killpg(server.pid, signal.SIGKILL)
            raise
        return next((exit_code for exit_code in exit_codes if exit_code), 0), output.read()


def launch(module: str, ranks: int, *arguments: str, timeout: float = 500.0) -> str:
    """Run ``python -m module arguments`` on several ranks and return their output; see `run_ranks`.

    Raises:
        AssertionError: with the output, if a rank fails or takes longer than `timeout` seconds.
    """
    exit_code, output = run_ranks(module, ranks, *arguments, timeout=timeout)
    assert exit_code == 0, f"{module} on {ranks} ranks failed, with the exit code {exit_code}:\n{output[-40000:]}"
    return output
