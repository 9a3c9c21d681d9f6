"""CellMeans: area-weighted means over regions; which channels are the components of wind vectors.

Shapes: C channels, V wind vectors, X = C + V rows, R regions, P cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from credit.channels import Channel
from credit.errors import DataError

_BLOCK_CELLS = 2**16  # some float32 fields of so many cells stay in a core's cache
_LEAST = 1e-32  # of a row's sum of squares; those of some cells may be below what float32 holds
_ROOMS = 4  # fields that a block needs besides those that it is given
# two fields (rows, W) to be multiplied, or one
Pair = tuple[np.ndarray, np.ndarray | None]
# number of a channel or vector, rows of the grid, room for four fields of them -> what sums are wanted of
Pairs = Callable[[int, slice, np.ndarray], Iterator[Pair]]


@dataclass(frozen=True)
class _Piece:
    """A rectangle whose rows are each added up before they are weighted.

    Attributes:
        rows: of the grid, or of a block of its rows.
        columns: those of a row.
        sums: where the rows' sums lie among those of all pieces.
    """

    rows: slice
    columns: slice
    sums: slice

    def within(self, rows: slice) -> Self | None:
        """Return what lies in a block of rows, counted from its first; None for nothing."""
        first, last = max(self.rows.start, rows.start), min(self.rows.stop, rows.stop)
        shift = self.sums.start - self.rows.start
        inside, sums = slice(first - rows.start, last - rows.start), slice(first + shift, last + shift)
        return replace(self, rows=inside, sums=sums) if first < last else None


class CellMeans:
    """Area-weighted means over regions, masked cells left out with the weights renormalised.

    Args:
        channels: the C channels that fields have.
        masks: variable -> (H, W) bool, True where missing.
        weights: (R, H, W) from `credit.verify.regions.region_weights`.
        winds: (index of u, index of v) of V wind vectors among the channels, whose masks are equal.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        masks: Mapping[str, np.ndarray],
        weights: np.ndarray,
        winds: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.names = [channel.name for channel in channels]
        everywhere = np.ones(weights.shape[1:], dtype=bool)
        valid = [~masks[c.variable] if c.variable in masks else everywhere for c in channels]
        self.valid_CP = np.stack(valid).reshape(len(channels), -1)
        self.u, self.v = (np.array([pair[i] for pair in winds], dtype=int) for i in (0, 1))
        self.winds = list(winds)
        self.shape = len(channels) + len(winds), len(weights)
        self._grid = weights.shape[1:]
        self._hidden_CHW = ~self.valid_CP.reshape(-1, *self._grid)
        self._masked = self._hidden_CHW.any(axis=(1, 2)).tolist()
        self._pieces, self._weights_SR = _cut(weights)
        self._norm_CR = self._weighted(self.valid_CP)
        height, width = self._grid
        count = max(1, _BLOCK_CELLS // width)
        self._blocks = [slice(first, min(first + count, height)) for first in range(0, height, count)]
        self._pieces_of_blocks = [[own for p in self._pieces if (own := p.within(rows))] for rows in self._blocks]
        self._room = _ROOMS, min(count, height), width
        self._rooms: dict[np.dtype, np.ndarray] = {}

    def flatten(self, fields_CHW: np.ndarray, what: str) -> np.ndarray:
        """Return (C, P) float64 with masked cells set to 0.

        Raises:
            DataError: see `require_finite`.
        """
        self.require_finite(fields_CHW, what)
        flat = fields_CHW.reshape(self.valid_CP.shape).astype(np.float64)
        flat[~self.valid_CP] = 0.0
        return flat

    def on_grid(self, fields: np.ndarray) -> np.ndarray:
        """Return fields (C, H, W) or (C, P) as (C, H, W)."""
        return fields.reshape(len(self.names), *self._grid)

    def require_finite(self, fields_CHW: np.ndarray, what: str) -> None:
        """Refuse fields of which a value outside the mask is missing.

        Raises:
            DataError: if there is one: `what` names the forecast and its time. A forecast that blew up must not pass
                for one with fewer cells.
        """
        flat_CP = fields_CHW.reshape(self.valid_CP.shape)
        for name, field_P, valid_P in zip(self.names, flat_CP, self.valid_CP, strict=True):
            if not np.isfinite(field_P[valid_P]).all():
                raise DataError(f"{what}: {name} is not finite outside its mask")

    def apart(
        self, one: np.ndarray, other: np.ndarray, channel: int, rows: slice, out: np.ndarray
    ) -> np.ndarray:  # fmt: skip
        """Return some rows of a channel of `one` less `other`, both (C, H, W), in `out`, (rows, W), 0 where masked."""
        return self.hide(np.subtract(one[channel, rows], other[channel, rows], out=out), channel, rows)

    def hide(self, values: np.ndarray, channel: int, rows: slice) -> np.ndarray:
        """Return values (rows, W) of a channel, set to 0 where it is masked."""
        if self._masked[channel]:
            values[self._hidden_CHW[channel, rows]] = 0.0
        return values

    def length(self, u: np.ndarray, v: np.ndarray, vector: int, rows: slice, room: np.ndarray) -> np.ndarray:
        """Return the length of a vector with the components `u` and `v`, (rows, W), in the first of two rooms."""
        square = np.square(u, out=room[0], dtype=room.dtype)
        square += np.square(v, out=room[1], dtype=room.dtype)
        return self.hide(np.sqrt(square, out=square), self.u[vector], rows)

    def of_products(self, count: int, pairs: Pairs, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the means over each region of fields and of products of two, (K, C, R), in one pass over the cells.

        Fields of float32 are worked on in float32, where the difference of two is rounded by 6e-8 of itself, and only a
        row's cells are added up so: a mean is off by some 1e-9 of the standard deviation.

        Args:
            count: K, the number of means.
            pairs: yields what they are of; 0 where masked.
            fields: what that is made of by name, (C, H, W), for its precision and the error.

        Raises:
            DataError: see `require_finite`.
        """
        return self._over_norm(self._sums(len(self.names), count, pairs, fields), self._norm_CR)

    def of_vector_products(self, count: int, pairs: Pairs, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the same of what belongs to the vectors, (K, V, R)."""
        return self._over_norm(self._sums(len(self.u), count, pairs, fields), self._norm_CR[self.u])

    def _sums(self, items: int, count: int, pairs: Pairs, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        dtype = np.result_type(*fields.values())
        along = self._along(range(items), count, pairs, dtype)
        largest = np.abs(along).max(axis=-1)
        if not np.isfinite(largest).all():
            for what, own in fields.items():
                self.require_finite(own, what)
        lost = np.flatnonzero(~((largest > _LEAST) & (largest < np.inf)).all(axis=0))
        if dtype != np.float64 and len(lost):  # squares that float32 may not hold are added up once more
            along[:, lost] = self._along(lost.tolist(), count, pairs, np.dtype(np.float64))
        return along @ self._weights_SR

    def _along(self, items: Sequence[int], count: int, pairs: Pairs, dtype: np.dtype) -> np.ndarray:
        """Return the sums along the rows of the pieces, (K, items, S) float64."""
        along = np.empty((count, len(items), len(self._weights_SR)))
        one_W = np.ones(self._grid[1], dtype)
        if dtype not in self._rooms:
            # torch aligns its memory to the processor's vectors, which numpy does not
            self._rooms[dtype] = torch.empty(self._room, dtype=getattr(torch, dtype.name)).numpy()
        with np.errstate(invalid="ignore", over="ignore"):  # of what is not finite; it is looked for at the end
            blocks = zip(self._blocks, self._pieces_of_blocks, strict=True)
            for (place, item), (rows, pieces) in itertools.product(enumerate(items), list(blocks)):
                room = self._rooms[dtype][:, : rows.stop - rows.start]
                for number, (x, y) in enumerate(pairs(item, rows, room)):
                    for piece in pieces:
                        out, cells = along[number, place, piece.sums], (piece.rows, piece.columns)
                        if y is None:
                            np.matmul(x[cells], one_W[piece.columns], out=out)
                        else:
                            np.vecdot(x[cells], y[cells], out=out)
        return along

    def mean(self, values_CP: np.ndarray) -> np.ndarray:
        """Return the means over each region, (C, R); `values_CP` must be 0 where masked."""
        return self._over_norm(self._weighted(values_CP), self._norm_CR)

    def means_of_channel(self, values_KP: np.ndarray, channel: int) -> np.ndarray:
        """Return the means over each region of K fields that belong to one channel, (K, R)."""
        return self._over_norm(self._weighted(values_KP), self._norm_CR[channel])

    def vector_mean(self, values_VP: np.ndarray) -> np.ndarray:
        """Return the means over each region of what belongs to the vectors, (V, R)."""
        return self._over_norm(self._weighted(values_VP), self._norm_CR[self.u])

    def with_vectors(self, means_CR: np.ndarray) -> np.ndarray:
        """Return (X, R): the channels' means, then for each vector the sum of its components'."""
        return np.concatenate([means_CR, means_CR[self.u] + means_CR[self.v]])

    def _weighted(self, values_KP: np.ndarray) -> np.ndarray:
        """Return the weighted sums over each region, (K, R) float64."""
        values, along = values_KP.reshape(-1, *self._grid), np.empty((len(values_KP), len(self._weights_SR)))
        for piece in self._pieces:
            values[:, piece.rows, piece.columns].sum(axis=2, dtype=np.float64, out=along[:, piece.sums])
        return along @ self._weights_SR

    @staticmethod
    def _over_norm(sums: np.ndarray, norm: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # a region without a valid cell has no mean
            return sums / norm


def _cut(weights_RHW: np.ndarray) -> tuple[list[_Piece], np.ndarray]:
    """Return the pieces that all regions are made of, and the weights of their rows' sums, (S, R).

    A stretch of columns over which a region's weight stays the same is added up first, so that few numbers are left to
    be weighted; regions that have the same stretch, such as bands of latitude the whole row, share its sums.
    """
    regions, height, width = weights_RHW.shape
    stretches: dict[tuple[int, int], np.ndarray] = {}
    for row, region in itertools.product(range(height), range(regions)):
        own = weights_RHW[region, row]
        for start, stop in itertools.pairwise([0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), width]):
            if own[start]:
                stretches.setdefault((start, stop), np.zeros((height, regions)))[row, region] = own[start]
    pieces, weights, count = [], [], 0
    for ends, own in stretches.items():
        used = np.flatnonzero(own.any(axis=1))
        rows = slice(int(used[0]), int(used[-1]) + 1)
        weights.append(own[rows])
        pieces.append(_Piece(rows, slice(*ends), slice(count, count := count + len(weights[-1]))))
    return pieces, np.concatenate(weights)


def wind_pairs(
    channels: Sequence[Channel], attributes: Mapping[str, Mapping[str, str]], masks: Mapping[str, np.ndarray]
) -> list[tuple[int, int, str]]:
    """Return (index of u, index of v, name of the pair's variable) of the horizontal winds among `channels`.

    Components belong together by standard_name, level, mask and a name that differs in its first letter only.
    """

    def component(channel: Channel) -> str | None:
        name = attributes.get(channel.variable, {}).get("standard_name", "")
        return {"eastward_wind": "u", "northward_wind": "v"}.get(name)

    northward = {(c.variable[1:], c.level): i for i, c in enumerate(channels) if component(c) == "v"}
    pairs = []
    for index, channel in enumerate(channels):
        partner = northward.get((channel.variable[1:], channel.level))
        if component(channel) != "u" or partner is None:
            continue
        if np.array_equal(masks.get(channel.variable), masks.get(channels[partner].variable)):
            pairs.append((index, partner, f"wind{channel.variable[1:]}"))
    return pairs
