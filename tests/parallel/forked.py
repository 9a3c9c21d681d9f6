"""Ranks that start at once: forks of a process that has imported torch, since imports take 4 s of each new rank.

Where the start of processes, their launcher or their end by signals is tested, use `tests.parallel.torchrun`. Its ranks
also differ in the order of their sets; the ranks here have one hash seed.
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
    """Start the server of this process, which ends when its standard input is closed."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.parallel.fork_server"],
        cwd=REPOSITORY, env=rank_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    atexit.register(stop_server, server)
    return server


def rank_environment() -> dict[str, str]:
    """Return the environment variables of server and ranks."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


def stop_server(server: subprocess.Popen) -> None:
    """Close the server's standard input and wait for its end."""
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
    """Run ``python -m module arguments`` on several ranks; return an exit code other than 0, if any, and the output.

    If a rank fails or `timeout` seconds have passed, all are ended.

    Args:
        module: module with a main program.
        ranks: number of ranks; one has no process group.
        arguments: arguments of the program.
        timeout: longest time in seconds.
        folder: working folder, this process's by default.
        environment: environment variables beside those of this process.
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
            codes = json.loads(server.stdout.readline())
        except BaseException:
            # The time of a test is over, say: an answer that comes later would be taken for that of the next request.
            start_server.cache_clear()
            os.killpg(server.pid, signal.SIGKILL)
            raise
        return next((code for code in codes if code), 0), output.read()


def launch(module: str, ranks: int, *arguments: str, timeout: float = 500.0) -> str:
    """Run ``python -m module arguments`` on several ranks and return what they printed; see `run_ranks`.

    Raises:
        AssertionError: with the output, if a rank fails or takes longer than `timeout` seconds.
    """
    code, output = run_ranks(module, ranks, *arguments, timeout=timeout)
    assert code == 0, f"{module} on {ranks} ranks failed, with the exit code {code}:\n{output[-40000:]}"
    return output
