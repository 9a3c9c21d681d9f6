"""Scores of a comparison: the tables of `credit verify` of every run and seed, and their combination over seeds.

Shapes: S seeds, L lead times, X rows of a score (channels, winds or events), R regions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.stats
import xarray as xr

from credit.verify.significance.comparison import adjust_scorecard, comparison_name
from credit.verify.table.summary import headline_channels
from credit.verify.table.table import WIND_METRICS, ScoreTable

_DIFFERENCE = "_difference"
# Lead times in hours of the table of results; lead times that the forecasts do not have are left out.
_RESULT_LEADS = (24, 72, 120)


@dataclass(frozen=True)
class SeedRange:
    """Value of a score for each seed of a run, with the mean and the range over the seeds.

    Attributes:
        values: label of the seed -> value; NaN if a seed has no value.
    """

    values: dict[str, float]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(list(self.values.values())))

    @property
    def low(self) -> float:
        """Smallest value of all seeds."""
        return min(self.values.values())

    @property
    def high(self) -> float:
        """Largest value of all seeds."""
        return max(self.values.values())


@dataclass(frozen=True)
class ResultRow:
    """Scores of all runs for one channel and lead time.

    Attributes:
        channel: name of the channel.
        units: units of the RMSE.
        lead_hours: lead time in hours.
        rmse: name of a run -> global RMSE of each seed.
        ratio: name of a run -> global RMSE of each seed, divided by the RMSE of persistence.
        best: name of the run with the smallest mean RMSE, if it differs significantly from every other run; else None.
    """

    channel: str
    units: str
    lead_hours: float
    rmse: dict[str, SeedRange]
    ratio: dict[str, SeedRange]
    best: str | None


class ComparisonScores:
    """Scores of all runs and seeds, and the comparison of each pair of runs.

    Args:
        names: names of the runs in the order of the command; runs without scores are left out.
        tables: (name of the run, label of the seed) -> score table, in which the run is ``model`` and the later runs
            are other forecasts.

    Attributes:
        names: names of the runs that have scores.
        pairs: (name of a run, name of a later run) -> table of their comparison, see `combine_pair`.
    """

    def __init__(self, names: Sequence[str], tables: dict[tuple[str, str], ScoreTable]) -> None:
        self.tables = tables
        self.names = [name for name in names if self.seeds_of(name)]
        self.pairs: dict[tuple[str, str], ScoreTable] = {}
        for first, second in itertools.combinations(self.names, 2):
            # A seed is not compared if one of the two runs has no forecasts for it.
            common = []
            for seed in self.seeds_of(first):
                table = tables[first, seed]
                if second in table.forecasts:
                    common.append(table)
            if common:
                self.pairs[first, second] = combine_pair(common, first, second)

    def seeds_of(self, name: str) -> list[str]:
        """Return the labels of the seeds for which a run has scores."""
        return [seed for run, seed in self.tables if run == name]

    @property
    def first_table(self) -> ScoreTable:
        """Score table of the first run and seed; all tables have the same channels, lead times and baselines."""
        return self.tables[self.names[0], self.seeds_of(self.names[0])[0]]

    def score(self, name: str, channel: str, lead_hours: float, metric: str = "rmse") -> SeedRange:
        """Return a global score of a run at one lead time for each seed, see `ScoreTable.score`."""
        values = {}
        for seed in self.seeds_of(name):
            values[seed] = self.tables[name, seed].score("model", channel, lead_hours, metric)
        return SeedRange(values)

    def scores_by_lead(self, name: str, channel: str, metric: str) -> np.ndarray:
        """Return a global score of a run for each seed and lead time, (S, L)."""
        curves = []
        for seed in self.seeds_of(name):
            curves.append(self.tables[name, seed].scores_by_lead("model", channel, metric))
        return np.stack(curves)

    def is_significant(self, name: str, other: str, channel: str, lead_hours: float) -> bool:
        """Return True if two runs were compared and their global RMSE differs significantly."""
        pair = (name, other) if (name, other) in self.pairs else (other, name)
        table = self.pairs.get(pair)
        if table is None:
            return False
        # The earlier run is the reference of the later one.
        significant_L = table.comparison("significant", channel, pair[0])
        return bool(significant_L[table.lead_hours.index(lead_hours)])

    def result_leads(self) -> list[float]:
        """Return the lead times in hours of the table of results.

        The result is 24, 72 and 120 h, as far as the forecasts have these lead times. If the forecasts have fewer than
        two of them, the result is the last three lead times of `ScoreTable.summary_leads`.
        """
        leads = [hours for hours in self.first_table.lead_hours if hours in _RESULT_LEADS]
        if len(leads) < 2:
            return self.first_table.summary_leads()[-3:]
        return leads

    def result_rows(self) -> list[ResultRow]:
        """Return the rows of the table of results, one for each headline channel and lead time of `result_leads`."""
        rows = []
        for channel in headline_channels(self.first_table):
            for hours in self.result_leads():
                rows.append(self._build_row(channel, hours))
        return rows

    def _build_row(self, channel: str, lead_hours: float) -> ResultRow:
        """Return the scores of all runs for one channel and lead time."""
        persistence = self.first_table.score("persistence", channel, lead_hours)
        rmse = {}
        ratio = {}
        for name in self.names:
            rmse[name] = self.score(name, channel, lead_hours)
            ratios = {}
            for seed, value in rmse[name].values.items():
                ratios[seed] = value / persistence if persistence > 0 else float("nan")
            ratio[name] = SeedRange(ratios)
        best: str | None = min(self.names, key=lambda name: rmse[name].mean)
        if len(self.names) < 2:
            # The other runs failed, so there is no comparison.
            best = None
        for other in self.names:
            if other != best and not self.is_significant(str(best), other, channel, lead_hours):
                best = None
                break
        return ResultRow(channel, self.first_table.units(channel), lead_hours, rmse, ratio, best)


def load_tables(folders: dict[tuple[str, str], Path]) -> dict[tuple[str, str], ScoreTable]:
    """Return the score tables of verified runs.

    Args:
        folders: (name of the run, label of the seed) -> folder with ``scores.nc``.

    Returns:
        (name of the run, label of the seed) -> score table.
    """
    tables = {}
    for key, folder in folders.items():
        with xr.open_dataset(folder / "scores.nc") as dataset:
            tables[key] = ScoreTable(dataset.load())
    return tables


def combine_pair(tables: Sequence[ScoreTable], first: str, second: str) -> ScoreTable:
    """Return the comparison of a later run with an earlier run over all seeds, as a table for scorecards.

    In the tables of `credit verify`, the earlier run is the model, and the later run is the reference. In the returned
    table, the later run is the model, and the earlier run is the only reference. For each seed, the score of the later
    run is divided by the score of the earlier run. The difference of a score is the geometric mean of these ratios over
    the seeds, minus 1.

    Two kinds of tests are combined. For each seed, the test of `credit verify` shows if the difference is larger than
    its variation between cases. A t-test of two independent samples of the logarithms of the scores shows if the
    difference is larger than its variation between seeds. The combined p-value is the largest p-value of all tests, or
    1 if the sign of the difference varies between seeds. This is an intersection-union test (Berger 1982,
    doi:10.1080/00401706.1982.10487790). With one seed, only the test over cases is used. All p-values are then adjusted
    for the false discovery rate as in `credit verify`.

    Args:
        tables: score table of the earlier run for each seed; the later run is among its references.
        first: name of the earlier run.
        second: name of the later run.
    """
    datasets = [table.dataset.sel(reference=[second]) for table in tables]
    names = [str(name) for name in datasets[0].data_vars if str(name).endswith(_DIFFERENCE)]
    # Tests of fair scores are left out: as in `credit verify`, the scorecard already tests the same quantities.
    scores = [name.removesuffix(_DIFFERENCE) for name in names if not name.endswith(f"_fair{_DIFFERENCE}")]
    differences = {}
    p_values = []
    for score in scores:
        difference, p_value = _combine_score(datasets, score, second)
        differences[score] = difference
        p_values.append(p_value)
    adjusted = adjust_scorecard(p_values, datasets[0]["n_blocks"].values)
    # Only the forecast ``model`` is kept, because the name of the later run must not occur twice. Intervals are
    # dropped, because they belong to a single seed.
    interval_ends = [
        name for name in datasets[0].data_vars if str(name).endswith(("_difference_low", "_difference_high"))
    ]
    combined = datasets[0].sel(forecast=["model"]).drop_vars(interval_ends)
    for score, p_value, results in zip(scores, p_values, adjusted, strict=True):
        values = {"difference": differences[score], "p_value": p_value, **results}
        for result, array in values.items():
            name = _variable_name(score, result)
            combined[name] = datasets[0][f"{score}{_DIFFERENCE}"].copy(data=array)
    combined = combined.assign_coords(reference=[first])
    combined["experiment"] = ("forecast", [second])
    combined.attrs["experiment"] = second
    return ScoreTable(combined)


def _combine_score(datasets: Sequence[xr.Dataset], score: str, second: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the relative difference of a score and its p-value over all seeds, each (1, seasons, X, L, R).

    Args:
        datasets: score table of each seed, with a single reference.
        score: name of the score in variable names, such as ``rmse``, ``wind_rmse`` or ``brier``.
        second: name of the later run, which is the reference in the tables.
    """
    ratios = np.stack([1 + dataset[f"{score}{_DIFFERENCE}"].values for dataset in datasets])
    with np.errstate(divide="ignore", invalid="ignore"):
        # The tables contain the score of the earlier run divided by the score of the later run; the sign inverts this.
        logarithms = -np.log(ratios)
    mean_logarithm = logarithms.mean(axis=0)
    p_value = np.stack([dataset[_variable_name(score, "p_value")].values for dataset in datasets]).max(axis=0)
    signs = np.sign(logarithms)
    p_value = np.where((signs != signs[0]).any(axis=0) & np.isfinite(p_value), 1.0, p_value)
    if len(datasets) > 1:
        # Where the seeds cannot be tested, only the tests over cases are used.
        seed_p_value = np.nan_to_num(_compute_seed_p_values(datasets, score, second), nan=0.0)
        p_value = np.maximum(p_value, seed_p_value)
    return np.exp(mean_logarithm) - 1, p_value


def _compute_seed_p_values(datasets: Sequence[xr.Dataset], score: str, second: str) -> np.ndarray:
    """Return the p-value of a t-test that compares two runs by their scores for each seed, (1, seasons, X, L, R).

    The samples are the logarithms of the scores of each run; the samples of the two runs are independent. The p-value
    is NaN if a score is 0, which has no logarithm, or if all seeds have the same score.

    Args:
        datasets: score table of each seed, with a single reference.
        score: name of the score in variable names, such as ``rmse``, ``wind_rmse`` or ``brier``.
        second: name of the later run, which is the reference in the tables.
    """
    variable = score
    if score.startswith("wind_"):
        variable = WIND_METRICS[score.removeprefix("wind_")]
    moments = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for forecast in ("model", second):
            values = np.stack([dataset[variable].sel(forecast=forecast).values for dataset in datasets])
            logarithms = np.log(values)
            moments += [logarithms.mean(axis=0), logarithms.std(axis=0, ddof=1), len(datasets)]
        result = scipy.stats.ttest_ind_from_stats(*moments)
    return np.asarray(result.pvalue)[None]


def _variable_name(score: str, result: str) -> str:
    """Return the name of the variable that contains a result of a comparison, such as ``wind_significant``.

    Args:
        score: name of the score, with the prefix ``wind_`` for wind vectors.
        result: name of the result, see `credit.verify.significance.comparison.comparison_name`.
    """
    if score.startswith("wind_"):
        return f"wind_{comparison_name(score.removeprefix('wind_'), result)}"
    return comparison_name(score, result)
