"""Worker of test_object_collectives: of two ranks one dies while rank 0 sends its result."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from credit.errors import CheckpointError
from credit.parallel.object_collectives import run_on_all_ranks, run_on_rank0
from credit.parallel.process_info import process_group, read_process_info


class Deadly:
    """Kills the process that sends it."""

    def __reduce__(self) -> tuple:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def main(collective: str) -> None:
    launch = read_process_info()
    with process_group(launch, torch.device("cpu"), 1):
        # Rank 1 may still be connecting its groups to rank 0, which must not die before that is done.
        dist.barrier()
        try:
            if collective == "run_on_rank0":
                run_on_rank0(Deadly)
            else:
                run_on_all_ranks(lambda: Deadly() if launch.rank == 0 else None)
        except CheckpointError as error:
            print(error, flush=True)
            # what is left of the group cannot be taken down together
            os._exit(3)


if __name__ == "__main__":
    main(sys.argv[1])
