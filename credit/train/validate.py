"""Validation: a rollout from times spread over the whole validation period, scored in physical units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from credit.data.samples.batch import Batch
from credit.forecast.objectives.base import Objective
from credit.metrics import Metric
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
    objective: Objective,
    batches: Iterator[Batch],
    share: ValidationShare,
    metrics: Sequence[Metric],
    loss_steps: int,
    stop: Callable[[], bool],
) -> dict[str, float] | None:
    """Collective: return the metrics of the weights that are in the model now, over the cases of all ranks.

    None where a rank wanted to stop before it was over.

    Args:
        objective: predicts with the network, which is put in eval mode and back.
        batches: of this rank, on its device.
        share: the cases that this rank evaluates.
        metrics: new ones, without sums.
        loss_steps: the training loss is averaged over the first so many steps, as many as training's rollout has.
        stop: whether this rank wants to stop; asked before each batch.
    """
    model = objective.stepper.model
    was_training = model.training
    model.eval()
    device = objective.stepper.normalizer.tendency_scale_C.device
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    is_stopped = False
    for num_counted in share.counted:
        is_stopped = any_rank_stops(stop, device)
        if is_stopped:
            break
        loss_sum += _add_batch(objective, next(batches), num_counted, metrics, loss_steps)
    model.train(was_training)
    if is_stopped:
        return None
    # Tensor-parallel peers have the same cases, so the means are those over the data ranks.
    totals = [loss_sum]
    for metric in metrics:
        totals += metric.sums.values()
    for total in totals:
        total.copy_(mean_over_ranks(total))
    num_cases = share.cases / share.ranks
    values = {"loss": loss_sum.item() / num_cases}
    for metric in metrics:
        values |= metric.summary(num_cases)
    return values


def _add_batch(
    objective: Objective, batch: Batch, num_counted: int, metrics: Sequence[Metric], loss_steps: int
) -> torch.Tensor | float:
    """Add the first `num_counted` cases of a batch to the metrics and return the sum of their losses."""
    stepper = objective.stepper
    decode = stepper.normalizer.decode_differences
    encoded = objective.encode(batch)
    target_BCTHW = encoded.target_BCTHW
    num_steps = target_BCTHW.shape[2]
    loss_steps = min(loss_steps, num_steps)
    start_BCHW = encoded.history_BCTHW[:, :, -1]
    # Diagnostics have no initial value, so their persistence is the mean.
    diagnostics_BCHW = torch.zeros_like(target_BCTHW[:, start_BCHW.shape[1] :, 0])
    persistence_BCHW = torch.cat([start_BCHW, diagnostics_BCHW], dim=1)[:num_counted]
    loss_sum = 0.0
    for lead, prediction_BMCHW in enumerate(objective.predict(encoded, num_steps)):
        prediction_BMCHW = prediction_BMCHW[:num_counted]
        truth_BCHW = target_BCTHW[:num_counted, :, lead]
        forecast_BMCHW = decode(prediction_BMCHW.flatten(0, 1), "output").unflatten(0, prediction_BMCHW.shape[:2])
        persistence, truth = decode(persistence_BCHW, "output"), decode(truth_BCHW, "output")
        for metric in metrics:
            metric.add(lead, forecast_BMCHW, persistence, truth)
        if lead < loss_steps and num_counted:
            loss_sum += objective.loss(prediction_BMCHW, truth_BCHW).double() * num_counted / loss_steps
    return loss_sum
