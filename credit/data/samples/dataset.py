"""A torch dataset of samples: history, forcing and targets of some initial times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from credit.data.samples.batch import Batch
from credit.data.samples.buffer_pool import BufferPool
from credit.data.samples.frames import FrameReader


class ForecastDataset(Dataset):
    """Samples of given initial times, in physical units and ChannelMap order.

    Args:
        frames: where the fields come from.
        initial: (N,) int64 minutes; every frame that a sample needs must exist.
        step: time step in minutes.
        history_len: input frames.
        forecast_len: forecast steps.
        as_forecast: True where forcing beyond the initial time must be what a forecast may know (validation).
        blank: read nothing and give tensors on the meta device, for a process that gets the fields from another.
    """

    def __init__(
        self,
        frames: FrameReader,
        initial: Sequence[int] | np.ndarray,
        step: int,
        history_len: int,
        forecast_len: int,
        as_forecast: bool = False,
        blank: bool = False,
    ) -> None:
        self._frames = frames
        self.initial = np.asarray(initial, dtype=np.int64)
        self._step = step
        self._history = history_len
        self._forecast = forecast_len
        self._as_forecast = as_forecast
        self._blank = blank
        self._buffers = BufferPool()

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may take samples at once."""
        return self._blank or self._frames.reader.is_thread_safe

    def __len__(self) -> int:
        return len(self.initial)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return some samples as one batch."""
        channels, cells = self._frames.reader.channels, self._frames.reader.grid.shape
        inputs = self._history + self._forecast - 1
        initial = self.initial[list(indices)]
        make = _blank if self._blank else self._buffers.take
        batch = Batch(
            make(len(indices), len(channels.group("prognostic")), self._history, *cells),
            make(len(indices), len(channels.group("dynamic_forcing")), inputs, *cells),
            make(len(indices), len(channels.output), self._forecast, *cells),
            torch.from_numpy(initial),
        )
        if not self._blank:
            arrays = [part.numpy() for part in (batch.history_BCTHW, batch.forcing_BCTHW, batch.target_BCTHW)]
            for row, start in enumerate(initial.tolist()):
                self._frames.fill(start, *(array[row] for array in arrays), as_forecast=self._as_forecast)
        return batch


def _blank(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")
