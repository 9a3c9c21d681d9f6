"""Worker of test_checkpoint.py: one of two ranks is lost while both write a file.

Its arguments are the folder of the test, and ``killed`` or ``late`` for the kind of loss.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from credit.errors import CheckpointError
from credit.parallel.object_collectives import LostRanksError
from credit.train.checkpoint.async_writer import AsyncCheckpointer
from credit.train.checkpoint.sharded import writer
from credit.train.checkpoint.sharded.files import write_ranges


def write_half_and_die(path: Path, ranges: Iterable[tuple[int, np.ndarray]], _: int) -> int:
    """Write half of the first range and kill this process, as the loss of its host or the operating system would."""
    offset, content = next(iter(ranges))
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(offset)
        file.write(content[: len(content) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


def write_late(path: Path, ranges: Iterable[tuple[int, np.ndarray]], file_size: int) -> int:
    """Write after the other rank has stopped waiting, as after a failure of the file system of one host."""
    time.sleep(2.5)
    return write_ranges(path, ranges, file_size)


def require_error_in_later_save(checkpointer: AsyncCheckpointer, state: dict[str, torch.Tensor]) -> None:
    """Require that a later save raises an error.

    No later save can succeed, so the run must not continue with a warning for each of them.
    """
    checkpointer.save(2, {"model": state}, {}, {})
    for _ in range(2):
        try:
            checkpointer.save(3, {"model": state}, {}, {})
        except LostRanksError as error:
            assert "step_00000002: cannot be saved (the connection to another rank was lost" in str(error)
            return
    raise AssertionError("the run goes on")


def main(folder: Path, loss_kind: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if loss_kind == "late":
        # The writer threads have their own process group. Shorten its timeout of 30 minutes.
        dist.new_group = functools.partial(dist.new_group, timeout=timedelta(seconds=1))
    mesh = init_device_mesh("cpu", (2,))
    state = {"weight": distribute_tensor(torch.arange(2000.0), mesh, [Shard(0)])}
    checkpointer = AsyncCheckpointer(folder)
    checkpointer.save(1, {"model": state}, {}, {}, synchronous=True)
    if dist.get_rank() == 1:
        writer.write_ranges = {"killed": write_half_and_die, "late": write_late}[loss_kind]
    if loss_kind == "late":
        require_error_in_later_save(checkpointer, state)
        dist.barrier()
        os._exit(0)
    try:
        checkpointer.save(2, {"model": state}, {}, {}, synchronous=True)
    except CheckpointError as error:
        # The process group cannot be used any more, so end without destroying it.
        print(f"rank 0 says: {error}", flush=True)
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
