"""Paired comparison of the model with baselines and other forecasts, case by case.

A scorecard compares the model with a reference. The reference is another forecast, or the best of the three baselines.
The opponents of a reference are the three baselines, or only the other forecast. The best opponent is compared with the
model.

Shapes: N cases, L lead times, X rows of the score table (channels and winds, or events), R regions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import scipy.stats

from credit.config.sections.verification import BASELINES, BEST_BASELINE, RESERVED_NAMES
from credit.verify.significance.bootstrap import cases_per_block, paired_test
from credit.verify.statistics.case_statistics import CaseStatistics

FALSE_DISCOVERY_RATE = 0.05
# With fewer blocks no difference is called significant.
MIN_BLOCKS_FOR_SIGNIFICANCE = 20
# Names of the results of `compare_with_best_opponent`, and of those of `adjust_scorecard`.
COMPARISON_NAMES = ("difference", "difference_low", "difference_high", "p_value", "n_eff")
SIGNIFICANCE_NAMES = ("p_adjusted", "significant")

Statistics = TypeVar("Statistics", bound=CaseStatistics)


def comparison_name(score: str, result: str) -> str:
    """Return the name of the variable of scores.nc that holds a result of the comparison.

    It is the name of the score followed by that of the result, such as ``brier_p_value``. For RMSE the prefix is
    omitted except for the difference and its interval, so the names are ``rmse_difference``, ``p_value``, ``n_eff``.

    Args:
        score: name of the score, such as ``rmse`` or ``brier``.
        result: one of `COMPARISON_NAMES` or `SIGNIFICANCE_NAMES`.
    """
    if score == "rmse" and not result.startswith("difference"):
        return result
    return f"{score}_{result}"


def opponents_by_reference(forecasts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return reference name -> names of its opponents, of which the best one is compared with the model.

    Args:
        forecasts: names of all forecasts and baselines of a table.
    """
    opponents = {BEST_BASELINE: tuple(BASELINES)}
    for name in forecasts:
        if name not in RESERVED_NAMES:
            opponents[name] = (name,)
    return opponents


def compare_with_best_opponent(
    initial_times: np.ndarray,
    model: np.ndarray,
    opponents: Sequence[tuple[np.ndarray, Sequence[int]]],
    leads: np.ndarray,
    power: float = 1.0,
) -> dict[str, np.ndarray]:
    """Compare a score of the model with that of its best opponent, case by case; smaller scores are better.

    The score is the mean over cases of their contributions, raised to `power`. For each row, region and lead time the
    best opponent is the one with the smallest score.

    Args:
        initial_times: (N,) initial times in minutes.
        model: (N, L, X, R) contribution of each case to the score of the model.
        opponents: for each opponent (contributions of the same cases (N, L, rows, R), indices of these rows among the X
            rows of the model).
        leads: (L,) lead times in minutes.
        power: 1/2 for RMSE, whose contributions are squared errors; 1 for other scores.

    Returns:
        Each of `COMPARISON_NAMES` -> (X, L, R), NaN where no opponent has the row. ``difference`` is the score of the
        model divided by that of the opponent, minus 1. ``difference_low`` and ``difference_high`` are the ends of its
        95 % interval, which takes the score of the opponent as exact. ``p_value`` and ``n_eff`` are those of
        `credit.verify.significance.bootstrap.paired_test`.
    """
    num_cases, _, num_rows, num_regions = model.shape
    results = {name: np.full((num_rows, len(leads), num_regions), np.nan) for name in COMPARISON_NAMES}
    for lead, minutes in enumerate(leads.tolist()):
        # An opponent without a row must not be the best one there.
        candidates = np.full((len(opponents), num_cases, num_rows, num_regions), np.inf)
        for number, (contributions, rows) in enumerate(opponents):
            candidates[number][:, list(rows)] = contributions[:, lead]
        # The best opponent of each row and region has the smallest mean over the cases.
        mean_scores = np.nan_to_num(candidates.mean(axis=1), nan=np.inf)
        best = mean_scores.argmin(axis=0)
        opponent = np.take_along_axis(candidates, best[None, None], axis=0)[0]
        # Where no opponent has a row, there is nothing to compare with.
        opponent[np.isinf(opponent)] = np.nan
        difference = model[:, lead] - opponent
        opponent_mean = opponent.mean(axis=0)
        mean_difference = difference.mean(axis=0)
        test = paired_test(difference, cases_per_block(initial_times, minutes))
        # Only the mean difference is uncertain here; the score of the opponent is taken as exact.
        ends = {"": 0.0, "_low": -test.half_width, "_high": test.half_width}
        for suffix, distance in ends.items():
            with np.errstate(invalid="ignore", divide="ignore"):
                ratio = 1.0 + (mean_difference + distance) / opponent_mean
                if power != 1.0:
                    # The lower end of a wide interval may be negative, and would have no root.
                    ratio = np.maximum(ratio, 0.0) ** power
            results[f"difference{suffix}"][:, lead] = np.where(np.isfinite(ratio), ratio - 1.0, np.nan)
        results["p_value"][:, lead] = test.p_value
        results["n_eff"][:, lead] = test.n_eff
    return results


def compare_with_references(
    statistics: Mapping[str, tuple[Statistics, Sequence[int]]],
    seasons: Mapping[str, np.ndarray],
    leads: np.ndarray,
    contribution: Callable[[Statistics, np.ndarray], np.ndarray],
    power: float = 1.0,
) -> dict[str, np.ndarray]:
    """Return the comparison of the model with every reference in every season.

    Args:
        statistics: forecast name -> (its statistics, indices of their rows among the X rows of the model). All are of
            the same N cases.
        seasons: season name -> (N,) bool, True for the cases of the season.
        leads: (L,) lead times in minutes.
        contribution: function of the statistics of a forecast and of a mask (N,) that selects cases. It returns the
            contributions of these cases to the score, (cases, L, rows, R), see `compare_with_best_opponent`.
        power: exponent of the mean contribution, see `compare_with_best_opponent`.

    Returns:
        Each of `COMPARISON_NAMES` -> (references, seasons, X, L, R), in the order of `opponents_by_reference` and
        `seasons`.
    """
    model, _ = statistics["model"]
    # The loop over seasons is the inner one, as the last step splits one dimension into references and seasons.
    comparisons = []
    for names in opponents_by_reference(list(statistics)).values():
        for is_in_season in seasons.values():
            opponents = []
            for name in names:
                opponent, rows = statistics[name]
                opponents.append((contribution(opponent, is_in_season), rows))
            comparison = compare_with_best_opponent(
                model.initial_times[is_in_season], contribution(model, is_in_season), opponents, leads, power
            )
            comparisons.append(comparison)
    results = {}
    for name in COMPARISON_NAMES:
        values = np.stack([comparison[name] for comparison in comparisons])
        results[name] = values.reshape(-1, len(seasons), *values.shape[1:])
    return results


def adjust_scorecard(p_values: Sequence[np.ndarray], n_blocks: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Return adjusted p-values and significance of all tests of the scorecards.

    A scorecard consists of the tests of all scores, rows and lead times for one reference, season and region. Its tests
    are adjusted together for the false discovery rate. Lead times with fewer than 20 blocks are left out.

    Args:
        p_values: for each score (such as RMSE, CRPS) its p-values (references, seasons, X, L, R), NaN where nothing was
            tested. The number X of rows may differ between scores.
        n_blocks: (seasons, L) number of blocks.

    Returns:
        For each score a dict with two arrays of the shape of its p-values: ``p_adjusted`` are the adjusted p-values,
        and ``significant`` (bool) is True where these are at most 5 %.
    """
    # The tests of all scores are adjusted together, and separated again at the end.
    all_p_values = np.concatenate(p_values, axis=2)
    # (seasons, L) becomes (references, seasons, X, L, R).
    has_blocks = (n_blocks >= MIN_BLOCKS_FOR_SIGNIFICANCE)[None, :, None, :, None]
    all_p_values = np.where(has_blocks, all_p_values, np.nan)
    adjusted = np.empty_like(all_p_values)
    num_references, num_seasons, _, _, num_regions = all_p_values.shape
    for reference, season, region in np.ndindex(num_references, num_seasons, num_regions):
        scorecard = reference, season, slice(None), slice(None), region
        adjusted[scorecard] = adjust_p_values(all_p_values[scorecard])
    # Index of the first row of each score but the first.
    row_counts = [values.shape[2] for values in p_values]
    first_rows = np.cumsum(row_counts)[:-1]
    results = []
    for p_adjusted in np.split(adjusted, first_rows, axis=2):
        results.append({"p_adjusted": p_adjusted, "significant": p_adjusted <= FALSE_DISCOVERY_RATE})
    return results


def adjust_p_values(p_values: np.ndarray) -> np.ndarray:
    """Return p-values of any shape, adjusted for the false discovery rate (Benjamini and Hochberg 1995).

    Among the tests whose adjusted p-value is at most q, at most a fraction q is expected to be significant only by
    chance. NaN is not counted as a test and stays NaN.
    """
    adjusted = np.full(p_values.shape, np.nan)
    is_tested = ~np.isnan(p_values)
    if is_tested.any():
        adjusted[is_tested] = scipy.stats.false_discovery_control(p_values[is_tested], method="bh")
    return adjusted
