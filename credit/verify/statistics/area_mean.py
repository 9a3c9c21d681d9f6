"""AreaMean: area-weighted means of fields over regions.

Along a row of cells the weights of all regions change in a few places only. Fields are therefore summed over segments
of cells with constant weights by compiled kernels (`credit.verify.statistics.kernels`), and only the sums are weighted.

A channel group is one channel, or the two components of a wind vector. Its sums are computed together by one thread.

Shapes: C channels, V wind vectors, X = C + V rows, R regions, H x W = P cells, S segments, K or L sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from credit.channels import Channel
from credit.errors import DataError
from credit.utils.threads import thread_map
from credit.verify.statistics.kernels import field_sums, weighted_sums

# Function of the index of a channel that writes its sums into an array (K, S).
SumChannel = Callable[[int, np.ndarray], None]
# Function of the indices of one channel, (1,), or of the two components of a wind vector, (2,). It writes their sums
# into an array (1 or 2, K, S) and those of the vector into (L, S), which is (0, S) for one channel.
SumChannelGroup = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


class AreaMean:
    """Area-weighted means over regions. Masked cells are left out and the weights renormalised.

    Args:
        channels: the C channels of the fields.
        masks: variable -> (H, W) bool, True where the variable is always missing.
        weights: (R, H, W) area weights from `credit.verify.statistics.regions.region_weights`.
        winds: (index of u, index of v) of V wind vectors among the channels, whose masks are equal.

    Attributes:
        names: names of the channels.
        valid_CP: bool, False where masked.
        is_masked: (C,) bool, True for a channel with masked cells.
        segments: indices of the first cell of each segment and of the cell after its last one, (S,) each.
        shape: (X, R): number of rows and of regions.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        masks: Mapping[str, np.ndarray],
        weights: np.ndarray,
        winds: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.names = [channel.name for channel in channels]
        valid_CHW = np.ones((len(channels), *weights.shape[1:]), dtype=bool)
        for index, channel in enumerate(channels):
            if channel.variable in masks:
                valid_CHW[index] = ~masks[channel.variable]
        self.valid_CP = valid_CHW.reshape(len(channels), -1)
        self.is_masked = (~self.valid_CP).any(axis=1)
        self.shape = len(channels) + len(winds), len(weights)
        self._u_index = np.array([u for u, _ in winds], dtype=int)
        self._v_index = np.array([v for _, v in winds], dtype=int)
        # Wind vectors come first, as they take longest and threads should not wait for them at the end.
        components = set(itertools.chain(*winds))
        self._channel_groups: list[tuple[np.ndarray, int | None]] = []
        for vector, pair in enumerate(winds):
            self._channel_groups.append((np.array(pair), vector))
        for index in range(len(channels)):
            if index not in components:
                self._channel_groups.append((np.array([index]), None))
        self.segments, self._weights_SR = _find_segments(weights)
        self._norm_CR = self._weighted_sum(self.valid_CP)

    def flatten(self, fields_CHW: np.ndarray, description: str) -> np.ndarray:
        """Return fields (C, H, W) as (C, P) float64 with masked cells set to 0.

        Args:
            fields_CHW: the fields.
            description: name of the fields in an error message.

        Raises:
            DataError: as `require_finite`.
        """
        self.require_finite(fields_CHW, description)
        fields_CP = fields_CHW.reshape(self.valid_CP.shape).astype(np.float64)
        fields_CP[~self.valid_CP] = 0.0
        return fields_CP

    def require_finite(self, fields_CHW: np.ndarray, description: str) -> None:
        """Require a finite value in every cell that is not masked.

        A forecast that became unstable must not be scored as one with fewer cells.

        Args:
            fields_CHW: the fields, (C, H, W) or (C, P).
            description: name of the forecast and its time in the error.

        Raises:
            DataError: if a value outside the mask is missing.
        """
        fields_CP = fields_CHW.reshape(self.valid_CP.shape)
        for name, field_P, valid_P in zip(self.names, fields_CP, self.valid_CP, strict=True):
            num_missing = int((~np.isfinite(field_P[valid_P])).sum())
            if num_missing:
                raise DataError(
                    f"{description}: {name} is not finite outside its mask, in {num_missing} of {int(valid_P.sum())} "
                    "cells; if it is always missing there, make the data missing there, too, or leave the variable out"
                )

    def channel_values(self, fields: np.ndarray, channel: int) -> np.ndarray:
        """Return the values of a channel of `fields` (C, H, W) or (C, P) as (P,), with 0 where it is masked."""
        values_P = fields[channel].reshape(-1)
        if self.is_masked[channel]:
            return np.where(self.valid_CP[channel], values_P, values_P.dtype.type(0))
        return values_P

    def reduce_channels(self, count: int, sum_channel: SumChannel, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return K means over each region, (K, C, R) float64.

        Args:
            count: number K of sums.
            sum_channel: function that writes the K sums of one channel over each of `segments`.
            fields: description -> (C, H, W) or (C, P), the fields that are summed; for the error message.

        Raises:
            DataError: as `require_finite`.
        """
        sums_KCR = np.empty((count, *self._norm_CR.shape))

        def reduce_channel(channel: int) -> None:
            sums_KS = self._new_sums(count)
            sum_channel(channel, sums_KS)
            weighted_sums(sums_KS, self._weights_SR, sums_KCR[:, channel])

        thread_map(reduce_channel, len(self.names), count * self.valid_CP.shape[1])
        return self._divide_by_norm(sums_KCR, self._norm_CR, fields)

    def reduce_channels_and_winds(
        self, counts: tuple[int, int], sum_group: SumChannelGroup, fields: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return K means of each channel, (K, C, R), and L means of each wind vector, (L, V, R), float64.

        A vector and its components are summed together, while they are in the processor's cache.

        Args:
            counts: numbers K and L of sums.
            sum_group: function that writes the sums of one channel group over each of `segments`.
            fields: as in `reduce_channels`.

        Raises:
            DataError: as `require_finite`.
        """
        channel_count, vector_count = counts
        channel_sums_KCR = np.empty((channel_count, len(self.names), self.shape[1]))
        vector_sums_LVR = np.empty((vector_count, len(self._u_index), self.shape[1]))

        def reduce_group(number: int) -> None:
            channels, vector = self._channel_groups[number]
            channel_sums = self._new_sums(len(channels), channel_count)
            vector_sums = self._new_sums(0 if vector is None else vector_count)
            sum_group(channels, channel_sums, vector_sums)
            for channel, sums_KS in zip(channels, channel_sums, strict=True):
                weighted_sums(sums_KS, self._weights_SR, channel_sums_KCR[:, channel])
            if vector is not None:
                weighted_sums(vector_sums, self._weights_SR, vector_sums_LVR[:, vector])

        thread_map(reduce_group, len(self._channel_groups), channel_count * self.valid_CP.shape[1])
        channel_means = self._divide_by_norm(channel_sums_KCR, self._norm_CR, fields)
        vector_means = self._divide_by_norm(vector_sums_LVR, self._norm_CR[self._u_index], fields)
        return channel_means, vector_means

    def means_of_channel(self, values_KP: np.ndarray, channel: int) -> np.ndarray:
        """Return the means over each region of K fields that belong to one channel, (K, R).

        Args:
            values_KP: K fields, 0 in cells that do not count.
            channel: index of the channel, whose mask gives the area of the mean.
        """
        return _divide(self._weighted_sum(values_KP), self._norm_CR[channel])

    def append_vectors(self, means_CR: np.ndarray) -> np.ndarray:
        """Return means of channels (C, R) as rows (X, R): then follows, for each vector, the sum of its components."""
        vector_means_VR = means_CR[self._u_index] + means_CR[self._v_index]
        return np.concatenate([means_CR, vector_means_VR])

    def _new_sums(self, *shape: int) -> np.ndarray:
        """Return an uninitialised array of sums over segments, (*shape, S)."""
        return np.empty((*shape, len(self._weights_SR)))

    def _divide_by_norm(self, sums: np.ndarray, norm: np.ndarray, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the means, given weighted sums and the weight of the valid cells; see `reduce_channels`."""
        # Values that are not finite make the sums so; only then are all cells looked at, to name the field.
        if not np.isfinite(sums).all():
            for description, values in fields.items():
                self.require_finite(np.asarray(values), description)
        return _divide(sums, norm)

    def _weighted_sum(self, values_KP: np.ndarray) -> np.ndarray:
        """Return the weighted sums over each region, (K, R) float64."""
        segment_sums = self._new_sums(len(values_KP), 1)
        for values_P, out in zip(values_KP, segment_sums, strict=True):
            field_sums(values_P, self.segments, out)
        sums_KR = np.empty((len(values_KP), self.shape[1]))
        weighted_sums(segment_sums[:, 0], self._weights_SR, sums_KR)
        return sums_KR


def _divide(sums: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """Return the means; NaN of a region without a valid cell."""
    with np.errstate(invalid="ignore"):
        return sums / norm


def _find_segments(weights_RHW: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Return the segments of cells with constant weights, and their weights in each region.

    A segment lies in one row of cells. Its weight is that of each of its cells. Cells outside all regions are in no
    segment.

    Args:
        weights_RHW: area weights of the cells in each region.

    Returns:
        The pair (first cells, cells after the last), (S,) indices each; and the weights, (S, R).
    """
    width = weights_RHW.shape[2]
    starts = []
    stops = []
    weights = []
    # Rows one after the other; a new segment starts where the weight of any region changes.
    for row, weights_RW in enumerate(weights_RHW.swapaxes(0, 1)):
        changes = np.flatnonzero((np.diff(weights_RW) != 0).any(axis=0)) + 1
        for start, stop in itertools.pairwise([0, *changes.tolist(), width]):
            if weights_RW[:, start].any():
                starts.append(row * width + start)
                stops.append(row * width + stop)
                weights.append(weights_RW[:, start])
    return (np.array(starts), np.array(stops)), np.array(weights)
