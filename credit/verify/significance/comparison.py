"""Paired comparison of the model with baselines and other forecasts, case by case.

A scorecard compares the model with a reference: another forecast, or the best of the three baselines. The opponents are
the forecasts from which the reference is chosen: the other forecast alone, or the three baselines. The opponent with
the best score is compared with the model.

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
# Smallest number of blocks for a difference to be marked as significant.
MIN_BLOCKS_FOR_SIGNIFICANCE = 20
# Names of the results of `compare_with_best_opponent`, and names of the results of `adjust_scorecard`.
COMPARISON_NAMES = ("difference", "difference_low", "difference_high", "p_value", "n_eff")
SIGNIFICANCE_NAMES = ("p_adjusted", "significant")

Statistics = TypeVar("Statistics", bound=CaseStatistics)


def comparison_name(score: str, result: str) -> str:
    """Return the name of the variable of scores.nc that contains a result of the comparison.

    The name consists of the score and the result, such as ``brier_p_value``. For RMSE, the score is omitted except in
    the names of the difference and its interval. The names are therefore ``rmse_difference``, ``p_value``, ``n_eff``.

    Args:
        score: name of the score, such as ``rmse`` or ``brier``.
        result: one of `COMPARISON_NAMES` or `SIGNIFICANCE_NAMES`.
    """
    if score == "rmse" and not result.startswith("difference"):
        return result
    return f"{score}_{result}"


def opponents_by_reference(forecasts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return reference name -> names of its opponents; the best opponent is compared with the model.

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
    """Compare a score of the model with the score of its best opponent, case by case.

    The score is the mean of the contributions of the cases, raised to `power`; smaller scores are better. The best
    opponent is chosen for each row, region and lead time; it is the opponent with the smallest score.

    Args:
        initial_times: (N,) initial times in minutes.
        model: (N, L, X, R) contribution of each case to the score of the model.
        opponents: for each opponent a tuple. The first item contains the contributions of the same cases to the score
            of the opponent, (N, L, rows, R). The second item contains the indices of these rows among the X rows.
        leads: (L,) lead times in minutes.
        power: 1/2 for RMSE, whose contributions are squared errors; 1 for other scores.

    Returns:
        Each of `COMPARISON_NAMES` -> (X, L, R) array, NaN where no opponent has the row. ``difference`` is the score of
        the model divided by the score of the best opponent, minus 1. ``difference_low`` and ``difference_high`` are the
        ends of its 95 % interval; the score of the opponent is assumed to be exact. ``p_value`` and ``n_eff`` are
        results of `credit.verify.significance.bootstrap.paired_test`.
    """
    num_cases, _, num_rows, num_regions = model.shape
    results = {name: np.full((num_rows, len(leads), num_regions), np.nan) for name in COMPARISON_NAMES}
    for lead, minutes in enumerate(leads.tolist()):
        # An opponent that does not have a row must not be the best opponent of this row.
        candidates = np.full((len(opponents), num_cases, num_rows, num_regions), np.inf)
        for number, (contributions, rows) in enumerate(opponents):
            candidates[number][:, list(rows)] = contributions[:, lead]
        # The best opponent of each row and region has the smallest mean over the cases.
        mean_scores = np.nan_to_num(candidates.mean(axis=1), nan=np.inf)
        best = mean_scores.argmin(axis=0)
        opponent = np.take_along_axis(candidates, best[None, None], axis=0)[0]
        # If no opponent has a row, the comparison of this row is NaN.
        opponent[np.isinf(opponent)] = np.nan
        difference = model[:, lead] - opponent
        opponent_mean = opponent.mean(axis=0)
        mean_difference = difference.mean(axis=0)
        test = paired_test(difference, cases_per_block(initial_times, minutes))
        # The interval contains only the uncertainty of the mean difference; the opponent's score is assumed exact.
        ends = {"": 0.0, "_low": -test.half_width, "_high": test.half_width}
        for suffix, distance in ends.items():
            with np.errstate(invalid="ignore", divide="ignore"):
                ratio = 1.0 + (mean_difference + distance) / opponent_mean
                if power != 1.0:
                    # The lower end of a wide interval may be negative, so that it has no root.
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
        statistics: forecast name -> (statistics of the forecast, indices of their rows among the X rows of the model).
            All statistics contain the same N cases.
        seasons: season name -> (N,) bool, True for the cases of the season.
        leads: (L,) lead times in minutes.
        contribution: function of the statistics of a forecast and of a mask (N,) that selects cases. The function
            returns the contributions of these cases to the score, (cases, L, rows, R).
        power: exponent of the mean contribution, see `compare_with_best_opponent`.

    Returns:
        Each of `COMPARISON_NAMES` -> (references, seasons, X, L, R) array. The references have the order of
        `opponents_by_reference`.
    """
    model, _ = statistics["model"]
    # The inner loop is over seasons, because the last step splits one dimension into references and seasons.
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
    """Return adjusted p-values and the significance of all tests of the scorecards.

    A scorecard consists of the tests of all scores, rows and lead times for one reference, season and region. The tests
    of a scorecard are adjusted together for the false discovery rate. Lead times with fewer than 20 blocks are left
    out.

    Args:
        p_values: p-values of each score (such as RMSE, CRPS), (references, seasons, X, L, R); NaN where no test was
            made. The number X of rows may differ between scores.
        n_blocks: (seasons, L) number of blocks.

    Returns:
        For each score, a dict with two arrays of the same shape as the p-values of the score. ``p_adjusted`` contains
        the adjusted p-values. ``significant`` (bool) is True where the adjusted p-value is at most 5 %.
    """
    # The p-values of all scores are joined for the adjustment and separated again at the end.
    all_p_values = np.concatenate(p_values, axis=2)
    # (seasons, L) becomes (references, seasons, X, L, R).
    has_blocks = (n_blocks >= MIN_BLOCKS_FOR_SIGNIFICANCE)[None, :, None, :, None]
    all_p_values = np.where(has_blocks, all_p_values, np.nan)
    adjusted = np.empty_like(all_p_values)
    num_references, num_seasons, _, _, num_regions = all_p_values.shape
    for reference, season, region in np.ndindex(num_references, num_seasons, num_regions):
        scorecard = reference, season, slice(None), slice(None), region
        adjusted[scorecard] = adjust_p_values(all_p_values[scorecard])
    # Index of the first row of each score except the first score.
    row_counts = [values.shape[2] for values in p_values]
    first_rows = np.cumsum(row_counts)[:-1]
    results = []
    for p_adjusted in np.split(adjusted, first_rows, axis=2):
        results.append({"p_adjusted": p_adjusted, "significant": p_adjusted <= FALSE_DISCOVERY_RATE})
    return results


def adjust_p_values(p_values: np.ndarray) -> np.ndarray:
    """Adjust p-values for the false discovery rate (Benjamini and Hochberg 1995).

    Among the tests with an adjusted p-value of at most q, at most a fraction q is expected to be due to chance.

    Args:
        p_values: p-values of any shape; NaN where no test was made.

    Returns:
        Adjusted p-values of the same shape; NaN where no test was made.
    """
    adjusted = np.full(p_values.shape, np.nan)
    is_tested = ~np.isnan(p_values)
    if is_tested.any():
        adjusted[is_tested] = scipy.stats.false_discovery_control(p_values[is_tested], method="bh")
    return adjusted
