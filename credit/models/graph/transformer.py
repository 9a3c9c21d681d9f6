"""Transformer layer on the mesh: attention of each node to its neighbourhood (GenCast, arXiv 2312.15796).

Shape suffixes: B batch, N mesh nodes, C channels, M blocks of nodes, Q queries and K keys of a block, h heads, d
channels of a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from credit.models.graph.neighbourhoods import AttentionBlocks
from credit.models.kernels.attention import attention_without_bias
from credit.models.layers.norm import NO_CONDITION_DIMS, NO_CONDITIONS, ConditionDims, Conditions, LayerNorm
from credit.models.layers.transformer_layer import FeedForward


class NeighbourhoodAttention(nn.Module):
    """Pre-norm multi-head attention of each node to its neighbourhood, without the residual connection.

    The outputs of `to_qkv` are ordered (head; q, k, v; channel of the head). Tensor parallelism splits the outputs into
    consecutive parts, so each rank gets complete heads.

    Args:
        dim: number of channels of the nodes.
        dim_head: number of channels of a head; divides `dim`.
        condition_dims: lengths of the conditions that the norm depends on.
    """

    def __init__(self, dim: int, dim_head: int, condition_dims: ConditionDims = NO_CONDITION_DIMS) -> None:
        super().__init__()
        self.heads = dim // dim_head
        self.dim_head = dim_head
        self.norm = LayerNorm(dim, condition_dims)
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x_BNC: Tensor, blocks: AttentionBlocks, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the attention output (B, N, C), to be added to the nodes.

        Args:
            x_BNC: mesh nodes.
            blocks: neighbourhoods of the nodes, for all samples of the batch.
            conditions: vectors of each sample that the norm depends on.
        """
        batch, num_nodes, _ = x_BNC.shape
        num_blocks = len(blocks.mask_MQK)
        qkv_BNC = self.to_qkv(self.norm(x_BNC, conditions))
        # The number of heads is -1 because a tensor-parallel rank holds only some of the heads.
        qkv_BNh3d = qkv_BNC.view(batch, num_nodes, -1, 3, self.dim_head)
        q_BNC = qkv_BNh3d[..., 0, :].flatten(2)
        # Keys and values are gathered together.
        kv_BNC = qkv_BNh3d[..., 1:, :].flatten(2)
        q_BMQhd = blocks.queries.gather(q_BNC).view(
            batch, num_blocks, -1, q_BNC.shape[-1] // self.dim_head, self.dim_head
        )
        kv_BMKh2d = blocks.keys.gather(kv_BNC).view(batch, num_blocks, -1, q_BMQhd.shape[3], 2, self.dim_head)
        # All samples and heads of a block use the same mask.
        q_MBhQd = q_BMQhd.permute(1, 0, 3, 2, 4).flatten(1, 2)
        k_MBhKd, v_MBhKd = (x.permute(1, 0, 3, 2, 4).flatten(1, 2) for x in kv_BMKh2d.unbind(4))
        y_MBhQd = attention_without_bias(q_MBhQd, k_MBhKd, v_MBhKd, blocks.mask_MQK[:, None])
        y_BMQhd = y_MBhQd.unflatten(1, (batch, -1)).permute(1, 0, 3, 2, 4)
        y_BNC = blocks.query_of_node.gather(y_BMQhd.reshape(batch, -1, q_BNC.shape[-1]))
        return self.to_out(y_BNC)


class MeshTransformerLayer(nn.Module):
    """Transformer layer on mesh nodes: neighbourhood attention, then feed-forward; each output is added to its input.

    Args:
        dim: number of channels of the nodes.
        dim_head: number of channels of a head; divides `dim`.
        condition_dims: lengths of the conditions that the norms depend on.
    """

    _fsdp2_shard = True
    _tp_plan = {
        "attention.to_qkv": "colwise",
        "attention.to_out": "rowwise",
        "feed_forward.expand": "colwise",
        "feed_forward.contract": "rowwise",
    }

    def __init__(self, dim: int, dim_head: int, condition_dims: ConditionDims = NO_CONDITION_DIMS) -> None:
        super().__init__()
        self.attention = NeighbourhoodAttention(dim, dim_head, condition_dims)
        self.feed_forward = FeedForward(dim, condition_dims=condition_dims)

    def forward(self, x_BNC: Tensor, blocks: AttentionBlocks, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the updated mesh nodes (B, N, C).

        Args:
            x_BNC: mesh nodes.
            blocks: neighbourhoods of the nodes, for all samples of the batch.
            conditions: vectors of each sample that the norms depend on.
        """
        x_BNC = x_BNC + self.attention(x_BNC, blocks, conditions)
        # The feed-forward expects rows and columns of tokens, so the nodes become the rows of a single column.
        return x_BNC + self.feed_forward(x_BNC[:, :, None], conditions)[:, :, 0]
