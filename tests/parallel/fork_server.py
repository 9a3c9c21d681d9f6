"""Server that imports the large packages once and then runs Python modules as ranks in forks of itself.

`tests.parallel.forked` starts one server for each pytest process. Each line of standard input is a request in JSON. The
answer is a line with the exit codes of the ranks.
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
    # The first DTensor imports this package, which takes as long as the import of torch.
    "torch._dynamo",
    # xarray imports this module when it opens the first file.
    "dask.array",
)  # fmt: skip
POLL_SECONDS = 0.02
# After a rank has failed, the other ranks have this time to print their errors and end, before SIGTERM is sent to them.
# They have the same time again between SIGTERM and SIGKILL.
GRACE_SECONDS = 2.0


def find_free_port() -> int:
    """Return the number of a free TCP port."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def become_rank(request: dict[str, Any], variables: dict[str, str]) -> None:
    """Give this fork of the server the environment, working folder, arguments and output of a rank."""
    os.environ.clear()
    os.environ.update(request["environment"] | variables)
    os.chdir(request["folder"])
    # ``python -m`` also puts the working folder first.
    sys.path[0] = request["folder"]
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    empty_input = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((empty_input, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.argv = [request["module"], *request["arguments"]]


def start_ranks(request: dict[str, Any]) -> list[int] | None:
    """Fork the ranks and return their process IDs. In a rank, return None."""
    num_ranks = request["ranks"]
    world_variables = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "localhost",
                       "MASTER_PORT": str(find_free_port())}  # fmt: skip
    pids = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            become_rank(
                request, {**world_variables, "RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else {}
            )
            return None
        pids.append(pid)
    return pids


def wait_for_ranks(pids: list[int], timeout: float) -> list[int]:
    """Wait for the ranks and return their exit codes.

    If a rank fails or the time is over, the other ranks are ended, as torchrun does.
    """
    exit_codes: dict[int, int] = {}
    end_time = time.monotonic() + timeout
    signals = [signal.SIGTERM, signal.SIGKILL]
    while len(exit_codes) < len(pids):
        for pid in pids:
            if pid not in exit_codes:
                ended_pid, status = os.waitpid(pid, os.WNOHANG)
                if ended_pid:
                    exit_codes[pid] = os.waitstatus_to_exitcode(status)
                    if exit_codes[pid]:
                        end_time = min(end_time, time.monotonic() + GRACE_SECONDS)
        if signals and time.monotonic() > end_time:
            end_time = time.monotonic() + GRACE_SECONDS
            send_signal(signals.pop(0), [pid for pid in pids if pid not in exit_codes])
        time.sleep(POLL_SECONDS)
    return [exit_codes[pid] for pid in pids]


def send_signal(signal_number: int, pids: list[int]) -> None:
    """Send a signal to processes whose exit codes have not been read yet."""
    for pid in pids:
        os.kill(pid, signal_number)


def serve() -> str | None:
    """Answer requests until standard input ends. In a rank, return the name of the module to run."""
    for line in iter(sys.stdin.buffer.readline, b""):
        request = json.loads(line)
        # The ranks inherit the imports of the module. The module itself runs again, as `__main__`. If its import fails,
        # each rank raises the error again.
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

    Threads are joined and exit handlers are run, as at the end of an interpreter. Modules are not torn down, because
    that would copy all memory pages shared with the server, which takes 2 s of CPU time.
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
    # Otherwise each garbage collection in a rank would copy the memory pages of all imported modules.
    gc.collect()
    gc.freeze()
    module = serve()
    if module is not None:
        run_as_main(module)
