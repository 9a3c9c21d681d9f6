"""Torch dataset of samples: history, forcing and targets of given initial times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from credit.data.samples.batch import Batch
from credit.data.samples.buffer_pool import BufferPool
from credit.data.samples.frames import FrameReader


class SampleDataset(Dataset):
    """Samples of given initial times, in physical units, with channels in the order of `ChannelMap`.

    Args:
        frames: reader of the frames.
        initial: (N,) int64 initial times in minutes since 1900; the data must contain all frames of each sample.
        step: time step in minutes.
        history_len: number of input frames of a sample.
        forecast_len: number of forecast steps of a sample.
        as_forecast: True to use, after the initial time, only forcing that is available to a real forecast (for
            validation).
        placeholder: True to read no data and return tensors without values on the meta device, for a process that
            receives the fields from a different process.

    Attributes:
        initial_minutes: (N,) int64 initial times in minutes since 1900.
    """

    def __init__(
        self,
        frames: FrameReader,
        initial: Sequence[int] | np.ndarray,
        step: int,
        history_len: int,
        forecast_len: int,
        as_forecast: bool = False,
        placeholder: bool = False,
    ) -> None:
        self._frames = frames
        # The numbers of channels and the grid define the shapes of a batch.
        channels = frames.reader.channels
        self._num_prognostic = len(channels.group("prognostic"))
        self._num_forcing = len(channels.group("dynamic_forcing"))
        self._num_output = len(channels.output)
        self._grid_shape = frames.reader.grid.shape
        self.initial_minutes = np.asarray(initial, dtype=np.int64)
        self._step = step
        self._history_len = history_len
        self._forecast_len = forecast_len
        # Each forecast step except the first adds an input frame to the frames of the history.
        self._num_inputs = history_len + forecast_len - 1
        self._as_forecast = as_forecast
        self._placeholder = placeholder
        self._buffers = BufferPool()

    @property
    def is_thread_safe(self) -> bool:
        """True if several threads may read samples at the same time."""
        return self._placeholder or self._frames.reader.is_thread_safe

    @property
    def sample_bytes(self) -> int:
        """Size in bytes of the float32 fields of a sample; 0 if this process does not read fields."""
        if self._placeholder:
            return 0
        num_fields = self._num_prognostic * self._history_len + self._num_forcing * self._num_inputs
        num_fields += self._num_output * self._forecast_len
        return 4 * num_fields * self._grid_shape[0] * self._grid_shape[1]

    def __len__(self) -> int:
        return len(self.initial_minutes)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return several samples as one batch; torch's loader calls this method instead of `__getitem__`.

        Args:
            indices: indices of the samples, which equal the indices of their initial times in `initial_minutes`.

        Raises:
            DataError: if a field cannot be read.
        """
        batch_size = len(indices)
        initial_minutes = tuple(self.initial_minutes[list(indices)].tolist())
        allocate = self._buffers.take
        if self._placeholder:
            allocate = _build_meta_tensor
        batch = Batch(
            history_BCTHW=allocate(batch_size, self._num_prognostic, self._history_len, *self._grid_shape),
            forcing_BCTHW=allocate(batch_size, self._num_forcing, self._num_inputs, *self._grid_shape),
            target_BCTHW=allocate(batch_size, self._num_output, self._forecast_len, *self._grid_shape),
            initial_minutes=initial_minutes,
        )
        if self._placeholder:
            return batch
        # These arrays share memory with the tensors, so the fields are read directly into the batch.
        history_BCTHW = batch.history_BCTHW.numpy()
        forcing_BCTHW = batch.forcing_BCTHW.numpy()
        target_BCTHW = batch.target_BCTHW.numpy()
        for row, initial in enumerate(initial_minutes):
            self._frames.read_sample(
                initial, history_BCTHW[row], forcing_BCTHW[row], target_BCTHW[row], as_forecast=self._as_forecast
            )
        return batch


def _build_meta_tensor(*shape: int) -> torch.Tensor:
    """Return a tensor of the given shape on the meta device, without values."""
    return torch.empty(shape, device="meta")
