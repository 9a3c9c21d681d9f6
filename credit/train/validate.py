"""Validation: rollouts from initial times spread over the validation period, scored in physical units.

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


def evenly_spaced(initial_times: np.ndarray, max_cases: int) -> np.ndarray:
    """Return at most `max_cases` of the initial times, evenly spaced from the first to the last.

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
    """The validation cases of one data rank.

    Every rank of a sharded model must run the same number of forward passes, so all ranks have the same number of
    batches, of the same sizes. A rank with fewer cases repeats the last case of all, and the repetitions do not count.

    Attributes:
        batches: for each batch, the indices of its cases among all initial times.
        counted: for each batch, the number of its leading cases that count; the rest are repetitions.
        cases: number of cases of all ranks together.
        ranks: number of data ranks.
    """

    batches: list[list[int]]
    counted: list[int]
    cases: int
    ranks: int


def shard_cases(num_cases: int, batch_size: int, rank: int, num_ranks: int) -> ValidationShare:
    """Return the share of data rank `rank` in `num_cases` validation cases.

    Args:
        num_cases: number of cases of all ranks together.
        batch_size: largest number of cases in a batch.
        rank: the data rank: index, from 0, among the data-parallel ranks.
        num_ranks: number of data ranks.
    """
    # The cases are dealt out in turn, so the numbers of two ranks differ by one at most.
    case_indices = list(range(rank, num_cases, num_ranks))
    num_counted = len(case_indices)
    cases_per_rank = math.ceil(num_cases / num_ranks)
    case_indices += [num_cases - 1] * (cases_per_rank - num_counted)
    batches = []
    counted = []
    for start in range(0, cases_per_rank, batch_size):
        batches.append(case_indices[start : start + batch_size])
        counted.append(max(0, min(batch_size, num_counted - start)))
    return ValidationShare(batches=batches, counted=counted, cases=num_cases, ranks=num_ranks)


def any_rank_stops(stop: Callable[[], bool], device: torch.device) -> bool:
    """Collective: return True if any rank wants to stop.

    Args:
        stop: function that returns whether this rank wants to stop.
        device: the device of this rank.
    """
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
    """Collective: return the metrics of the model's present weights, averaged over the cases of all ranks.

    Args:
        objective: the training objective, which forecasts with the network and has the loss. The network is in eval
            mode during the validation.
        batches: the batches of this rank, on its device.
        share: the cases that this rank evaluates.
        metrics: metrics whose sums are still zero.
        loss_steps: number of leading rollout steps over which the training loss is averaged.
        stop: function that returns whether this rank has been asked to stop; called before each batch.

    Returns:
        Name of a metric's value, or ``loss`` -> value in the unit of the metric; the loss has no unit. None if a rank
        was asked to stop during the validation.

    Raises:
        ConfigError: if two metrics have values of the same name, or the values of a metric have other names than its
            method `names` returns.
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

    # Each sum over the cases of this rank is replaced, in place, by its mean over the ranks. Tensor-parallel peers have
    # the same cases, so the means over all ranks are those over the data ranks.
    totals = [loss_sum]
    for metric in metrics:
        totals += metric.sums.values()
    for total in totals:
        total.copy_(mean_over_ranks(total))
    # The totals are means over the ranks, so they are divided by the mean number of cases of a rank.
    num_cases = share.cases / share.ranks
    values = {"loss": loss_sum.item() / num_cases}
    for metric in metrics:
        _add_summary(values, metric, num_cases)
    return values


def _add_summary(values: dict[str, float], metric: Metric, num_cases: float) -> None:
    """Add the values of a metric to `values`, which has those of the metrics before it.

    Args:
        values: name -> value; extended in place.
        metric: the metric. Its sums over this rank's cases have already been replaced by their means over the ranks.
        num_cases: mean number of cases of a rank, by which the metric divides its sums.

    Raises:
        ConfigError: if the values have other names than the metric's method `names` returns, or a name that is already
            in `values`.
    """
    context = metric.context
    summary = metric.summary(num_cases)
    names = set(metric.names(context.channels, context.lead_hours))
    if summary.keys() != names:
        differing = ", ".join(sorted(summary.keys() ^ names))
        raise ConfigError(
            f"trainer.metrics: {type(metric).__qualname__}.summary and .names differ in {differing}; return the same"
        )
    repeated_names = values.keys() & summary.keys()
    if repeated_names:
        # The second value would replace the first.
        raise ConfigError(
            f"trainer.metrics: {type(metric).__qualname__} returns {', '.join(sorted(repeated_names))}, a name that is "
            "taken; choose another name in the metric's class"
        )
    values |= summary


def _add_batch(
    objective: Objective, batch: Batch, num_counted: int, metrics: Sequence[Metric], loss_steps: int
) -> torch.Tensor | float:
    """Add the first `num_counted` cases of a batch to the metrics and return the sum of their losses.

    Args:
        objective: the training objective, which forecasts with the network in eval mode and has the loss.
        batch: a batch of this rank, on its device.
        num_counted: number of leading cases that count, possibly 0.
        metrics: the metrics to add to, which take fields in physical units.
        loss_steps: number of leading rollout steps over which the loss of a case is averaged.

    Returns:
        The sum of the cases' losses, a float64 scalar; 0.0 if no case counts.
    """
    stepper = objective.stepper
    stepper.begin_iteration()
    decode = stepper.normalizer.decode_differences
    encoded = objective.encode(batch)
    target_BCTHW = encoded.target_BCTHW
    num_steps = target_BCTHW.shape[2]
    loss_steps = min(loss_steps, num_steps)

    # Persistence, the forecast of no change, is the reference of skill.
    start_BCHW = encoded.history_BCTHW[:, :, -1]
    # Diagnostic channels have no initial value, so their persistence is the mean, which is 0 after normalisation.
    diagnostics_BCHW = torch.zeros_like(target_BCTHW[:, start_BCHW.shape[1] :, 0])
    persistence_BCHW = torch.cat([start_BCHW, diagnostics_BCHW], dim=1)[:num_counted]
    loss_sum = 0.0
    for lead, prediction_BMCHW in enumerate(objective.predict(encoded, num_steps)):
        if num_counted == 0:
            # The other ranks of a sharded model need only the forward passes of this rank.
            continue
        prediction_BMCHW = prediction_BMCHW[:num_counted]
        truth_BCHW = target_BCTHW[:num_counted, :, lead]
        # The normaliser takes (B, C, H, W), so the members are decoded as further samples.
        decoded_samples = decode(prediction_BMCHW.flatten(0, 1), "output")
        forecast_BMCHW = decoded_samples.unflatten(0, prediction_BMCHW.shape[:2])
        decoded_persistence_BCHW = decode(persistence_BCHW, "output")
        decoded_truth_BCHW = decode(truth_BCHW, "output")
        for metric in metrics:
            metric.add(lead, forecast_BMCHW, decoded_persistence_BCHW, decoded_truth_BCHW)
        if lead < loss_steps:
            # The loss is a mean over the cases; the sum over the cases is accumulated.
            mean_loss = objective.loss(prediction_BMCHW, truth_BCHW)
            loss_sum += mean_loss.double() * num_counted / loss_steps
    return loss_sum
