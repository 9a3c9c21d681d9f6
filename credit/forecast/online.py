"""Forecasts that a network makes while they are scored, without writing files.

Shape suffixes: B starts of a batch, M members, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from credit.forecast.distribution import group_initial_times
from credit.forecast.forecast_source import ForecastSource
from credit.forecast.io.diagnostics import OutputDiagnostics
from credit.forecast.io.schema import OutputFields
from credit.forecast.rollout import ForecastStart, build_start_batches, iterate_in_inference_mode
from credit.forecast.shared_forecasts import ForecastFunction, StepFilter, build_padding_batches
from credit.parallel.host_copy import prefetch_to_host

# Value that `next` returns at the end of an iterator. It differs from None, because None replaces an output that this
# rank does not receive.
_END = object()


@dataclass(frozen=True)
class ForecastBatching:
    """Distribution of initial times and members over batches.

    Attributes:
        batch_size: largest number of forecasts in a batch.
        members: number of ensemble members; None for single forecasts.
        lag_minutes: interval in minutes between the analyses of successive lagged members; 0 without lags.
        num_ranks: number of ranks that share the batches of a group. If it is above 1, the forecast function must be a
            `credit.forecast.shared_forecasts.DistributedForecastFunction`.
        has_every_output: True if this rank receives the output of every step. False with domain parallelism, because
            only the first rank of a domain group receives outputs.
        first_member: number of the first member; for single forecasts, the number of the member that they compute.
    """

    batch_size: int
    members: int | None = None
    lag_minutes: int = 0
    num_ranks: int = 1
    has_every_output: bool = True
    first_member: int = 0


@dataclass
class _PendingFields:
    """Forecast fields of one initial time at one lead time that were not read yet.

    Attributes:
        fields_MCHW: fields of the members; the fields of some members may not be computed yet.
        num_missing: number of members whose fields are not computed yet.
    """

    fields_MCHW: np.ndarray
    num_missing: int


class OnlineForecasts(ForecastSource):
    """Forecasts that a network makes step by step while they are read.

    The initial times are grouped as in `credit rollout`, so the values are identical to the values in its files. Memory
    holds one step of a group, or several steps with lagged members. If a group is one batch, a GPU computes the next
    step while the host processes the current step.

    Args:
        forecast_batch: function that makes the forecasts of a batch.
        fields: description of the fields that `read_members` returns.
        initial_times: initial times in minutes.
        leads: lead times in minutes, multiples of the model's time step.
        batching: distribution of the forecasts over batches.
        origin: path of the checkpoint.
        attributes: description of the run, as in the global attributes of forecast files.
        diagnostics: object that computes the returned fields from the model's output; None to return the output itself.
    """

    def __init__(
        self,
        forecast_batch: ForecastFunction,
        fields: OutputFields,
        initial_times: Sequence[int],
        leads: Sequence[int],
        batching: ForecastBatching,
        *,
        origin: Path,
        attributes: Mapping[str, object],
        diagnostics: OutputDiagnostics | None = None,
    ) -> None:
        self.origin = origin
        self.grid = fields.grid
        self.calendar = fields.calendar
        self.attributes = attributes
        self.initial_minutes = np.array(sorted(initial_times), dtype=np.int64)
        self.lead_minutes = np.array(sorted(leads), dtype=np.int64)
        self.members = batching.members
        channels = fields.channels.output
        self.channel_names = [channel.name for channel in channels]
        self.names_without_levels = frozenset(channel.name for channel in channels if channel.level is None)
        variables = {channel.variable for channel in channels}
        self.units = {}
        for name, field_attributes in fields.attributes.items():
            if name in variables and "units" in field_attributes:
                self.units[name] = field_attributes["units"]
        # Channel index -> mask of its variable.
        self._channel_masks: dict[int, np.ndarray] = {}
        for index, channel in enumerate(channels):
            if channel.variable in fields.masks:
                self._channel_masks[index] = fields.masks[channel.variable]
        self._forecast_batch = forecast_batch
        self._step_minutes = fields.step_minutes
        self._batch_size = batching.batch_size
        self._lag_minutes = batching.lag_minutes
        self._num_ranks = batching.num_ranks
        self._has_every_output = batching.has_every_output
        self._first_member = batching.first_member
        self._diagnostics = diagnostics
        self._scored_leads = frozenset(self.lead_minutes.tolist())
        self._last_lead = int(self.lead_minutes[-1])
        # State of the current group: initial times, batches with their outputs, and number of completed steps.
        self._group: list[int] = []
        self._batches: list[tuple[list[ForecastStart], Iterator[Tensor | None]]] = []
        self._num_steps = 0
        # Number of batches without padding, and longest lag of a member in minutes.
        self._num_batches = 0
        self._longest_lag = 0
        # (initial time, lead time) -> computed fields that are not read yet.
        self._pending: dict[tuple[int, int], _PendingFields] = {}

    def initial_time_groups(self) -> list[list[int]]:
        """Return the initial times (in minutes) in groups whose forecasts are made together."""
        return group_initial_times(self.initial_minutes.tolist(), self.members or 1, self._batch_size)

    def read_members(self, initial_minutes: int, lead_index: int) -> np.ndarray:
        """Return all members at one lead time, (M, C, H, W) float32; see `ForecastSource.read_members`.

        The first call for an initial time of a new group starts the forecasts of this group. Within a group, read the
        lead times in ascending order, and read each lead time once for every initial time.
        """
        if initial_minutes not in self._group:
            self._start_group(self._find_group(initial_minutes))
        lead_minutes = int(self.lead_minutes[lead_index])
        key = (initial_minutes, lead_minutes)
        while key not in self._pending or self._pending[key].num_missing > 0:
            self._advance(first_lead=lead_minutes)
        return self._pending.pop(key).fields_MCHW

    def join_collectives(self, leads: Sequence[int], initial_times: Sequence[int] = ()) -> None:
        """Collective: make the forecasts of a group and discard them; see `ForecastSource.join_collectives`.

        If `initial_times` is empty, the forecasts from the first initial time are made.
        """
        group = [int(self.initial_minutes[0])]
        if initial_times:
            group = self._find_group(initial_times[0])
        self._start_group(group)
        # A lead time is complete when the member with the longest lag has reached the lead time.
        for lead in leads:
            while self._num_steps * self._step_minutes < lead + self._longest_lag:
                self._advance(first_lead=lead)
        self._group = []
        self._pending = {}

    def _find_group(self, initial_minutes: int) -> list[int]:
        """Return the group of initial times (in minutes) that contains an initial time."""
        return next(group for group in self.initial_time_groups() if initial_minutes in group)

    def _start_group(self, group: list[int]) -> None:
        """Discard the forecasts of the current group and prepare the forecasts of a new group, without the first step.

        Args:
            group: initial times in minutes.
        """
        self._group = group
        self._batches = []
        self._num_steps = 0
        self._pending = {}
        if self._diagnostics is not None:
            self._diagnostics.reset()
        batches = build_start_batches(group, self._batch_size, self.members or 1, self._lag_minutes, self._first_member)
        self._num_batches = len(batches)
        self._longest_lag = 0
        for batch in batches + build_padding_batches(batches, self._num_ranks):
            longest_lag = max(start.initial_minutes - start.analysis_minutes for start in batch)
            self._longest_lag = max(self._longest_lag, longest_lag)
            num_steps = (self._last_lead + longest_lag) // self._step_minutes
            outputs = iterate_in_inference_mode(self._forecast_batch(batch, num_steps))
            # Prefetching keeps one more step in memory. Several batches keep a GPU busy without prefetching.
            if len(batches) == 1 and self._num_ranks == 1 and self._has_every_output:
                outputs = prefetch_to_host(outputs)
            self._batches.append((batch, outputs))

    def _advance(self, first_lead: int) -> None:
        """Make the next step of every batch, and store the fields of scored lead times until they are read.

        Args:
            first_lead: next lead time to read, in minutes. Fields of earlier lead times are deleted.
        """
        self._num_steps += 1
        # Iterate over a copy of the keys, because the loop deletes entries.
        for initial_minutes, lead in list(self._pending):
            if lead < first_lead:
                del self._pending[initial_minutes, lead]
        has_advanced = False
        # Every batch makes one step before a batch makes the next step, so ranks with sharded weights run the same
        # collectives.
        for number, (batch, outputs) in enumerate(self._batches):
            output_BCHW = next(outputs, _END)
            # A batch without the members of the longest lag reaches the last lead time earlier than other batches.
            if output_BCHW is _END:
                continue
            has_advanced = True
            # Ranks that send their members to another rank have no output. Padding batches are discarded.
            if output_BCHW is not None and number < self._num_batches:
                self._add_to_pending(batch, output_BCHW.cpu().numpy(), first_lead)
        assert has_advanced, (self._group, first_lead)

    def _add_to_pending(self, batch: Sequence[ForecastStart], fields_BCHW: np.ndarray, first_lead: int) -> None:
        """Add the fields of one step of a batch to the pending fields.

        Args:
            batch: starts of the forecasts of the batch.
            fields_BCHW: output of the step in physical units. Cells that are always missing are set to NaN in place.
            first_lead: next lead time to read, in minutes. Fields of earlier lead times are not added.
        """
        num_members = self.members or 1
        diagnostics = self._diagnostics
        # In one batch without lag, the members of an initial time are adjacent and arrive at once: no copy is needed.
        arrive_at_once = self._lag_minutes == 0 and self._num_batches == 1
        members_are_adjacent = diagnostics is None and arrive_at_once
        for index, start in enumerate(batch):
            lead = start.lead_minutes(self._num_steps, self._step_minutes)
            is_read = lead in self._scored_leads and lead >= first_lead
            fields_CHW = fields_BCHW[index]
            # Sums over time also need steps that are not read.
            is_needed = is_read or (diagnostics is not None and diagnostics.needs_every_step)
            if diagnostics is not None and is_needed and 0 < lead <= self._last_lead:
                fields_CHW = diagnostics.compute(start, lead, fields_CHW)
            if not is_read:
                continue
            # The network's output also has values in cells that are always missing.
            for channel_index, mask in self._channel_masks.items():
                fields_CHW[channel_index, mask] = np.nan
            key = (start.initial_minutes, lead)
            if members_are_adjacent:
                # The first member adds the fields of all members.
                if start.member == self._first_member:
                    self._pending[key] = _PendingFields(fields_BCHW[index : index + num_members], num_missing=0)
                continue
            # The members of an initial time arrive one by one, from several batches or after different lags.
            if key not in self._pending:
                empty_MCHW = np.empty((num_members, *fields_CHW.shape), fields_CHW.dtype)
                self._pending[key] = _PendingFields(empty_MCHW, num_missing=num_members)
            self._pending[key].fields_MCHW[start.member - self._first_member] = fields_CHW
            self._pending[key].num_missing -= 1


def build_step_filter(
    lead_minutes: Sequence[int], step_minutes: int, diagnostics: OutputDiagnostics | None
) -> StepFilter:
    """Build the function that returns True for each step whose output `OnlineForecasts` uses.

    The outputs of all other steps need not be sent to the rank that computes the scores.

    Args:
        lead_minutes: scored lead times, in minutes.
        step_minutes: time step of the model in minutes.
        diagnostics: object that computes the scored fields from the output; None to score the output itself.
    """
    scored_leads = frozenset(lead_minutes)
    last_lead = max(lead_minutes)
    needs_every_step = diagnostics is not None and diagnostics.needs_every_step

    def needs_step(batch: Sequence[ForecastStart], step: int) -> bool:
        for start in batch:
            lead = start.lead_minutes(step, step_minutes)
            if lead in scored_leads or (needs_every_step and 0 < lead <= last_lead):
                return True
        return False

    return needs_step
