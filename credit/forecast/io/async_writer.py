"""Asynchronous writer of forecasts: a thread writes the output of a step while the model computes the next steps.

Shape suffixes: B forecasts of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from torch import Tensor

from credit.errors import CreditError
from credit.forecast.io.diagnostics import OutputDiagnostics
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.rollout import ForecastStart
from credit.parallel.host_copy import AsyncHostCopy

# Maximum number of steps in the queue between the model and the disk; each step is a batch of fields.
_MAX_WAITING_STEPS = 2


@dataclass(frozen=True)
class _BatchItem:
    """Forecast of a batch whose queued step must be written, or added to running sums.

    Attributes:
        index: index of the forecast in the batch.
        lead: lead time of the step in minutes.
        start: initial time, analysis and member of the forecast.
    """

    index: int
    lead: int
    start: ForecastStart


class BackgroundWriter:
    """Context manager that writes the steps of forecasts in a thread; a bounded queue limits the memory.

    At the end of the ``with`` block, all steps are on disk. After an error, incomplete forecasts are removed.

    Args:
        writer: writer of the files.
        lead_indices: lead time in minutes -> its index in the files. Steps at other lead times are not written.
        step_minutes: time step of the model in minutes.
        origin: checkpoint or other source of the forecasts, for messages.
        initial_times: initial times to write, in minutes. Forecasts of a batch with other initial times are not
            written.
        diagnostics: object that computes the written fields from the output; None to write the output itself.
        raises_in_put: True to raise errors in `put`. If several ranks write, set it to False, because all ranks must
            stop together when one rank has an error. Then only `raise_pending_error` and `flush` raise errors.

    Attributes:
        file_lock: lock that the caller must hold while it reads netCDF files, because the netCDF library is not
            thread-safe.
    """

    def __init__(
        self,
        writer: ForecastWriter,
        lead_indices: Mapping[int, int],
        step_minutes: int,
        origin: str,
        initial_times: Collection[int],
        diagnostics: OutputDiagnostics | None = None,
        raises_in_put: bool = True,
    ) -> None:
        self.file_lock = threading.Lock()
        self._raises_in_put = raises_in_put
        self._writer = writer
        self._lead_indices = lead_indices
        self._step_minutes = step_minutes
        self._origin = origin
        self._initial_times = frozenset(initial_times)
        self._diagnostics = diagnostics
        self._last_lead = max(lead_indices)
        # The item None ends the thread.
        self._queue: queue.Queue[tuple[list[_BatchItem], AsyncHostCopy] | None] = queue.Queue(_MAX_WAITING_STEPS)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write_queued_steps, name="writer", daemon=True)

    def put(self, starts: Sequence[ForecastStart], step: int, output: Tensor) -> None:
        """Queue the output of a step for writing; wait if the disk is slower than the model.

        If `raises_in_put` is False, this method does not raise the error of an earlier step. It drops the outputs after
        the error, and `raise_pending_error` or `flush` raises the error.

        Args:
            starts: starts of the B forecasts of the batch.
            step: number of the step after the analyses, from 1.
            output: (B, C, H, W) in physical units, on any device. The caller must not change it afterwards.

        Raises:
            CreditError: if an earlier step could not be written (the message names the file), or had a value that is
                not finite.
        """
        if self._raises_in_put:
            self.raise_pending_error()
        items = self._select_items(starts, step)
        if items and self._error is None:
            self._queue.put((items, AsyncHostCopy(output)))

    def needs_step(self, starts: Sequence[ForecastStart], step: int) -> bool:
        """Return True if `put` would queue the output of a step; see `put` for the arguments."""
        return bool(self._select_items(starts, step))

    def flush(self) -> None:
        """Wait until all queued steps are written.

        Raises:
            CreditError: if a step could not be written, or had a value that is not finite.
        """
        self._queue.join()
        self.raise_pending_error()

    def _select_items(self, starts: Sequence[ForecastStart], step: int) -> list[_BatchItem]:
        """Return the forecasts of a batch whose step is written or added to running sums; see `put` for arguments."""
        needs_every_step = self._diagnostics is not None and self._diagnostics.needs_every_step
        items = []
        for index, start in enumerate(starts):
            lead = start.lead_minutes(step, self._step_minutes)
            if start.initial_minutes not in self._initial_times or not 0 < lead <= self._last_lead:
                continue
            if lead in self._lead_indices or needs_every_step:
                items.append(_BatchItem(index, lead, start))
        return items

    def __enter__(self) -> BackgroundWriter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.put(None)
        self._thread.join()
        self._writer.close()
        if kind is None:
            self.raise_pending_error()

    def raise_pending_error(self) -> None:
        """Raise the error of an earlier step, if a step could not be written or was not finite."""
        if self._error is not None:
            raise self._error

    def _write_queued_steps(self) -> None:
        """Write the steps of the queue until it contains None; the thread runs this method.

        After an error, steps are removed from the queue but not written, so that `put` does not block.
        """
        while (queued := self._queue.get()) is not None:
            if self._error is None:
                items, output = queued
                try:
                    self._write_step(items, output)
                except BaseException as error:
                    self._error = error
            # `flush` waits until every step is marked as done.
            self._queue.task_done()

    def _write_step(self, items: Sequence[_BatchItem], output: AsyncHostCopy) -> None:
        """Compute the diagnostics of one step of a batch, and write forecasts at lead times in `lead_indices`."""
        fields_BCHW = output.get().numpy()
        for item in items:
            fields_CHW = fields_BCHW[item.index]
            self._require_finite(fields_CHW, item)
            if self._diagnostics is not None:
                fields_CHW = self._diagnostics.compute(item.start, item.lead, fields_CHW)
            if item.lead in self._lead_indices:
                lead_index = self._lead_indices[item.lead]
                with self.file_lock:
                    self._writer.put(item.start.initial_minutes, lead_index, fields_CHW, item.start.member)

    def _require_finite(self, fields_CHW: np.ndarray, item: _BatchItem) -> None:
        """Raise CreditError if the fields of a forecast contain NaN or infinite values."""
        if np.isfinite(fields_CHW).all():
            return
        schema = self._writer.schema
        forecast_name = schema.calendar.format(item.start.initial_minutes)
        if schema.members is not None:
            forecast_name += f", member {item.start.member}"
        raise CreditError(
            f"{self._origin}: forecast from {forecast_name}: not finite at {item.lead / 60:g} h; not written. Set a "
            "shorter inference.lead_time, or train on longer rollouts (data.forecast_len)"
        )
