"""Scores every forecast and baseline on one set of cases, in one pass over the truth."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from credit import __version__
from credit.calendar import parse_duration
from credit.channels import Channel, select_figure_channels, take_channels
from credit.config import Config
from credit.config.schema_verification import BASELINES
from credit.data.climatology.climatology import Climatology, Fields
from credit.data.error_collector import ErrorCollector
from credit.data.formats.run_grid import load_grid
from credit.data.splits import Split, build_splits
from credit.forecast.forecast_source import ForecastSource
from credit.forecast.initial_times import round_robin
from credit.forecast.io.forecast_reader import open_other_forecasts
from credit.grid import LatLonGrid
from credit.utils.progress import ProgressBar
from credit.verify.cases import agree, conversion_of, describe_seen, find_unscored
from credit.verify.example import ExampleCollector, ExampleEvolution
from credit.verify.regridded_reader import RegriddedReader
from credit.verify.report.metadata import describe_grid, describe_truth
from credit.verify.scored_forecast import ScoredForecast
from credit.verify.scores.baseline_state import BaselineState
from credit.verify.scores.baselines import baseline_fields, build_climatology, fit_damping
from credit.verify.scores.event_scorer import EventScorer
from credit.verify.scores.rank_histogram import RankHistogram
from credit.verify.scores.spectra import SphericalSpectrum
from credit.verify.statistics.area_mean import AreaMean, wind_pairs
from credit.verify.statistics.deterministic import DeterministicStatistics
from credit.verify.statistics.ensemble import EnsembleStatistics
from credit.verify.statistics.error_moments import error_moments
from credit.verify.statistics.partial_scores import Pairs, PartialScores, WorkShare, gather
from credit.verify.statistics.regions import GLOBE, describe_regions, region_weights, scored_regions
from credit.verify.statistics.seasons import cases_by_season
from credit.verify.table.event_rows import EventResults
from credit.verify.table.spectra_rows import add_spectra
from credit.verify.table.table import LACKING, SEEN_HERE, ScoreTable
from credit.verify.table.table_builder import RowIndex, build_table

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verification:
    """What a verification found.

    Attributes:
        table: the scores.
        grid: that of the scores and maps.
        climatology: of the baselines.
        damping: (L, C) r of damped persistence.
        cases: (N,) initial times in minutes.
        left_out: initial times of the archive without truth in the test period.
        figure_channels: names of the channels of the figures.
        figure_leads: lead times of the maps and spectra in minutes.
        example: the case of the maps.
        maps: (figure channel, lead) -> (truth, forecast), each (H, W), at the example; of an ensemble the mean and,
            third, the standard deviation over members.
        course: the example over all lead times.
        spectra: (figure channel, lead) -> (truth, the model, other forecasts) power by total wavenumber, mean over the
            cases; of an ensemble its first member's, as a mean is smooth.
    """

    table: ScoreTable
    grid: LatLonGrid
    climatology: Climatology
    damping: np.ndarray
    cases: np.ndarray
    left_out: int
    figure_channels: list[str]
    figure_leads: list[int]
    example: int
    maps: Pairs
    course: ExampleEvolution
    spectra: Pairs


def score_forecasts(
    config: Config, reader: FieldReader, archive: ForecastSource, share: WorkShare | None = None
) -> Verification | None:
    """Score the forecasts, the baselines and ``verification.other_forecasts``; collective where there are ranks.

    Returns:
        What was found, on the first rank, None on the others.

    Raises:
        DataError: if forecasts and truth differ in grid, calendar or quantities, or have no case in common: with
            everything that does not fit, before anything is computed.
        ConfigError: if the climatology cannot be made.
    """
    share = share or WorkShare()
    splits = build_splits(config.data, reader.calendar)
    archives, problems = {"model": archive}, ErrorCollector()
    for name, other in config.verification.other_forecasts.items():
        with problems.collect():
            archives[name] = open_other_forecasts(name, other, config.data.level_units)
    problems.raise_any()
    leads, cases = agree(
        archives, reader, config.verification.grid is not None, splits["test"], config.verification.allow_seen
    )
    lacking, lines = find_unscored(config, archive, reader, leads, splits["test"])
    seen = describe_seen(archives, splits["test"], reader.calendar)
    for line in filter(None, [seen, lacking, *lines] if share.number == 0 else []):
        logger.warning("%s", line)
    channels = [c for c in reader.channels.output if c.name in archive.channel_names]
    unknown = [name for name in archive.channel_names if name not in {channel.name for channel in channels}]
    if unknown and share.number == 0:
        few = f"{', '.join(unknown[:20])}{', ...' if len(unknown) > 20 else ''}"
        logger.info("not scored, as data.variables predict nothing of these names and levels: %s", few)
    known = set(cases.tolist())
    groups = [kept for own in archive.groups() if (kept := [minutes for minutes in own if minutes in known])]
    scorer = _Scorer(config, reader, archives, channels, cases, leads, splits["train"], groups)
    mine = round_robin(groups, share.number, share.count)
    example = int(cases[len(cases) // 2])

    def score() -> PartialScores | None:
        part = scorer.score(mine, example)
        # sharded weights are gathered by all ranks: who has no more to score takes part in the others' forecasts
        for _ in range(-(-len(groups) // share.count) - len(mine)):
            archive.join_collectives(leads.tolist())
        return part if share.counts else None

    whole = gather(score, share.is_spread)
    if whole is None:
        return None
    found = scorer.conclude(whole, cases, example, len(archive.initial_minutes) - len(cases))
    found.table.dataset.attrs |= {key: text for key, text in ((SEEN_HERE, seen), (LACKING, lacking)) if text}
    return found


class _Scorer:
    """One pass over the cases."""

    def __init__(
        self,
        config: Config,
        reader: FieldReader,
        archives: Mapping[str, ForecastSource],
        channels: list[Channel],
        cases: np.ndarray,
        leads: np.ndarray,
        train: Split,
        groups: list[list[int]],
    ) -> None:
        conf, data = config.verification, reader
        onto = load_grid(conf.grid, "verification.grid") if conf.grid is not None else None
        reader = RegriddedReader(data, len(leads) + 2, onto)
        self._brought = f", conservatively from {describe_grid(data.grid)}" if onto is not None else ""
        self._config, self._reader, self._channels, self._leads = config, reader, channels, leads
        self._shown = select_figure_channels(conf.figure_channels, channels, "verification.figure_channels")
        self._figure_leads = _figure_leads(config, leads)
        animate = select_figure_channels(conf.animate, channels, "verification.animate")
        names = [c.name for c in channels]
        stored = [c.name for c in reader.channels.stored]
        self._stored = [stored.index(name) for name in names]
        self._regions = scored_regions(config.verification)
        self._weights = region_weights(reader.grid, self._regions)
        self._winds = wind_pairs(channels, reader.attributes, reader.masks)
        self._means = AreaMean(channels, reader.masks, self._weights, [(u, v) for u, v, _ in self._winds])
        self._contenders = {key: self._contender(key, archive, data) for key, archive in archives.items()}
        self._thresholds = EventScorer(conf, reader, channels, self._means, self._truth, train, cases, leads, groups)
        # a store's climatology is on the grid of the data
        own = data if onto is not None else reader
        self._climatology, normal_grid = build_climatology(conf, config.data, own, names, train)
        self._bring_normal = reader.bring(channels, normal_grid)
        globe = AreaMean(channels, reader.masks, region_weights(reader.grid, GLOBE))
        self._damping = fit_damping(self._truth, reader.times, self._normal, train, leads, globe)
        origins = [data.grid, *(own.grid for own in archives.values())]
        self._spectrum = SphericalSpectrum(reader.grid, origins)
        what = channels, reader.masks, leads.tolist(), self._shown, animate, conf.hovmoeller_band
        self._course = ExampleCollector(reader.grid, *what)

    def _contender(self, key: str, archive: ForecastSource, data: FieldReader) -> ScoredForecast:
        names = [c.name for c in self._channels]
        has = [i for i, name in enumerate(names) if name in archive.channel_names]
        winds = [(number, u, v) for number, (u, v, _) in enumerate(self._winds) if {u, v} <= set(has)]
        own = [(has.index(u), has.index(v)) for _, u, v in winds]
        converted = {n: conversion_of(key, archive, data, self._channels[i].variable) for n, i in enumerate(has)}
        return ScoredForecast(
            archive=archive,
            has=has,
            places=[archive.channel_names.index(names[i]) for i in has],
            rows=has + [len(names) + number for number, *_ in winds],
            means=AreaMean([self._channels[i] for i in has], self._reader.masks, self._weights, own),
            conversions={number: found for number, found in converted.items() if found is not None},
            bring=self._reader.bring([self._channels[i] for i in has], archive.grid),
            is_alike=len(has) == len(names) and (archive.members or 1) == 1,
        )

    def _truth(self, minutes: int) -> np.ndarray:
        index = self._reader.index_of(minutes)
        assert index is not None, minutes
        return take_channels(self._reader.read(index), self._stored)

    def _normal(self, minutes: int) -> Fields:
        return self._bring_normal(self._climatology.evaluate_lazily(minutes))

    def _known(self, minutes: int) -> dict[str, Fields]:
        """Return truth and climatology at a time, (C, H, W), by what errors call them."""
        when = self._reader.calendar.format(minutes)
        return {f"truth at {when}": self._truth(minutes), f"climatology at {when}": self._normal(minutes)}

    def score(self, groups: Sequence[Sequence[int]], example: int) -> PartialScores:
        """Score the cases of `groups` and collect what the figures show."""
        cases = np.array(sorted(minutes for own in groups for minutes in own), dtype=np.int64)
        leads = len(self._leads)
        sums: dict[str, DeterministicStatistics] = {
            key: own.sums(cases, leads) for key, own in self._contenders.items()
        }
        sums |= {name: DeterministicStatistics.empty(cases, leads, self._means) for name in BASELINES}
        histograms = {
            key: RankHistogram.zeros(leads, own.means, own.members)
            for key, own in self._contenders.items()
            if own.members > 1
        }
        members = {key: own.members for key, own in sums.items()}
        part = PartialScores(cases, sums, *self._thresholds.empty(cases, leads, members), histograms, {}, {})
        first = not dist.is_initialized() or dist.get_rank() == 0
        with ProgressBar(total=len(cases), desc="scoring", disable=None if first else True) as bar:
            for group in groups:
                self._score_group(group, part, example)
                bar.update(len(group))
        return part

    def conclude(self, part: PartialScores, cases: np.ndarray, example: int, left_out: int) -> Verification:
        """Return the verification of all cases."""
        everything = list(range(self._means.shape[0]))
        rows = {key: self._contenders[key].rows if key in self._contenders else everything for key in part.sums}
        table = build_table(
            {key: (own, rows[key]) for key, own in part.sums.items()},
            RowIndex(self._channels, self._winds, self._reader.attributes),
            self._leads,
            cases_by_season(cases, self._reader.calendar),
            list(self._regions),
            self._facts(cases),
            part.histograms,
            EventResults(self._thresholds.events, part.events, self._thresholds.precipitation, part.seeps),
            {key: own.archive.attributes for key, own in self._contenders.items()},
        )
        spectra = {key: tuple(own.mean(axis=0)) for key, own in part.spectra.items()}
        add_spectra(table, spectra, list(self._contenders))
        self._thresholds.log_unscored(part.seeps.get("model"))
        return Verification(
            table=table,
            grid=self._reader.grid,
            climatology=self._climatology,
            damping=self._damping,
            cases=cases,
            left_out=left_out,
            figure_channels=self._shown,
            figure_leads=self._figure_leads,
            example=example,
            maps=part.maps,
            course=self._course.conclude(part, self._contenders["model"].members),
            spectra=spectra,
        )

    def _score_group(self, group: Sequence[int], part: PartialScores, example: int) -> None:
        """Score the cases of a group side by side."""
        used = self._thresholds.channels
        numbers = np.searchsorted(part.cases, group).tolist()
        beginnings = [BaselineState.of(self._means, self._known(initial)) for initial in group]
        for row, lead in enumerate(self._leads.tolist()):
            r = self._damping[row]
            for case, initial, first in zip(numbers, group, beginnings, strict=True):
                place, valid = (case, row), initial + lead
                later = self._known(valid)
                truth, normal = later.values()
                members = {key: own.read(initial, lead) for key, own in self._contenders.items() if own.is_alike}
                self._add_alike(part, place, initial, first, later, members)
                if used:
                    expected = np.asarray(normal[used])
                    few = baseline_fields(first.fields[used], first.anomaly[used], expected, r[used, None, None])
                    for name, baseline in few.items():
                        self._thresholds.add(part, name, place, valid, baseline[None], truth, used)
                for key, own in self._contenders.items():
                    fields = members[key] if own.is_alike else own.read(initial, lead)
                    self._score_forecast(key, part, place, initial, later, fields, initial == example)

    def _add_alike(
        self,
        part: PartialScores,
        place: tuple[int, int],
        initial: int,
        first: BaselineState,
        known: Mapping[str, Fields],
        forecasts: Mapping[str, np.ndarray],
    ) -> None:
        """Enter the baselines and the `forecasts` that are like them, (1, C, H, W); see `_score_forecast`."""
        truth, normal = known.values()
        single = {key: own for key, (own,) in forecasts.items()}
        lead = int(self._leads[place[1]])
        names = {self._contenders[key].describe(initial, lead): own for key, own in single.items()}
        names |= {"truth at the initial time": first.fields, **known}
        baselines = first, self._damping[place[1]]
        for key, moments in error_moments(self._means, truth, normal, single, names, baselines).items():
            part.sums[key].enter(place, self._means, moments)

    def _score_forecast(
        self, key: str, part: PartialScores, place: tuple[int, int], initial: int, known: Mapping[str, Fields],
        members: np.ndarray, is_example: bool,
    ) -> None:  # fmt: skip
        """Score one forecast at one lead time.

        Args:
            key: its name.
            part: has the sums.
            place: numbers of the case and of the lead time.
            initial: the initial time.
            known: truth and climatology at the valid time, (C, H, W), by what errors call them.
            members: its scored channels, (M, C, H, W).
            is_example: whether it is the case of the maps.
        """
        own, lead = self._contenders[key], int(self._leads[place[1]])
        sums, truth, what = part.sums[key], next(iter(known.values())), own.describe(initial, lead)
        if not own.is_alike:
            mean = members[0] if len(members) == 1 else members.mean(axis=0, dtype=np.float64)
            fields = (take_channels(field, own.has) for field in known.values())
            sums.add(*place, own.means, mean, *fields, (what, *known))
        self._thresholds.add(part, key, place, initial + lead, members, truth, own.has)
        if isinstance(sums, EnsembleStatistics):
            flat, true = (field.reshape(*field.shape[:-2], -1) for field in (members, take_channels(truth, own.has)))
            part.histograms[key].add(place[1], sums.add_members(*place, own.means, flat, true, what))
        if key == "model" and is_example:
            self._course.keep(part, lead, truth, members)
        if lead in self._figure_leads:
            self._collect(key, part, place[0], lead, truth, members, is_example)

    def _collect(
        self,
        key: str,
        part: PartialScores,
        case: int,
        lead: int,
        truth: np.ndarray,
        members: np.ndarray,
        is_example: bool,
    ) -> None:
        """Keep the spectra, and of the model the maps of the example; masked channels have no spectrum."""
        masks, has = self._reader.masks, self._contenders[key].has
        shape = len(part.cases), 1 + len(self._contenders), len(self._spectrum.wavenumbers)
        for index, channel in enumerate(self._channels):
            if channel.name not in self._shown or index not in has:
                continue
            own, place = members[:, has.index(index)], (channel.name, lead)
            if key == "model" and is_example:
                hidden = masks.get(channel.variable, False)
                fields = [truth[index], own.mean(axis=0)] + ([own.std(axis=0, ddof=1)] if len(own) > 1 else [])
                part.maps[place] = tuple(np.where(hidden, np.nan, field) for field in fields)
            if channel.variable not in masks:
                power = part.spectra.setdefault(place, np.full(shape, np.nan))[case]
                if key == "model":
                    power[0] = self._spectrum.power(truth[index])
                power[1 + list(self._contenders).index(key)] = self._spectrum.power(own[0])

    def _facts(self, cases: np.ndarray) -> dict[str, str | int]:
        calendar = self._reader.calendar
        first, last = (calendar.format(cases[i]) for i in (0, -1))
        hours = sorted({calendar.format(time)[-5:] for time in cases.tolist()})
        return {
            "title": f"Scores of {self._config.experiment}",
            "n_cases": len(cases),
            "initial_times": f"{first} to {last}".replace("T", " ") + " UTC",
            "first_case": first,
            "last_case": last,
            "initial_hours": " ".join(hours),
            "grid": describe_grid(self._reader.grid) + self._brought,
            "truth": describe_truth(self._config.data),
            "climatology": self._climatology.description,
            "level_units": self._config.data.level_units,
            "regions": describe_regions(self._regions),
            "seasons": "by the month of the initial time",
            **self._thresholds.facts(),
            "version": f"credit {__version__}",
        }


def _figure_leads(config: Config, leads: np.ndarray) -> list[int]:
    """Return the asked lead times that the forecasts have, else the last; a warning names those they have not."""
    wanted = {text: parse_duration(text) for text in config.verification.figure_leads}
    found = [lead for lead in wanted.values() if lead in leads] or [int(leads[-1])]
    absent = [text for text, lead in wanted.items() if lead not in leads]
    if absent:
        logger.warning(
            "verification.figure_leads: %s: not among the forecasts, which have %g h to %g h; figures are of %s",
            ", ".join(absent), leads[0] / 60, leads[-1] / 60, ", ".join(f"{lead / 60:g} h" for lead in found),
        )  # fmt: skip
    return found
