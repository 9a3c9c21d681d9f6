"""Field reader that regrids the fields of the data to the grid of the scores, and caches the regridded fields.

Shapes: N times, C channels, h x w cells of the source grid, H x W cells of the grid of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from credit.channels import Channel
from credit.data.formats.regrid import Regridder
from credit.data.store.chunk_reader import scatter_fields
from credit.grid import LatLonGrid

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

# Size of the cache in bytes.
_CACHE_BYTES = 1 << 30
Masks = Mapping[str, np.ndarray]


class RegriddedReader:
    """Field reader on the grid of the scores with a cache of the most recently read times.

    The cache is useful because climatology, damping and scoring read the same times. It uses up to 1 GiB of memory.

    Args:
        reader: reader of the data on their original grid.
        min_cached_times: smallest number of times that the cache can contain, even if they need more than 1 GiB.
        score_grid: grid of the scores; None to use the grid of the data.

    Attributes:
        grid: grid of the fields that `read` returns.
        masks: variable -> (H, W) bool on `grid`, True where the variable is always missing.
        read: function that returns the time-varying stored channels at an index in `times`, (C, H, W) float32 in the
            units of the data.
        path: path of the training store; None if the data are not read from a training store.
        calendar, channels, times, attributes, index_of, static, is_thread_safe: the same attributes of `reader`, see
            `credit.data.reader.FieldReader`.
    """

    def __init__(self, reader: FieldReader, min_cached_times: int, score_grid: LatLonGrid | None = None) -> None:
        self.calendar = reader.calendar
        self.channels = reader.channels
        self.times = reader.times
        self.attributes = reader.attributes
        self.index_of = reader.index_of
        self.static = reader.static
        # The cache and the regridding may be used by several threads at the same time.
        self.is_thread_safe = reader.is_thread_safe
        # A training store has a path, and may contain a climatology in addition to its fields.
        self.path = getattr(reader, "path", None)
        self.grid = reader.grid
        self.masks = reader.masks
        self._native_grid = reader.grid
        self._native_masks = reader.masks
        read = reader.read
        if score_grid is not None:
            self.grid = score_grid
            self.masks = _regrid_masks(reader.masks, Regridder(reader.grid, score_grid, "conservative"))
            regrid = self.build_regridding(reader.channels.time_varying_stored, reader.grid)

            def read(index: int) -> np.ndarray:
                return regrid(reader.read(index))

        # Bytes of the fields of one time, which are float32.
        field_bytes = 4 * len(reader.channels.time_varying_stored) * self.grid.shape[0] * self.grid.shape[1]
        num_cached_times = max(min_cached_times, _CACHE_BYTES // field_bytes)
        self.read = lru_cache(maxsize=num_cached_times)(read)

    def read_each(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the fields (C, H, W) at each of several indices in `times`."""
        return map(self.read, indices)

    def read_into(self, index: int, targets: Sequence[np.ndarray | None]) -> None:
        """Copy the fields of one time into given arrays.

        Args:
            index: index of the time in `times`.
            targets: for each time-varying stored channel an array (H, W), or None to skip the channel.
        """
        scatter_fields(self.read(index), targets)

    def build_regridding(self, channels: Sequence[Channel], grid: LatLonGrid) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function that regrids fields (..., C, h, w) to the grid of the scores, (..., C, H, W).

        The regridding averages over the cells that are not missing. A cell is missing if its value is NaN. For fields
        on the grid of the data, a cell is also missing if the mask of the data is True in this cell.

        Args:
            channels: the C channels of the fields.
            grid: grid of the fields before regridding.
        """
        if self.grid.describe_mismatch(grid) is None:
            return lambda fields: fields
        # Masks apply only to fields on the grid of the data.
        regridder = Regridder(grid, self.grid, "conservative")
        if not self._native_masks or self._native_grid.describe_mismatch(grid) is not None:
            return regridder.apply
        unmasked = np.zeros(grid.shape, dtype=bool)
        mask_CHW = np.stack([self._native_masks.get(channel.variable, unmasked) for channel in channels])

        def regrid_masked(fields: np.ndarray) -> np.ndarray:
            # NaN is converted to float32, so that the fields remain float32.
            return regridder.apply(np.where(mask_CHW, np.float32(np.nan), fields))

        return regrid_masked


def _regrid_masks(masks: Masks, regridder: Regridder) -> dict[str, np.ndarray]:
    """Return variable -> (H, W) mask on the new grid, True in a cell if less than half of its area has data.

    Args:
        masks: variable -> (h, w) bool, True where the variable is missing on the source grid.
        regridder: regridder from the source grid to the new grid.
    """
    regridded = {}
    for name, mask in masks.items():
        # Cells with data may have any value; the regridder returns NaN for a cell with too few data.
        field = np.where(mask, np.float32(np.nan), np.float32(0.0))
        regridded[name] = np.isnan(regridder.apply(field))
    return regridded
