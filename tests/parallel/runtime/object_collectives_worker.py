"""Worker of test_object_collectives: rank 0 of two ranks dies while it sends its result."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from credit.errors import CheckpointError
from credit.parallel.object_collectives import run_on_all_ranks, run_on_rank0
from credit.parallel.process_info import process_group, read_process_info


class ResultThatKillsProcess:
    """Result that kills the process when it is pickled to be sent."""

    def __reduce__(self) -> tuple:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def main(collective: str) -> None:
    process_info = read_process_info()
    with process_group(process_info, torch.device("cpu"), 1):
        # Rank 1 may still be connecting to rank 0. Rank 0 must not die before all connections exist.
        dist.barrier()
        try:
            if collective == "run_on_rank0":
                run_on_rank0(ResultThatKillsProcess)
            else:
                run_on_all_ranks(lambda: ResultThatKillsProcess() if process_info.rank == 0 else None)
        except CheckpointError as error:
            print(error, flush=True)
            # The process group cannot be destroyed without rank 0, so end without clean-up.
            os._exit(3)


if __name__ == "__main__":
    main(sys.argv[1])
