"""Constant tensors of a graph network: indices and geometric features. Each process builds them once for each grid.

The tensors are computed from the grid, so they are not parameters or buffers. Checkpoints do not contain them, and a
network on the meta device has them with their values.

Shape suffixes: G grid points, N mesh nodes, E edges.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from credit.errors import ConfigError
from credit.grid import GridKey, LatLonGrid
from credit.models.graph.connections import (
    compute_edge_features,
    compute_node_features,
    connect_grid_to_mesh,
    connect_mesh_to_grid,
    find_mesh_coordinates,
    list_grid_coordinates,
    to_unit_vectors,
)
from credit.models.graph.edge_index import EdgeIndex, sort_edges
from credit.models.graph.mesh import IcosahedralMesh
from credit.models.graph.neighbourhoods import AttentionBlocks, find_neighbourhoods


class Edges(NamedTuple):
    """Edges with their features.

    Attributes:
        index: sender and receiver of each edge.
        features_E4: geometric features from `compute_edge_features`, float32.
    """

    index: EdgeIndex
    features_E4: Tensor


class GraphTables(NamedTuple):
    """Constant tensors of a graph network.

    Attributes:
        grid_features_G3: sine of latitude, sine and cosine of longitude of the grid points, float32.
        mesh_features_N3: the same features of the mesh nodes, float32.
        to_mesh: edges from grid points to mesh nodes.
        to_grid: edges from mesh nodes to grid points.
        mesh: edges of all levels between mesh nodes; None for a transformer.
        attention: neighbourhoods of mesh nodes; None for message passing.
    """

    grid_features_G3: Tensor
    mesh_features_N3: Tensor
    to_mesh: Edges
    to_grid: Edges
    mesh: Edges | None
    attention: AttentionBlocks | None


class GraphConstants:
    """Tables of a grid and mesh, with a cached copy for each device.

    Args:
        tables: the tables on the CPU.
    """

    def __init__(self, tables: GraphTables) -> None:
        self.tables = tables
        self._copies: dict[torch.device, GraphTables] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphConstants:
        """Return the same object, so that copies of a network share the tables."""
        return self

    def on_device(self, device: torch.device) -> GraphTables:
        """Return the tables on a device; the first call for each device copies the tables."""
        if device.type == "cpu":
            return self.tables
        if device in self._copies:
            return self._copies[device]
        # A tensor that is created in inference mode could not be used in a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            tables = tree_map_only(Tensor, lambda tensor: tensor.to(device), self.tables)
        # The planner traces the network with fake tensors, which have no memory and must not be cached.
        if type(tables.grid_features_G3) is Tensor:
            self._copies[device] = tables
        return tables


def build_constants(grid: LatLonGrid, refinements: int, hops: int | None) -> GraphConstants:
    """Return the constants of a graph network. Calls with the same arguments return the same object.

    Args:
        grid: the latitude-longitude grid.
        refinements: number of refinements of the icosahedron.
        hops: radius of attention in mesh edges; None for message passing.

    Raises:
        ConfigError: if a mesh node has no edge from a grid point.
    """
    # A tensor that is created in inference mode could not be used in a later backward pass.
    with torch.inference_mode(False):
        return _build_cached_constants(GridKey(grid), refinements, hops)


@functools.lru_cache(maxsize=4)
def _build_cached_constants(key: GridKey, refinements: int, hops: int | None) -> GraphConstants:
    """Return the constants of the grid in `key`; see `build_constants`."""
    grid = key.grid
    mesh = IcosahedralMesh.build(refinements)
    grid_lat, grid_lon = list_grid_coordinates(grid)
    mesh_lat, mesh_lon = find_mesh_coordinates(mesh.nodes_N3)
    grid_G3 = to_unit_vectors(grid_lat, grid_lon)

    to_mesh_E2 = connect_grid_to_mesh(grid_G3, mesh)
    _require_connected(to_mesh_E2, grid, grid_G3, refinements)
    to_mesh = build_edges(to_mesh_E2, grid_G3, (mesh_lat, mesh_lon))
    to_grid = build_edges(connect_mesh_to_grid(grid_G3, mesh), mesh.nodes_N3, (grid_lat, grid_lon))
    mesh_edges = attention = None
    if hops is None:
        mesh_edges = build_edges(mesh.list_multimesh_edges(), mesh.nodes_N3, (mesh_lat, mesh_lon))
    else:
        attention = find_neighbourhoods(mesh, hops)
    tables = GraphTables(
        _as_float32(compute_node_features(grid_lat, grid_lon)),
        _as_float32(compute_node_features(mesh_lat, mesh_lon)),
        to_mesh,
        to_grid,
        mesh_edges,
        attention,
    )
    return GraphConstants(tables)


def build_edges(
    edges_E2: np.ndarray, sender_points_P3: np.ndarray, receiver_coordinates: tuple[np.ndarray, np.ndarray]
) -> Edges:
    """Return the index and the features of the edges in `edges_E2`; the order of `edges_E2` has no effect.

    Args:
        edges_E2: edges as (sender, receiver).
        sender_points_P3: unit vectors of the nodes that may send.
        receiver_coordinates: latitudes and longitudes in radians of the nodes that may receive.
    """
    lat, lon = receiver_coordinates
    sorted_edges_E2 = sort_edges(edges_E2)
    index = EdgeIndex.build(sorted_edges_E2, len(sender_points_P3), len(lat))
    return Edges(index, _as_float32(compute_edge_features(sorted_edges_E2, sender_points_P3, lat, lon)))


def _require_connected(edges_E2: np.ndarray, grid: LatLonGrid, grid_G3: np.ndarray, refinements: int) -> None:
    """Raise ConfigError if a mesh node has no edge from a grid point.

    Args:
        edges_E2: edges as (grid point, mesh node).
        grid: the grid.
        grid_G3: unit vectors of the grid points.
        refinements: number of refinements of the mesh.

    Raises:
        ConfigError: if a mesh node has no edge; the message names the largest valid number of refinements.
    """
    if _count_connected_nodes(edges_E2) == 10 * 4**refinements + 2:
        return
    largest = refinements - 1
    while largest > 0:
        coarser_mesh = IcosahedralMesh.build(largest)
        if _count_connected_nodes(connect_grid_to_mesh(grid_G3, coarser_mesh)) == len(coarser_mesh.nodes_N3):
            break
        largest -= 1
    raise ConfigError(
        f"model.refinements: {refinements}: the mesh is finer than the grid of {grid.shape[0]} x {grid.shape[1]} "
        f"points, so some of its {10 * 4**refinements + 2} nodes have no grid point nearby; every node needs one: "
        f"choose {largest} or less, or auto"
    )


def _count_connected_nodes(edges_E2: np.ndarray) -> int:
    """Return the number of mesh nodes that have an edge from a grid point."""
    return len(np.unique(edges_E2[:, 1]))


def _as_float32(features: np.ndarray) -> Tensor:
    """Return features as a float32 tensor on the CPU."""
    return torch.from_numpy(features.astype(np.float32))
