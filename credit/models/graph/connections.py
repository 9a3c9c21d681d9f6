"""Edges between the grid and the mesh, and geometric features of nodes and edges (GraphCast, arXiv 2212.12794).

All computations are in float64. Shape suffixes: P points, E edges, G grid points, N mesh nodes; a trailing 3 is the
coordinates of a vector.
"""

from __future__ import annotations

import numpy as np
from scipy.spatial import cKDTree

from credit.grid import LatLonGrid
from credit.models.graph.mesh import ICOSAHEDRON_EDGE_DEGREES, IcosahedralMesh

# A grid point sends to all mesh nodes within this multiple of the longest edge of the finest level.
RADIUS_IN_EDGES = 0.6
# With `refinements: auto`, a mesh edge is at most this multiple of the grid spacing.
MAX_SPACINGS_PER_EDGE = 3.0


def choose_refinements(grid: LatLonGrid) -> int:
    """Return the smallest number of refinements for which a mesh edge is at most three times the grid spacing.

    Each refinement halves the edges. So the edges have a length of 1.5 to 3 grid spacings, unless the icosahedron
    without refinement is fine enough. The grid spacing is the larger of the row spacing and the column spacing at the
    equator, in degrees.
    """
    spacing = max(float(-np.diff(grid.lat).min()), 360.0 / grid.shape[1])
    refinements = 0
    while ICOSAHEDRON_EDGE_DEGREES / 2**refinements > MAX_SPACINGS_PER_EDGE * spacing:
        refinements += 1
    return refinements


def list_grid_coordinates(grid: LatLonGrid) -> tuple[np.ndarray, np.ndarray]:
    """Return the latitudes (G,) and the longitudes (G,) of the grid points in radians, row by row."""
    lat, lon = np.meshgrid(np.deg2rad(grid.lat), np.deg2rad(grid.lon), indexing="ij")
    return lat.ravel(), lon.ravel()


def find_mesh_coordinates(nodes_N3: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the latitudes (N,) and the longitudes (N,) of the mesh nodes in radians; no node is at a pole."""
    return np.arcsin(nodes_N3[:, 2]), np.arctan2(nodes_N3[:, 1], nodes_N3[:, 0])


def to_unit_vectors(lat: np.ndarray, lon: np.ndarray) -> np.ndarray:
    """Return (P, 3) unit vectors of points at latitudes and longitudes in radians."""
    return np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=1)


def connect_grid_to_mesh(grid_G3: np.ndarray, mesh: IcosahedralMesh) -> np.ndarray:
    """Return the edges from grid points to mesh nodes, (E, 2), as (grid point, mesh node).

    A grid point and a mesh node have an edge if their distance is less than 0.6 times the longest mesh edge. Distances
    are chords of the unit sphere.

    Args:
        grid_G3: unit vectors of the grid points.
        mesh: the mesh.
    """
    radius = RADIUS_IN_EDGES * mesh.compute_longest_edge()
    pairs = cKDTree(grid_G3).sparse_distance_matrix(cKDTree(mesh.nodes_N3), radius, output_type="ndarray")
    return np.stack([pairs["i"], pairs["j"]], axis=1)


def connect_mesh_to_grid(grid_G3: np.ndarray, mesh: IcosahedralMesh) -> np.ndarray:
    """Return the edges from mesh nodes to grid points, (3G, 2), as (mesh node, grid point).

    A grid point has three edges, from the corners of the mesh face that contains the point.

    Args:
        grid_G3: unit vectors of the grid points.
        mesh: the mesh.
    """
    corners_G3 = mesh.faces[-1][mesh.find_faces(grid_G3)]
    receivers_G3 = np.broadcast_to(np.arange(len(grid_G3))[:, None], corners_G3.shape)
    return np.stack([corners_G3.ravel(), receivers_G3.ravel()], axis=1)


def compute_node_features(lat: np.ndarray, lon: np.ndarray) -> np.ndarray:
    """Return the features of nodes, (P, 3): sine of the latitude, sine and cosine of the longitude.

    The code of GraphCast has the cosine of the colatitude, which equals the sine of the latitude. The sign of this
    feature lets the network distinguish the hemispheres.

    Args:
        lat: (P,) latitudes in radians.
        lon: (P,) longitudes in radians.
    """
    return np.stack([np.sin(lat), np.sin(lon), np.cos(lon)], axis=1)


def compute_edge_features(
    edges_E2: np.ndarray, sender_points_P3: np.ndarray, receiver_lat: np.ndarray, receiver_lon: np.ndarray
) -> np.ndarray:
    """Return the features of edges, (E, 4): the length, and the vector from receiver to sender in local coordinates.

    The vector has upward, eastward and northward components at the receiver. GraphCast computes these components by a
    rotation that moves the receiver to latitude 0 and longitude 0. At a pole, the longitude of the grid point defines
    east and north. All features are divided by the length of the longest edge.

    Args:
        edges_E2: edges as (sender, receiver).
        sender_points_P3: unit vectors of all nodes that may send.
        receiver_lat: (P,) latitudes in radians of all nodes that may receive.
        receiver_lon: (P,) longitudes in radians of all nodes that may receive.
    """
    senders, receivers = edges_E2.T
    lat, lon = receiver_lat[receivers], receiver_lon[receivers]
    up_E3 = to_unit_vectors(lat, lon)
    east_E3 = np.stack([-np.sin(lon), np.cos(lon), np.zeros_like(lon)], axis=1)
    north_E3 = np.stack([-np.sin(lat) * np.cos(lon), -np.sin(lat) * np.sin(lon), np.cos(lat)], axis=1)
    difference_E3 = sender_points_P3[senders] - up_E3
    columns = [np.linalg.norm(difference_E3, axis=1)]
    for direction_E3 in (up_E3, east_E3, north_E3):
        columns.append((difference_E3 * direction_E3).sum(axis=1))
    features_E4 = np.stack(columns, axis=1)
    return features_E4 / features_E4[:, 0].max()
