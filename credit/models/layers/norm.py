"""Layer norm and group norm whose result may depend on conditions, such as noise.

Shape suffixes: B batch, C channels, H and W rows and columns, K channels of a condition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit.models.kernels.autocast import autocast_dtype
from credit.parallel.domain.group_norm import CellCounts, normalise_part


class Conditions(NamedTuple):
    """Additional inputs of a block of a network, such as noise. Inputs that the network does not have are None.

    The class is a named tuple, because the wrappers of blocks (sharding, checkpointing) search tuples for tensors.

    Attributes:
        vector_BK: (B, K) vector for each sample, such as global noise or lead time.
        cells_BHWK: (B, H, W, K) vector for each cell at the resolution of the block, such as cell noise.
        dropout_seeds_BM: (B, M) int64 seeds of the dropout masks of each sample, one for each of the M values of
            ``memory`` in the config of the noise, see `credit.models.layers.seeded_dropout`.
    """

    vector_BK: Tensor | None = None
    cells_BHWK: Tensor | None = None
    dropout_seeds_BM: Tensor | None = None

    @property
    def changes_norms(self) -> bool:
        """True if the conditions contain a vector on which norms depend (for each sample or for each cell)."""
        return self.vector_BK is not None or self.cells_BHWK is not None


NO_CONDITIONS = Conditions()


@dataclass(frozen=True)
class ConditionDims:
    """Lengths of the vectors in `Conditions` on which norms depend. A length of 0 means that norms ignore the vector.

    Attributes:
        vector: length of the vector of each sample.
        cells: length of the vector of each cell.
    """

    vector: int = 0
    cells: int = 0


NO_CONDITION_DIMS = ConditionDims()


class ConditionalScaleShift(nn.Module):
    """Layer that scales and shifts channels depending on a condition (FiLM, Perez et al. 2018, arXiv 1709.07871).

    Scale and shift are linear functions of the condition. After a norm, the layer makes the result depend on a vector
    for each sample, such as noise or lead time, or on a vector for each cell. The initial weight is zero, so adding the
    layer to a trained network does not change the output. The weight is not in a linear layer, because spectral norm
    would divide the zeros by their largest singular value, which is 0.

    Args:
        dim: number of channels to scale and shift.
        condition_dim: length of the condition vector.
        channel_dim: tensor dimension of the channels: -1 for tokens (B, ..., C), 1 for fields (B, C, H, W).
    """

    # A checkpoint may lack the weight. The weight is then zero.
    may_be_added = True
    # Weight decay would pull the spread of an ensemble towards zero.
    has_weight_decay = False

    def __init__(self, dim: int, condition_dim: int, channel_dim: int = -1) -> None:
        super().__init__()
        self.dim = dim
        self.channel_dim = channel_dim
        self.weight = nn.Parameter(torch.zeros(2 * dim, condition_dim))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return x * (1 + scale) + shift, with the shape of `x`; scale and shift are linear in the condition.

        Args:
            x: normalised tokens or fields.
            condition: (B, K) vector of each sample, or (B, H, W, K) vector of each cell.
        """
        scale_shift = F.linear(condition.to(self.weight.dtype), self.weight)
        if condition.dim() == 2:
            # All cells of a sample have the same scale and shift.
            shape = [x.shape[0]] + [1] * (x.dim() - 1)
            shape[self.channel_dim] = 2 * self.dim
            scale_shift = scale_shift.view(shape)
        else:
            scale_shift = scale_shift.movedim(-1, self.channel_dim)
        scale, shift = scale_shift.chunk(2, dim=self.channel_dim)
        # With a weight of zeros the result is exactly x.
        return torch.addcmul(shift, x, 1 + scale)

    def initial_value(self, key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return zeros of `shape`, on the CPU."""
        return torch.zeros(shape, device="cpu")


def _build_scale_shift(dim: int, condition_dim: int, channel_dim: int) -> ConditionalScaleShift | None:
    """Return the layer that makes a norm depend on a condition of length `condition_dim`; None if the length is 0."""
    return ConditionalScaleShift(dim, condition_dim, channel_dim) if condition_dim else None


def _apply_conditions(norm: LayerNorm | GroupNorm, normed: Tensor, conditions: Conditions) -> Tensor:
    """Scale and shift `normed`, which is the result of `norm`, by the conditions on which the norm depends."""
    if conditions.vector_BK is not None and norm.scale_shift is not None:
        normed = norm.scale_shift(normed, conditions.vector_BK)
    if conditions.cells_BHWK is not None and norm.cell_scale_shift is not None:
        normed = norm.cell_scale_shift(normed, conditions.cells_BHWK)
    return normed


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension whose scale and shift may depend on conditions.

    Args:
        dim: number of channels.
        condition_dims: lengths of the condition vectors.
    """

    def __init__(self, dim: int, condition_dims: ConditionDims = NO_CONDITION_DIMS) -> None:
        super().__init__(dim)
        self.scale_shift = _build_scale_shift(dim, condition_dims.vector, channel_dim=-1)
        self.cell_scale_shift = _build_scale_shift(dim, condition_dims.cells, channel_dim=-1)

    def forward(self, x: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the normalised tokens (B, ..., C).

        Args:
            x: (B, ..., C) tokens; they must be (B, H, W, C) if there is a condition vector for each cell.
            conditions: vectors of each sample or cell, such as noise, on which the norm depends.
        """
        return _apply_conditions(self, super().forward(x), conditions)


class GroupNorm(nn.GroupNorm):
    """Group norm whose scale and shift may depend on conditions; under autocast it computes in float32 on every device.

    Under autocast, the group norm of torch computes in float32 only on GPUs. On a CPU it computes in bfloat16, which
    takes several times as long (torch 2.13).

    Args:
        groups: number of groups; a divisor of `channels`.
        channels: number of channels.
        condition_dims: lengths of the condition vectors.

    Attributes:
        cell_counts: the ranks that share the field and the number of cells of each rank; None if this rank has the
            complete field.
    """

    def __init__(self, groups: int, channels: int, condition_dims: ConditionDims = NO_CONDITION_DIMS) -> None:
        super().__init__(groups, channels)
        self.cell_counts: CellCounts | None = None
        self.scale_shift = _build_scale_shift(channels, condition_dims.vector, channel_dim=1)
        self.cell_scale_shift = _build_scale_shift(channels, condition_dims.cells, channel_dim=1)

    def forward(self, x_BCHW: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the normalised field (B, C, H, W), in float32 under autocast.

        Args:
            x_BCHW: field.
            conditions: vectors of each sample or cell, such as noise, on which the norm depends.
        """
        if autocast_dtype(x_BCHW) is not None:
            x_BCHW = x_BCHW.float()
        if self.cell_counts is None:
            normed_BCHW = super().forward(x_BCHW)
        else:
            normed_BCHW = normalise_part(x_BCHW, self.weight, self.bias, self.num_groups, self.eps, self.cell_counts)
        return _apply_conditions(self, normed_BCHW, conditions)
