"""Input and truth frames in physical units at any time: what was read, what is computed, what a forecast may know.

A forecast must not be fed the analysed future. Beyond its initial time, forcing read from data is held at its anomaly
(or is the climatology, or is read where the config says ``observed``); computed forcing is exact at any time.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from credit.config.schema_data import DataConfig
from credit.data.climatology import Climatology
from credit.data.forcing import computed_dynamic, computed_static
from credit.data.reader import FieldReader
from credit.errors import DataError

# fields of a time that a process keeps: as many as a sample needs at once, or a gibibyte of them
_LEAST_KEPT, _MOST_KEPT, _KEPT_BYTES = 4, 16, 2**30


class Frames:
    """Frames of one reader in ChannelMap order.

    Args:
        reader: the fields.
        conf: the data section.
        climatology: of the dynamic forcing that is read from data; None holds the value instead of its anomaly.
    """

    def __init__(self, reader: FieldReader, conf: DataConfig, climatology: Climatology | None) -> None:
        self.reader = reader
        self._conf = conf
        self._climatology = climatology
        self._step = conf.step_minutes
        stored = [channel.name for channel in reader.channels.stored]
        self._read_forcing = [c for c in reader.channels.group("dynamic_forcing") if c.source == "data"]
        self._forcing_rows = [stored.index(c.name) for c in self._read_forcing]
        size = 4 * len(stored) * math.prod(reader.grid.shape)
        kept = min(_MOST_KEPT, max(_LEAST_KEPT, _KEPT_BYTES // size))
        self._read = lru_cache(maxsize=None if conf.cache == "memory" else kept)(reader.read)
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

    def static(self) -> np.ndarray:
        """Return the static channels (C, H, W): read, computed and masks."""
        read = iter(self.reader.static())
        out = []
        for channel in self.reader.channels.group("static"):
            if channel.source == "data":
                out.append(next(read))
            elif channel.source == "computed":
                out.append(computed_static(channel.name, self.reader.grid))
            else:
                out.append(self.reader.masks[channel.variable].astype(np.float32))
        return np.stack(out) if out else np.zeros((0, *self.reader.grid.shape), dtype=np.float32)

    def has(self, minutes: int) -> bool:
        """Whether the data have this time."""
        return self.reader.index_of(minutes) is not None

    def _stored(self, minutes: int) -> np.ndarray:
        index = self.reader.index_of(minutes)
        if index is None:
            raise DataError(f"the data have no fields at {self.reader.clock.format(minutes)}")
        return self._read(index)

    def _compute(self, name: str, minutes: int) -> np.ndarray:
        return computed_dynamic(name, minutes, self.reader.clock, self.reader.grid, self._step, self._conf.solar)

    def _forcing_from_data(self, channel, minutes: int, initial: int | None) -> np.ndarray:
        field = self._conf.field(channel.variable)
        number = self._read_forcing.index(channel)
        row = self._forcing_rows[number]
        windowed = field.temporal != "instant" and field.window == "next"
        label = minutes + self._step if windowed else minutes
        if initial is None or field.in_forecast == "observed" or label <= initial:
            return self._stored(label)[row]
        if field.in_forecast == "climatology":
            if self._climatology is None:
                raise DataError(
                    f"data.fields.{channel.variable}.in_forecast is climatology, but the training period is too short "
                    "to fit one; use persist"
                )
            return self._climatology.at(label)[number]
        held = self._stored(initial)[row]
        if self._climatology is None:
            return held
        return held + self._climatology.at(label)[number] - self._climatology.at(initial)[number]
