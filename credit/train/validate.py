"""Validation: a rollout from times spread over the whole validation period, scored in physical units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from credit.data.samples.batch import Batch
from credit.forecast.stepper import Stepper, forcing_windows
from credit.metrics import ErrorSums
from credit.parallel.reduce import mean_over_ranks


def evenly_spaced(initial: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` of the initial times, evenly over the whole of them."""
    if len(initial) <= most:
        return initial
    return initial[np.linspace(0, len(initial) - 1, most).round().astype(int)]


@dataclass(frozen=True)
class ValidationShare:
    """One data rank's part of the validation cases.

    Every rank of a sharded model must run the same number of forwards, so all have as many batches of the same sizes; a
    rank that is short of cases repeats the last one, and what it gives is not counted.

    Attributes:
        batches: indices of the cases.
        counted: how many of each batch, from its beginning, count.
        cases: of all ranks together.
        ranks: number of data ranks.
    """

    batches: list[list[int]]
    counted: list[int]
    cases: int
    ranks: int


def shard_cases(cases: int, size: int, rank: int, ranks: int) -> ValidationShare:
    """Return data rank `rank`'s share of `cases` validation cases in batches of at most `size`."""
    own = list(range(rank, cases, ranks))
    most = -(-cases // ranks)
    padded = own + [cases - 1] * (most - len(own))
    starts = range(0, most, size)
    return ValidationShare(
        batches=[padded[first : first + size] for first in starts],
        counted=[max(0, min(size, len(own) - first)) for first in starts],
        cases=cases,
        ranks=ranks,
    )


def any_rank_stops(stop: Callable[[], bool], device: torch.device) -> bool:
    """Return whether `stop` is true on any rank; collective."""
    return mean_over_ranks(torch.tensor(float(stop()), device=device)).item() > 0


@torch.no_grad()
def validate(
    stepper: Stepper,
    loss: nn.Module,
    batches: Iterator[Batch],
    mine: ValidationShare,
    weight_CHW: torch.Tensor,
    step_minutes: int,
    loss_steps: int,
    stop: Callable[[], bool],
) -> dict[str, float] | None:
    """Return the metrics of the weights that are in the model now, over the cases of all ranks; collective.

    None where a rank wanted to stop before it was over.

    Args:
        stepper: runs the network, which is put in eval mode and back.
        loss: the training loss, averaged over the first `loss_steps` steps.
        batches: of this rank, on its device.
        mine: what they are.
        weight_CHW: cell weights by output channel, summing to 1 over each.
        step_minutes: time step.
        loss_steps: as many as training's rollout has.
        stop: whether this rank wants to stop; asked before each batch.
    """
    model = stepper.model
    was_training = model.training
    model.eval()
    sums, losses = None, torch.zeros((), dtype=torch.float64, device=weight_CHW.device)
    stopped = False
    for counted in mine.counted:
        stopped = any_rank_stops(stop, weight_CHW.device)
        if stopped:
            break
        batch = next(batches)
        steps = batch.target_BCTHW.shape[2]
        sums = sums or ErrorSums(weight_CHW, steps)
        losses += _batch(stepper, loss, batch, counted, sums, min(loss_steps, steps))
    model.train(was_training)
    if stopped:
        return None
    assert sums is not None, "a validation loader is never empty"
    # tensor-parallel peers have the same cases, so the means are those over the data ranks
    for values in (losses, sums.model_LC, sums.persistence_LC):
        values.copy_(mean_over_ranks(values))
    sums.cases = mine.cases / mine.ranks
    hours = [(number + 1) * step_minutes / 60 for number in range(sums.model_LC.shape[0])]
    return {"loss": losses.item() / sums.cases, **sums.summary(stepper.channels, hours)}


def _batch(
    stepper: Stepper, loss: nn.Module, batch: Batch, counted: int, sums: ErrorSums, loss_steps: int
) -> torch.Tensor | float:
    """Add the first `counted` cases of a batch to `sums` and return their loss times their number."""
    normalizer = stepper.normalizer
    history = normalizer.encode(batch.history_BCTHW, "prognostic")
    windows = forcing_windows(normalizer.encode(batch.forcing_BCTHW, "dynamic_forcing"), history.shape[2])
    target = normalizer.encode(batch.target_BCTHW, "output")
    start = history[:, :, -1]
    # diagnostics have no initial value, so persistence is their mean
    persistence = torch.cat([start, torch.zeros_like(target[:, start.shape[1] :, 0])], dim=1)[:counted]
    total = 0.0
    for number, output in enumerate(stepper.rollout(history, windows, target.shape[2])):
        output, truth = output[:counted], target[:counted, :, number]
        sums.add(number, *(normalizer.decode_differences(x, "output") for x in (output, persistence, truth)))
        if number < loss_steps and counted:
            total += loss(output, truth).double() * counted / loss_steps
    return total
