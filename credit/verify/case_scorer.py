"""Score every forecast and baseline in one pass over the cases.

A case is an initial time. The truth at a valid time is read once for all forecasts. The pass stores the area means of
each case and lead time in the statistics of `credit.verify.statistics`. The score table is computed from these
statistics afterwards.

Shapes: M ensemble members, C channels, H x W grid cells, P = H * W cells, N cases, L lead times, R regions, F
forecasts, K total wavenumbers. Fields are in the units of the data. Times are in minutes since 1900-01-01
(`credit.calendar`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from credit.channels import Channel, select_channels, select_figure_channels
from credit.config import Config
from credit.config.sections.verification import BASELINES
from credit.data.climatology.climatology import Fields
from credit.data.formats.run_grid import load_grid
from credit.data.splits import Split
from credit.forecast.forecast_source import ForecastSource
from credit.utils.progress import ProgressBar
from credit.verify.cases import unit_conversion
from credit.verify.example import ExampleCollector
from credit.verify.partial_scores import PartialScores
from credit.verify.regridded_reader import RegriddedReader
from credit.verify.scored_forecast import ScoredForecast
from credit.verify.scores.baselines import build_baseline_fields, build_climatology, fit_damping
from credit.verify.scores.event_scorer import CommonSample, EventScorer
from credit.verify.scores.rank_histogram import RankHistogram
from credit.verify.scores.spectra import SphericalSpectrum
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.case_statistics import DeterministicStatistics, EnsembleStatistics
from credit.verify.statistics.error_moments import BaselineState, ReferenceFields, compute_error_moments
from credit.verify.statistics.regions import GLOBE, region_weights, scored_regions
from credit.verify.statistics.wind_vectors import wind_pairs

if TYPE_CHECKING:
    from credit.data.reader import FieldReader


class CaseScorer:
    """Scorer of all forecasts and baselines; its constructor fits the climatology and the damping.

    Args:
        config: config of the run.
        data_reader: reader of the truth and the training data, on their original grid.
        archives: forecast name -> source of the forecasts; the forecasts of the run have the name ``model``.
        channels: the C scored channels.
        train: the training period, to which the climatology and the damping are fitted.
        sample: cases and lead times that all processes together score.
        figure_leads: lead times of the maps and spectra in minutes.

    Attributes:
        reader: reader of the truth and the training data, regridded to the grid of the scores.
        channels: the C scored channels.
        forecasts: forecast name -> source of the forecast with its channels and conversions.
        figure_channels: names of the channels that figures show.
        winds: (index of u, index of v, name) of each wind vector; the indices refer to `channels`.
        regions: region name -> latitude-longitude boxes that make up the region.
        climatology: climatology of the baselines.
        damping: (L, C) dimensionless factor of damped persistence.
        events: scorer of events and of precipitation categories (SEEPS).
        example_collector: collector of the example forecast at all lead times.
        num_rows: number of rows of the score table, which are the channels and then the wind vectors.

    Raises:
        ConfigError: if a channel of figures or events is not scored, or if the climatology cannot be computed.
    """

    def __init__(
        self,
        config: Config,
        data_reader: FieldReader,
        archives: Mapping[str, ForecastSource],
        channels: list[Channel],
        train: Split,
        sample: CommonSample,
        figure_leads: list[int],
    ) -> None:
        verification = config.verification
        score_grid = None
        if verification.grid is not None:
            score_grid = load_grid(verification.grid, "verification.grid")
        # The cache is large enough for the truth of a case at the initial time and at every lead time.
        reader = RegriddedReader(data_reader, len(sample.leads) + 2, score_grid)
        self.reader = reader
        self.channels = channels
        self._leads = sample.leads
        self._figure_leads = figure_leads
        # Names of channels are checked first, because the climatology below may take minutes to fit.
        self.figure_channels = select_figure_channels(
            verification.figure_channels, channels, "verification.figure_channels"
        )
        # This call raises an error for names that are not scored; its result is not needed.
        select_figure_channels(verification.animate, channels, "verification.animate")
        names = [channel.name for channel in channels]
        stored_names = [channel.name for channel in reader.channels.time_varying_stored]
        self._stored_index = [stored_names.index(name) for name in names]

        # Regions, winds, and the forecasts with the channels that they have.
        self.regions = scored_regions(verification)
        self._weights = region_weights(reader.grid, self.regions)
        self.winds = wind_pairs(channels, reader.attributes, reader.masks)
        self._area_mean = AreaMean(channels, reader.masks, self._weights, [(u, v) for u, v, _ in self.winds])
        self.num_rows = self._area_mean.shape[0]
        self.forecasts = {}
        for name, archive in archives.items():
            self.forecasts[name] = self._prepare_forecast(name, archive, data_reader)

        self.events = EventScorer(verification, reader, channels, self._area_mean, self._read_truth, train, sample)
        # The climatology of a training store is on the grid of the data.
        climatology_reader = data_reader
        if score_grid is None:
            climatology_reader = reader
        self.climatology, climatology_grid = build_climatology(
            verification, config.data, climatology_reader, names, train
        )
        self._regrid_climatology = reader.build_regridding(channels, climatology_grid)
        # The damping is fitted with global means.
        globe = AreaMean(channels, reader.masks, region_weights(reader.grid, GLOBE))
        self.damping = fit_damping(
            self._read_truth, reader.times, self._evaluate_climatology, train, sample.leads, globe
        )
        # Spectra end at the largest wavenumber that all grids resolve.
        source_grids = [data_reader.grid, *(archive.grid for archive in archives.values())]
        self._spectrum = SphericalSpectrum(reader.grid, source_grids)
        self.example_collector = ExampleCollector(
            verification, reader.grid, channels, reader.masks, sample.leads.tolist(), self.figure_channels
        )

    def _prepare_forecast(self, name: str, archive: ForecastSource, data_reader: FieldReader) -> ScoredForecast:
        """Return a forecast with its scored channels, table rows, unit conversions and regridding function.

        Args:
            name: name of the forecast.
            archive: source of the forecasts.
            data_reader: reader of the data, whose units are the target of the conversions.
        """
        # The list contains the indices of the scored channels that the forecast has.
        channels = []
        for index, channel in enumerate(self.channels):
            if channel.name in archive.channel_names:
                channels.append(index)
        # The rows of the table are the channels, then the wind vectors for which the forecast has both components.
        forecast_winds = []
        rows = list(channels)
        for number, (u, v, _) in enumerate(self.winds):
            if u in channels and v in channels:
                forecast_winds.append((channels.index(u), channels.index(v)))
                rows.append(len(self.channels) + number)
        conversions = {}
        for number, index in enumerate(channels):
            conversion = unit_conversion(name, archive, data_reader, self.channels[index].variable)
            if conversion is not None:
                conversions[number] = conversion
        forecast_channels = [self.channels[index] for index in channels]
        is_single = (archive.members or 1) == 1
        return ScoredForecast(
            archive=archive,
            channels=channels,
            archive_channels=[archive.channel_names.index(channel.name) for channel in forecast_channels],
            rows=rows,
            area_mean=AreaMean(forecast_channels, self.reader.masks, self._weights, forecast_winds),
            conversions=conversions,
            regrid=self.reader.build_regridding(forecast_channels, archive.grid),
            shares_baseline_channels=is_single and len(channels) == len(self.channels),
        )

    def _read_truth(self, minutes: int) -> np.ndarray:
        """Return the truth at a time in minutes, (C, H, W) scored channels on the grid of the scores."""
        index = self.reader.index_of(minutes)
        # Every case has truth, because `select_common_cases` left out cases without truth.
        assert index is not None, minutes
        return select_channels(self.reader.read(index), self._stored_index)

    def _evaluate_climatology(self, minutes: int) -> Fields:
        """Return the climatology at a time in minutes, (C, H, W) on the grid of the scores."""
        return self._regrid_climatology(self.climatology.evaluate_lazily(minutes))

    def _read_truth_and_climatology(self, minutes: int) -> ReferenceFields:
        """Return truth and climatology at a time in minutes, each (C, H, W) on the grid of the scores."""
        time = self.reader.calendar.format(minutes)
        return ReferenceFields(
            self._read_truth(minutes), self._evaluate_climatology(minutes), f"truth at {time}", f"climatology at {time}"
        )

    def score(self, groups: Sequence[Sequence[int]], example_time: int) -> PartialScores:
        """Score the cases of `groups` and collect the fields of the figures.

        Args:
            groups: groups of initial times in minutes. All cases of a group are scored at the first lead time, then at
                the next lead time, because their forecasts may be made as one batch.
            example_time: initial time in minutes of the case that maps, animations and Hovmoeller diagrams show.

        Returns:
            The scores of these cases.

        Raises:
            DataError: if a field has a missing value in a cell that is not masked.
        """
        cases = np.array(sorted(itertools.chain.from_iterable(groups)), dtype=np.int64)
        num_leads = len(self._leads)
        # Empty statistics of every forecast and baseline, which the pass fills.
        statistics: dict[str, DeterministicStatistics] = {}
        histograms = {}
        for name, forecast in self.forecasts.items():
            statistics[name] = forecast.create_statistics(cases, num_leads)
            if forecast.num_members > 1:
                histograms[name] = RankHistogram.zeros(num_leads, forecast.area_mean, forecast.num_members)
        for name in BASELINES:
            statistics[name] = DeterministicStatistics.empty(cases, num_leads, self._area_mean)
        num_members = {name: forecast.num_members for name, forecast in statistics.items()}
        events, seeps = self.events.create_statistics(cases, num_leads, num_members)
        scores = PartialScores(cases, statistics, events, seeps, histograms)
        is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
        # With None, the progress bar is shown only if the output is a terminal.
        hide_bar = None if is_first_rank else True
        with ProgressBar(total=len(cases), desc="scoring", disable=hide_bar) as progress_bar:
            for group in groups:
                self._score_group(group, scores, example_time)
                progress_bar.update(len(group))
        return scores

    def _score_group(self, group: Sequence[int], scores: PartialScores, example_time: int) -> None:
        """Add the scores of the cases of a group to `scores`.

        Args:
            group: initial times in minutes. All cases are scored at the first lead time, then at the next lead time.
            scores: partial scores to add to.
            example_time: initial time in minutes of the case that figures show.
        """
        cases = np.searchsorted(scores.cases, group).tolist()
        # The truth at the initial time is read once for all lead times of a case.
        states = [BaselineState.build(self._area_mean, self._read_truth_and_climatology(initial)) for initial in group]
        for lead_index, lead in enumerate(self._leads.tolist()):
            # A network that makes forecasts during the scoring steps all cases of a group at once. The loop over cases
            # is therefore inside the loop over lead times.
            for case, initial, state in zip(cases, group, states, strict=True):
                index = case, lead_index
                reference = self._read_truth_and_climatology(initial + lead)
                # Forecasts that share the channels of the baselines are scored in one pass with the baselines.
                members = {}
                for name, forecast in self.forecasts.items():
                    if forecast.shares_baseline_channels:
                        members[name] = forecast.read(initial, lead)
                self._score_with_baselines(scores, index, initial, state, reference, members)
                self._score_baseline_events(scores, index, initial + lead, state, reference)
                for name, forecast in self.forecasts.items():
                    if not forecast.shares_baseline_channels:
                        members[name] = forecast.read(initial, lead)
                    self._score_forecast(
                        scores, name, index, initial, reference, members[name], initial == example_time
                    )

    def _score_with_baselines(
        self, scores: PartialScores, index: tuple[int, int], initial_time: int, state: BaselineState,
        reference: ReferenceFields, members: Mapping[str, np.ndarray],
    ) -> None:  # fmt: skip
        """Add the errors of the baselines, and of single forecasts with all scored channels, to the partial scores.

        Args:
            scores: partial scores to add to.
            index: (index of the case, index of the lead time).
            initial_time: initial time in minutes.
            state: truth and anomaly at the initial time.
            reference: truth and climatology at the valid time.
            members: name of a single forecast with all scored channels -> its fields, (1, C, H, W).
        """
        lead = int(self._leads[index[1]])
        fields = {name: members_1CHW[0] for name, members_1CHW in members.items()}
        descriptions = {name: self.forecasts[name].describe(initial_time, lead) for name in members}
        baselines = state, self.damping[index[1]]
        moments = compute_error_moments(self._area_mean, reference, fields, descriptions, baselines)
        for name, forecast_moments in moments.items():
            scores.statistics[name].add_moments(*index, self._area_mean, forecast_moments)

    def _score_baseline_events(
        self, scores: PartialScores, index: tuple[int, int], valid_time: int, state: BaselineState,
        reference: ReferenceFields,
    ) -> None:  # fmt: skip
        """Add the event scores and SEEPS of the baselines to the partial scores.

        Args:
            valid_time: valid time in minutes; `_score_with_baselines` describes the other arguments.
        """
        channels = self.events.channels
        if not channels:
            return
        damping_C = self.damping[index[1]][channels]
        # Only the channels of the events are selected, so that a lazy climatology evaluates no other channels.
        fields = build_baseline_fields(
            state.fields[channels],
            state.anomaly[channels],
            np.asarray(reference.climatology[channels]),
            damping_C[:, None, None],
        )
        for name, fields_CHW in fields.items():
            self.events.add(scores, name, index, valid_time, fields_CHW[None], reference.truth, channels)

    def _score_forecast(
        self, scores: PartialScores, name: str, index: tuple[int, int], initial_time: int, reference: ReferenceFields,
        members_MCHW: np.ndarray, is_example: bool,
    ) -> None:  # fmt: skip
        """Add the scores of one forecast for one case at one lead time, and the fields that figures show.

        Args:
            scores: partial scores to add to.
            name: name of the forecast.
            index: (index of the case, index of the lead time).
            initial_time: initial time in minutes.
            reference: truth and climatology at the valid time, with all scored channels.
            members_MCHW: members of the forecast, with the scored channels that the forecast has.
            is_example: True for the case that maps, animations and Hovmoeller diagrams show.
        """
        forecast = self.forecasts[name]
        lead = int(self._leads[index[1]])
        statistics = scores.statistics[name]
        truth_CHW = select_channels(reference.truth, forecast.channels)
        description = forecast.describe(initial_time, lead)
        # The errors of a forecast that shares the channels of the baselines were added with the baselines.
        if not forecast.shares_baseline_channels:
            # A single forecast keeps its precision.
            mean_CHW = members_MCHW[0]
            if len(members_MCHW) > 1:
                mean_CHW = members_MCHW.mean(axis=0, dtype=np.float64)
            forecast_reference = ReferenceFields(
                truth_CHW,
                select_channels(reference.climatology, forecast.channels),
                reference.truth_description,
                reference.climatology_description,
            )
            statistics.add(*index, forecast.area_mean, mean_CHW, forecast_reference, description)
        self.events.add(scores, name, index, initial_time + lead, members_MCHW, reference.truth, forecast.channels)
        # The members of an ensemble are scored in each cell.
        if isinstance(statistics, EnsembleStatistics):
            members_MCP = members_MCHW.reshape(*members_MCHW.shape[:-2], -1)
            truth_CP = truth_CHW.reshape(*truth_CHW.shape[:-2], -1)
            ranks = statistics.add_members(*index, forecast.area_mean, members_MCP, truth_CP, description)
            scores.histograms[name].add(index[1], ranks)
        # Figures show the example case of the model, and the spectra of every forecast.
        is_model_example = name == "model" and is_example
        if is_model_example:
            self.example_collector.add(scores, lead, reference.truth, members_MCHW)
        if lead in self._figure_leads:
            if is_model_example:
                self._add_maps(scores, lead, reference.truth, members_MCHW)
            self._add_spectra(scores, name, index[0], lead, reference.truth, members_MCHW)

    def _list_figure_channels(self, name: str) -> list[tuple[int, int, Channel]]:
        """Return (index in `channels`, index in the channels of the forecast, channel) of each figure channel."""
        forecast_channels = self.forecasts[name].channels
        fields = []
        for index, channel in enumerate(self.channels):
            if channel.name in self.figure_channels and index in forecast_channels:
                fields.append((index, forecast_channels.index(index), channel))
        return fields

    def _add_maps(self, scores: PartialScores, lead: int, truth_CHW: np.ndarray, members_MCHW: np.ndarray) -> None:
        """Store maps of truth and forecast of the example; for an ensemble, of truth, ensemble mean and spread.

        `lead` is the lead time in minutes.
        """
        for index, forecast_index, channel in self._list_figure_channels("model"):
            members_MHW = members_MCHW[:, forecast_index]
            fields = [truth_CHW[index], members_MHW.mean(axis=0)]
            if len(members_MHW) > 1:
                fields.append(members_MHW.std(axis=0, ddof=1))
            # Masked cells may contain any value; maps show them as missing.
            mask = self.reader.masks.get(channel.variable, False)
            masked_fields = [np.where(mask, np.nan, field) for field in fields]
            scores.maps[channel.name, lead] = tuple(masked_fields)

    def _add_spectra(
        self, scores: PartialScores, name: str, case: int, lead: int, truth_CHW: np.ndarray, members_MCHW: np.ndarray
    ) -> None:
        """Store the power spectra of a forecast's first member; for ``model``, also store the spectra of the truth.

        Channels with masked cells have no spectrum, because spherical harmonics need every cell. `case` is the index of
        the case and `lead` is in minutes; `_score_forecast` describes the other arguments.
        """
        shape = len(scores.cases), 1 + len(self.forecasts), len(self._spectrum.wavenumbers)
        for index, forecast_index, channel in self._list_figure_channels(name):
            if channel.variable in self.reader.masks:
                continue
            power_NFK = scores.spectra.setdefault((channel.name, lead), np.full(shape, np.nan))
            if name == "model":
                power_NFK[case, 0] = self._spectrum.power(truth_CHW[index])
            # Row 0 is the truth; the next rows are the forecasts in the order of `forecasts`.
            row = 1 + list(self.forecasts).index(name)
            power_NFK[case, row] = self._spectrum.power(members_MCHW[0, forecast_index])
