"""From sums to the table of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from credit.channels import Channel
from credit.verify.report.metadata import describe_forecasts
from credit.verify.scores.rank_histogram import RankHistogram
from credit.verify.significance.bootstrap import number_of_blocks, seasonal_scores
from credit.verify.significance.comparison import compare_all, comparison_name, judge, references
from credit.verify.statistics.deterministic import DeterministicStatistics
from credit.verify.table.event_rows import EventResults
from credit.verify.table.table import CORRELATIONS, ENSEMBLE_METRICS, METRICS, RANK_METRICS, WIND_NAMES, ScoreTable


@dataclass(frozen=True)
class RowIndex:
    """What the rows of the sums are: channels, then wind vectors.

    Attributes:
        channels: the C channels.
        winds: from `credit.verify.statistics.area_mean.wind_pairs`.
        attributes: variable -> ``units``.
    """

    channels: Sequence[Channel]
    winds: Sequence[tuple[int, int, str]]
    attributes: Mapping[str, Mapping[str, str]]

    def coordinates(self) -> dict[str, tuple[str, list] | list[str]]:
        """Return the coordinates of the dimensions channel and wind."""
        units = [str(self.attributes.get(c.variable, {}).get("units", "")) for c in self.channels]
        of_winds = [self.channels[u] for u, *_ in self.winds]
        return {
            "channel": [c.name for c in self.channels],
            **_labels("channel", "", [c.variable for c in self.channels], self.channels, units),
            **_labels("wind", "wind_", [n for *_, n in self.winds], of_winds, [units[u] for u, *_ in self.winds]),
        }


def build_table(
    sums: Mapping[str, tuple[DeterministicStatistics, Sequence[int]]],
    rows: RowIndex,
    leads: np.ndarray,
    seasons: Mapping[str, np.ndarray],
    regions: Sequence[str],
    facts: Mapping[str, str | int],
    histograms: Mapping[str, RankHistogram] | None = None,
    thresholds: EventResults | None = None,
    attributes: Mapping[str, Mapping[str, object]] | None = None,
) -> ScoreTable:
    """Turn sums into scores.

    Args:
        sums: forecast -> its sums and which of `rows` theirs are; all of the same cases; ``model`` has every row.
        rows: what the rows are.
        leads: (L,) lead times in minutes.
        seasons: from `credit.verify.statistics.seasons.cases_by_season`.
        regions: names of the regions.
        facts: global attributes: ``n_cases``, ``level_units`` and what else describes the scores.
        histograms: forecast -> rank histograms of its channels, of those that are ensembles.
        thresholds: what was found of events and precipitation.
        attributes: forecast -> what describes its run, see `credit.verify.report.metadata.describe_forecasts`.
    """
    thresholds = thresholds or EventResults()
    initial = sums["model"][0].initial
    names = METRICS + ENSEMBLE_METRICS if any(own.members > 1 for own, _ in sums.values()) else METRICS
    scores = seasonal_scores(sums, list(sums), names, len(rows.channels) + len(rows.winds), leads, seasons)
    for name in CORRELATIONS:
        scores[name][list(sums).index("climatology")] = np.nan
    blocks = [[number_of_blocks(initial[chosen], lead) for lead in leads.tolist()] for chosen in seasons.values()]
    channels, winds = slice(len(rows.channels)), slice(len(rows.channels), None)
    dims = ("season", "channel", "lead", "region")
    data = {name: (("forecast", *dims), values[:, :, channels]) for name, values in scores.items()}
    if rows.winds:
        dims = ("season", "wind", "lead", "region")
        data |= {WIND_NAMES[name]: (("forecast", *dims), values[:, :, winds]) for name, values in scores.items()}
    data |= _comparisons(sums, rows, thresholds, leads, seasons, np.array(blocks))
    if histograms:
        data |= _ranks(histograms, sums, len(rows.channels), len(seasons))
    data |= thresholds.variables(list(sums), len(rows.channels), leads, seasons)
    told = describe_forecasts({name: own.members for name, (own, _) in sums.items()}, attributes or {})
    data |= {name: ("forecast", values) for name, values in told.items()}
    data["n_cases"] = ("season", [int(chosen.sum()) for chosen in seasons.values()])
    data["n_blocks"] = (("season", "lead"), blocks)
    coords = {
        "forecast": list(sums),
        "reference": list(references(list(sums))),
        "season": list(seasons),
        "lead": ("lead", leads / 60.0, {"units": "hour", "standard_name": "forecast_period"}),
        "region": list(regions),
        **rows.coordinates(),
        **thresholds.coordinates(rows.channels),
    }
    return ScoreTable(xr.Dataset(data, coords, dict(facts)))


def _comparisons(
    sums: Mapping[str, tuple[DeterministicStatistics, Sequence[int]]],
    rows: RowIndex,
    thresholds: EventResults,
    leads: np.ndarray,
    seasons: Mapping[str, np.ndarray],
    n_blocks: np.ndarray,
) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """Return the paired tests of the model: those of the scorecard, and of the fair scores beside it.

    A fair score says of ensembles of equal size what the plain one says, so each has a false discovery rate of its own.
    """
    count = len(rows.channels)
    card = {"rmse": ("row", compare_all(sums, seasons, leads, lambda own, chosen: own.squared[chosen], power=0.5))}
    beside = {}
    if any(own.members > 1 for own, _ in sums.values()):
        card["crps"] = "row", compare_all(sums, seasons, leads, lambda own, chosen: own.crps_of_cases()[chosen])
        fair = compare_all(sums, seasons, leads, lambda own, chosen: own.crps_fair_of_cases()[chosen])
        if np.isfinite(fair["difference"]).any():
            beside["crps_fair"] = "row", fair
    card |= thresholds.compare(list(sums), count, leads, seasons)
    brier_fair = thresholds.compare_fair(list(sums), leads, seasons)
    if brier_fair is not None:
        beside["brier_fair"] = "event", brier_fair
    data = {}
    for together in (card, *({score: own} for score, own in beside.items())):
        verdicts = judge([found["p_value"] for _, found in together.values()], n_blocks)
        for (score, (dim, found)), verdict in zip(together.items(), verdicts, strict=True):
            for name, values in {**found, **verdict}.items():
                data |= _by_place(comparison_name(score, name), dim, values, count)
    return data


def _by_place(name: str, dim: str, values: np.ndarray, channels: int) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """Return the variables that (references, seasons, X, L, R) make; rows are channels, then winds."""
    parts = {name: (dim, values)}
    if dim == "row":
        parts = {name: ("channel", values[:, :, :channels]), f"wind_{name}": ("wind", values[:, :, channels:])}
    return {
        own: (("reference", "season", along, "lead", "region"), part)
        for own, (along, part) in parts.items() if part.shape[2]
    }  # fmt: skip


def _ranks(
    histograms: Mapping[str, RankHistogram],
    sums: Mapping[str, tuple[DeterministicStatistics, Sequence[int]]],
    channels: int,
    seasons: int,
) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """Return what rank histograms say, of all seasons; a smaller ensemble than the largest lacks the last ranks."""
    most = max(own.members for own in histograms.values()) + 1
    _, leads, _, regions = sums["model"][0].error.shape
    frequency = np.full((len(sums), channels, leads, regions, most), np.nan)
    numbers = {name: np.full((len(sums), seasons, channels, leads, regions), np.nan) for name in RANK_METRICS}
    for f, (forecast, (_, index)) in enumerate(sums.items()):
        if forecast in histograms:
            own, rows = histograms[forecast], [row for row in index if row < channels]
            frequency[f, rows, :, :, : own.members + 1] = np.moveaxis(own.frequencies(), 1, 0)
            for name, values in own.metrics().items():
                numbers[name][f, 0, rows] = np.moveaxis(values, 1, 0)
    found = {name: (("forecast", "season", "channel", "lead", "region"), values) for name, values in numbers.items()}
    return {"ranks": (("forecast", "channel", "lead", "region", "rank"), frequency)} | found


def _labels(
    dim: str, prefix: str, variables: list[str], channels: Sequence[Channel], units: list[str]
) -> dict[str, tuple[str, list]]:
    if not variables:
        return {}
    numbers = [np.nan if c.level is None else c.level for c in channels]
    return {
        f"{prefix}variable": (dim, variables),
        f"{prefix}level": (dim, np.array(numbers, dtype=np.float64)),
        f"{prefix}units": (dim, units),
    }
