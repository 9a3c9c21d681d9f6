"""Score every forecast and baseline on the same cases.

Shapes: N cases (initial times), L lead times, C scored channels, H x W cells of the grid of the scores, F forecasts
(without baselines), K total wavenumbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from credit import __version__
from credit.calendar import parse_duration
from credit.channels import Channel
from credit.config import Config
from credit.data.climatology.climatology import Climatology
from credit.data.error_collector import ErrorCollector
from credit.data.splits import Split, build_splits
from credit.errors import DataError
from credit.forecast.distribution import select_round_robin
from credit.forecast.forecast_source import ForecastSource
from credit.forecast.io.forecast_reader import open_other_forecasts
from credit.grid import LatLonGrid
from credit.verify.case_scorer import CaseScorer
from credit.verify.cases import describe_seen_periods, describe_unscored, select_common_cases
from credit.verify.example import ExampleEvolution
from credit.verify.partial_scores import FieldsByChannelAndLead, PartialScores, WorkShare, score_and_gather
from credit.verify.report.metadata import describe_grid, describe_truth
from credit.verify.scores.event_scorer import CommonSample
from credit.verify.statistics.regions import describe_regions
from credit.verify.statistics.seasons import cases_by_season
from credit.verify.table.event_rows import EventResults
from credit.verify.table.spectra_rows import add_spectra
from credit.verify.table.table import MISSING_LEADS, SEEN_PERIODS, ScoreTable
from credit.verify.table.table_builder import TableAxes, TableRows, build_table

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

logger = logging.getLogger(__name__)

# Largest number of names in a log message.
_MAX_LISTED_NAMES = 20


@dataclass(frozen=True)
class Verification:
    """Result of a verification: the score table, and the fields that figures show.

    Lead times are in minutes, and fields are in the units of the data.

    Attributes:
        table: table of all scores.
        other_tables: name of each other forecast -> table of scores in which this forecast is ``model``. The other
            forecasts of the table are those that follow it in ``verification.other_forecasts``. Empty without
            ``verification.all_pairs``.
        grid: grid of the scores and maps.
        climatology: climatology of the baselines.
        damping: (L, C) dimensionless factor of damped persistence.
        cases: (N,) initial times in minutes.
        num_left_out: number of initial times of the run's forecasts that are not scored.
        figure_channels: names of the channels that figures show.
        figure_leads: lead times of the maps and spectra in minutes.
        example_time: initial time in minutes of the case that maps, animations and Hovmoeller diagrams show.
        maps: (figure channel, lead time in minutes) -> (truth, forecast) of the example, each (H, W). For an ensemble,
            the value is (truth, ensemble mean, standard deviation over members).
        evolution: means and animation frames of the example at all lead times.
        spectra: (figure channel, lead time in minutes) -> power spectra of the truth, the model and then each other
            forecast, each (K,), averaged over the cases. For an ensemble, the spectrum of the first member is used,
            because an ensemble mean is too smooth.
    """

    table: ScoreTable
    other_tables: dict[str, ScoreTable]
    grid: LatLonGrid
    climatology: Climatology
    damping: np.ndarray
    cases: np.ndarray
    num_left_out: int
    figure_channels: list[str]
    figure_leads: list[int]
    example_time: int
    maps: FieldsByChannelAndLead
    evolution: ExampleEvolution
    spectra: FieldsByChannelAndLead


def score_forecasts(
    config: Config, reader: FieldReader, archive: ForecastSource, share: WorkShare | None = None
) -> Verification | None:
    """Collective: score the forecasts, the baselines and ``verification.other_forecasts``.

    Args:
        config: config of the run.
        reader: reader of the truth, and of the training data to which climatology and damping are fitted.
        archive: forecasts of the run.
        share: share of the cases that this process scores; None if this process scores all cases.

    Returns:
        The verification on rank 0, None on the other ranks.

    Raises:
        DataError: if forecasts and truth cannot be compared; the message lists all reasons.
        ConfigError: if the climatology cannot be computed.
    """
    splits = build_splits(config.data, reader.calendar)
    return score_period(config, reader, archive, splits["train"], splits["test"], share)


def score_period(
    config: Config,
    reader: FieldReader,
    archive: ForecastSource,
    train: Split,
    test: Split,
    share: WorkShare | None = None,
) -> Verification | None:
    """Collective: score the forecasts of a period; see `score_forecasts`.

    Args:
        config: config of the run; its splits are not used.
        reader: reader of the truth, and of the training data.
        archive: forecasts of the run.
        train: period to which climatology and damping are fitted.
        test: period that contains the scored initial times and valid times.
        share: share of the cases that this process scores; None if this process scores all cases.
    """
    share = share or WorkShare()
    archives = _open_forecasts(config, archive)
    is_regridded = config.verification.grid is not None
    leads, cases = select_common_cases(archives, reader, is_regridded, test, config.verification.allow_seen)
    channels = [channel for channel in reader.channels.output if channel.name in archive.channel_names]
    # Differences between the forecasts, and missing scores, are reported before the long computation begins.
    missing_leads, gaps = describe_unscored(config, archive, reader, leads, test)
    notices = {SEEN_PERIODS: describe_seen_periods(archives, test, reader.calendar), MISSING_LEADS: missing_leads}
    if share.index == 0 and share.are_scores_used:
        _log_unscored(archive, channels, [*notices.values(), *gaps])

    # Each process scores its share; then the shares are gathered on rank 0, and only rank 0 continues.
    sample = CommonSample(cases, leads, _select_scored_groups(archive, cases))
    figure_leads = _choose_figure_leads(config, leads)
    scorer = CaseScorer(config, reader, archives, channels, train, sample, figure_leads)
    if config.verification.all_pairs:
        _require_all_channels(scorer)
    example_time = int(cases[len(cases) // 2])
    scores = score_and_gather(lambda: _score_share(scorer, archive, sample, share, example_time), share.is_sharded)
    if scores is None:
        return None
    scorer.events.warn_of_missing_seeps(scores.seeps.get("model"))
    notices = {name: notice for name, notice in notices.items() if notice}
    tables = {}
    for name in scorer.forecasts if config.verification.all_pairs else ["model"]:
        tables[name] = _build_score_table(config, reader, scorer, sample, scores, name)
        tables[name].dataset.attrs.update(notices)
    return Verification(
        table=tables.pop("model"),
        other_tables=tables,
        grid=scorer.reader.grid,
        climatology=scorer.climatology,
        damping=scorer.damping,
        cases=cases,
        num_left_out=len(archive.initial_minutes) - len(cases),
        figure_channels=scorer.figure_channels,
        figure_leads=figure_leads,
        example_time=example_time,
        maps=scores.maps,
        evolution=scorer.example_collector.build_evolution(scores, scorer.forecasts["model"].num_members),
        spectra=_average_spectra(scores),
    )


def _average_spectra(scores: PartialScores) -> FieldsByChannelAndLead:
    """Return the power spectra of `Verification`, averaged over the cases."""
    mean_spectra = {}
    for key, power_NFK in scores.spectra.items():
        mean_spectra[key] = tuple(power_NFK.mean(axis=0))
    return mean_spectra


def _require_all_channels(scorer: CaseScorer) -> None:
    """Raise a DataError if a forecast does not have all scored channels and so cannot be the model of a comparison."""
    for name, forecast in scorer.forecasts.items():
        missing = [channel.name for row, channel in enumerate(scorer.channels) if row not in forecast.rows]
        if missing:
            raise DataError(
                f"verification.all_pairs: the forecasts {name} lack {', '.join(missing[:_MAX_LISTED_NAMES])}; all "
                "forecasts must have the channels of the run; remove the key, or these forecasts"
            )


def _select_scored_groups(archive: ForecastSource, cases: np.ndarray) -> list[list[int]]:
    """Return the scored cases, grouped into the batches in which the source makes the forecasts.

    Args:
        archive: source of the forecasts; it makes the forecasts of a group as one batch.
        cases: (N,) scored initial times in minutes.

    Returns:
        Groups of initial times in minutes. Initial times that are not scored are left out.
    """
    scored_times = set(cases.tolist())
    groups = []
    for group in archive.initial_time_groups():
        scored_group = [minutes for minutes in group if minutes in scored_times]
        if scored_group:
            groups.append(scored_group)
    return groups


def _score_share(
    scorer: CaseScorer, archive: ForecastSource, sample: CommonSample, share: WorkShare, example_time: int
) -> PartialScores | None:
    """Collective: score the share of the cases of this process.

    Args:
        scorer: scorer of the cases.
        archive: forecasts of the run; the source may make them during the scoring.
        sample: cases and lead times that all processes together score.
        share: share of this process.
        example_time: initial time in minutes of the case that figures show.

    Returns:
        The partial scores; None if they are ignored, because another process with the same share returns them.
    """
    # Groups are assigned round-robin, so the numbers of groups of two ranks differ by at most one.
    share_groups = select_round_robin(sample.groups, share.index, share.num_shares)
    scores = None
    if share.has_whole_forecasts:
        scores = scorer.score(share_groups, example_time)
    else:
        # This process only computes its part of the forecasts, which another process scores.
        for group in share_groups:
            archive.join_collectives(sample.leads.tolist(), group)
    # Ranks that share weights communicate at every step, so a rank without further groups takes part in the forecasts
    # of the other ranks.
    largest_share = math.ceil(len(sample.groups) / share.num_shares)
    for _ in range(largest_share - len(share_groups)):
        archive.join_collectives(sample.leads.tolist())
    if not share.are_scores_used:
        return None
    return scores


def _open_forecasts(config: Config, archive: ForecastSource) -> dict[str, ForecastSource]:
    """Return forecast name -> source: first ``model`` for the run, then each of ``verification.other_forecasts``.

    Raises:
        CreditError: if other forecasts cannot be opened; the message lists all errors.
    """
    # The model comes first in all tables and figures.
    archives = {"model": archive}
    errors = ErrorCollector()
    for name, other_forecasts in config.verification.other_forecasts.items():
        with errors.collect():
            archives[name] = open_other_forecasts(name, other_forecasts, config.data.level_units)
    errors.raise_any()
    return archives


def _log_unscored(archive: ForecastSource, channels: list[Channel], warnings: Sequence[str]) -> None:
    """Log warnings, and the names of the forecast channels that are not scored.

    Args:
        archive: forecasts of the run.
        channels: scored channels.
        warnings: warning messages; empty messages are skipped.
    """
    for message in warnings:
        if message:
            logger.warning("%s", message)
    scored_names = {channel.name for channel in channels}
    unscored = [name for name in archive.channel_names if name not in scored_names]
    if unscored:
        names = ", ".join(unscored[:_MAX_LISTED_NAMES])
        if len(unscored) > _MAX_LISTED_NAMES:
            names += ", ..."
        logger.info("not scored, because they are not predicted variables of data.variables: %s", names)


def _build_score_table(
    config: Config, reader: FieldReader, scorer: CaseScorer, sample: CommonSample, scores: PartialScores, model: str
) -> ScoreTable:
    """Return the score table of all cases.

    Args:
        config: config of the run.
        reader: reader of the truth on its original grid.
        scorer: scorer of the cases.
        sample: cases and lead times that all processes together scored.
        scores: joined scores of all cases.
        model: name of the forecast that becomes ``model`` in the table; it is compared with the forecasts after it.
    """
    names = list(scorer.forecasts)
    scores = scores.use_as_model(model, names)
    forecasts = {"model": scorer.forecasts[model]}
    for name in names[names.index(model) + 1 :]:
        forecasts[name] = scorer.forecasts[name]
    # Each forecast has statistics for its rows of the table.
    all_rows = list(range(scorer.num_rows))
    statistics = {}
    for name, forecast_statistics in scores.statistics.items():
        # Baselines have every row.
        rows = all_rows
        if name in forecasts:
            rows = forecasts[name].rows
        statistics[name] = (forecast_statistics, rows)
    table = build_table(
        statistics,
        TableAxes(
            rows=TableRows(scorer.channels, scorer.winds, scorer.reader.attributes),
            leads=sample.leads,
            seasons=cases_by_season(sample.cases, reader.calendar),
            regions=list(scorer.regions),
        ),
        _describe_scores(config, reader, scorer, sample.cases, config.experiment if model == "model" else model),
        scores.histograms,
        EventResults(scorer.events.events, scores.events, scorer.events.precipitation, scores.seeps),
        {name: forecast.archive.attributes for name, forecast in forecasts.items()},
    )
    add_spectra(table, _average_spectra(scores), list(forecasts))
    return table


def _describe_scores(
    config: Config, reader: FieldReader, scorer: CaseScorer, cases: np.ndarray, experiment: str
) -> dict[str, str | int]:
    """Return the global attributes of scores.nc, which describe the cases, the truth and the grid of the scores."""
    calendar = reader.calendar
    first_case = calendar.format(cases[0])
    last_case = calendar.format(cases[-1])
    # Times are formatted as 2020-01-31T12:00.
    initial_hours = sorted({calendar.format(minutes)[-5:] for minutes in cases.tolist()})
    grid = describe_grid(scorer.reader.grid)
    if config.verification.grid is not None:
        grid += f", conservatively from {describe_grid(reader.grid)}"
    return {
        "title": f"Scores of {experiment}",
        "experiment": experiment,
        "n_cases": len(cases),
        "initial_times": f"{first_case} to {last_case}".replace("T", " ") + " UTC",
        "first_case": first_case,
        "last_case": last_case,
        "initial_hours": " ".join(initial_hours),
        "grid": grid,
        "truth": describe_truth(config.data),
        "climatology": scorer.climatology.description,
        "level_units": config.data.level_units,
        "regions": describe_regions(scorer.regions),
        "seasons": "by the month of the initial time",
        **scorer.events.attributes(),
        "version": f"credit {__version__}",
    }


def _choose_figure_leads(config: Config, leads: np.ndarray) -> list[int]:
    """Return the lead times of ``verification.figure_leads`` that are scored, in minutes.

    If none of these lead times is scored, return only the last scored lead time.

    Args:
        config: config of the run.
        leads: (L,) scored lead times in minutes.
    """
    figure_leads = []
    missing = []
    # A dict drops repeated entries and keeps their order.
    for text in dict.fromkeys(config.verification.figure_leads):
        lead = parse_duration(text)
        if lead in leads:
            figure_leads.append(lead)
        else:
            missing.append(text)
    if not figure_leads:
        figure_leads = [int(leads[-1])]
    if missing:
        drawn = ", ".join(f"{lead / 60:g} h" for lead in figure_leads)
        logger.warning(
            "verification.figure_leads: %s: not among the forecasts, which have %g h to %g h; figures are of %s",
            ", ".join(missing), leads[0] / 60, leads[-1] / 60, drawn,
        )  # fmt: skip
    return figure_leads
