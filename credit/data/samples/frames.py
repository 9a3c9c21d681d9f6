"""Input and truth frames in physical units at any time: what was read, what is computed, what a forecast may know.

A forecast must not be fed the analysed future. Beyond its initial time, forcing read from data is held at its anomaly
(or is the climatology, or is read where the config says ``observed``); computed forcing is exact at any time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from credit.channels import Channel
from credit.config.schema_data import DataConfig, VariableOptions
from credit.data.climatology.climatology import Climatology
from credit.data.reader import FieldReader
from credit.data.samples.forcing import compute_dynamic_forcing, compute_static
from credit.data.store.chunk_reader import scatter_fields
from credit.errors import DataError

# times whose fields a process keeps, for forecasts and for forcing that is held: a few, or a gibibyte of them
_LEAST_KEPT, _MOST_KEPT, _KEPT_BYTES = 4, 16, 2**30


class FrameReader:
    """Frames of one reader in ChannelMap order.

    Args:
        reader: the fields.
        conf: the data section.
        climatology: of the dynamic forcing that is read from data; None holds the value instead of its anomaly.
        hidden: of a forecast: variable -> (H, W) bool, True where its values are taken as missing.
    """

    def __init__(
        self, reader: FieldReader, conf: DataConfig, climatology: Climatology | None,
        hidden: Mapping[str, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        self.reader = reader
        self._conf = conf
        self._climatology = climatology
        self._step = conf.step_minutes
        stored = [channel.name for channel in reader.channels.stored]
        self._read_forcing = [c for c in reader.channels.group("dynamic_forcing") if c.source == "data"]
        self._rows = {c.name: stored.index(c.name) for c in self._read_forcing}
        size = 4 * len(stored) * math.prod(reader.grid.shape)
        kept = min(_MOST_KEPT, max(_LEAST_KEPT, _KEPT_BYTES // size))
        self._hidden = {
            row: hidden[c.variable] for row, c in enumerate(reader.channels.stored) if hidden and c.variable in hidden
        }
        self._read = lru_cache(maxsize=kept)(self._read_shown if self._hidden else reader.read)
        self._computed = lru_cache(maxsize=None if conf.cache == "memory" else 64)(self._compute)

    def state(self, minutes: int) -> np.ndarray:
        """Return the output channels (C, H, W) valid at `minutes`."""
        return self._stored(minutes)[: len(self.reader.channels.output)]

    def prognostic(self, minutes: int) -> np.ndarray:
        """Return the prognostic channels (C, H, W) valid at `minutes`."""
        return self._stored(minutes)[: len(self.reader.channels.group("prognostic"))]

    def forcing(self, minutes: int, initial: int | None = None) -> np.ndarray:
        """Return the dynamic forcing (C, H, W) for an input frame valid at `minutes`.

        Args:
            minutes: the frame's time.
            initial: the initial time of a forecast; None in training, where the data's own values are used.
        """
        out = []
        for channel in self.reader.channels.group("dynamic_forcing"):
            if channel.source == "computed":
                out.append(self._computed(channel.name, minutes))
            else:
                out.append(self._forcing_from_data(channel, minutes, initial))
        if not out:
            return np.zeros((0, *self.reader.grid.shape), dtype=np.float32)
        return np.stack(out)

    def fill(
        self,
        initial: int,
        history_CTHW: np.ndarray,
        forcing_CTHW: np.ndarray,
        target_CTHW: np.ndarray,
        as_forecast: bool,
    ) -> None:
        """Fill the arrays of one sample; each time is read once, each field goes straight to its place.

        Args:
            initial: minutes of the initial time.
            history_CTHW: prognostic channels at the input frames, the last of which is the initial time.
            forcing_CTHW: dynamic forcing at the input frames and at every further input of the rollout.
            target_CTHW: output channels at every forecast step.
            as_forecast: forcing beyond the initial time is what a forecast may know.
        """
        inputs, history = forcing_CTHW.shape[1], history_CTHW.shape[1]
        first = initial - (history - 1) * self._step
        limit = initial if as_forecast else None
        stored, forcing = len(self.reader.channels.stored), [*enumerate(self.reader.channels.group("dynamic_forcing"))]
        for number in range(history + target_CTHW.shape[1]):
            minutes = first + number * self._step
            fields = history_CTHW[:, number] if number < history else target_CTHW[:, number - history]
            places = [*fields, *[None] * (stored - len(fields))]
            for column, channel in forcing:
                # a window that ends later belongs to the input before
                frame = number - self._label(channel, 0) // self._step
                if 0 <= frame < inputs and channel.source == "data" and self._may_know(channel, minutes, limit):
                    places[self._rows[channel.name]] = forcing_CTHW[column, frame]
            self._deliver(minutes, places, at_hand=as_forecast and minutes == initial)
        for frame in range(inputs):
            minutes = first + frame * self._step
            for column, channel in forcing:
                if channel.source == "computed":
                    forcing_CTHW[column, frame] = self._computed(channel.name, minutes)
                elif not self._may_know(channel, self._label(channel, minutes), limit):
                    forcing_CTHW[column, frame] = self._held(channel, self._label(channel, minutes), initial)

    def static(self) -> np.ndarray:
        """Return the static channels (C, H, W): read, computed and masks."""
        read = iter(self.reader.static())
        out = []
        for channel in self.reader.channels.group("static"):
            if channel.source == "data":
                out.append(next(read))
            elif channel.source == "computed":
                out.append(compute_static(channel.name, self.reader.grid))
            else:
                out.append(self.reader.masks[channel.variable].astype(np.float32))
        return np.stack(out) if out else np.zeros((0, *self.reader.grid.shape), dtype=np.float32)

    def has(self, minutes: int) -> bool:
        """Whether the data have this time."""
        return self.reader.index_of(minutes) is not None

    def _index(self, minutes: int) -> int:
        index = self.reader.index_of(minutes)
        if index is None:
            raise DataError(f"the data have no fields at {self.reader.calendar.format(minutes)}")
        return index

    def _read_shown(self, index: int) -> np.ndarray:
        fields = self.reader.read(index).copy()
        for row, cells in self._hidden.items():
            fields[row, cells] = np.nan
        return fields

    def _stored(self, minutes: int) -> np.ndarray:
        return self._read(self._index(minutes))

    def _compute(self, name: str, minutes: int) -> np.ndarray:
        return compute_dynamic_forcing(
            name, minutes, self.reader.calendar, self.reader.grid, self._step, self._conf.solar
        )

    def _deliver(self, minutes: int, places: list[np.ndarray | None], at_hand: bool) -> None:
        """Bring the fields of a time to their places; by way of those that are kept, where it is needed again."""
        if at_hand:
            scatter_fields(self._stored(minutes), places)
        else:
            self.reader.read_into(self._index(minutes), places)

    def _may_know(self, channel: Channel, label: int, initial: int | None) -> bool:
        """Whether a forecast from `initial` (None in training) may use the data's own value at `label`."""
        return initial is None or label <= initial or self._conf.field(channel.variable).in_forecast == "observed"

    def _label(self, channel: Channel, minutes: int) -> int:
        """Return the time that a forcing of the input frame at `minutes` has in the data."""
        field = self._conf.field(channel.variable)
        return minutes + self._step if field.temporal != "instant" and field.window == "next" else minutes

    def _forcing_from_data(self, channel: Channel, minutes: int, initial: int | None) -> np.ndarray:
        label = self._label(channel, minutes)
        if self._may_know(channel, label, initial):
            return self._stored(label)[self._rows[channel.name]]
        return self._held(channel, label, initial)

    def _held(self, channel: Channel, label: int, initial: int) -> np.ndarray:
        """Return what a forecast from `initial` takes for a forcing after it."""
        number, field = self._read_forcing.index(channel), self._conf.field(channel.variable)
        if field.in_forecast == "climatology":
            if self._climatology is None:
                raise DataError(
                    f"data.variable_options.{channel.variable}.in_forecast is climatology, but the training period is "
                    "too short to fit one; use persist"
                )
            return _within(field, self._climatology.sum_at(label)[number])
        held = self._stored(initial)[self._rows[channel.name]]
        if self._climatology is None:
            return held
        moved = held + self._climatology.sum_at(label)[number] - self._climatology.sum_at(initial)[number]
        return _within(field, moved)


def _within(field: VariableOptions, values: np.ndarray) -> np.ndarray:
    """Return values within the bounds of their variable, which an anomaly and harmonics do not know of."""
    bounded = field.minimum is not None or field.maximum is not None
    return np.clip(values, field.minimum, field.maximum) if bounded else values
