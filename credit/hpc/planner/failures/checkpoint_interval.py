"""Best interval between checkpoints, and the time of a run with failures.

Failures come at random, with a constant rate (exponential distribution). The time of a run with failures and the best
interval are those of Daly (2006), doi 10.1016/j.future.2004.11.016. A checkpoint stalls training while the weights are
copied (`stall`), and is written afterwards while training goes on (`write`). A failure during the write loses this
checkpoint, so that the run goes back to the one before.
"""

from __future__ import annotations

import math


def best_interval(stall: float, mtbf: float) -> float:
    """Return the time of training between two checkpoints that makes the run shortest: Daly's higher-order estimate.

    It does not depend on the times of the restart and of the write (Vaidya 1997, "Impact of checkpoint latency on
    overhead ratio of a checkpointing scheme"), see `run_time`.

    Args:
        stall: time in which training waits for a checkpoint, in any unit of time.
        mtbf: mean time between failures of the whole job, in the same unit.
    """
    if stall >= 2 * mtbf:
        return mtbf
    ratio = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def run_time(work: float, interval: float, stall: float, write: float, restart: float, mtbf: float) -> float:
    """Return the expected time of a run with failures, for many checkpoints; infinite if it cannot be computed.

    This is Daly's model with a write beside the training. A checkpoint can be used from the end of its write. Without a
    failure, the next one can be used ``interval + stall`` later. After a failure, this takes ``restart + interval +
    stall + write``, because the training since the copy of the checkpoint is repeated. So `write` is added to Daly's
    `restart`: an interval takes M e^((restart + write) / M) (e^((interval + stall) / M) - 1), with M for `mtbf`.

    Args:
        work: time of the run without checkpoints and failures.
        interval: time of training between two checkpoints.
        stall: time in which training waits for a checkpoint.
        write: time until a checkpoint is written, while training goes on; at most ``interval + stall``.
        restart: time from a failure until training goes on at the checkpoint.
        mtbf: mean time between failures of the whole job.
    """
    try:
        # expm1 keeps its digits if failures are rare.
        time_per_interval = mtbf * math.exp((restart + write) / mtbf) * math.expm1((interval + stall) / mtbf)
    except OverflowError:
        return math.inf
    return time_per_interval * work / interval
