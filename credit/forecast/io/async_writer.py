"""BackgroundWriter: finished steps are brought to the host and written while the model computes the next ones."""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType

import numpy as np
from torch import Tensor

from credit.errors import CreditError
from credit.forecast.io.diagnostics import OutputDiagnostics
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.rollout import ForecastStart
from credit.parallel.host_copy import AsyncHostCopy

_WAITING = 2  # steps between the model and the disk; each is a batch of fields


class BackgroundWriter:
    """Hands a batch's steps to a thread that writes them; memory is bounded by the steps that wait.

    Used as a context manager, it ends when everything is on disk, or removes what is half written after an error.

    Args:
        writer: what it writes with.
        numbers: lead time in minutes -> its number in the files; other steps are not kept.
        step_minutes: of the model.
        origin: how to call the forecasts in messages.
        wanted: initial times to write; others may be in a batch, too.
        products: what is made of the outputs before they are written; None for the outputs as they are.

    Attributes:
        reading: to be held while source files are read, as netCDF's library is not safe for two threads.
    """

    def __init__(
        self,
        writer: ForecastWriter,
        numbers: Mapping[int, int],
        step_minutes: int,
        origin: str,
        wanted: Collection[int],
        products: OutputDiagnostics | None = None,
    ) -> None:
        self.reading = threading.Lock()
        self._writer, self._numbers, self._step, self._origin = writer, numbers, step_minutes, origin
        self._wanted, self._products = frozenset(wanted), products
        self._last = max(numbers)
        self._queue: queue.Queue[tuple[list[tuple[int, int, ForecastStart]], AsyncHostCopy] | None] = queue.Queue(
            _WAITING
        )
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write_all, name="writer", daemon=True)

    def put(self, starts: Sequence[ForecastStart], step: int, output: Tensor) -> None:
        """Take a step's output (B, C_out, H, W) in physical units; waits where the disk is behind.

        Args:
            starts: of the batch.
            step: number from 1, counted from the analyses.
            output: on any device; not changed afterwards.

        Raises:
            CreditError: that writing an earlier step ended in, naming the file; or for a forecast that is not finite.
        """
        self._raise()
        kept = []
        for row, start in enumerate(starts):
            lead = start.analysis + step * self._step - start.initial
            if start.initial not in self._wanted or not 0 < lead <= self._last:
                continue
            if lead in self._numbers or (self._products is not None and self._products.needs_every_step):
                kept.append((row, lead, start))
        if kept:
            self._queue.put((kept, AsyncHostCopy(output)))

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
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_all(self) -> None:
        """Run the thread: after an error take what comes, so that nobody waits, and do nothing with it."""
        while (item := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._write(*item)
                except BaseException as error:
                    self._error = error

    def _write(self, kept: list[tuple[int, int, ForecastStart]], output: AsyncHostCopy) -> None:
        fields = output.get().numpy()
        for row, lead, start in kept:
            self._require_finite(fields[row], lead, start)
            made = fields[row] if self._products is None else self._products.compute(start, lead, fields[row])
            if lead in self._numbers:
                with self.reading:
                    self._writer.put(start.initial, self._numbers[lead], made, start.member)

    def _require_finite(self, fields: np.ndarray, lead: int, start: ForecastStart) -> None:
        """Stop before a forecast that has blown up passes for one; nothing of it is left."""
        if np.isfinite(fields).all():
            return
        layout = self._writer.layout
        member = "" if layout.members is None else f", member {start.member}"
        raise CreditError(
            f"{self._origin}: forecast from {layout.calendar.format(start.initial)}{member}: not finite at "
            f"{lead / 60:g} h; not written. Forecast a shorter inference.lead_time, or train on longer "
            "rollouts (data.forecast_len)"
        )
