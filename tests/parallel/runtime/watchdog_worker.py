"""Ranks of which one stops in the middle; run under torchrun by the test."""

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
    """Rank 1 stays away from the fourth sum: stopped as a whole (`silent`), or only late."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    launch = read_process_info()
    with (
        process_group(launch, torch.device("cpu"), 1) as store,
        Watchdog(store, launch.rank, launch.world, patience=1.5, beat=0.3) as watchdog,
    ):
        for number in range(4):
            watchdog.record_activity(f"step {number}")
            if launch.rank == 1 and number == 3:
                if silent:
                    # somebody else has to wake it up again
                    subprocess.Popen(["sh", "-c", f"sleep 7; kill -CONT {os.getpid()}"])
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    threading.Event().wait(7)
            dist.all_reduce(torch.ones(3))
        print(f"rank {launch.rank} is through", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] == "silent")
