"""Dropout whose masks are a function of a seed for each sample, so that they are noise that can be drawn again.

The bits of a mask are a hash of the sample's seed, of the layer and of the position in the layer. They do not depend on
the batch, the device, or the part of a layer that a tensor-parallel rank holds, and nothing has to be saved for a
recomputation.

Shape suffixes: B batch, R rows (cells of the grid, or queries of attention), U units (hidden channels, or keys of
attention), M memories of the noise.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# SplitMix64 (Steele et al. 2014, doi:10.1145/2714064.2660195): increment and multipliers, as signed numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64
# A hash has the random numbers of four units, of 16 bits each.
_UNITS_PER_HASH = 4
_NUM_VALUES = 2**16


def hash_(x: Tensor) -> Tensor:
    """Replace each int64 of `x` by 64 random bits in place, and return it; products wrap around.

    These are two rounds of SplitMix64 without its last shift, which 16 bits of the result do not need. Shifts copy the
    sign, which makes a difference of one bit in a round and saves an operation.
    """
    for multiplier in (_MULTIPLIER_1, _MULTIPLIER_2):
        x.bitwise_xor_(x >> 32).mul_(multiplier)
    return x


class SeededDropout(nn.Module):
    """Dropout of one layer of a network.

    Args:
        rate: probability of dropping a unit; it is rounded to a multiple of 1 / 65536.
        number: number of the layer among those with such dropout.

    Attributes:
        first_unit: number of the first hidden channel or head that this rank holds; tensor parallelism sets it.
    """

    def __init__(self, rate: float, number: int) -> None:
        super().__init__()
        self.rate = rate
        self.number = number
        self.first_unit = 0
        # The numbers of the layers are far apart, and wrap around as int64.
        self._layer_offset = (number * _INCREMENT + 2**63) % 2**64 - 2**63
        num_dropped_values = round(rate * _NUM_VALUES)
        # A unit is kept if its random number, an int16, is at least the threshold. All are at least the lowest one.
        self._lowest = -_NUM_VALUES // 2
        self._threshold = self._lowest + num_dropped_values
        self._scale = _NUM_VALUES / (_NUM_VALUES - num_dropped_values)

    def drop_channels(self, x: Tensor, seeds_BM: Tensor) -> Tensor:
        """Return hidden channels (B, ..., U) of which some are zeros.

        Args:
            x: hidden channels that this rank holds, for each cell.
            seeds_BM: seeds of each sample; 0 for a sample without dropout.
        """
        x_BRU = x.flatten(1, -2)
        rows_R = torch.arange(x_BRU.shape[1], device=x.device)
        seed_B11 = self._select_seed(seeds_BM)
        is_kept_BRU = self._draw_mask(seed_B11, rows_R, x.shape[-1], self.first_unit)
        return self._apply_mask(x_BRU, is_kept_BRU, seed_B11).view_as(x)

    def drop_weights(self, weights_NhLL: Tensor, seeds_BM: Tensor, heads: int) -> Tensor:
        """Return attention weights of which some are zeros.

        Args:
            weights_NhLL: weights of query and key, for each window of the whole batch and each head of this rank.
            seeds_BM: seeds of each sample; 0 for a sample without dropout.
            heads: number of heads of all ranks.
        """
        weights_BnhLL = weights_NhLL.unflatten(0, (len(seeds_BM), -1))
        _, num_windows, num_heads, length, _ = weights_BnhLL.shape
        windows_n = torch.arange(num_windows, device=weights_NhLL.device)
        heads_h = self.first_unit + torch.arange(num_heads, device=weights_NhLL.device)
        queries_L = torch.arange(length, device=weights_NhLL.device)
        rows_nhL = (windows_n[:, None, None] * heads + heads_h[:, None]) * length + queries_L
        seed_B11 = self._select_seed(seeds_BM)
        is_kept_BRU = self._draw_mask(seed_B11, rows_nhL.flatten(), length, first_unit=0)
        return self._apply_mask(weights_BnhLL.flatten(1, 3), is_kept_BRU, seed_B11).view(weights_NhLL.shape)

    def _select_seed(self, seeds_BM: Tensor) -> Tensor:
        """Return the seed of this layer for each sample, (B, 1, 1); the layers take turns with the memories."""
        return seeds_BM[:, self.number % seeds_BM.shape[1], None, None]

    def _draw_mask(self, seed_B11: Tensor, rows_R: Tensor, num_units: int, first_unit: int) -> Tensor:
        """Return the mask (B, R, U), bool: False for a unit that is dropped.

        Args:
            seed_B11: seed of each sample; 0 for a sample of which no unit is dropped.
            rows_R: numbers of the rows, int64.
            num_units: number of units of a row.
            first_unit: number of the first of them.
        """
        layer_seed_B11 = hash_(seed_B11 + self._layer_offset)
        row_seed_BR1 = hash_(layer_seed_B11 + rows_R[:, None] * _INCREMENT)
        first_hash = first_unit // _UNITS_PER_HASH
        end_hash = -(-(first_unit + num_units) // _UNITS_PER_HASH)
        hashes = torch.arange(first_hash, end_hash, device=rows_R.device)
        numbers_BRU = hash_(row_seed_BR1 + hashes * _INCREMENT).view(torch.int16)
        offset = first_unit - first_hash * _UNITS_PER_HASH
        threshold_B11 = torch.where(seed_B11 == 0, self._lowest, self._threshold).to(torch.int16)
        return numbers_BRU[..., offset : offset + num_units] >= threshold_B11

    def _apply_mask(self, x_BRU: Tensor, is_kept_BRU: Tensor, seed_B11: Tensor) -> Tensor:
        """Return units with zeros in the place of those that are dropped; the others are scaled to keep the mean."""
        scale_B11 = torch.where(seed_B11 == 0, 1.0, self._scale).to(x_BRU.dtype)
        return x_BRU * scale_B11 * is_kept_BRU

    def extra_repr(self) -> str:
        """Return the arguments, for `repr` of the network."""
        return f"rate={self.rate}, number={self.number}"


def use_seeded_dropout(model: nn.Module, attention_rate: float, feed_forward_rate: float) -> int:
    """Give the layers of a network seeded dropout in the place of torch's, and return the number of these layers.

    Args:
        model: its layers are changed in place, if they have an attribute ``seeded_dropout``: window attention and
            feed-forward layers.
        attention_rate: rate of attention weights; 0 for none.
        feed_forward_rate: rate of hidden channels; 0 for none.
    """
    number = 0
    for module in list(model.modules()):
        if not hasattr(module, "seeded_dropout"):
            continue
        # Attention keeps its rate in a number, a feed-forward layer in a module.
        is_feed_forward = isinstance(module.dropout, nn.Dropout)
        if is_feed_forward:
            module.dropout.p = 0.0
        else:
            module.dropout = 0.0
        rate = feed_forward_rate if is_feed_forward else attention_rate
        if rate > 0:
            module.seeded_dropout = SeededDropout(rate, number)
            number += 1
    return number
