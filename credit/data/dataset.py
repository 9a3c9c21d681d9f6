"""A torch dataset of samples: history, forcing and targets of some initial times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from credit.data.batch import Batch
from credit.data.frames import Frames


class ForecastDataset(Dataset):
    """Samples of given initial times, in physical units and ChannelMap order.

    Args:
        frames: where the fields come from.
        initial: (N,) int64 minutes; every frame that a sample needs must exist.
        step: time step in minutes.
        history_len: input frames.
        forecast_len: forecast steps.
        as_forecast: True where forcing beyond the initial time must be what a forecast may know (validation).
    """

    def __init__(
        self,
        frames: Frames,
        initial: Sequence[int] | np.ndarray,
        step: int,
        history_len: int,
        forecast_len: int,
        as_forecast: bool = False,
    ) -> None:
        self._frames = frames
        self.initial = np.asarray(initial, dtype=np.int64)
        self._step = step
        self._history = history_len
        self._forecast = forecast_len
        self._as_forecast = as_forecast

    def __len__(self) -> int:
        return len(self.initial)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return some samples as one batch; each field is read once and copied once, to its place."""
        channels, cells = self._frames.reader.channels, self._frames.reader.grid.shape
        history_BCTHW = _empty(len(indices), len(channels.group("prognostic")), self._history, *cells)
        inputs = self._history + self._forecast - 1
        forcing_BCTHW = _empty(len(indices), len(channels.group("dynamic_forcing")), inputs, *cells)
        target_BCTHW = _empty(len(indices), len(channels.output), self._forecast, *cells)
        initial = self.initial[list(indices)]
        for row, start in enumerate(initial.tolist()):
            known = start if self._as_forecast else None
            # in order of time, so that a frame is at hand for all that it is needed for
            for frame in range(self._history + self._forecast):
                time = start + (frame - self._history + 1) * self._step
                if frame < self._history:
                    history_BCTHW[row, :, frame] = torch.from_numpy(self._frames.prognostic(time))
                else:
                    target_BCTHW[row, :, frame - self._history] = torch.from_numpy(self._frames.state(time))
                if frame < inputs:
                    forcing_BCTHW[row, :, frame] = torch.from_numpy(self._frames.forcing(time, known))
        return Batch(history_BCTHW, forcing_BCTHW, target_BCTHW, torch.from_numpy(initial))


def _empty(*shape: int) -> torch.Tensor:
    """Return a float32 tensor; in a loader process in the memory that it has in common with the training process."""
    tensor = torch.empty(shape)
    return tensor if get_worker_info() is None else tensor.share_memory_()
