"""Dropout whose masks are a function of the seed of the sample, so that a mask can be computed again.

The bits of a mask are a hash of the seed of the sample, the layer and the position in the layer. The bits do not depend
on the batch, the device or the tensor-parallel split. A recomputation needs no saved random state.

Shape suffixes: B batch, R rows (cells of the grid, or queries of attention), U units (hidden channels, or keys of
attention), M values of ``memory`` of the noise (times for which a mask stays the same), each with a seed; N windows of
the complete batch, n windows of one sample, h heads, L positions in a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

# SplitMix64 (Steele et al. 2014, doi:10.1145/2714064.2660195): increment and multipliers, as signed numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64
# A 64-bit hash contains the 16-bit random numbers of four units.
_UNITS_PER_HASH = 4
_NUM_VALUES = 2**16


def hash_in_place(x: Tensor) -> Tensor:
    """Replace each int64 of `x` in place with its hash, which has 64 pseudo-random bits, and return `x`.

    The hash consists of the two multiplication rounds of SplitMix64, in which products wrap around. The final shift of
    SplitMix64 is omitted, because only groups of 16 bits are used. SplitMix64 shifts zeros in from the left; the right
    shifts here copy the sign bit. This saves an operation and loses one bit of randomness per round.
    """
    for multiplier in (_MULTIPLIER_1, _MULTIPLIER_2):
        x.bitwise_xor_(x >> 32).mul_(multiplier)
    return x


@dataclass(frozen=True)
class CellNumbering:
    """Numbers of the cells (or windows) in the part of one rank, counted in the complete field.

    Attributes:
        rows: rows of the part in the complete field.
        columns: columns of the part in the complete field.
        width: number of columns of the complete field.
    """

    rows: range
    columns: range
    width: int

    def numbers(self, device: torch.device) -> Tensor:
        """Return row * width + column of each cell of the part, row by row, int64 (number of cells,)."""
        rows = torch.arange(self.rows.start, self.rows.stop, device=device)
        columns = torch.arange(self.columns.start, self.columns.stop, device=device)
        return (rows[:, None] * self.width + columns).flatten()


class SeededDropout(nn.Module):
    """Dropout of one layer of a network, with masks computed from seeds that the caller passes.

    Args:
        rate: probability of dropping a unit; it is rounded to a multiple of 1 / 65536.
        number: index of the layer, from 0, among the layers with seeded dropout.

    Attributes:
        first_unit: index of the first hidden channel or head of this rank; 0 without tensor parallelism.
        numberings: for each rank of the domain group, the numbers of its cells (or windows) in the complete field;
            empty if this rank has the complete field.
        field_ranks: the ranks of the domain group whose cells the layer receives: this rank; with sequence parallelism
            also its tensor-parallel peers.
    """

    def __init__(self, rate: float, number: int) -> None:
        super().__init__()
        self.rate = rate
        self.number = number
        self.first_unit = 0
        self.numberings: tuple[CellNumbering, ...] = ()
        self.field_ranks = range(0)
        # The offsets of two layers differ by a large number, and wrap around as int64.
        self._layer_offset = (number * _INCREMENT + 2**63) % 2**64 - 2**63
        num_dropped_values = round(rate * _NUM_VALUES)
        # A unit is kept if its random number, an int16, is at least the threshold. The lowest int16 keeps all units.
        self._lowest = -_NUM_VALUES // 2
        self._threshold = self._lowest + num_dropped_values
        self._scale = _NUM_VALUES / (_NUM_VALUES - num_dropped_values)

    def drop_channels(self, x: Tensor, seeds_BM: Tensor) -> Tensor:
        """Return hidden channels after dropout: some are set to zero, the others are scaled to keep the mean.

        Args:
            x: (B, ..., U) or (B * cells, U) hidden channels of each cell; under tensor parallelism, the channels of
                this rank.
            seeds_BM: (B, M) int64 seeds of each sample; 0 for a sample without dropout.
        """
        x_BRU = x.reshape(len(seeds_BM), -1, x.shape[-1])
        rows_R = self._number_cells(x_BRU.shape[1], x.device)
        seed_B11 = self._select_seed(seeds_BM)
        is_kept_BRU = self._compute_mask(seed_B11, rows_R, x.shape[-1], self.first_unit)
        return self._apply_mask(x_BRU, is_kept_BRU, seed_B11).view_as(x)

    def drop_attention_weights(self, weights_NhLL: Tensor, seeds_BM: Tensor, heads: int) -> Tensor:
        """Return attention weights after dropout: some are set to zero, the others are scaled to keep the mean.

        Args:
            weights_NhLL: (N, h, L, L) attention weights, for each window of the complete batch, each head of this rank,
                each query position and each key position.
            seeds_BM: (B, M) int64 seeds of each sample; 0 for a sample without dropout.
            heads: total number of heads of all tensor-parallel ranks.
        """
        weights_BnhLL = weights_NhLL.unflatten(0, (len(seeds_BM), -1))
        _, num_windows, num_heads, length, _ = weights_BnhLL.shape
        windows_n = self._number_cells(num_windows, weights_NhLL.device)
        heads_h = self.first_unit + torch.arange(num_heads, device=weights_NhLL.device)
        queries_L = torch.arange(length, device=weights_NhLL.device)
        # Rows are numbered over the heads of all ranks, so the masks do not depend on the number of ranks.
        window_heads_nh1 = windows_n[:, None, None] * heads + heads_h[:, None]
        rows_nhL = window_heads_nh1 * length + queries_L
        seed_B11 = self._select_seed(seeds_BM)
        is_kept_BRU = self._compute_mask(seed_B11, rows_nhL.flatten(), length, first_unit=0)
        return self._apply_mask(weights_BnhLL.flatten(1, 3), is_kept_BRU, seed_B11).view(weights_NhLL.shape)

    def _number_cells(self, num_cells: int, device: torch.device) -> Tensor:
        """Return the number of each cell (or window) of a sample, counted in the complete field, int64 (num_cells,)."""
        if not self.numberings:
            return torch.arange(num_cells, device=device)
        return torch.cat([self.numberings[rank].numbers(device) for rank in self.field_ranks])

    def _select_seed(self, seeds_BM: Tensor) -> Tensor:
        """Return the seed of each sample for this layer, (B, 1, 1): layer i uses seed i modulo M."""
        return seeds_BM[:, self.number % seeds_BM.shape[1], None, None]

    def _compute_mask(self, seed_B11: Tensor, rows_R: Tensor, num_units: int, first_unit: int) -> Tensor:
        """Return the bool mask (B, R, U): True for units to keep, False for units to drop.

        Args:
            seed_B11: (B, 1, 1) seed of each sample; 0 to keep all units of the sample.
            rows_R: (R,) int64 indices of the rows in the complete layer.
            num_units: number of units of a row, U.
            first_unit: index of the first unit in the complete layer.
        """
        # The first hash combines the seed of the sample with the layer. The second hash combines the first hash with
        # the row, and the third combines the second hash with each group of four units.
        layer_seed_B11 = hash_in_place(seed_B11 + self._layer_offset)
        row_seed_BR1 = hash_in_place(layer_seed_B11 + rows_R[:, None] * _INCREMENT)
        # `-(-a // b)` is a / b rounded up, because only a part of the last group may be needed.
        first_hash = first_unit // _UNITS_PER_HASH
        end_hash = -(-(first_unit + num_units) // _UNITS_PER_HASH)
        hashes = torch.arange(first_hash, end_hash, device=rows_R.device)
        # The view splits each hash into the numbers of its four units. The first group may begin before the first unit.
        numbers_BRU = hash_in_place(row_seed_BR1 + hashes * _INCREMENT).view(torch.int16)
        offset = first_unit - first_hash * _UNITS_PER_HASH
        threshold_B11 = torch.where(seed_B11 == 0, self._lowest, self._threshold).to(torch.int16)
        return numbers_BRU[..., offset : offset + num_units] >= threshold_B11

    def _apply_mask(self, x_BRU: Tensor, is_kept_BRU: Tensor, seed_B11: Tensor) -> Tensor:
        """Set dropped units of `x_BRU` to zero, scale the others to keep the mean, and return the result."""
        scale_B11 = torch.where(seed_B11 == 0, 1.0, self._scale).to(x_BRU.dtype)
        return x_BRU * scale_B11 * is_kept_BRU

    def extra_repr(self) -> str:
        """Return the rate and the number as a string, for `repr` of the network."""
        return f"rate={self.rate}, number={self.number}"


def use_seeded_dropout(model: nn.Module, attention_rate: float, feed_forward_rate: float) -> int:
    """Replace the dropout of torch in a network with seeded dropout, in place; return the number of changed layers.

    Args:
        model: the network. All layers with an attribute ``seeded_dropout`` are changed, such as window attention,
            feed-forward layers and residual blocks.
        attention_rate: dropout rate of attention weights; 0 for no dropout.
        feed_forward_rate: dropout rate of the hidden channels of feed-forward layers; 0 for no dropout.
    """
    number = 0
    for module in list(model.modules()):
        if not hasattr(module, "seeded_dropout"):
            continue
        # Switch off the dropout of torch, which is a number in attention layers and a module in feed-forward layers.
        if isinstance(module.dropout, nn.Dropout):
            module.dropout.p = 0.0
            rate = feed_forward_rate
        else:
            module.dropout = 0.0
            rate = attention_rate
        if rate > 0:
            module.seeded_dropout = SeededDropout(rate, number)
            number += 1
    return number
