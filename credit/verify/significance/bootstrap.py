"""Uncertainty of scores from blocks of contiguous initial times.

Errors of forecasts that start a day apart are much alike, so cases are not independent, but blocks of days nearly are.
A block spans at least 5 days, and at least 2 days more than the lead time.

Shapes: N cases, L lead times, X rows, R regions.
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
# Intervals and p-values need this many blocks; fewer do not show how much the scores vary.
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
    """Return the names of the columns with the ends of each metric's confidence interval, in the order of `metrics`."""
    names = []
    for metric in metrics:
        names += [f"{metric}{suffix}" for suffix in INTERVAL_SUFFIXES]
    return names


def cases_per_block(initial_times: np.ndarray, lead_minutes: int) -> int:
    """Return the number of cases of a block.

    Any so many cases in a row span at least 5 days, and at least 2 days more than the lead time.

    Args:
        initial_times: (N,) initial times in minutes, increasing.
        lead_minutes: lead time in minutes.
    """
    span = max(_MIN_BLOCK_MINUTES, lead_minutes + _MINUTES_BEYOND_LEAD)
    cases_within_span = np.searchsorted(initial_times, initial_times + span) - np.arange(len(initial_times))
    return int(cases_within_span.max())


def count_blocks(initial_times: np.ndarray, lead_minutes: int) -> int:
    """Return the number of whole blocks of the cases."""
    return len(initial_times) // cases_per_block(initial_times, lead_minutes)


def confidence_intervals(statistics: CaseStatistics, lead: int, lead_minutes: int) -> dict[str, np.ndarray]:
    """Return metric -> (2, X, R), ends of the 95 % interval at one lead; empty where there are fewer than 6 blocks.

    A circular block bootstrap (Politis and Romano 1992): blocks that start at any case, the last one continued with the
    first case, are drawn with replacement. The quantiles are widened twice. Few blocks underestimate the spread, so the
    quantiles lie further out by the ratio of Student's t to the normal distribution. And the remaining correlation r of
    neighbouring blocks widens the interval by the root of (1 + r) / (1 - r).

    Args:
        statistics: statistics of all cases.
        lead: index of the lead time.
        lead_minutes: lead time in minutes.

    Returns:
        The lower and the upper ends, (2, X, R) in the units of the metric.
    """
    num_cases = len(statistics.initial_times)
    length = cases_per_block(statistics.initial_times, lead_minutes)
    num_blocks = num_cases // length
    if num_blocks < MIN_BLOCKS_FOR_INTERVALS:
        return {}
    # Means of the resamples: each is the sum over its blocks, of which a block may have been drawn several times.
    draw_counts = _draw_counts(num_cases, num_blocks)
    cases = {}
    case_means = {}
    resampled_means = {}
    for name, values in statistics.resampled().items():
        values_NXR = values[:, lead]
        block_sums = _circular_block_sums(values_NXR.reshape(num_cases, -1), length)
        means = draw_counts @ block_sums / (num_blocks * length)
        cases[name] = values_NXR
        case_means[name] = values_NXR.mean(axis=0)
        resampled_means[name] = means.reshape(NUM_RESAMPLES, *values_NXR.shape[1:])
    # The metrics of all cases are the centre; those of the resamples show their spread.
    center = statistics.metrics_from_means(case_means)
    resampled = statistics.metrics_from_means(resampled_means)
    # Quantiles of the resamples about the centre, widened for few blocks and for their correlation.
    tail = _tail_probability(num_blocks)
    intervals = {}
    for name, contributions in statistics.contributions(cases, case_means, center).items():
        widening = np.sqrt(_variance_inflation(_block_means(contributions, num_blocks)))
        quantiles = np.quantile(resampled[name], [tail, 1 - tail], axis=0)
        intervals[name] = np.clip(center[name] + widening * (quantiles - center[name]), *_BOUNDS[name])
    return intervals


def compute_seasonal_scores(
    statistics: Mapping[str, tuple[CaseStatistics, Sequence[int]]],
    forecasts: Sequence[str],
    metrics: Sequence[str],
    num_rows: int,
    leads: np.ndarray,
    seasons: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return scores by season, with their intervals.

    Args:
        statistics: forecast -> its statistics and the indices of their rows; all of the same cases.
        forecasts: names of the forecasts of the table, of which some may have no statistics.
        metrics: names of the metrics.
        num_rows: X.
        leads: (L,) lead times in minutes.
        seasons: name -> (N,) bool.

    Returns:
        metric, and with ``_low`` and ``_high`` the ends of its interval -> (forecasts, seasons, X, L, R); NaN where
        there is none.
    """
    num_regions = next(iter(statistics["model"][0].resampled().values())).shape[-1]
    shape = len(forecasts), len(seasons), num_rows, len(leads), num_regions
    names = [*metrics, *interval_names(metric for metric in METRICS_WITH_INTERVAL if metric in metrics)]
    scores = {name: np.full(shape, np.nan) for name in names}
    for forecast, (all_cases, rows) in statistics.items():
        f = forecasts.index(forecast)
        for s, is_in_season in enumerate(seasons.values()):
            season_cases = all_cases.select(is_in_season)
            # The score itself over all cases of the season.
            for metric, values_LXR in season_cases.metrics().items():
                if metric in scores:
                    scores[metric][f, s][list(rows)] = np.moveaxis(values_LXR, 1, 0)
            # The interval of each metric that has one.
            for lead, minutes in enumerate(leads.tolist()):
                for metric, ends in confidence_intervals(season_cases, lead, minutes).items():
                    if metric not in scores:
                        continue
                    for suffix, values_XR in zip(INTERVAL_SUFFIXES, ends, strict=True):
                        scores[f"{metric}{suffix}"][f, s][list(rows), lead] = values_XR
    return scores


@lru_cache(maxsize=4)
def _draw_counts(num_cases: int, num_blocks: int) -> np.ndarray:
    """Return (resamples, N): the number of draws of the block that starts at a case; the same for every score."""
    # The seed depends on the numbers alone, so scores of equal samples are resampled alike.
    random = np.random.default_rng([num_cases, num_blocks])
    starts = random.integers(num_cases, size=(NUM_RESAMPLES, num_blocks))
    counts = np.zeros((NUM_RESAMPLES, num_cases))
    np.add.at(counts, (np.arange(NUM_RESAMPLES)[:, None], starts), 1.0)
    return counts


def _circular_block_sums(values_NK: np.ndarray, length: int) -> np.ndarray:
    """Return (N, K): sums of `length` rows from each row on, the last row followed by the first."""
    # A sum of consecutive rows is the difference of two cumulative sums.
    extended = np.concatenate([np.zeros_like(values_NK[:1]), values_NK, values_NK[: length - 1]])
    cumulative = np.cumsum(extended, axis=0)
    return cumulative[length:] - cumulative[:-length]


@lru_cache
def _tail_probability(num_blocks: int) -> float:
    """Return the probability of the lower quantile: the normal one as far out as the quantile of Student's t."""
    # The bootstrap's variance is too small by (n - 1) / n of n blocks, which the root corrects.
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE_LEVEL) / 2, num_blocks - 1)
    distance = float(quantile * np.sqrt(num_blocks / (num_blocks - 1)))
    return NormalDist().cdf(-distance)


class PairedTest(NamedTuple):
    """Result of `paired_test`; arrays of the shape (...), NaN where there are fewer than 6 blocks.

    Attributes:
        p_value: two-sided p-value of the mean difference.
        n_eff: number of independent cases whose mean would be as uncertain, at most N.
        half_width: half of the width of the 95 % interval of the mean difference, in its units.
    """

    p_value: np.ndarray
    n_eff: np.ndarray
    half_width: np.ndarray


def paired_test(difference: np.ndarray, length: int) -> PairedTest:
    """Test whether a mean difference is 0, from the means over blocks.

    Student's t of the block means. Their variance is inflated by the remaining correlation r of neighbouring blocks,
    (1 + r) / (1 - r).

    Args:
        difference: (N, ...) of one case each, in the order of their times.
        length: from `cases_per_block`.
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
        # Equal forecasts do not differ, although their variance is zero.
        t = np.where(mean == 0, 0.0, mean / np.sqrt(variance_of_mean))
        n_eff = np.minimum(difference.var(axis=0, ddof=1) / variance_of_mean, num_cases)
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE_LEVEL) / 2, num_blocks - 1)
    return PairedTest(
        p_value=2 * scipy.stats.t.sf(np.abs(t), num_blocks - 1),
        n_eff=n_eff,
        half_width=quantile * np.sqrt(variance_of_mean),
    )


def _block_means(values: np.ndarray, num_blocks: int) -> np.ndarray:
    """Return (num_blocks, ...), the means of contiguous cases of `values` (N, ...), which are divided evenly."""
    num_cases = len(values)
    edges = np.arange(num_blocks) * num_cases // num_blocks
    sizes = np.diff(np.append(edges, num_cases)).reshape(-1, *[1] * (values.ndim - 1))
    return np.add.reduceat(values, edges, axis=0) / sizes


def _variance_inflation(block_means: np.ndarray) -> np.ndarray:
    """Return the ratio of the variance of their mean to that of independent blocks: (1 + r) / (1 - r), r from 0."""
    deviation = block_means - block_means.mean(axis=0)
    squares = (deviation**2).sum(axis=0)
    products = (deviation[1:] * deviation[:-1]).sum(axis=0)
    correlation = np.divide(products, squares, out=np.zeros_like(squares), where=squares > 0)
    # A negative correlation is chance, and one near 1 would make the ratio infinite.
    r = np.clip(correlation, 0.0, 0.9)
    return (1 + r) / (1 - r)
