"""Plugin that kills rank 1 in its second training step, as a machine that fails."""

from __future__ import annotations

import os
import signal

from credit.train.step import TrainingStep

compute = TrainingStep.__call__
num_steps = 0


def run_or_die(*args: object, **kwargs: object) -> object:
    """Compute the first step; kill this process in the second one."""
    global num_steps
    num_steps += 1
    if num_steps == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return compute(*args, **kwargs)


if os.environ["RANK"] == "1":
    TrainingStep.__call__ = run_or_die
