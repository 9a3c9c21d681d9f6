"""Blocks of contiguous initial times, and what they say of the uncertainty of scores.

Errors of forecasts that start a day apart are much alike, so cases are not independent, but blocks of days nearly are.
A block spans at least 5 days, and at least the lead time and 2 days more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import scipy.stats

from credit.verify.statistics.case_statistics import CaseStatistics

RESAMPLES = 1000
LEVEL = 0.95
LEAST_BLOCKS = 6  # for intervals and p-values
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
WITH_INTERVAL = tuple(_BOUNDS)
ENDS = ("_low", "_high")
_LEAST_MINUTES, _BEYOND_LEAD = 5 * 1440, 2 * 1440


def ends_of(metrics: Iterable[str]) -> list[str]:
    """Return the names of the ends of the metrics' intervals."""
    return [f"{metric}{end}" for metric in metrics for end in ENDS]


def block_length(initial: np.ndarray, lead_minutes: int) -> int:
    """Return how many cases make a block: any so many in a row span max(5 days, lead + 2 days) or more."""
    span = max(_LEAST_MINUTES, lead_minutes + _BEYOND_LEAD)
    return int((np.searchsorted(initial, initial + span) - np.arange(len(initial))).max())


def number_of_blocks(initial: np.ndarray, lead_minutes: int) -> int:
    """Return how many whole blocks the cases make."""
    return len(initial) // block_length(initial, lead_minutes)


def intervals(sums: CaseStatistics, lead: int, lead_minutes: int) -> dict[str, np.ndarray]:
    """Return metric -> (2, X, R), ends of the 95 % interval at one lead; nothing where there are fewer than 6 blocks.

    A circular block bootstrap (Politis and Romano 1992): blocks that start at any case, the last going on with the
    first, are drawn with replacement. Two things make its quantiles wider. Few blocks show too little of the spread, so
    the quantiles lie further out by as much as Student's t exceeds the normal distribution. And what is left of the
    correlation r of neighbouring blocks widens the interval by the root of (1 + r) / (1 - r).
    """
    length = block_length(sums.initial, lead_minutes)
    blocks = len(sums.initial) // length
    if blocks < LEAST_BLOCKS:
        return {}
    cases = {name: own[:, lead] for name, own in sums.resampled().items()}
    drawn = _drawn(len(sums.initial), blocks)
    means = {}
    for name, values in cases.items():
        block_sums = _circular_block_sums(values.reshape(len(values), -1), length)
        means[name] = (drawn @ block_sums / (blocks * length)).reshape(RESAMPLES, *values.shape[1:])
    whole = {name: values.mean(axis=0) for name, values in cases.items()}
    centre, spread, tail = sums.metrics_of(whole), sums.metrics_of(means), _tail(blocks)
    found = {}
    for name, each in sums.contributions(cases, whole, centre).items():
        wider = np.sqrt(_widening(_block_means(each, blocks)))
        ends = np.quantile(spread[name], [tail, 1 - tail], axis=0)
        found[name] = np.clip(centre[name] + wider * (ends - centre[name]), *_BOUNDS[name])
    return found


def seasonal_scores(
    sums: Mapping[str, tuple[CaseStatistics, Sequence[int]]],
    forecasts: Sequence[str],
    names: Sequence[str],
    rows: int,
    leads: np.ndarray,
    seasons: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return scores by season, with their intervals.

    Args:
        sums: forecast -> its sums and which of the rows theirs are; all of the same cases.
        forecasts: those of the table, of which some may have no sums.
        names: of the metrics.
        rows: X, how many there are.
        leads: (L,) lead times in minutes.
        seasons: name -> (N,) bool.

    Returns:
        metric, and with ``_low`` and ``_high`` the ends of its interval -> (forecasts, seasons, X, L, R); NaN where
        there is none.
    """
    regions = next(iter(sums["model"][0].resampled().values())).shape[-1]
    shape = len(forecasts), len(seasons), rows, len(leads), regions
    found = {name: np.full(shape, np.nan) for name in (*names, *ends_of(n for n in WITH_INTERVAL if n in names))}
    for f, (whole, index) in ((forecasts.index(name), own) for name, own in sums.items()):
        for s, chosen in enumerate(seasons.values()):
            own = whole.select(chosen)
            for name, values in own.metrics().items():
                if name in found:
                    found[name][f, s][list(index)] = np.moveaxis(values, 1, 0)
            for number, lead in enumerate(leads.tolist()):
                for name, ends in intervals(own, number, lead).items():
                    if name in found:
                        for end, values in zip(ENDS, ends, strict=True):
                            found[f"{name}{end}"][f, s][list(index), number] = values
    return found


@lru_cache(maxsize=4)
def _drawn(cases: int, blocks: int) -> np.ndarray:
    """Return (resamples, cases): how often the block that starts at a case is drawn; the same for every score."""
    starts = np.random.default_rng([cases, blocks]).integers(cases, size=(RESAMPLES, blocks))
    counts = np.zeros((RESAMPLES, cases))
    np.add.at(counts, (np.arange(RESAMPLES)[:, None], starts), 1.0)
    return counts


def _circular_block_sums(values: np.ndarray, length: int) -> np.ndarray:
    """Return (N, K): sums of `length` rows of `values` (N, K) from each row on, the last going on with the first."""
    total = np.cumsum(np.concatenate([np.zeros_like(values[:1]), values, values[: length - 1]]), axis=0)
    return total[length:] - total[:-length]


@lru_cache
def _tail(blocks: int) -> float:
    """Return the lower quantile's level: that of a normal distribution where it is as far out as Student's t."""
    quantile = scipy.stats.t.ppf((1 + LEVEL) / 2, blocks - 1)
    reach = float(quantile * np.sqrt(blocks / (blocks - 1)))
    return NormalDist().cdf(-reach)


def paired_test(difference: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Test whether a mean difference is 0, from the means over blocks.

    Student's t of the block means, whose variance is widened by what is left of the correlation of neighbouring blocks,
    (1 + r) / (1 - r).

    Args:
        difference: (N, ...) of one case each, in the order of their times.
        length: from `block_length`.

    Returns:
        The two-sided p-value and n_eff, the number of independent cases whose mean would be as uncertain, at most N;
        both (...), NaN where there are fewer than 6 blocks.
    """
    cases = len(difference)
    blocks = cases // length
    if blocks < LEAST_BLOCKS:
        nothing = np.full(difference.shape[1:], np.nan)
        return nothing, nothing
    means = _block_means(difference, blocks)
    centre, variance = means.mean(axis=0), means.var(axis=0, ddof=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        of_mean = variance / blocks * _widening(means)
        t = np.where(centre == 0, 0.0, centre / np.sqrt(of_mean))  # equal forecasts do not differ
        n_eff = np.minimum(difference.var(axis=0, ddof=1) / of_mean, cases)
    return 2 * scipy.stats.t.sf(np.abs(t), blocks - 1), n_eff


def _block_means(values: np.ndarray, blocks: int) -> np.ndarray:
    """Return (blocks, ...), the means of contiguous cases of `values` (N, ...), which are shared out evenly."""
    cases = len(values)
    edges = np.arange(blocks) * cases // blocks
    sizes = np.diff(np.append(edges, cases)).reshape(-1, *[1] * (values.ndim - 1))
    return np.add.reduceat(values, edges, axis=0) / sizes


def _widening(block_means: np.ndarray) -> np.ndarray:
    """Return by how much the variance of their mean exceeds that of independent ones: (1 + r) / (1 - r), r from 0."""
    apart = block_means - block_means.mean(axis=0)
    squares = (apart**2).sum(axis=0)
    product = (apart[1:] * apart[:-1]).sum(axis=0)
    r = np.clip(np.divide(product, squares, out=np.zeros_like(squares), where=squares > 0), 0.0, 0.9)
    return (1 + r) / (1 - r)
