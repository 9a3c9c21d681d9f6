"""Validation: rollouts from initial times in the validation period, scored in physical units.

A case is the forecast from one initial time.

Shape suffixes: B cases of a batch, M ensemble members, C channels, T rollout steps or, in the history, input frames,
H latitude rows, W longitude columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from credit.data.samples.batch import Batch
from credit.errors import ConfigError
from credit.forecast.objectives.base import Objective
from credit.metrics import Metric
from credit.parallel.reduce import mean_over_ranks


def select_evenly_spaced(initial_times: np.ndarray, max_cases: int) -> np.ndarray:
    """Return at most `max_cases` initial times, evenly spaced and including the first and the last.

    Args:
        initial_times: (N,) times in minutes, increasing.
        max_cases: largest number of times to return.
    """
    if len(initial_times) <= max_cases:
        return initial_times
    indices = np.linspace(0, len(initial_times) - 1, max_cases).round().astype(int)
    return initial_times[indices]


@dataclass(frozen=True)
class ValidationShare:
    """Validation cases of one data-parallel rank.

    Every rank of a sharded model must run the same number of forward passes, so all ranks have the same number of
    batches with the same sizes. A rank with fewer cases repeats the last case, and the metrics ignore the repetitions.

    Attributes:
        batches: for each batch, the indices of its cases in the list of all initial times.
        scored_counts: for each batch, the number of cases that are scored; further cases at its end are repetitions.
        cases: total number of cases of all ranks.
        ranks: number of data-parallel ranks.
    """

    batches: list[list[int]]
    scored_counts: list[int]
    cases: int
    ranks: int


def shard_cases(num_cases: int, batch_size: int, rank: int, num_ranks: int) -> ValidationShare:
    """Return the validation cases of data-parallel rank `rank`.

    Args:
        num_cases: total number of cases of all ranks.
        batch_size: largest number of cases in a batch.
        rank: the data-parallel rank, from 0.
        num_ranks: number of data-parallel ranks.
    """
    # The cases are assigned round-robin, so the numbers of cases of two ranks differ by at most one.
    case_indices = list(range(rank, num_cases, num_ranks))
    num_scored = len(case_indices)
    cases_per_rank = math.ceil(num_cases / num_ranks)
    case_indices += [num_cases - 1] * (cases_per_rank - num_scored)
    batches = []
    scored_counts = []
    for start in range(0, cases_per_rank, batch_size):
        batches.append(case_indices[start : start + batch_size])
        scored_counts.append(max(0, min(batch_size, num_scored - start)))
    return ValidationShare(batches=batches, scored_counts=scored_counts, cases=num_cases, ranks=num_ranks)


def any_rank_stops(stop: Callable[[], bool], device: torch.device) -> bool:
    """Collective: return True if any rank must stop.

    Args:
        stop: function that returns True if this rank must stop.
        device: the device of this rank.
    """
    return mean_over_ranks(torch.tensor(float(stop()), device=device)).item() > 0


@torch.no_grad()
def validate(
    objective: Objective,
    batches: Iterator[Batch],
    share: ValidationShare,
    metrics: Sequence[Metric],
    num_loss_steps: int,
    stop: Callable[[], bool],
) -> dict[str, float] | None:
    """Collective: return the metrics of the model's current weights, averaged over the cases of all ranks.

    Args:
        objective: the training objective, which makes forecasts and computes the loss. The network is in eval mode
            during the validation.
        batches: the batches of this rank, on its device.
        share: the cases that this rank evaluates.
        metrics: metrics whose sums are still zero.
        num_loss_steps: number of first rollout steps over which the training loss is averaged.
        stop: function that returns True if this rank has received a request to stop; it is called before each batch.

    Returns:
        Name of a metric's value, or ``loss`` -> value in the units of the metric; the loss has no units. None if a rank
        received a request to stop during the validation.

    Raises:
        ConfigError: if two metrics return values with the same name, or if the names of a metric's values differ from
            the names that its method `names` returns.
    """
    model = objective.stepper.model
    was_training = model.training
    model.eval()
    device = objective.stepper.normalizer.tendency_scale_C.device
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    is_stopped = False
    for num_scored in share.scored_counts:
        is_stopped = any_rank_stops(stop, device)
        if is_stopped:
            break
        loss_sum += _add_batch(objective, next(batches), num_scored, metrics, num_loss_steps)
    model.train(was_training)
    if is_stopped:
        return None

    # Each sum over the cases of this rank is replaced in place with its mean over the ranks. The ranks of a
    # tensor-parallel group have the same cases, so the mean over all ranks is the mean over the data-parallel ranks.
    totals = [loss_sum]
    for metric in metrics:
        totals += metric.sums.values()
    for total in totals:
        total.copy_(mean_over_ranks(total))
    # The totals are means over the ranks, so they are divided by the mean number of cases per rank.
    num_cases = share.cases / share.ranks
    values = {"loss": loss_sum.item() / num_cases}
    for metric in metrics:
        _add_summary(values, metric, num_cases)
    return values


def _add_summary(values: dict[str, float], metric: Metric, num_cases: float) -> None:
    """Compute the values of a metric and add them to `values`.

    Args:
        values: name -> value, of the previous metrics; extended in place.
        metric: the metric. Its sums over this rank's cases have already been replaced with their means over the ranks.
        num_cases: mean number of cases per rank; the metric divides its sums by this number.

    Raises:
        ConfigError: if the names of the values differ from the names that the method `names` of the metric returns, or
            if a name is already in `values`.
    """
    context = metric.context
    summary = metric.summary(num_cases)
    names = set(metric.names(context.channels, context.lead_hours))
    if summary.keys() != names:
        differing = ", ".join(sorted(summary.keys() ^ names))
        raise ConfigError(
            f"trainer.metrics: {type(metric).__qualname__}.summary and .names differ in {differing}; both must return "
            "the same names"
        )
    repeated_names = values.keys() & summary.keys()
    if repeated_names:
        # The second value would replace the first.
        raise ConfigError(
            f"trainer.metrics: {type(metric).__qualname__} returns {', '.join(sorted(repeated_names))}, a name that "
            "another metric returns; choose a different name in the metric's class"
        )
    values |= summary


def _add_batch(
    objective: Objective, batch: Batch, num_scored: int, metrics: Sequence[Metric], num_loss_steps: int
) -> torch.Tensor | float:
    """Add the first `num_scored` cases of a batch to the metrics, and return the sum of the losses of these cases.

    Args:
        objective: the training objective, which makes forecasts with the network in eval mode and computes the loss.
        batch: a batch of this rank, on its device.
        num_scored: number of cases at the beginning of the batch that are scored, possibly 0.
        metrics: metrics that the cases are added to; they expect fields in physical units.
        num_loss_steps: number of first rollout steps over which the loss of a case is averaged.

    Returns:
        The sum of the losses, a float64 scalar; 0.0 if no case is scored.
    """
    stepper = objective.stepper
    stepper.begin_iteration()
    decode = stepper.normalizer.decode_differences
    encoded = objective.encode(batch)
    target_BCTHW = encoded.target_BCTHW
    num_steps = target_BCTHW.shape[2]
    num_loss_steps = min(num_loss_steps, num_steps)

    # Skill is relative to persistence, the forecast that nothing changes.
    start_BCHW = encoded.history_BCTHW[:, :, -1]
    # Diagnostic channels have no initial value, so their persistence forecast is the mean, which is 0 if normalised.
    diagnostics_BCHW = torch.zeros_like(target_BCTHW[:, start_BCHW.shape[1] :, 0])
    persistence_BCHW = torch.cat([start_BCHW, diagnostics_BCHW], dim=1)[:num_scored]
    loss_sum = 0.0
    for lead, prediction_BMCHW in enumerate(objective.predict(encoded, num_steps)):
        if num_scored == 0:
            # The other ranks of a sharded model need only the forward passes of this rank.
            continue
        prediction_BMCHW = prediction_BMCHW[:num_scored]
        truth_BCHW = target_BCTHW[:num_scored, :, lead]
        # The normaliser expects (B, C, H, W), so the members are decoded as additional samples.
        decoded_samples = decode(prediction_BMCHW.flatten(0, 1), "output")
        forecast_BMCHW = decoded_samples.unflatten(0, prediction_BMCHW.shape[:2])
        decoded_persistence_BCHW = decode(persistence_BCHW, "output")
        decoded_truth_BCHW = decode(truth_BCHW, "output")
        for metric in metrics:
            metric.add(lead, forecast_BMCHW, decoded_persistence_BCHW, decoded_truth_BCHW)
        if lead < num_loss_steps:
            # The objective returns the mean loss over the cases, and `loss_sum` is a sum over the cases.
            mean_loss = objective.loss(prediction_BMCHW, truth_BCHW)
            loss_sum += mean_loss.double() * num_scored / num_loss_steps
    return loss_sum
