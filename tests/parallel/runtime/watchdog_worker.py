"""Worker of test_watchdog: rank 1 of three ranks stops, or is late, in the fourth step."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading

import torch
import torch.distributed as dist

from credit.parallel.process_info import process_group, read_process_info
from credit.parallel.watchdog import Watchdog


def main(silent: bool) -> None:
    """Take four steps. Rank 1 begins the collective of the last step 7 s late.

    Args:
        silent: True if the whole process of rank 1 is stopped for this time, False if only its main thread waits.
    """
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    process_info = read_process_info()
    with (
        process_group(process_info, torch.device("cpu"), 1) as store,
        Watchdog(store, process_info.rank, process_info.world, patience=1.5, beat=0.3) as watchdog,
    ):
        for step in range(4):
            watchdog.record_activity(f"step {step}")
            if process_info.rank == 1 and step == 3:
                if silent:
                    # A stopped process cannot continue itself, so another process does it.
                    subprocess.Popen(["sh", "-c", f"sleep 7; kill -CONT {os.getpid()}"])
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    threading.Event().wait(7)
            dist.all_reduce(torch.ones(3))
        print(f"rank {process_info.rank} is through", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] == "silent")
