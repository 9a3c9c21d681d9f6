"""Best interval between checkpoints, and the time of a run with failures.

Failures occur at random with a constant rate (exponential distribution). The formulas for the time of a run with
failures and for the best interval are from Daly (2006), doi 10.1016/j.future.2004.11.016. Training waits while a
checkpoint is copied (`stall`), and continues while it is written (`write`). After a failure during the write, this
checkpoint is lost, and the run restarts from the previous checkpoint.
"""

from __future__ import annotations

import math


def compute_best_interval(stall: float, mtbf: float) -> float:
    """Return the training time between two checkpoints for the shortest run, from Daly's higher-order estimate.

    The best interval does not depend on the times of the restart and the write (Vaidya 1997, "Impact of checkpoint
    latency on overhead ratio of a checkpointing scheme"), see `compute_run_time`.

    Args:
        stall: time for which training waits for a checkpoint, in any unit of time.
        mtbf: mean time between failures of the whole job, in the same unit.
    """
    if stall >= 2 * mtbf:
        return mtbf
    ratio = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def compute_run_time(work: float, interval: float, stall: float, write: float, restart: float, mtbf: float) -> float:
    """Return the expected time of a run with failures and many checkpoints; infinite if the result overflows.

    This is Daly's model, extended by a write during training. A checkpoint can be used after the end of its write.
    Without a failure, the next checkpoint can be used after the time ``interval + stall``. With a failure, it can be
    used after ``restart + interval + stall + write``, because the training since the copy of the checkpoint is
    repeated. The extended model therefore adds `write` to Daly's `restart`. With M for `mtbf`, the expected time of an
    interval is M e^((restart + write) / M) (e^((interval + stall) / M) - 1).

    Args:
        work: time of the run without checkpoints and failures.
        interval: training time between two checkpoints.
        stall: time for which training waits for a checkpoint.
        write: time to write a checkpoint while training continues; at most ``interval + stall``.
        restart: time from a failure until training continues from the checkpoint.
        mtbf: mean time between failures of the whole job.
    """
    try:
        # expm1 is accurate even if failures are rare.
        time_per_interval = mtbf * math.exp((restart + write) / mtbf) * math.expm1((interval + stall) / mtbf)
    except OverflowError:
        return math.inf
    return time_per_interval * work / interval
