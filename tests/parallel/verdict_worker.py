"""Two ranks, one of which dies while rank 0's result is on its way; started by test_verdict."""

from __future__ import annotations

import os
import signal
import sys

import torch

from credit.errors import CheckpointError
from credit.parallel.object_collectives import dealt_by_main, on_main
from credit.parallel.process_info import process_group, read_launch


class Deadly:
    """Kills the process that sends it."""

    def __reduce__(self) -> tuple:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def main(how: str) -> None:
    launch = read_launch()
    with process_group(launch, torch.device("cpu"), 1):
        try:
            if how == "on_main":
                on_main(Deadly)
            else:
                dealt_by_main(0, lambda offers: [Deadly() for _ in offers])
        except CheckpointError as error:
            print(error, flush=True)
            # what is left of the group cannot be taken down together
            os._exit(3)


if __name__ == "__main__":
    main(sys.argv[1])
