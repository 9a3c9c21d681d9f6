"""Reader of input and target frames in physical units: fields that are read, and forcing that is computed.

A frame is the set of fields at one valid time. A forecast must not use analyses after its initial time. Therefore,
forcing from data after the initial time is the climatology plus the anomaly at the initial time, or only the
climatology. It is read from the data only if ``in_forecast`` is ``observed``. Computed forcing is exact at any time.

Shape suffixes: C channels, T frames, H latitude rows, W longitude columns.
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

# Limits of the cache of fields in number of times and in bytes. Forecasts and persisted forcing use this cache.
_MIN_CACHED_TIMES = 4
_MAX_CACHED_TIMES = 16
_CACHE_BYTES = 2**30
# Number of computed fields in the cache; each field is one forcing at one time.
_CACHED_FORCINGS = 64


class FrameReader:
    """Reader of input and target frames, with channels in the order of `ChannelMap`.

    Args:
        reader: reader of the fields.
        conf: the ``data`` section of the config.
        climatology: climatology of the dynamic forcing that is read from data. If it is None, a forecast persists the
            value of this forcing instead of its anomaly.
        hidden: name of a variable -> mask (H, W), True in cells whose values are treated as missing; None for no such
            cells.

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
        stored_channels = reader.channels.time_varying_stored
        stored_names = [channel.name for channel in stored_channels]
        self._num_stored = len(stored_channels)
        self._grid_shape = reader.grid.shape
        # These values are computed once, because reading a sample needs them for every channel and time.
        self._forcing_channels = list(reader.channels.group("dynamic_forcing"))
        self._data_forcing = [channel for channel in self._forcing_channels if channel.source == "data"]
        self._stored_index = {channel.name: stored_names.index(channel.name) for channel in self._data_forcing}
        self._label_offsets = {channel.name: self._compute_label_offset(channel) for channel in self._forcing_channels}
        self._hidden_cells: dict[int, np.ndarray] = {}
        for index, channel in enumerate(stored_channels):
            if hidden and channel.variable in hidden:
                self._hidden_cells[index] = hidden[channel.variable]
        # Limit the size of the cache of fields. Computed forcing is also cached, because samples share times.
        bytes_per_time = 4 * self._num_stored * math.prod(self._grid_shape)
        cached_times = min(_MAX_CACHED_TIMES, max(_MIN_CACHED_TIMES, _CACHE_BYTES // bytes_per_time))
        read = reader.read
        if self._hidden_cells:
            read = self._read_masked
        self._cached_read = lru_cache(maxsize=cached_times)(read)
        # With ``data.cache: memory``, all computed forcing is cached, as are the fields that are read.
        cached_forcings = _CACHED_FORCINGS
        if conf.cache == "memory":
            cached_forcings = None
        self._cached_compute = lru_cache(maxsize=cached_forcings)(self._compute_forcing)

    def state(self, minutes: int) -> np.ndarray:
        """Return the output channels (prognostic, then diagnostic) at one time, (C, H, W) float32 in physical units.

        Args:
            minutes: valid time in minutes since 1900.

        Raises:
            DataError: if the data do not contain this time, or the fields cannot be read.
        """
        return self._read_stored(minutes)[: len(self.reader.channels.output)]

    def prognostic(self, minutes: int) -> np.ndarray:
        """Return the prognostic channels at one time, (C, H, W) float32, with the units and errors of `state`."""
        return self._read_stored(minutes)[: len(self.reader.channels.group("prognostic"))]

    def forcing(self, minutes: int, initial: int | None = None) -> np.ndarray:
        """Return the dynamic forcing of an input frame, (C, H, W) float32 in physical units.

        Args:
            minutes: time of the frame in minutes since 1900.
            initial: initial time of a forecast in minutes since 1900. Forcing after the initial time is read from the
                data only if ``in_forecast`` is ``observed``. None in training, where all forcing is read from the data.

        Raises:
            DataError: if the data do not contain a required time, or the fields cannot be read.
        """
        fields = []
        for channel in self._forcing_channels:
            if channel.source == "computed":
                fields.append(self._cached_compute(channel.name, minutes))
                continue
            label = minutes + self._label_offsets[channel.name]
            if self._is_available(channel, label, initial):
                fields.append(self._read_stored(label)[self._stored_index[channel.name]])
            else:
                fields.append(self._extrapolate_forcing(channel, label, initial))
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
        """Fill the arrays of one sample. Each time is read once, directly into the arrays.

        Args:
            initial: initial time in minutes since 1900.
            history_CTHW: array for the prognostic channels at the input frames; the last frame is at `initial`.
            forcing_CTHW: array for the dynamic forcing at the input frames and at all later inputs of the rollout.
            target_CTHW: array for the output channels at every forecast step.
            as_forecast: True to use, after the initial time, only forcing that is available to a real forecast.

        Raises:
            DataError: if the data do not contain a required time, or the fields cannot be read.
        """
        num_inputs = forcing_CTHW.shape[1]
        history_len = history_CTHW.shape[1]
        first_minutes = initial - (history_len - 1) * self._step
        forecast_initial = initial if as_forecast else None

        # For each time, assign every field that is read to its target array, then read the time.
        for number in range(history_len + target_CTHW.shape[1]):
            minutes = first_minutes + number * self._step
            if number < history_len:
                fields_CHW = history_CTHW[:, number]
            else:
                fields_CHW = target_CTHW[:, number - history_len]
            # The stored channels begin with the prognostic and then the diagnostic channels, as history and target do.
            targets: list[np.ndarray | None] = [None] * self._num_stored
            targets[: len(fields_CHW)] = fields_CHW
            # The value with this time label is the forcing of this frame. For means over the following step
            # (window: next), it is the forcing of the previous frame.
            for row, channel in enumerate(self._forcing_channels):
                frame = number - self._label_offsets[channel.name] // self._step
                is_input = 0 <= frame < num_inputs
                if not is_input or channel.source != "data":
                    continue
                if self._is_available(channel, minutes, forecast_initial):
                    targets[self._stored_index[channel.name]] = forcing_CTHW[row, frame]
            if as_forecast and minutes == initial:
                # Read these fields through the cache, because they are needed again to persist forcing.
                scatter_fields(self._read_stored(minutes), targets)
            else:
                self.reader.read_into(self._require_index(minutes), targets)
                self._mask_hidden_cells(targets)

        # Fill in computed forcing, and forcing that is not available to a forecast.
        for frame in range(num_inputs):
            minutes = first_minutes + frame * self._step
            for row, channel in enumerate(self._forcing_channels):
                label = minutes + self._label_offsets[channel.name]
                if channel.source == "computed":
                    forcing_CTHW[row, frame] = self._cached_compute(channel.name, minutes)
                elif not self._is_available(channel, label, forecast_initial):
                    forcing_CTHW[row, frame] = self._extrapolate_forcing(channel, label, initial)

    def static(self) -> np.ndarray:
        """Return the static channels, (C, H, W) float32: fields in physical units, computed fields, and 0-1 masks."""
        stored_fields = iter(self.reader.static())
        fields = []
        for channel in self.reader.channels.group("static"):
            if channel.source == "data":
                fields.append(next(stored_fields))
            elif channel.source == "computed":
                fields.append(compute_static(channel.name, self.reader.grid))
            else:
                # The channel is the mask of a variable.
                fields.append(self.reader.masks[channel.variable].astype(np.float32))
        if not fields:
            return np.zeros((0, *self.reader.grid.shape), dtype=np.float32)
        return np.stack(fields)

    def has(self, minutes: int) -> bool:
        """Return True if the data contain the time `minutes` (minutes since 1900)."""
        return self.reader.index_of(minutes) is not None

    def _require_index(self, minutes: int) -> int:
        """Return the index of a time in the reader; raise DataError if the data do not contain the time."""
        index = self.reader.index_of(minutes)
        if index is None:
            time = self.reader.calendar.format(minutes)
            raise DataError(f"the data have no fields at {time}; add this time to data.sources, or choose other times")
        return index

    def _read_masked(self, index: int) -> np.ndarray:
        """Read the stored fields at an index of the reader, (C, H, W), with NaN in hidden cells."""
        fields_CHW = self.reader.read(index).copy()
        self._mask_hidden_cells(fields_CHW)
        return fields_CHW

    def _mask_hidden_cells(self, fields: np.ndarray | list[np.ndarray | None]) -> None:
        """Set hidden cells to NaN in the fields of one time, in place.

        Args:
            fields: field (H, W) of each channel of ``time_varying_stored``; None for a channel that is not read.
        """
        for row, hidden_cells in self._hidden_cells.items():
            field = fields[row]
            if field is not None:
                field[hidden_cells] = np.nan

    def _read_stored(self, minutes: int) -> np.ndarray:
        """Return the stored fields at a time, (C, H, W) in the order of ``time_varying_stored``; they are cached."""
        return self._cached_read(self._require_index(minutes))

    def _compute_forcing(self, name: str, minutes: int) -> np.ndarray:
        """Compute the dynamic forcing `name` for the time step that starts at `minutes`, (H, W) float32."""
        return compute_dynamic_forcing(
            name, minutes, self.reader.calendar, self.reader.grid, self._step, self._conf.solar
        )

    def _is_available(self, channel: Channel, label: int, initial: int | None) -> bool:
        """Return True if a forecast may use the forcing in the data with the time label `label`.

        Args:
            channel: channel of the forcing.
            label: time label of the values in the data, in minutes since 1900.
            initial: initial time of the forecast in minutes since 1900; None in training, which may use all values.
        """
        if initial is None or label <= initial:
            return True
        return self._conf.options_of(channel.variable).in_forecast == "observed"

    def _compute_label_offset(self, channel: Channel) -> int:
        """Return the time label of a forcing in the data minus the time of its input frame, in minutes.

        For a mean or sum over the step that follows the frame (``window: next``), the difference is one time step,
        because the data label this value with the end of the step. Otherwise the difference is 0.
        """
        options = self._conf.options_of(channel.variable)
        if options.temporal != "instant" and options.window == "next":
            return self._step
        return 0

    def _extrapolate_forcing(self, channel: Channel, label: int, initial: int) -> np.ndarray:
        """Return a substitute for forcing after the initial time, (H, W).

        If ``in_forecast`` is ``climatology``, this is the climatology. Otherwise it is the climatology plus the anomaly
        at the initial time. Without a climatology, it is the value at the initial time.

        Args:
            channel: channel of the forcing.
            label: time label of the values in the data, in minutes since 1900.
            initial: initial time of the forecast in minutes since 1900.

        Raises:
            DataError: if the config requests the climatology, but there is no climatology.
        """
        row = self._data_forcing.index(channel)
        options = self._conf.options_of(channel.variable)
        if options.in_forecast == "climatology":
            if self._climatology is None:
                raise DataError(
                    f"data.variable_options.{channel.variable}.in_forecast is climatology, but the training period is "
                    "too short to fit one; use persist"
                )
            return _clip_to_bounds(options, self._climatology.evaluate_lazily(label)[row])
        initial_field = self._read_stored(initial)[self._stored_index[channel.name]]
        if self._climatology is None:
            return initial_field
        # Persist the anomaly at the initial time.
        expected = self._climatology.evaluate_lazily(label)[row]
        initial_expected = self._climatology.evaluate_lazily(initial)[row]
        return _clip_to_bounds(options, initial_field + expected - initial_expected)


def _clip_to_bounds(options: VariableOptions, values: np.ndarray) -> np.ndarray:
    """Return extrapolated values, clipped to the bounds of the variable in the config."""
    if options.minimum is None and options.maximum is None:
        return values
    return np.clip(values, options.minimum, options.maximum)
