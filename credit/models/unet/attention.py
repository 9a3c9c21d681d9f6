"""Attention of each cell to all cells of a level, and the domain-parallelism rule for this attention.

Shape suffixes: B batch, C channels, H and W rows and columns, N cells of this rank, M cells of the complete level,
h heads, d channels per head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from credit.models.kernels.attention import attention_without_bias
from credit.models.layers.norm import NO_CONDITION_DIMS, NO_CONDITIONS, ConditionDims, Conditions, GroupNorm
from credit.parallel.domain.division import FieldDivision
from credit.parallel.domain.exchange import Cells
from credit.parallel.domain.rules import DomainRule, build_exchange


class GlobalAttention(nn.Module):
    """Pre-norm multi-head attention of each cell to all cells, without the residual connection.

    The outputs of `to_qkv` are ordered (head; q, k, v; channel of the head). Tensor parallelism splits the outputs into
    consecutive parts, so each rank gets complete heads.

    Args:
        dim: channels of the field.
        dim_head: channels per head; divides `dim`.
        groups: groups of the norm; divides `dim`.
        condition_dims: lengths of the conditions that the norm depends on.
    """

    _tp_plan = {"to_qkv": "colwise", "to_out": "rowwise"}

    def __init__(self, dim: int, dim_head: int, groups: int, condition_dims: ConditionDims = NO_CONDITION_DIMS) -> None:
        super().__init__()
        self.heads = dim // dim_head
        self.dim_head = dim_head
        self.norm = GroupNorm(groups, dim, condition_dims)
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        # With domain parallelism, `GlobalAttentionRule` makes this layer collect the keys and values of all cells.
        # Without domain parallelism, the layer does nothing.
        self.collect_cells = nn.Identity()
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x_BCHW: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the output of the attention (B, C, H, W), to be added to the input.

        Args:
            x_BCHW: input field.
            conditions: noise on which the norm depends.
        """
        H, W = x_BCHW.shape[2:]
        tokens_BHWC = self.norm(x_BCHW, conditions).permute(0, 2, 3, 1)
        # The number of heads is -1 because a tensor-parallel rank holds only some of the heads.
        qkv_BHWh3d = self.to_qkv(tokens_BHWC).unflatten(-1, (-1, 3, self.dim_head))
        q_BhNd = qkv_BHWh3d[..., 0, :].flatten(1, 2).transpose(1, 2)
        kv_BHWh2d = self.collect_cells(qkv_BHWh3d[..., 1:, :])
        k_BhMd, v_BhMd = kv_BHWh2d.flatten(1, 2).permute(3, 0, 2, 1, 4).unbind(0)
        y_BhNd = attention_without_bias(q_BhNd, k_BhMd, v_BhMd)
        y_BNC = self.to_out(y_BhNd.transpose(1, 2).flatten(2))
        return y_BNC.transpose(1, 2).unflatten(2, (H, W))


@dataclass(frozen=True)
class GlobalAttentionRule(DomainRule):
    """Rule of `GlobalAttention.collect_cells`: each rank receives the keys and values of all cells.

    Each rank computes queries, keys and values only for its own cells, and attention only for its own queries.

    Attributes:
        division: division of the cells of the level among ranks.
    """

    division: FieldDivision

    def install(self, layer: nn.Identity, group: dist.ProcessGroup) -> None:
        """Exchange keys and values before the layer.

        Args:
            layer: the layer `collect_cells`.
            group: the ranks that share the field.
        """
        height, width = self.division.shape
        all_cells = [Cells(range(height), range(width))]
        exchange = build_exchange(group, self.division, [all_cells] * self.division.num_ranks)

        def collect(layer: nn.Identity, args: tuple[Tensor]) -> tuple[Tensor]:
            kv_BHWh2d = args[0]
            # The exchange expects a single dimension of channels.
            collected_BHWC = exchange(kv_BHWh2d.flatten(3))
            return (collected_BHWC.unflatten(3, kv_BHWh2d.shape[3:]),)

        layer.register_forward_pre_hook(collect)
