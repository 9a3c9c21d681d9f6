"""Area-weighted means of fields over regions.

Along a row of cells, the area weights change only where a region begins or ends. A segment is a sequence of adjacent
cells in one row with equal weights. Compiled kernels (`credit.verify.statistics.kernels`) sum the fields over each
segment, and only these sums are multiplied by the weights.

A channel group is one channel, or the two components of a wind vector. One thread computes all sums of a group.

Shapes: C channels, V wind vectors, X = C + V rows of the score table (channels, then wind vectors), R regions,
H x W = P cells, S segments, K sums (such as error, squared error, ...) of each channel, L sums of each wind vector.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from credit.channels import Channel
from credit.errors import DataError
from credit.utils.threads import thread_map
from credit.verify.statistics.kernels import field_sums, weighted_sums

# Function of the index of a channel and of an output array (K, S). It writes the sums of the channel into the array.
SumChannel = Callable[[int, np.ndarray], None]
# Function of the indices of the channels of a group, (1,) or (2,), and of two output arrays. It writes the sums of the
# channels into the first array, (1 or 2, K, S), and the sums of the wind vector into the second array, (L, S). The
# second array is (0, S) for a group of one channel.
SumChannelGroup = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


class AreaMean:
    """Computation of area-weighted means over regions; masked cells are left out.

    Args:
        channels: the C channels of the fields.
        masks: variable -> (H, W) bool, True where the variable is always missing.
        weights: (R, H, W) area weights from `credit.verify.statistics.regions.region_weights`.
        winds: (index of u, index of v) of each of the V wind vectors. The indices refer to `channels`; both components
            must have the same mask.

    Attributes:
        names: names of the channels.
        valid_CP: bool, True in cells that are not masked.
        is_masked: (C,) bool, True for a channel with masked cells.
        segments: two arrays (S,): index of the first cell of each segment, and index after its last cell.
        shape: (X, R), number of rows of the score table and number of regions.
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
        # Most channels have no masked cells and need no copy in `channel_values`.
        self.is_masked = (~self.valid_CP).any(axis=1)
        self.shape = len(channels) + len(winds), len(weights)
        self._u_index = np.array([u for u, _ in winds], dtype=int)
        self._v_index = np.array([v for _, v in winds], dtype=int)
        # Wind vectors take longest, so threads start with them and do not wait for them at the end.
        components = set(itertools.chain(*winds))
        self._channel_groups: list[tuple[np.ndarray, int | None]] = []
        for vector, pair in enumerate(winds):
            self._channel_groups.append((np.array(pair), vector))
        for index in range(len(channels)):
            if index not in components:
                self._channel_groups.append((np.array([index]), None))
        self.segments, self._weights_SR = _find_segments(weights)
        # Weighted sums are divided by the total weight of the valid cells of each channel in each region.
        self._norm_CR = self._compute_weighted_sums(self.valid_CP)

    def flatten(self, fields_CHW: np.ndarray, description: str) -> np.ndarray:
        """Return fields (C, H, W) as (C, P) float64 with masked cells set to 0.

        Args:
            fields_CHW: the fields; masked cells may contain any value.
            description: description of the fields for an error message.

        Raises:
            DataError: if a value is not finite in a cell that is not masked.
        """
        self.require_finite(fields_CHW, description)
        fields_CP = fields_CHW.reshape(self.valid_CP.shape).astype(np.float64)
        fields_CP[~self.valid_CP] = 0.0
        return fields_CP

    def require_finite(self, fields_CHW: np.ndarray, description: str) -> None:
        """Raise a DataError if a value is not finite in a cell that is not masked.

        Without this check, an unstable forecast would be scored only on the cells with finite values.

        Args:
            fields_CHW: the fields, (C, H, W) or (C, P).
            description: name and time of the fields for the error message.
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
        """Return one channel of fields (C, H, W) or (C, P) as an array (P,) with 0 in masked cells."""
        values_P = fields[channel].reshape(-1)
        if self.is_masked[channel]:
            return np.where(self.valid_CP[channel], values_P, values_P.dtype.type(0))
        return values_P

    def reduce_channels(self, count: int, sum_channel: SumChannel, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """Compute K area means of each channel in each region, (K, C, R) float64, with several threads.

        Args:
            count: number K of quantities that are averaged, for example 2 for the error and its square.
            sum_channel: function that writes the sums of the K quantities of one channel over each segment.
            fields: description -> field (C, H, W) or (C, P) from which the sums are computed. If a sum is not finite,
                the error message contains the description of the field with the value that is not finite.

        Raises:
            DataError: if a value of `fields` is not finite in a cell that is not masked.
        """
        sums_KCR = np.empty((count, *self._norm_CR.shape))

        # Threads write to different channels of the output, so they need no lock.
        def reduce_channel(channel: int) -> None:
            sums_KS = self._new_sums(count)
            sum_channel(channel, sums_KS)
            weighted_sums(sums_KS, self._weights_SR, sums_KCR[:, channel])

        thread_map(reduce_channel, len(self.names), count * self.valid_CP.shape[1])
        return self._divide_by_norm(sums_KCR, self._norm_CR, fields)

    def reduce_channels_and_winds(
        self, counts: tuple[int, int], sum_group: SumChannelGroup, fields: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute K area means of each channel, (K, C, R), and L area means of each wind vector, (L, V, R), in float64.

        A vector and its components are summed together, because they are then in the CPU cache.

        Args:
            counts: (K, L), numbers of quantities that are averaged for each channel and for each wind vector.
            sum_group: function that writes the sums of one channel group over each segment.
            fields: fields from which the sums are computed, see `reduce_channels`.

        Raises:
            DataError: if a value of `fields` is not finite in a cell that is not masked.
        """
        channel_count, vector_count = counts
        channel_sums_KCR = np.empty((channel_count, len(self.names), self.shape[1]))
        vector_sums_LVR = np.empty((vector_count, len(self._u_index), self.shape[1]))

        def reduce_group(number: int) -> None:
            channels, vector = self._channel_groups[number]
            channel_sums = self._new_sums(len(channels), channel_count)
            # A group of one channel has no vector sums.
            vector_sums = self._new_sums(0)
            if vector is not None:
                vector_sums = self._new_sums(vector_count)
            sum_group(channels, channel_sums, vector_sums)
            # Sums over regions are computed from the sums over segments.
            for channel, sums_KS in zip(channels, channel_sums, strict=True):
                weighted_sums(sums_KS, self._weights_SR, channel_sums_KCR[:, channel])
            if vector is not None:
                weighted_sums(vector_sums, self._weights_SR, vector_sums_LVR[:, vector])

        thread_map(reduce_group, len(self._channel_groups), channel_count * self.valid_CP.shape[1])
        channel_means = self._divide_by_norm(channel_sums_KCR, self._norm_CR, fields)
        # Both components have the same mask, so the weight of the first component is also the weight of the vector.
        vector_means = self._divide_by_norm(vector_sums_LVR, self._norm_CR[self._u_index], fields)
        return channel_means, vector_means

    def means_of_channel(self, values_KP: np.ndarray, channel: int) -> np.ndarray:
        """Return the area means of K fields that were derived from one channel, (K, R).

        Args:
            values_KP: K fields; they must be 0 in masked cells.
            channel: index of the channel. The means are over the cells of this channel that are not masked.
        """
        return _divide(self._compute_weighted_sums(values_KP), self._norm_CR[channel])

    def append_vectors(self, means_CR: np.ndarray) -> np.ndarray:
        """Append the sum over both components of each wind vector to means of the channels, and return (X, R)."""
        vector_means_VR = means_CR[self._u_index] + means_CR[self._v_index]
        return np.concatenate([means_CR, vector_means_VR])

    def _new_sums(self, *shape: int) -> np.ndarray:
        """Return an uninitialised float64 array (*shape, S) for sums over segments."""
        return np.empty((*shape, len(self._weights_SR)))

    def _divide_by_norm(self, sums: np.ndarray, norm: np.ndarray, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return weighted sums divided by the weight of the valid cells.

        Args:
            sums: (K, C, R) or (L, V, R) weighted sums.
            norm: (C, R) or (V, R) weight of the cells that are not masked.
            fields: fields from which the sums were computed, see `reduce_channels`.

        Raises:
            DataError: if a sum is not finite because a value of `fields` is not finite.
        """
        # Only if a sum is not finite, all cells are searched for the field with the value that is not finite.
        if not np.isfinite(sums).all():
            for description, values in fields.items():
                self.require_finite(np.asarray(values), description)
        return _divide(sums, norm)

    def _compute_weighted_sums(self, values_KP: np.ndarray) -> np.ndarray:
        """Return the area-weighted sums of K fields over each region, (K, R) float64."""
        segment_sums = self._new_sums(len(values_KP), 1)
        for values_P, out in zip(values_KP, segment_sums, strict=True):
            field_sums(values_P, self.segments, out)
        sums_KR = np.empty((len(values_KP), self.shape[1]))
        weighted_sums(segment_sums[:, 0], self._weights_SR, sums_KR)
        return sums_KR


def _divide(sums: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """Return sums / norm, NaN for a region without valid cells."""
    with np.errstate(invalid="ignore"):
        return sums / norm


def _find_segments(weights_RHW: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Divide the cells of all regions into segments, and return the segments and their weights.

    A segment consists of adjacent cells in one row, and all its cells have the same weights. Cells outside all regions
    are in no segment.

    Args:
        weights_RHW: area weights of the cells in each region, 0 outside the region.

    Returns:
        (segments, weights). The segments are two arrays (S,): index of the first cell of each segment, and index after
        its last cell. The weights are (S, R): weight of one cell of each segment in each region.
    """
    width = weights_RHW.shape[2]
    starts = []
    stops = []
    weights = []
    # In each row, a new segment starts where the weight of any region changes.
    for row, weights_RW in enumerate(weights_RHW.swapaxes(0, 1)):
        # Difference i is the difference between columns i and i + 1, so the new segment starts at column i + 1.
        has_change = (np.diff(weights_RW) != 0).any(axis=0)
        changes = np.flatnonzero(has_change) + 1
        for start, stop in itertools.pairwise([0, *changes.tolist(), width]):
            if weights_RW[:, start].any():
                starts.append(row * width + start)
                stops.append(row * width + stop)
                weights.append(weights_RW[:, start])
    return (np.array(starts), np.array(stops)), np.array(weights)
