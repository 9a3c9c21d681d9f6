"""Plugin (``plugins: [tests.faults.inject]``) that makes the loss of chosen steps wrong, like damaged data or hardware.

The environment variable CREDIT_TEST_INJECT contains JSON with these keys:

- ``steps``: steps, counted from 0. Their batches at the first visit have a wrong loss, also at later visits.
- ``rank``: the rank with the wrong loss; all ranks by default.
- ``always``: true to make the loss of these steps wrong for any batch.
- ``factor``: factor of the loss; NaN by default.
- ``error``: true to raise a DataError.
- ``shape``: true to add tensors whose shapes differ, which raises a RuntimeError.
"""

from __future__ import annotations

import json
import math
import os

import torch
import torch.distributed as dist

from credit.data.samples.batch import Batch
from credit.errors import DataError
from credit.forecast.objectives.base import MicroStep
from credit.forecast.objectives.deterministic import DeterministicRollout

FAULT = json.loads(os.environ.get("CREDIT_TEST_INJECT", "{}"))
_faulty_times: dict[int, tuple[int, ...]] = {}
_original_loss = DeterministicRollout.training_loss


def _faulty_loss(self: DeterministicRollout, batch: Batch, micro_step: MicroStep) -> torch.Tensor:
    loss = _original_loss(self, batch, micro_step)
    step = micro_step.optimizer_step
    rank = dist.get_rank() if dist.is_initialized() else 0
    if FAULT.get("rank", rank) != rank:
        return loss
    times = batch.initial_minutes
    if step in FAULT.get("steps", ()):
        _faulty_times.setdefault(step, times)
    is_faulty = step in FAULT.get("steps", ()) if FAULT.get("always") else times in _faulty_times.values()
    if is_faulty and FAULT.get("error"):
        raise DataError("era5.nc: t2m cannot be read")
    if is_faulty and FAULT.get("shape"):
        return loss + torch.zeros(2).add(torch.zeros(3)).sum()
    return loss * FAULT.get("factor", math.nan) if is_faulty else loss


DeterministicRollout.training_loss = _faulty_loss
