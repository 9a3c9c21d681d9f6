"""A plugin (``plugins: [tests.faults.inject]``) that spoils the loss of chosen steps, as broken data or hardware would.

The environment variable CREDIT_TEST_INJECT holds JSON: ``steps`` (from 0) whose batches are spoiled when they are
first met, ``rank`` that does it (all without), ``always`` true to spoil the steps whatever their batch, ``factor`` of
the loss (NaN without), ``error`` true to raise a DataError instead, ``shape`` true to add tensors that do not fit.
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

WHAT = json.loads(os.environ.get("CREDIT_TEST_INJECT", "{}"))
_met: dict[int, tuple[int, ...]] = {}
_right = DeterministicRollout.training_loss


def _spoiled_loss(self: DeterministicRollout, batch: Batch, micro_step: MicroStep) -> torch.Tensor:
    loss = _right(self, batch, micro_step)
    step = micro_step.optimizer_step
    rank = dist.get_rank() if dist.is_initialized() else 0
    if WHAT.get("rank", rank) != rank:
        return loss
    times = batch.initial_minutes
    if step in WHAT.get("steps", ()):
        _met.setdefault(step, times)
    spoiled = step in WHAT.get("steps", ()) if WHAT.get("always") else times in _met.values()
    if spoiled and WHAT.get("error"):
        raise DataError("era5.nc: t2m cannot be read")
    if spoiled and WHAT.get("shape"):
        return loss + torch.zeros(2).add(torch.zeros(3)).sum()
    return loss * WHAT.get("factor", math.nan) if spoiled else loss


DeterministicRollout.training_loss = _spoiled_loss
