"""Blocks of the graph network: encoder, message passing on the mesh, and decoder (GraphCast, arXiv 2212.12794).

Shape suffixes: B batch, G grid points, N mesh nodes, E edges, C channels, I input channels, O output channels.
"""

from __future__ import annotations

from torch import Tensor, nn

from credit.models.graph.edge_index import EdgeIndex
from credit.models.graph.mlp import MLP, EdgeMLP
from credit.models.graph.tables import Edges
from credit.models.layers.norm import NO_CONDITION_DIMS, NO_CONDITIONS, ConditionDims, Conditions

# Number of geometric features of a node and of an edge.
NODE_FEATURES = 3
EDGE_FEATURES = 4
# Factor on the initial values of the last layer. With this factor, the first forecasts are close to persistence.
OUTPUT_SCALE = 0.1
# Tensor-parallel plan of the message MLP of a block, which is split by hidden channels.
MESSAGE_PLAN = {
    "message.expand.0": "colwise",
    "message.expand.1": "colwise",
    "message.expand.2": "colwise",
    "message.contract": "rowwise",
}


class Encoder(nn.Module):
    """Encoder that embeds the grid and sends messages from the grid points to the mesh nodes.

    Args:
        in_dim: number of input channels of a grid point.
        dim: number of channels of nodes and edges.
        condition_dims: lengths of the conditions that the norms depend on.
    """

    _fsdp2_shard = True
    _tp_plan = {
        **MESSAGE_PLAN,
        "update_mesh.expand.0": "colwise",
        "update_mesh.expand.1": "colwise",
        "update_mesh.contract": "rowwise",
        "update_grid.expand.0": "colwise",
        "update_grid.contract": "rowwise",
    }

    def __init__(self, in_dim: int, dim: int, condition_dims: ConditionDims = NO_CONDITION_DIMS) -> None:
        super().__init__()
        self.embed_grid = MLP((in_dim, NODE_FEATURES), dim, dim, condition_dims)
        # The embeddings of geometric features are the same for all samples, so they do not depend on noise.
        self.embed_mesh = MLP((NODE_FEATURES,), dim, dim)
        self.embed_edges = MLP((EDGE_FEATURES,), dim, dim)
        self.message = EdgeMLP(dim, condition_dims)
        self.update_mesh = MLP((dim, dim), dim, dim, condition_dims)
        self.update_grid = MLP((dim,), dim, dim, condition_dims)

    def forward(
        self,
        x_BGI: Tensor,
        grid_features_G3: Tensor,
        mesh_features_N3: Tensor,
        edges: Edges,
        conditions: Conditions = NO_CONDITIONS,
        noise_BGC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the mesh nodes (B, N, C) and the grid nodes (B, G, C).

        Args:
            x_BGI: input fields at the grid points.
            grid_features_G3: geometric features of the grid points.
            mesh_features_N3: geometric features of the mesh nodes.
            edges: edges from grid points to mesh nodes, for all samples of the batch.
            conditions: vectors of each sample that the norms depend on.
            noise_BGC: embedded noise, to be added to the embedded grid points; None for a forecast without noise.
        """
        batch = x_BGI.shape[0]
        grid_BGC = self.embed_grid(x_BGI, grid_features_G3[None], conditions=conditions)
        if noise_BGC is not None:
            grid_BGC = grid_BGC + noise_BGC
        # Mesh nodes have no input fields, so their initial values are the same for all samples.
        mesh_BNC = self.embed_mesh(mesh_features_N3[None]).expand(batch, -1, -1)
        edges_1EC = self.embed_edges(edges.features_E4[None])
        message_BEC = self.message(edges_1EC, grid_BGC, mesh_BNC, edges.index, conditions)
        sum_BNC = edges.index.receivers.sum_by_row(message_BEC)
        mesh_BNC = mesh_BNC + self.update_mesh(mesh_BNC, sum_BNC, conditions=conditions)
        grid_BGC = grid_BGC + self.update_grid(grid_BGC, conditions=conditions)
        return mesh_BNC, grid_BGC


class MessagePassingLayer(nn.Module):
    """Interaction network on the mesh (Battaglia et al. 2016, arXiv 1612.00222).

    An MLP computes a message for each edge from the edge and its two nodes. Another MLP updates each node from the sum
    of the messages of its incoming edges.

    Args:
        dim: number of channels of nodes and edges.
        condition_dims: lengths of the conditions that the norms depend on.
    """

    _fsdp2_shard = True
    _tp_plan = {
        **MESSAGE_PLAN,
        "update.expand.0": "colwise",
        "update.expand.1": "colwise",
        "update.contract": "rowwise",
    }

    def __init__(self, dim: int, condition_dims: ConditionDims = NO_CONDITION_DIMS) -> None:
        super().__init__()
        self.message = EdgeMLP(dim, condition_dims)
        self.update = MLP((dim, dim), dim, dim, condition_dims)

    def forward(
        self, nodes_BNC: Tensor, edges_BEC: Tensor, index: EdgeIndex, conditions: Conditions = NO_CONDITIONS
    ) -> tuple[Tensor, Tensor]:
        """Return the updated nodes (B, N, C) and the updated edges (B, E, C).

        Args:
            nodes_BNC: mesh nodes.
            edges_BEC: mesh edges; (1, E, C) if they are the same for all samples.
            index: sender and receiver of each edge, for all samples of the batch.
            conditions: vectors of each sample that the norms depend on.
        """
        message_BEC = self.message(edges_BEC, nodes_BNC, nodes_BNC, index, conditions)
        sum_BNC = index.receivers.sum_by_row(message_BEC)
        nodes_BNC = nodes_BNC + self.update(nodes_BNC, sum_BNC, conditions=conditions)
        return nodes_BNC, edges_BEC + message_BEC


class Decoder(nn.Module):
    """Decoder that sends messages from the mesh nodes to the grid points and computes the output fields.

    Args:
        dim: number of channels of nodes and edges.
        out_dim: number of output channels of a grid point.
        condition_dims: lengths of the conditions that the norms depend on.
    """

    _fsdp2_shard = True
    _tp_plan = {
        **MESSAGE_PLAN,
        "update_grid.expand.0": "colwise",
        "update_grid.expand.1": "colwise",
        "update_grid.contract": "rowwise",
        "head.expand.0": "colwise",
        "head.contract": "rowwise",
    }

    def __init__(self, dim: int, out_dim: int, condition_dims: ConditionDims = NO_CONDITION_DIMS) -> None:
        super().__init__()
        self.embed_edges = MLP((EDGE_FEATURES,), dim, dim)
        self.message = EdgeMLP(dim, condition_dims)
        self.update_grid = MLP((dim, dim), dim, dim, condition_dims)
        self.head = MLP((dim,), dim, out_dim, has_norm=False, output_scale=OUTPUT_SCALE)

    def forward(
        self, mesh_BNC: Tensor, grid_BGC: Tensor, edges: Edges, conditions: Conditions = NO_CONDITIONS
    ) -> Tensor:
        """Return the output fields (B, G, O) at the grid points.

        Args:
            mesh_BNC: mesh nodes.
            grid_BGC: grid nodes of the encoder.
            edges: edges from mesh nodes to grid points, for all samples of the batch.
            conditions: vectors of each sample that the norms depend on.
        """
        edges_1EC = self.embed_edges(edges.features_E4[None])
        message_BEC = self.message(edges_1EC, mesh_BNC, grid_BGC, edges.index, conditions)
        sum_BGC = edges.index.receivers.sum_by_row(message_BEC)
        grid_BGC = grid_BGC + self.update_grid(grid_BGC, sum_BGC, conditions=conditions)
        return self.head(grid_BGC)
