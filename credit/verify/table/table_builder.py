"""Build the score table from the statistics of all cases.

Shapes: N cases, C channels, X rows (channels, then wind vectors), L lead times, R regions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from credit.channels import Channel
from credit.verify.report.metadata import describe_forecasts
from credit.verify.scores.rank_histogram import RankHistogram
from credit.verify.significance.bootstrap import compute_seasonal_scores, count_blocks
from credit.verify.significance.comparison import (
    adjust_scorecard,
    compare_with_references,
    comparison_name,
    opponents_by_reference,
)
from credit.verify.statistics.case_statistics import DeterministicStatistics
from credit.verify.table.event_rows import EventResults
from credit.verify.table.table import CORRELATIONS, ENSEMBLE_METRICS, METRICS, RANK_METRICS, WIND_NAMES, ScoreTable

# Name of a variable of scores.nc -> (dimensions, values).
Variables = dict[str, tuple[tuple[str, ...], np.ndarray]]
# Name of a forecast -> (statistics, indices of the rows of the statistics in the table).
StatisticsByForecast = Mapping[str, tuple[DeterministicStatistics, Sequence[int]]]


@dataclass(frozen=True)
class TableRows:
    """Rows of the statistics: channels, then wind vectors.

    Attributes:
        channels: the C channels.
        winds: (index of u, index of v, name) of each wind, from `credit.verify.statistics.wind_vectors.wind_pairs`.
        attributes: variable -> attributes of the variable in the data; only ``units`` is used.
    """

    channels: Sequence[Channel]
    winds: Sequence[tuple[int, int, str]]
    attributes: Mapping[str, Mapping[str, str]]

    def coordinates(self) -> dict[str, tuple[str, list] | list[str]]:
        """Return the coordinates of the dimensions ``channel`` and ``wind``, by name.

        The level is NaN for a channel without a level.
        """
        names = []
        variables = []
        levels = []
        units = []
        for channel in self.channels:
            names.append(channel.name)
            variables.append(channel.variable)
            level = np.nan if channel.level is None else channel.level
            levels.append(level)
            units.append(str(self.attributes.get(channel.variable, {}).get("units", "")))
        coordinates = {
            "channel": names,
            "variable": ("channel", variables),
            "level": ("channel", np.array(levels, dtype=np.float64)),
            "units": ("channel", units),
        }
        if self.winds:
            # A wind has the level and the units of its first component.
            u_index = [u for u, _, _ in self.winds]
            coordinates["wind_variable"] = ("wind", [name for _, _, name in self.winds])
            coordinates["wind_level"] = ("wind", np.array([levels[u] for u in u_index], dtype=np.float64))
            coordinates["wind_units"] = ("wind", [units[u] for u in u_index])
        return coordinates


@dataclass(frozen=True)
class TableAxes:
    """Axes of a score table: rows, lead times, seasons and regions.

    Attributes:
        rows: rows of the table: channels, then wind vectors.
        leads: (L,) lead times in minutes.
        seasons: season name -> (N,) bool, True for the cases of the season, from
            `credit.verify.statistics.seasons.cases_by_season`.
        regions: names of the R regions.
    """

    rows: TableRows
    leads: np.ndarray
    seasons: Mapping[str, np.ndarray]
    regions: Sequence[str]

    @property
    def num_channels(self) -> int:
        """Number C of channels."""
        return len(self.rows.channels)


def build_table(
    statistics: StatisticsByForecast,
    axes: TableAxes,
    attributes: Mapping[str, str | int],
    histograms: Mapping[str, RankHistogram] | None = None,
    events: EventResults | None = None,
    forecast_attributes: Mapping[str, Mapping[str, object]] | None = None,
) -> ScoreTable:
    """Build the score table from the statistics of all cases.

    Args:
        statistics: name of a forecast or baseline -> (statistics, indices of the rows of the statistics in the table).
            All statistics contain the same N cases, and ``model`` must have every row.
        axes: rows, lead times, seasons and regions of the table.
        attributes: global attributes of scores.nc that describe the scores, such as ``n_cases`` and ``level_units``.
        histograms: ensemble name -> rank histograms of the ensemble; None without ensembles.
        events: statistics of events and SEEPS; None without events and SEEPS.
        forecast_attributes: forecast name -> global attributes of the forecast files, for
            `credit.verify.report.metadata.describe_forecasts`; None if the attributes are not known.
    """
    events = events or EventResults()
    forecasts = list(statistics)
    n_blocks = _count_blocks_by_season(statistics["model"][0].initial_times, axes)
    variables = _build_score_variables(statistics, axes)
    variables |= _build_comparison_variables(statistics, axes, events, n_blocks)
    if histograms:
        variables |= _build_rank_variables(histograms, statistics, axes)
    variables |= events.variables(forecasts, axes.num_channels, axes.leads, axes.seasons)

    num_members = {}
    for name, (forecast_statistics, _) in statistics.items():
        num_members[name] = forecast_statistics.num_members
    for name, values in describe_forecasts(num_members, forecast_attributes or {}).items():
        variables[name] = ("forecast", values)
    n_cases = [int(is_in_season.sum()) for is_in_season in axes.seasons.values()]
    variables["n_cases"] = ("season", n_cases)
    variables["n_blocks"] = (("season", "lead"), n_blocks)
    coordinates = {
        "forecast": forecasts,
        "reference": list(opponents_by_reference(forecasts)),
        "season": list(axes.seasons),
        "lead": ("lead", axes.leads / 60.0, {"units": "hour", "standard_name": "forecast_period"}),
        "region": list(axes.regions),
        **axes.rows.coordinates(),
        **events.coordinates(axes.rows.channels),
    }
    return ScoreTable(xr.Dataset(variables, coordinates, dict(attributes)))


def _count_blocks_by_season(initial_times: np.ndarray, axes: TableAxes) -> np.ndarray:
    """Return the number of blocks of cases for each season and lead time, (seasons, L)."""
    # Blocks are longer at longer lead times, so there are fewer of them.
    n_blocks = []
    for is_in_season in axes.seasons.values():
        season_times = initial_times[is_in_season]
        n_blocks.append([count_blocks(season_times, lead) for lead in axes.leads.tolist()])
    return np.array(n_blocks)


def _build_score_variables(statistics: StatisticsByForecast, axes: TableAxes) -> Variables:
    """Build the variables of scores.nc with the scores of channels and wind vectors and the ends of their intervals."""
    forecasts = list(statistics)
    metrics = METRICS
    if _has_ensemble(statistics):
        metrics = METRICS + ENSEMBLE_METRICS
    num_rows = axes.num_channels + len(axes.rows.winds)
    scores = compute_seasonal_scores(statistics, forecasts, metrics, num_rows, axes.leads, axes.seasons)
    # The anomaly of the climatology is zero, so its correlation is not defined; rounding errors may give a value.
    for name in CORRELATIONS:
        scores[name][forecasts.index("climatology")] = np.nan
    variables: Variables = {}
    for name, values in scores.items():
        channel_values = values[:, :, : axes.num_channels]
        variables[name] = (("forecast", "season", "channel", "lead", "region"), channel_values)
    if axes.rows.winds:
        for name, values in scores.items():
            wind_values = values[:, :, axes.num_channels :]
            variables[WIND_NAMES[name]] = (("forecast", "season", "wind", "lead", "region"), wind_values)
    return variables


def _has_ensemble(statistics: StatisticsByForecast) -> bool:
    """Return True if at least one forecast has several members."""
    return any(forecast_statistics.num_members > 1 for forecast_statistics, _ in statistics.values())


def _build_comparison_variables(
    statistics: StatisticsByForecast, axes: TableAxes, events: EventResults, n_blocks: np.ndarray
) -> Variables:  # fmt: skip
    """Build the variables of scores.nc with the results of the paired tests of the model against all references.

    The scorecard consists of the tests of RMSE, CRPS, SEEPS and Brier scores; their p-values are adjusted together. The
    p-values of each fair score are adjusted separately. For ensembles of equal size, the test of a fair score would
    only repeat the test of the ordinary score.

    Args:
        statistics: statistics of all forecasts and baselines, see `build_table`.
        axes: rows, lead times, seasons and regions of the table.
        events: statistics of events and SEEPS.
        n_blocks: (seasons, L) number of blocks.
    """

    def compare_rows(
        contribution: Callable[[DeterministicStatistics, np.ndarray], np.ndarray], power: float = 1.0
    ) -> tuple[str, dict[str, np.ndarray]]:
        return "row", compare_with_references(statistics, axes.seasons, axes.leads, contribution, power)

    forecasts = list(statistics)
    # Score -> (dimension of its rows, results of the comparison). The power is for RMSE, which is the root of a mean.
    scorecard = {"rmse": compare_rows(lambda cases, is_selected: cases.squared_error[is_selected], power=0.5)}
    fair_scores = {}
    if _has_ensemble(statistics):
        scorecard["crps"] = compare_rows(lambda cases, is_selected: cases.crps_of_cases()[is_selected])
        crps_fair = compare_rows(lambda cases, is_selected: cases.crps_fair_of_cases()[is_selected])
        # If the model is a single forecast, it has no fair CRPS, and all results are NaN.
        _, fair_results = crps_fair
        if np.isfinite(fair_results["difference"]).any():
            fair_scores["crps_fair"] = crps_fair
    scorecard |= events.compare(forecasts, axes.num_channels, axes.leads, axes.seasons)
    brier_fair = events.compare_fair(forecasts, axes.leads, axes.seasons)
    if brier_fair is not None:
        fair_scores["brier_fair"] = "event", brier_fair

    # The p-values of each group of scores are adjusted separately.
    score_groups = [scorecard]
    for name, comparison in fair_scores.items():
        score_groups.append({name: comparison})
    variables: Variables = {}
    for scores in score_groups:
        p_values = [results["p_value"] for _, results in scores.values()]
        adjusted = adjust_scorecard(p_values, n_blocks)
        for (score, (dim, results)), significance in zip(scores.items(), adjusted, strict=True):
            for result, values in {**results, **significance}.items():
                variables |= _split_channels_and_winds(comparison_name(score, result), dim, values, axes.num_channels)
    return variables


def _split_channels_and_winds(name: str, dim: str, values: np.ndarray, num_channels: int) -> Variables:
    """Return the variables of scores.nc that contain one result of the comparison.

    Args:
        name: name of the variable for channels or events; the variable for winds has the additional prefix ``wind_``.
        dim: meaning of the rows of `values`: ``channel``, ``event``, or ``row`` for channels followed by winds.
        values: (references, seasons, rows, L, R) values.
        num_channels: number of channels.
    """
    if dim == "row":
        values_by_name = {
            name: ("channel", values[:, :, :num_channels]),
            f"wind_{name}": ("wind", values[:, :, num_channels:]),
        }
    else:
        values_by_name = {name: (dim, values)}
    variables: Variables = {}
    for variable, (row_dim, row_values) in values_by_name.items():
        # Without winds, the dataset has no dimension wind.
        if row_values.shape[2]:
            variables[variable] = (("reference", "season", row_dim, "lead", "region"), row_values)
    return variables


def _build_rank_variables(
    histograms: Mapping[str, RankHistogram], statistics: StatisticsByForecast, axes: TableAxes
) -> Variables:  # fmt: skip
    """Build the variables of scores.nc for the rank histograms and their metrics.

    The histograms cover all cases; the metrics of single seasons are NaN. For ensembles with fewer members than the
    largest ensemble, the last ranks are NaN.

    Args:
        histograms: ensemble name -> rank histograms of the ensemble.
        statistics: statistics of all forecasts and baselines, see `build_table`.
        axes: rows, lead times, seasons and regions of the table.
    """
    num_forecasts = len(statistics)
    most_members = max(histogram.num_members for histogram in histograms.values())
    num_ranks = most_members + 1
    _, num_leads, _, num_regions = statistics["model"][0].error.shape
    frequency = np.full((num_forecasts, axes.num_channels, num_leads, num_regions, num_ranks), np.nan)
    shape = num_forecasts, len(axes.seasons), axes.num_channels, num_leads, num_regions
    # Histograms are sums over all cases, so the metrics of single seasons are NaN.
    metrics = {name: np.full(shape, np.nan) for name in RANK_METRICS}
    # Only channels have ranks. The season with index 0 contains all cases.
    for f, (forecast, (_, rows)) in enumerate(statistics.items()):
        if forecast not in histograms:
            continue
        histogram = histograms[forecast]
        # The rows after the channels are winds; they have no ranks.
        channels = [row for row in rows if row < axes.num_channels]
        frequency_CLRK = np.moveaxis(histogram.frequencies(), 1, 0)
        frequency[f, channels, :, :, : frequency_CLRK.shape[-1]] = frequency_CLRK
        for name, values_LCR in histogram.metrics().items():
            metrics[name][f, 0, channels] = np.moveaxis(values_LCR, 1, 0)
    variables: Variables = {"ranks": (("forecast", "channel", "lead", "region", "rank"), frequency)}
    for name, values in metrics.items():
        variables[name] = (("forecast", "season", "channel", "lead", "region"), values)
    return variables
