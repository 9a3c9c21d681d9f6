"""The model against baselines and other forecasts, case by case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import scipy.stats

from credit.config.schema_verification import BASELINES, BEST_BASELINE, OWN_NAMES
from credit.verify.significance.bootstrap import block_length, paired_test
from credit.verify.statistics.case_statistics import CaseStatistics

FALSE_SHARE = 0.05
ENOUGH_BLOCKS = 20  # nothing is called significant with fewer
COMPARED = ("difference", "p_value", "n_eff")
JUDGED = ("p_adjusted", "significant")

Sums = TypeVar("Sums", bound=CaseStatistics)


def comparison_name(score: str, what: str) -> str:
    """Return what scores.nc calls one of `COMPARED` or `JUDGED` of a score: of RMSE only the difference names it."""
    return what if score == "rmse" and what != "difference" else f"{score}_{what}"


def references(forecasts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return reference -> the forecasts of which the best, score by score, is the model's opponent."""
    others = [name for name in forecasts if name not in OWN_NAMES]
    return {BEST_BASELINE: BASELINES} | {name: (name,) for name in others}


def compare(
    initial: np.ndarray,
    model: np.ndarray,
    opponents: Sequence[tuple[np.ndarray, Sequence[int]]],
    leads: np.ndarray,
    power: float = 1.0,
) -> dict[str, np.ndarray]:
    """Compare a score of the model and of the best opponent, smaller being better, paired by case.

    Args:
        initial: (N,) initial times in minutes.
        model: (N, L, X, R) what each case contributes; the score is its mean to the power of `power`.
        opponents: those of the same cases, and which rows of the model's theirs are.
        leads: (L,) lead times in minutes.
        power: 1/2 for a root-mean-square error, of whose squares `model` is.

    Returns:
        `COMPARED`, arrays of the shape (X, L, R), NaN where no opponent has a row. ``difference`` is the model's score
        over the opponent's, less 1; ``p_value`` and ``n_eff`` are of
        `credit.verify.significance.bootstrap.paired_test`.
    """
    cases, _, rows, regions = model.shape
    found = {name: np.full((rows, len(leads), regions), np.nan) for name in COMPARED}
    for number, lead in enumerate(leads.tolist()):
        theirs = np.full((len(opponents), cases, rows, regions), np.inf)
        for place, (own, index) in enumerate(opponents):
            theirs[place][:, list(index)] = own[:, number]
        best = np.nan_to_num(theirs.mean(axis=1), nan=np.inf).argmin(axis=0)
        opponent = np.take_along_axis(theirs, best[None, None], axis=0)[0]
        opponent[np.isinf(opponent)] = np.nan
        ours = model[:, number]
        p, n_eff = paired_test(ours - opponent, block_length(initial, lead))
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = (ours.mean(axis=0) / opponent.mean(axis=0)) ** power
        found["difference"][:, number] = np.where(np.isfinite(ratio), ratio - 1.0, np.nan)
        found["p_value"][:, number], found["n_eff"][:, number] = p, n_eff
    return found


def compare_all(
    sums: Mapping[str, tuple[Sums, Sequence[int]]],
    seasons: Mapping[str, np.ndarray],
    leads: np.ndarray,
    contribution: Callable[[Sums, np.ndarray], np.ndarray],
    power: float = 1.0,
) -> dict[str, np.ndarray]:
    """Return what `compare` finds for every reference and season, each (references, seasons, X, L, R).

    Args:
        sums: forecast -> its sums and which of the model's rows theirs are; all of the same cases.
        seasons: name -> (N,) bool.
        leads: (L,) lead times in minutes.
        contribution: sums and the chosen cases, (N,) bool -> what these contribute, see `compare`.
        power: see `compare`.
    """
    pairs = []
    for names in references(list(sums)).values():
        for chosen in seasons.values():
            opponents = [(contribution(sums[name][0], chosen), sums[name][1]) for name in names]
            model = sums["model"][0]
            pairs.append(compare(model.initial[chosen], contribution(model, chosen), opponents, leads, power))
    return {
        name: np.stack([pair[name] for pair in pairs]).reshape(-1, len(seasons), *pairs[0][name].shape)
        for name in COMPARED
    }


def judge(p_values: Sequence[np.ndarray], n_blocks: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Return `JUDGED` of each of several sets of tests, which make one scorecard.

    Args:
        p_values: each (references, seasons, X, L, R) with its own X; NaN where nothing was tested.
        n_blocks: (seasons, L) number of blocks.

    Returns:
        For each set ``p_adjusted``, for the false discovery rate over the scorecard, which is all rows and lead times
        with 20 blocks or more of one reference, season and region; and ``significant`` (bool), where it is at most 5 %.
    """
    whole = np.concatenate(p_values, axis=2)
    whole = np.where((n_blocks >= ENOUGH_BLOCKS)[None, :, None, :, None], whole, np.nan)
    adjusted = np.empty_like(whole)
    for reference, season, region in np.ndindex(whole.shape[0], whole.shape[1], whole.shape[4]):
        place = reference, season, slice(None), slice(None), region
        adjusted[place] = adjust_p_values(whole[place])
    ends = np.cumsum([own.shape[2] for own in p_values])[:-1]
    return [{"p_adjusted": own, "significant": own <= FALSE_SHARE} for own in np.split(adjusted, ends, axis=2)]


def adjust_p_values(p_values: np.ndarray) -> np.ndarray:
    """Return p-values adjusted for their number, of any shape; NaN does not count and stays NaN.

    Among the tests whose adjusted value is at most q, a share of at most q is expected to be false (Benjamini and
    Hochberg 1995).
    """
    adjusted = np.full(p_values.shape, np.nan)
    is_tested = ~np.isnan(p_values)
    if is_tested.any():
        adjusted[is_tested] = scipy.stats.false_discovery_control(p_values[is_tested], method="bh")
    return adjusted
