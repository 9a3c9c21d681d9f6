"""The model against baselines and other forecasts, case by case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from credit.verify.baselines import BASELINES
from credit.verify.blocks import block_length, number_of_blocks, paired_test
from credit.verify.student import false_discovery
from credit.verify.sums import ScoreSums

BEST_BASELINE = "best_baseline"
FALSE_SHARE = 0.05
ENOUGH_BLOCKS = 20  # nothing is called significant with fewer
COMPARED = ("rmse_difference", "p_value", "p_adjusted", "n_eff", "significant")


def references(forecasts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return reference -> the forecasts of which the best, score by score, is the model's opponent."""
    others = [name for name in forecasts if name not in ("model", *BASELINES)]
    return {BEST_BASELINE: BASELINES} | {name: (name,) for name in others}


def compare(
    initial: np.ndarray, model: np.ndarray, opponents: Sequence[tuple[np.ndarray, Sequence[int]]], leads: np.ndarray
) -> dict[str, np.ndarray]:
    """Compare the squared errors of the model and of the best opponent, paired by case.

    Args:
        initial: (N,) initial times in minutes.
        model: (N, L, X, R) its squared errors.
        opponents: those of the same cases, and which rows of the model's theirs are.
        leads: (L,) lead times in minutes.

    Returns:
        Arrays of the shape (X, L, R) by name, NaN where no opponent has a row. ``rmse_difference`` is the model's RMSE
        over the opponent's, less 1; ``p_value`` and ``n_eff`` are of `credit.verify.blocks.paired_test`; ``p_adjusted``
        is for the false discovery rate over the scorecard, which is all rows and leads of one region with 20 blocks or
        more; ``significant`` (bool) is where it is at most 5 %.
    """
    cases, _, rows, regions = model.shape
    shape = rows, len(leads), regions
    found = {name: np.full(shape, np.nan) for name in COMPARED[:-1]}
    enough = np.zeros(len(leads), dtype=bool)
    for number, lead in enumerate(leads.tolist()):
        squared = np.full((len(opponents), cases, rows, regions), np.inf)
        for place, (own, index) in enumerate(opponents):
            squared[place][:, list(index)] = own[:, number]
        best = np.nan_to_num(squared.mean(axis=1), nan=np.inf).argmin(axis=0)
        opponent = np.take_along_axis(squared, best[None, None], axis=0)[0]
        opponent[np.isinf(opponent)] = np.nan
        ours = model[:, number]
        p, n_eff = paired_test(ours - opponent, block_length(initial, lead))
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.sqrt(ours.mean(axis=0) / opponent.mean(axis=0))
        found["rmse_difference"][:, number] = np.where(np.isfinite(ratio), ratio - 1.0, np.nan)
        found["p_value"][:, number], found["n_eff"][:, number] = p, n_eff
        enough[number] = number_of_blocks(initial, lead) >= ENOUGH_BLOCKS
    for region in range(regions):
        tested = np.where(enough, found["p_value"][..., region], np.nan)
        found["p_adjusted"][..., region] = false_discovery(tested)
    return found | {"significant": found["p_adjusted"] <= FALSE_SHARE}


def compare_all(
    sums: Mapping[str, tuple[ScoreSums, Sequence[int]]], seasons: Mapping[str, np.ndarray], leads: np.ndarray
) -> dict[str, np.ndarray]:
    """Return what `compare` finds for every reference and season, each (references, seasons, X, L, R)."""
    model, pairs = sums["model"][0], []
    for names in references(list(sums)).values():
        for chosen in seasons.values():
            opponents = [(sums[name][0].squared[chosen], sums[name][1]) for name in names]
            pairs.append(compare(model.initial[chosen], model.squared[chosen], opponents, leads))
    return {
        name: np.stack([pair[name] for pair in pairs]).reshape(-1, len(seasons), *pairs[0][name].shape)
        for name in COMPARED
    }
