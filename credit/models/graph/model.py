"""Graph network on a refined icosahedral mesh, with the processor of GraphCast or of GenCast.

In GraphCast (Lam et al. 2023, arXiv 2212.12794), the processor passes messages between mesh nodes. In GenCast (Price et
al. 2024, arXiv 2312.15796), the processor is a transformer. The diffusion of GenCast is not implemented here.

Shape suffixes: B batch, C channels, T time frames, H and W latitude rows and longitude columns, G = H * W grid points,
N mesh nodes, E edges, K channels of noise.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from credit.errors import ConfigError
from credit.models.base import ForecastModel, ModelSpec
from credit.models.checks import find_nearest_divisor
from credit.models.data_axes import mark_input_layer, mark_output_layer
from credit.models.graph.connections import choose_refinements
from credit.models.graph.layers import EDGE_FEATURES, Decoder, Encoder, MessagePassingLayer
from credit.models.graph.mlp import MLP
from credit.models.graph.section import GraphSection
from credit.models.graph.tables import Edges, GraphTables, build_constants
from credit.models.graph.transformer import MeshTransformerLayer
from credit.models.layers.norm import ConditionDims, Conditions
from credit.models.noise.noise_embedding import NoiseFieldEmbedding
from credit.models.noise.noise_input import count_noise_channels
from credit.models.registry import register_model


@register_model("graph", GraphSection)
class GraphNetwork(ForecastModel):
    """Graph network: encoder from the grid to the mesh, processor on the mesh, and decoder from the mesh to the grid.

    Args:
        spec: channels, grid and frames of the data.
        section: sizes and options, described in `GraphSection`.

    Attributes:
        refinements: number of refinements of the icosahedron.
        constants: indices and geometric features of the grid and the mesh.

    Raises:
        ConfigError: if ``dim_head`` does not divide ``dim``, or the mesh is too fine for the grid.
    """

    output_is_new = True
    casts_weights = True
    conditions = ("global", "cell", "spherical")

    def __init__(self, spec: ModelSpec, section: GraphSection) -> None:
        super().__init__(spec, section)
        self.refinements = section.refinements
        if section.refinements == "auto":
            self.refinements = choose_refinements(spec.grid)
        dim = section.dim
        hops = None
        if section.processor == "transformer":
            hops = section.hops
            _require_head_width(dim, section.dim_head)
        self.constants = build_constants(spec.grid, self.refinements, hops)

        # `global` noise changes the norms; `cell` and `spherical` noise is added to the embedded grid points.
        condition_dims = ConditionDims(vector=count_noise_channels(section, "global"))
        self.noise_embeddings = nn.ModuleDict()
        for kind in ("cell", "spherical"):
            channels = count_noise_channels(section, kind)
            if channels:
                self.noise_embeddings[kind] = NoiseFieldEmbedding(channels, dim, stride=1)

        self.encoder = Encoder(spec.in_channels * spec.input_frames, dim, condition_dims)
        mark_input_layer(self.encoder.embed_grid.expand[0], spec.input_frames)
        self.embed_edges = None
        if section.processor == "message_passing":
            self.embed_edges = MLP((EDGE_FEATURES,), dim, dim)
        self.layers = nn.ModuleList()
        for _ in range(section.depth):
            if section.processor == "message_passing":
                layer = MessagePassingLayer(dim, condition_dims)
            else:
                layer = MeshTransformerLayer(dim, section.dim_head, condition_dims)
            self.layers.append(layer)
        self.decoder = Decoder(dim, spec.out_channels * spec.output_frames, condition_dims)
        mark_output_layer(self.decoder.head.contract, spec.output_frames)
        self.initialise_unless_meta()

    def forward(self, x_BCTHW: Tensor, condition: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the normalised output; see `ForecastModel.forward` for arguments, shapes and errors."""
        # Each cell is a grid point.
        x_BGC = self.flatten_frames(x_BCTHW).flatten(2).transpose(1, 2)
        batch = x_BGC.shape[0]
        tables = _cast_features(self.constants.on_device(x_BGC.device), x_BGC.dtype)
        conditions = Conditions(vector_BK=condition.get("global") if condition else None)
        noise_BGC = self._embed_noise(condition, x_BGC.dtype)

        to_mesh = tables.to_mesh._replace(index=tables.to_mesh.index.repeat(batch))
        mesh_BNC, grid_BGC = self.encoder(
            x_BGC, tables.grid_features_G3, tables.mesh_features_N3, to_mesh, conditions, noise_BGC
        )
        mesh_BNC = self._process(mesh_BNC, tables, conditions)
        to_grid = tables.to_grid._replace(index=tables.to_grid.index.repeat(batch))
        y_BGC = self.decoder(mesh_BNC, grid_BGC, to_grid, conditions)
        return y_BGC.transpose(1, 2).contiguous().view(batch, *self.spec.out_shape)

    def _process(self, mesh_BNC: Tensor, tables: GraphTables, conditions: Conditions) -> Tensor:
        """Return the mesh nodes (B, N, C) after the layers of the processor.

        Args:
            mesh_BNC: mesh nodes of the encoder.
            tables: constants of the network.
            conditions: vectors of each sample that the norms depend on.
        """
        batch = mesh_BNC.shape[0]
        if tables.attention is not None:
            blocks = tables.attention.repeat(batch)
            for layer in self.layers:
                mesh_BNC = layer(mesh_BNC, blocks, conditions)
            return mesh_BNC
        index = tables.mesh.index.repeat(batch)
        # Before the first layer, the edges are the same for all samples.
        edges_BEC = self.embed_edges(tables.mesh.features_E4[None])
        for layer in self.layers:
            mesh_BNC, edges_BEC = layer(mesh_BNC, edges_BEC, index, conditions)
        return mesh_BNC

    def _embed_noise(self, condition: Mapping[str, Tensor] | None, dtype: torch.dtype) -> Tensor | None:
        """Return the sum of the embedded noise fields (B, G, C); None for a forecast without noise fields.

        Args:
            condition: kind of noise -> its tensor, as in `forward`.
            dtype: dtype in which the network computes without autocast.
        """
        noise_BGC = None
        for kind, embedding in self.noise_embeddings.items():
            if condition and kind in condition:
                embedded_BGC = embedding(condition[kind].to(dtype)).flatten(2).transpose(1, 2)
                noise_BGC = embedded_BGC if noise_BGC is None else noise_BGC + embedded_BGC
        return noise_BGC


def _cast_features(tables: GraphTables, dtype: torch.dtype) -> GraphTables:
    """Return the tables with all geometric features cast to `dtype`."""

    def cast(edges: Edges | None) -> Edges | None:
        return None if edges is None else edges._replace(features_E4=edges.features_E4.to(dtype))

    return tables._replace(
        grid_features_G3=tables.grid_features_G3.to(dtype),
        mesh_features_N3=tables.mesh_features_N3.to(dtype),
        to_mesh=cast(tables.to_mesh),
        to_grid=cast(tables.to_grid),
        mesh=cast(tables.mesh),
    )


def _require_head_width(dim: int, dim_head: int) -> None:
    """Raise ConfigError if the number of channels of an attention head does not divide the number of channels.

    Args:
        dim: number of channels of a node.
        dim_head: number of channels of an attention head.

    Raises:
        ConfigError: if `dim_head` does not divide `dim`; the message names the nearest divisor.
    """
    if dim % dim_head:
        nearest = find_nearest_divisor(dim, dim_head)
        raise ConfigError(
            f"model.dim_head: {dim_head} does not divide the {dim} channels of model.dim; the nearest divisor is "
            f"{nearest}"
        )
