"""Server that runs Python modules as ranks, each in a fork of itself, which has imported the large packages already.

`tests.parallel.forked` starts one for each process of pytest. Every line of standard input is a request in JSON, and
the answer is a line with the exit codes of its ranks.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

PRELOADED = (
    "credit.cli.main", "credit.cli.rollout.command", "credit.cli.rollout.forecast_rounds", "credit.cli.train",
    "credit.cli.verify", "credit.train.build.training", "credit.train.build.forecaster",
    "credit.train.build.open_data", "credit.models.wxformer", "credit.verify.verification",
    "credit.verify.report.report", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "xarray",
    # The first DTensor imports it, which takes as long as importing torch.
    "torch._dynamo",
    # xarray imports it when it first opens a file.
    "dask.array",
)  # fmt: skip
POLL_SECONDS = 0.02
# When a rank has failed, the others have some time to end by themselves, and to say why, then as much after TERM.
GRACE_SECONDS = 2.0


def free_port() -> int:
    """Return a port that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def become_rank(request: dict[str, Any], variables: dict[str, str]) -> None:
    """Give this process, a fork of the server, the variables, folder, arguments and output of a rank."""
    os.environ.clear()
    os.environ.update(request["environment"] | variables)
    os.chdir(request["folder"])
    # as of ``python -m``
    sys.path[0] = request["folder"]
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    no_input = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((no_input, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.argv = [request["module"], *request["arguments"]]


def start_ranks(request: dict[str, Any]) -> list[int] | None:
    """Fork the ranks and return their process numbers; in a rank, return None."""
    world = request["ranks"]
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost",
              "MASTER_PORT": str(free_port())}  # fmt: skip
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            become_rank(request, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {})
            return None
        pids.append(pid)
    return pids


def wait_for_ranks(pids: list[int], timeout: float) -> list[int]:
    """Return the exit codes. If one fails or the time is over, the others are ended, as torchrun does."""
    codes: dict[int, int] = {}
    end_time = time.monotonic() + timeout
    signals = [signal.SIGTERM, signal.SIGKILL]
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                ended_pid, status = os.waitpid(pid, os.WNOHANG)
                if ended_pid:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid]:
                        end_time = min(end_time, time.monotonic() + GRACE_SECONDS)
        if signals and time.monotonic() > end_time:
            end_time = time.monotonic() + GRACE_SECONDS
            send(signals.pop(0), [pid for pid in pids if pid not in codes])
        time.sleep(POLL_SECONDS)
    return [codes[pid] for pid in pids]


def send(signal_number: int, pids: list[int]) -> None:
    """Send a signal to processes that have not been waited for."""
    for pid in pids:
        os.kill(pid, signal_number)


def serve() -> str | None:
    """Answer requests until the end of standard input; in a rank, return the name of the module that it is to run."""
    for line in iter(sys.stdin.buffer.readline, b""):
        request = json.loads(line)
        # The program itself runs as a new module, `__main__`, but finds all that it imports. Ranks repeat an error.
        with suppress(Exception):
            importlib.import_module(request["module"])
        sys.modules.pop(request["module"], None)
        pids = start_ranks(request)
        if pids is None:
            return request["module"]
        print(json.dumps(wait_for_ranks(pids, request["timeout"])), flush=True)
    return None


def run_as_main(module: str) -> NoReturn:
    """Run a module as the main program and end the process.

    Threads are joined and exit handlers run as at the end of an interpreter. But modules are not torn down: that takes
    2 s of CPU time, since it copies all pages that are shared with the server.
    """
    exit_code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as request:
        if isinstance(request.code, str):
            print(request.code, file=sys.stderr)
        exit_code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:
        traceback.print_exc()
        exit_code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    # Else each collection of garbage in a rank would copy the pages of all that is imported.
    gc.collect()
    gc.freeze()
    module = serve()
    if module is not None:
        run_as_main(module)
