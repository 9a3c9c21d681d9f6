"""Input and target frames in physical units at any time: fields that are read, forcing that is computed.

A forecast must not be given the analysed future. After its initial time, forcing from data keeps the anomaly of the
initial time (or is the climatology, or is read where the config says ``observed``). Computed forcing is exact at any
time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from credit.channels import Channel
from credit.config.sections.data import DataConfig, VariableOptions
from credit.data.climatology.climatology import Climatology
from credit.data.reader import FieldReader
from credit.data.samples.forcing import compute_dynamic_forcing, compute_static
from credit.data.store.chunk_reader import scatter_fields
from credit.errors import DataError

# A process caches the fields of a few times, for forecasts and for persisted forcing.
_MIN_CACHED_TIMES = 4
_MAX_CACHED_TIMES = 16
_CACHE_BYTES = 2**30


class FrameReader:
    """Input and target frames from one reader of fields, in the order of `ChannelMap`.

    Args:
        reader: reader of the fields.
        conf: the ``data`` section of the config.
        climatology: climatology of the dynamic forcing that is read from data; None persists the value of this forcing
            instead of its anomaly.
        hidden: variable -> (H, W) bool, True where a forecast must treat the values as missing.

    Attributes:
        reader: reader of the fields.
    """

    def __init__(
        self,
        reader: FieldReader,
        conf: DataConfig,
        climatology: Climatology | None,
        hidden: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.reader = reader
        self._conf = conf
        self._climatology = climatology
        self._step = conf.step_minutes
        stored = reader.channels.time_varying_stored
        stored_names = [channel.name for channel in stored]
        self._num_stored = len(stored)
        self._grid_shape = reader.grid.shape
        # These are looked up once, because reading a sample needs them for every channel and time.
        self._forcing_channels = list(reader.channels.group("dynamic_forcing"))
        self._data_forcing = [channel for channel in self._forcing_channels if channel.source == "data"]
        self._stored_index = {channel.name: stored_names.index(channel.name) for channel in self._data_forcing}
        self._label_offsets = {channel.name: self._label_offset(channel) for channel in self._forcing_channels}
        self._hidden_cells: dict[int, np.ndarray] = {}
        for index, channel in enumerate(stored):
            if hidden and channel.variable in hidden:
                self._hidden_cells[index] = hidden[channel.variable]
        # The cache of fields has a limited size. Forcing is computed for the same times of the day again and again.
        bytes_per_time = 4 * self._num_stored * math.prod(self._grid_shape)
        cached_times = min(_MAX_CACHED_TIMES, max(_MIN_CACHED_TIMES, _CACHE_BYTES // bytes_per_time))
        read = self._read_masked if self._hidden_cells else reader.read
        self._read = lru_cache(maxsize=cached_times)(read)
        cached_forcings = None if conf.cache == "memory" else 64
        self._computed = lru_cache(maxsize=cached_forcings)(self._compute)

    def state(self, minutes: int) -> np.ndarray:
        """Return the output channels valid at `minutes`, (C, H, W) float32 in physical units.

        Raises:
            DataError: if the data do not have this time, or it cannot be read.
        """
        return self._stored(minutes)[: len(self.reader.channels.output)]

    def prognostic(self, minutes: int) -> np.ndarray:
        """Return the prognostic channels valid at `minutes`, (C, H, W) float32; units and errors as of `state`."""
        return self._stored(minutes)[: len(self.reader.channels.group("prognostic"))]

    def forcing(self, minutes: int, initial: int | None = None) -> np.ndarray:
        """Return the dynamic forcing for an input frame valid at `minutes`, (C, H, W) float32 in physical units.

        Args:
            minutes: time of the frame in minutes since 1900.
            initial: initial time of a forecast in minutes, after which forcing is extrapolated unless it is observed;
                None in training, where the values of the data are used.

        Raises:
            DataError: if the data do not have a time that is needed, or it cannot be read.
        """
        fields = []
        for channel in self._forcing_channels:
            if channel.source == "computed":
                fields.append(self._computed(channel.name, minutes))
                continue
            label = minutes + self._label_offsets[channel.name]
            if self._is_available(channel, label, initial):
                fields.append(self._stored(label)[self._stored_index[channel.name]])
            else:
                fields.append(self._extrapolate(channel, label, initial))
        if not fields:
            return np.zeros((0, *self._grid_shape), dtype=np.float32)
        return np.stack(fields)

    def read_sample(
        self,
        initial: int,
        history_CTHW: np.ndarray,
        forcing_CTHW: np.ndarray,
        target_CTHW: np.ndarray,
        as_forecast: bool,
    ) -> None:
        """Fill the arrays of one sample; each time is read once, and each field is read straight into its array.

        Args:
            initial: initial time in minutes since 1900.
            history_CTHW: prognostic channels at the input frames, the last of which is the initial time.
            forcing_CTHW: dynamic forcing at the input frames and at every further input of the rollout.
            target_CTHW: output channels at every forecast step.
            as_forecast: True uses, after the initial time, only forcing that a real forecast would have.

        Raises:
            DataError: as `forcing`.
        """
        num_inputs = forcing_CTHW.shape[1]
        history_len = history_CTHW.shape[1]
        first_minutes = initial - (history_len - 1) * self._step
        forecast_initial = initial if as_forecast else None

        # First everything that is read: for each time, the target array of every stored channel.
        for number in range(history_len + target_CTHW.shape[1]):
            minutes = first_minutes + number * self._step
            is_history = number < history_len
            fields_CHW = history_CTHW[:, number] if is_history else target_CTHW[:, number - history_len]
            targets: list[np.ndarray | None] = [None] * self._num_stored
            targets[: len(fields_CHW)] = fields_CHW
            # The value at this time is the forcing of this frame or, for windows that follow, of the frame before.
            for row, channel in enumerate(self._forcing_channels):
                frame = number - self._label_offsets[channel.name] // self._step
                if not 0 <= frame < num_inputs or channel.source != "data":
                    continue
                if self._is_available(channel, minutes, forecast_initial):
                    targets[self._stored_index[channel.name]] = forcing_CTHW[row, frame]
            if as_forecast and minutes == initial:
                # These fields are needed again to persist forcing, so they go through the cache.
                scatter_fields(self._stored(minutes), targets)
            else:
                self.reader.read_into(self._index(minutes), targets)

        # Then the forcing that is computed, or that a forecast cannot know.
        for frame in range(num_inputs):
            minutes = first_minutes + frame * self._step
            for row, channel in enumerate(self._forcing_channels):
                label = minutes + self._label_offsets[channel.name]
                if channel.source == "computed":
                    forcing_CTHW[row, frame] = self._computed(channel.name, minutes)
                elif not self._is_available(channel, label, forecast_initial):
                    forcing_CTHW[row, frame] = self._extrapolate(channel, label, initial)

    def static(self) -> np.ndarray:
        """Return the static channels, (C, H, W) float32: fields in physical units, computed fields, and masks."""
        stored_fields = iter(self.reader.static())
        fields = []
        for channel in self.reader.channels.group("static"):
            if channel.source == "data":
                fields.append(next(stored_fields))
            elif channel.source == "computed":
                fields.append(compute_static(channel.name, self.reader.grid))
            else:
                fields.append(self.reader.masks[channel.variable].astype(np.float32))
        if not fields:
            return np.zeros((0, *self.reader.grid.shape), dtype=np.float32)
        return np.stack(fields)

    def has(self, minutes: int) -> bool:
        """Return True if the data have the time `minutes`."""
        return self.reader.index_of(minutes) is not None

    def _index(self, minutes: int) -> int:
        """Return the index of a time in the reader; raise DataError if the data do not have it."""
        index = self.reader.index_of(minutes)
        if index is None:
            raise DataError(f"the data have no fields at {self.reader.calendar.format(minutes)}")
        return index

    def _read_masked(self, index: int) -> np.ndarray:
        """Return the stored fields at an index, (C, H, W), with hidden cells missing."""
        fields_CHW = self.reader.read(index).copy()
        for row, hidden_cells in self._hidden_cells.items():
            fields_CHW[row, hidden_cells] = np.nan
        return fields_CHW

    def _stored(self, minutes: int) -> np.ndarray:
        """Return the stored fields at a time, (C, H, W) in the order of ``time_varying_stored``; they are cached."""
        return self._read(self._index(minutes))

    def _compute(self, name: str, minutes: int) -> np.ndarray:
        """Return one computed forcing of the step that starts at `minutes`, (H, W)."""
        return compute_dynamic_forcing(
            name, minutes, self.reader.calendar, self.reader.grid, self._step, self._conf.solar
        )

    def _is_available(self, channel: Channel, label: int, initial: int | None) -> bool:
        """Return True if a forecast from `initial` (None in training) may use the value of the data at `label`."""
        if initial is None or label <= initial:
            return True
        return self._conf.options_of(channel.variable).in_forecast == "observed"

    def _label_offset(self, channel: Channel) -> int:
        """Return the minutes from the time of an input frame to the time that its forcing has in the data.

        A mean or sum over the window that follows a time is labelled with the end of the window.
        """
        options = self._conf.options_of(channel.variable)
        if options.temporal != "instant" and options.window == "next":
            return self._step
        return 0

    def _extrapolate(self, channel: Channel, label: int, initial: int) -> np.ndarray:
        """Return the forcing at `label` that a forecast from `initial` uses, (H, W): persisted, or the climatology.

        Args:
            channel: channel of the forcing.
            label: time in minutes that the values would have in the data.
            initial: initial time in minutes since 1900.

        Raises:
            DataError: if the config asks for the climatology and there is none.
        """
        row = self._data_forcing.index(channel)
        options = self._conf.options_of(channel.variable)
        if options.in_forecast == "climatology":
            if self._climatology is None:
                raise DataError(
                    f"data.variable_options.{channel.variable}.in_forecast is climatology, but the training period is "
                    "too short to fit one; use persist"
                )
            return _clip(options, self._climatology.evaluate_lazily(label)[row])
        initial_field = self._stored(initial)[self._stored_index[channel.name]]
        if self._climatology is None:
            return initial_field
        expected = self._climatology.evaluate_lazily(label)[row]
        initial_expected = self._climatology.evaluate_lazily(initial)[row]
        # The anomaly of the initial time is persisted.
        return _clip(options, initial_field + expected - initial_expected)


def _clip(options: VariableOptions, values: np.ndarray) -> np.ndarray:
    """Return values within the bounds of their variable, which persisted anomalies and harmonics may exceed."""
    if options.minimum is None and options.maximum is None:
        return values
    return np.clip(values, options.minimum, options.maximum)
