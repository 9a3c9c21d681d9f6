"""Plugin that kills rank 1 in its second training step, as if its host had failed."""

from __future__ import annotations

import os
import signal

from credit.train.step import TrainingStep

original_step = TrainingStep.__call__
num_steps = 0


def step_or_die(*args: object, **kwargs: object) -> object:
    """Compute the first step; kill this process in the second one."""
    global num_steps
    num_steps += 1
    if num_steps == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return original_step(*args, **kwargs)


if os.environ["RANK"] == "1":
    TrainingStep.__call__ = step_or_die
