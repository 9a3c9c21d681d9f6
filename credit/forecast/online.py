"""OnlineForecasts: forecasts that are made while they are scored, without a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.forecast.forecast_source import ForecastSource
from credit.forecast.initial_times import group
from credit.forecast.io.diagnostics import OutputDiagnostics
from credit.forecast.rollout import ForecastStart, batch_starts, inference_mode
from credit.grid import LatLonGrid
from credit.parallel.host_copy import fetched

# starts of a batch and number of steps -> output (B, C, H, W) of each step
Run = Callable[[Sequence[ForecastStart], int], Iterator[Tensor]]


class OnlineForecasts(ForecastSource):
    """Forecasts that a network makes as far as they are read.

    The initial times are grouped as `credit_rollout` groups them, so the numbers are those of its files to the last
    bit. Of a group one step is held in memory, of lagged members as many as they are apart. A GPU makes the next step
    of a group that is one batch while the host works on the last.

    Args:
        run: makes the forecasts of a batch.
        initial: initial times in minutes.
        leads: lead times in minutes, increasing, multiples of `step_minutes`.
        step_minutes: of the model.
        batch_size: starts of a batch.
        members: number of members, None for single forecasts.
        lag_minutes: between the members' analyses.
        origin: the checkpoint.
        channels: of the model's outputs, or of `products`.
        grid: its grid.
        calendar: its calendar.
        attributes: variable -> CF attributes.
        described: what describes the run.
        products: what is made of the outputs before they are read; None for the outputs as they are.
        masks: variable -> (H, W) bool, True where it is always missing.
    """

    def __init__(
        self,
        run: Run,
        initial: Sequence[int],
        leads: Sequence[int],
        step_minutes: int,
        batch_size: int,
        members: int | None,
        lag_minutes: int,
        *,
        origin: Path,
        channels: ChannelMap,
        grid: LatLonGrid,
        calendar: Calendar,
        attributes: Mapping[str, Mapping[str, str]],
        described: Mapping[str, object],
        products: OutputDiagnostics | None = None,
        masks: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.origin, self.grid, self.calendar, self.attributes = origin, grid, calendar, described
        self.initial_minutes, self.lead_minutes = (np.array(sorted(own), dtype=np.int64) for own in (initial, leads))
        self.members = members
        self.channel_names = [channel.name for channel in channels.output]
        self.flat_names = frozenset(channel.name for channel in channels.output if channel.level is None)
        rows = [(row, channel.variable) for row, channel in enumerate(channels.output)]
        self._masks = [(row, masks[variable]) for row, variable in rows if masks and variable in masks]
        variables = {channel.variable for channel in channels.output}
        self.units = {name: own["units"] for name, own in attributes.items() if name in variables and "units" in own}
        self._run, self._step, self._batch_size, self._lag = run, step_minutes, batch_size, lag_minutes
        self._products = products
        self._wanted, self._last = frozenset(self.lead_minutes.tolist()), int(self.lead_minutes[-1])
        self._group: list[int] = []
        self._batches: list[tuple[list[ForecastStart], Iterator[Tensor]]] = []
        self._taken = 0
        # initial and lead time -> (M, C, H, W), and how many members are still to come
        self._made: dict[tuple[int, int], np.ndarray] = {}
        self._missing: dict[tuple[int, int], int] = {}

    def groups(self) -> list[list[int]]:
        """Return the initial times that are forecast side by side."""
        return group(self.initial_minutes.tolist(), self.members or 1, self._batch_size)

    def read_members(self, initial_minutes: int, number: int) -> np.ndarray:
        """Return all members at one lead time, (M, C, H, W) float32.

        Reading another group's initial time begins its forecasts; within a group lead times are read in order, each
        once for an initial time.
        """
        if initial_minutes not in self._group:
            self._begin(next(own for own in self.groups() if initial_minutes in own))
        key = initial_minutes, int(self.lead_minutes[number])
        while self._missing.get(key, 1):
            self._advance(after=key[1])
        del self._missing[key]
        return self._made.pop(key)

    def keep_company(self, leads: Sequence[int]) -> None:
        """Make the forecasts of a group for nobody, where other ranks need this one's weights for theirs."""
        initial = int(self.initial_minutes[0])
        self._begin([initial])
        for lead in leads:
            self.read_members(initial, self.lead_minutes.tolist().index(lead))
        self._group = []

    def _begin(self, initial: list[int]) -> None:
        batches = batch_starts(initial, self._batch_size, self.members or 1, self._lag)
        self._group, self._made, self._missing, self._taken, self._batches = initial, {}, {}, 0, []
        if self._products is not None:
            self._products.begin()
        for batch in batches:
            longest = self._last + max(start.initial - start.analysis for start in batch)
            outputs = inference_mode(self._run(batch, longest // self._step))
            # several batches keep a GPU busy by themselves, and each would hold a step more in memory
            self._batches.append((batch, fetched(outputs) if len(batches) == 1 else outputs))

    def _advance(self, after: int) -> None:
        """Make the next step of every batch; lead times before `after` are not asked for any more."""
        self._taken += 1
        for key in [key for key in self._made if key[1] < after]:
            del self._made[key], self._missing[key]
        made = False
        for batch, steps in self._batches:
            output = next(steps, None)
            if output is not None:  # else its members were at the last lead time before those with a longer lag
                made = True
                self._keep(batch, output.cpu().numpy(), after)
        assert made, (self._group, after)

    def _keep(self, batch: Sequence[ForecastStart], fields: np.ndarray, after: int) -> None:
        """Keep what is wanted of a step of a batch (B, C, H, W)."""
        members, derived = self.members or 1, self._products
        # all members of an initial time lie side by side and arrive at once
        whole = derived is None and self._lag == 0 and len(self._batches) == 1
        for row, start in enumerate(batch):
            lead = start.analysis + self._taken * self._step - start.initial
            key, wanted = (start.initial, lead), lead in self._wanted and lead >= after
            own = fields[row]
            if derived is not None and 0 < lead <= self._last and (wanted or derived.needs_every_step):
                own = derived.make(start, lead, own)
            if not wanted:
                continue
            for number, mask in self._masks:
                own[number, mask] = np.nan
            if whole and start.member == 0:
                self._made[key], self._missing[key] = fields[row : row + members], 0
            elif not whole:
                if key not in self._made:
                    self._made[key], self._missing[key] = np.empty((members, *own.shape), own.dtype), members
                self._made[key][start.member] = own
                self._missing[key] -= 1
