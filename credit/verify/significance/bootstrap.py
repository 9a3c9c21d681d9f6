"""Confidence intervals and paired tests of scores, computed from blocks of contiguous initial times.

Forecasts with initial times one day apart have similar errors, so cases are not independent. Means over blocks of
several days are nearly independent. A block spans at least 5 days, and at least the lead time plus 2 days.

Shapes: N cases, L lead times, X rows of the score table (channels and winds, or events), R regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import scipy.stats

from credit.verify.statistics.case_statistics import CaseStatistics

NUM_RESAMPLES = 1000
CONFIDENCE_LEVEL = 0.95
# Smallest number of blocks for intervals and p-values. Fewer blocks do not show how much the scores vary.
MIN_BLOCKS_FOR_INTERVALS = 6
# Smallest and largest possible value of each metric that has an interval.
_BOUNDS = {
    "rmse": (0.0, np.inf),
    "bias": (-np.inf, np.inf),
    "mae": (0.0, np.inf),
    "acc": (-1.0, 1.0),
    "crps": (0.0, np.inf),
    "crps_fair": (-np.inf, np.inf),
    "spread_skill": (0.0, np.inf),
    "brier": (0.0, 1.0),
    "brier_fair": (-np.inf, 1.0),
    "brier_skill": (-np.inf, 1.0),
    "brier_skill_fair": (-np.inf, np.inf),
    "seeps": (0.0, np.inf),
    "diagram_observed": (0.0, 1.0),
}
METRICS_WITH_INTERVAL = tuple(_BOUNDS)
# Suffixes of the names of the lower and the upper end of an interval.
INTERVAL_SUFFIXES = ("_low", "_high")
_MIN_BLOCK_MINUTES = 5 * 1440
_MINUTES_BEYOND_LEAD = 2 * 1440


def interval_names(metrics: Iterable[str]) -> list[str]:
    """Return the names of the interval ends of each metric, such as ``rmse_low`` and ``rmse_high`` for ``rmse``."""
    names = []
    for metric in metrics:
        for suffix in INTERVAL_SUFFIXES:
            names.append(f"{metric}{suffix}")
    return names


def cases_per_block(initial_times: np.ndarray, lead_minutes: int) -> int:
    """Return the number of consecutive cases in a block at one lead time.

    The minimum span of a block is the longer of two periods: 5 days, or the lead time plus 2 days. The result is the
    largest number of cases within any period of this length. Every block of this number of cases therefore spans at
    least the minimum span.

    Args:
        initial_times: (N,) initial times in minutes, increasing.
        lead_minutes: lead time in minutes.
    """
    span = max(_MIN_BLOCK_MINUTES, lead_minutes + _MINUTES_BEYOND_LEAD)
    # Number of cases from each case (inclusive) to the end of a span that begins with this case.
    cases_within_span = np.searchsorted(initial_times, initial_times + span) - np.arange(len(initial_times))
    return int(cases_within_span.max())


def count_blocks(initial_times: np.ndarray, lead_minutes: int) -> int:
    """Return the number of complete blocks into which the cases can be divided at one lead time.

    Args:
        initial_times: (N,) initial times in minutes, increasing.
        lead_minutes: lead time in minutes.
    """
    return len(initial_times) // cases_per_block(initial_times, lead_minutes)


def confidence_intervals(statistics: CaseStatistics, lead: int, lead_minutes: int) -> dict[str, np.ndarray]:
    """Return the 95 % interval of each metric at one lead time, from a circular block bootstrap.

    Each resample consists of blocks that are sampled with replacement. A block may start at any case; after the last
    case, the block continues with the first case (Politis and Romano 1992). The interval between the quantiles of the
    resampled scores would be too narrow, so it is widened twice. With few blocks the bootstrap underestimates the
    variance, so the quantiles are moved outward by the ratio of Student's t to the normal quantile. Neighbouring blocks
    are still correlated (r), so the interval is also widened by sqrt((1 + r) / (1 - r)).

    Args:
        statistics: statistics of all cases.
        lead: index of the lead time.
        lead_minutes: lead time in minutes.

    Returns:
        Metric name -> (2, X, R) lower and upper end of the interval, in the units of the metric. The dict is empty if
        there are fewer than 6 blocks.
    """
    num_cases = len(statistics.initial_times)
    length = cases_per_block(statistics.initial_times, lead_minutes)
    num_blocks = num_cases // length
    if num_blocks < MIN_BLOCKS_FOR_INTERVALS:
        return {}
    # The mean of a statistic over a resample follows from the sums over all possible blocks and the number of times
    # that the resample contains each block.
    num_draws = _count_sampled_blocks(num_cases, num_blocks)
    cases = {}
    case_means = {}
    resampled_means = {}
    for name, values in statistics.resampled().items():
        values_NXR = values[:, lead]
        block_sums = _circular_block_sums(values_NXR.reshape(num_cases, -1), length)
        means = num_draws @ block_sums / (num_blocks * length)
        cases[name] = values_NXR
        case_means[name] = values_NXR.mean(axis=0)
        resampled_means[name] = means.reshape(NUM_RESAMPLES, *values_NXR.shape[1:])
    # The metrics of all cases are the centre of the intervals, and the metrics of the resamples determine the width.
    center = statistics.metrics_from_means(case_means)
    resampled = statistics.metrics_from_means(resampled_means)
    # The intervals are widened for the small number of blocks and for the correlation of neighbouring blocks.
    tail = _compute_tail_probability(num_blocks)
    intervals = {}
    for name, contributions in statistics.contributions(cases, case_means, center).items():
        contribution_means = _block_means(contributions, num_blocks)
        widening = np.sqrt(_variance_inflation(contribution_means))
        quantiles = np.quantile(resampled[name], [tail, 1 - tail], axis=0)
        ends = center[name] + widening * (quantiles - center[name])
        intervals[name] = np.clip(ends, *_BOUNDS[name])
    return intervals


def compute_seasonal_scores(
    statistics: Mapping[str, tuple[CaseStatistics, Sequence[int]]],
    forecasts: Sequence[str],
    metrics: Sequence[str],
    num_rows: int,
    leads: np.ndarray,
    seasons: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return the scores of all forecasts in each season, with their intervals.

    Args:
        statistics: forecast name -> (statistics of the forecast, indices of their rows among the X rows of the table).
            All statistics contain the same N cases, and ``model`` must be one of the forecasts.
        forecasts: names of all forecasts of the table; forecasts without statistics get NaN.
        metrics: names of the metrics to return.
        num_rows: number X of rows of the table.
        leads: (L,) lead times in minutes.
        seasons: season name -> (N,) bool, True for the cases of the season.

    Returns:
        Metric name -> (forecasts, seasons, X, L, R) scores, NaN where there is no score. For metrics with an interval,
        the dict also contains the ends of the interval; their keys have the suffixes ``_low`` and ``_high``.
    """
    # Every statistic has the regions as its last dimension.
    num_regions = next(iter(statistics["model"][0].resampled().values())).shape[-1]
    shape = len(forecasts), len(seasons), num_rows, len(leads), num_regions
    metrics_with_interval = [metric for metric in METRICS_WITH_INTERVAL if metric in metrics]
    names = [*metrics, *interval_names(metrics_with_interval)]
    scores = {name: np.full(shape, np.nan) for name in names}
    for forecast, (all_cases, rows) in statistics.items():
        f = forecasts.index(forecast)
        for s, is_in_season in enumerate(seasons.values()):
            season_cases = all_cases.select(is_in_season)
            # Scores over all cases of the season.
            for metric, values_LXR in season_cases.metrics().items():
                if metric in scores:
                    # The first index returns a view, so the assignment changes the array in `scores`.
                    scores[metric][f, s][list(rows)] = np.moveaxis(values_LXR, 1, 0)
            # Intervals of the metrics in `METRICS_WITH_INTERVAL`.
            for lead, minutes in enumerate(leads.tolist()):
                for metric, ends in confidence_intervals(season_cases, lead, minutes).items():
                    if metric not in scores:
                        continue
                    for suffix, values_XR in zip(INTERVAL_SUFFIXES, ends, strict=True):
                        scores[f"{metric}{suffix}"][f, s][list(rows), lead] = values_XR
    return scores


@lru_cache(maxsize=4)
def _count_sampled_blocks(num_cases: int, num_blocks: int) -> np.ndarray:
    """Count the occurrences of the block that starts at each case in each bootstrap resample.

    Args:
        num_cases: number N of cases.
        num_blocks: number of blocks in a resample.

    Returns:
        (NUM_RESAMPLES, N) float64 counts; the sum of each row is `num_blocks`.
    """
    # The seed depends only on the two arguments, so all scores of the same cases use the same resamples.
    random = np.random.default_rng([num_cases, num_blocks])
    starts = random.integers(num_cases, size=(NUM_RESAMPLES, num_blocks))
    counts = np.zeros((NUM_RESAMPLES, num_cases))
    np.add.at(counts, (np.arange(NUM_RESAMPLES)[:, None], starts), 1.0)
    return counts


def _circular_block_sums(values_NK: np.ndarray, length: int) -> np.ndarray:
    """Return, for each case, the sum over the block of cases that starts at this case, (N, K).

    After the last case, a block continues with the first case.

    Args:
        values_NK: K values of each of N cases.
        length: number of cases in a block.
    """
    # The sum over a block is the difference of two cumulative sums. The row of zeros at the start is needed for the
    # first block. The first cases are appended at the end for the blocks that continue with the first case.
    extended = np.concatenate([np.zeros_like(values_NK[:1]), values_NK, values_NK[: length - 1]])
    cumulative = np.cumsum(extended, axis=0)
    return cumulative[length:] - cumulative[:-length]


@lru_cache
def _compute_tail_probability(num_blocks: int) -> float:
    """Return the probability p; the p-quantile of the resampled scores is the lower end of the 95 % interval.

    For a normal distribution of the scores, this probability would be 2.5 %. The returned probability is smaller, so
    that the interval is as wide as an interval by Student's t with `num_blocks` - 1 degrees of freedom.

    Args:
        num_blocks: number of blocks, at least 2.
    """
    # For n blocks, the bootstrap underestimates the variance by the factor (n - 1) / n. The square root corrects this.
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE_LEVEL) / 2, num_blocks - 1)
    distance = float(quantile * np.sqrt(num_blocks / (num_blocks - 1)))
    return NormalDist().cdf(-distance)


class PairedTest(NamedTuple):
    """Result of `paired_test` for an array of differences (N, ...) with N cases.

    All arrays have the shape (...), without the dimension of the cases. They are NaN if there are fewer than 6 blocks.

    Attributes:
        p_value: two-sided p-value of the mean difference.
        n_eff: effective number of cases, at most N. The mean difference over `n_eff` independent cases would be equally
            uncertain.
        half_width: half the width of the 95 % interval of the mean difference, in the units of the difference.
    """

    p_value: np.ndarray
    n_eff: np.ndarray
    half_width: np.ndarray


def paired_test(difference: np.ndarray, length: int) -> PairedTest:
    """Test if the mean of a difference is 0, by Student's t-test of the means over blocks.

    The variance of the block means is multiplied by (1 + r) / (1 - r), where r is the remaining correlation of
    neighbouring blocks.

    Args:
        difference: (N, ...) difference of two scores in each case, in the order of the initial times.
        length: number of cases in a block, from `cases_per_block`.
    """
    num_cases = len(difference)
    num_blocks = num_cases // length
    if num_blocks < MIN_BLOCKS_FOR_INTERVALS:
        missing = np.full(difference.shape[1:], np.nan)
        return PairedTest(missing, missing, missing)
    block_means = _block_means(difference, num_blocks)
    mean = block_means.mean(axis=0)
    variance = block_means.var(axis=0, ddof=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        variance_of_mean = variance / num_blocks * _variance_inflation(block_means)
        # The statistic is 0 for two equal forecasts, although their variance is also 0.
        t_statistic = np.where(mean == 0, 0.0, mean / np.sqrt(variance_of_mean))
        # The mean of n independent cases has the variance of a single case divided by n. This equation is solved for n.
        n_eff = np.minimum(difference.var(axis=0, ddof=1) / variance_of_mean, num_cases)
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE_LEVEL) / 2, num_blocks - 1)
    return PairedTest(
        p_value=2 * scipy.stats.t.sf(np.abs(t_statistic), num_blocks - 1),
        n_eff=n_eff,
        half_width=quantile * np.sqrt(variance_of_mean),
    )


def _block_means(values: np.ndarray, num_blocks: int) -> np.ndarray:
    """Return the means over blocks of contiguous cases, (num_blocks, ...).

    Args:
        values: (N, ...) values of each case.
        num_blocks: number of blocks into which the cases are divided. The sizes of the blocks differ by at most one.
    """
    num_cases = len(values)
    # Index of the first case of each block.
    edges = np.arange(num_blocks) * num_cases // num_blocks
    sizes = np.diff(np.append(edges, num_cases))
    # The sizes get dimensions of length 1, so that they broadcast over the other dimensions.
    other_dims = [1] * (values.ndim - 1)
    return np.add.reduceat(values, edges, axis=0) / sizes.reshape(num_blocks, *other_dims)


def _variance_inflation(block_means: np.ndarray) -> np.ndarray:
    """Return the factor by which correlation of neighbouring blocks increases the variance of the total mean, (...).

    The factor is (1 + r) / (1 - r), where r is the correlation of the means of neighbouring blocks, clipped to the
    range 0 to 0.9.

    Args:
        block_means: (number of blocks, ...) means over blocks, in the order of time.
    """
    deviation = block_means - block_means.mean(axis=0)
    squares = (deviation**2).sum(axis=0)
    products = (deviation[1:] * deviation[:-1]).sum(axis=0)
    correlation = np.divide(products, squares, out=np.zeros_like(squares), where=squares > 0)
    # A negative correlation is treated as chance, and a correlation near 1 would make the ratio infinite.
    correlation = np.clip(correlation, 0.0, 0.9)
    return (1 + correlation) / (1 - correlation)
