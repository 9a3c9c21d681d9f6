"""A torch dataset of samples: history, forcing and targets of one initial time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.utils.data import Dataset

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

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return the members of a `Batch` without the batch dimension."""
        start = int(self.initial[index])
        past = [start + offset * self._step for offset in range(1 - self._history, 1)]
        inputs = past + [start + offset * self._step for offset in range(1, self._forecast)]
        targets = [start + offset * self._step for offset in range(1, self._forecast + 1)]
        known = start if self._as_forecast else None
        return {
            "history_BCTHW": np.stack([self._frames.prognostic(time) for time in past], axis=1),
            "forcing_BCTHW": np.stack([self._frames.forcing(time, known) for time in inputs], axis=1),
            "target_BCTHW": np.stack([self._frames.state(time) for time in targets], axis=1),
            "initial_B": np.int64(start),
        }
