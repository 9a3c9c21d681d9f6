"""Edges between grid and mesh, and geometric features."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from credit.grid import LatLonGrid
from credit.models.graph.connections import (
    choose_refinements,
    compute_edge_features,
    compute_node_features,
    connect_grid_to_mesh,
    connect_mesh_to_grid,
    find_mesh_coordinates,
    list_grid_coordinates,
    to_unit_vectors,
)
from credit.models.graph.mesh import IcosahedralMesh
from credit.models.graph.tables import build_constants, build_edges

GRID = LatLonGrid.equiangular(19, 36, True)


@pytest.mark.parametrize(
    ("rows", "columns", "poles", "refinements"),
    [(32, 64, False, 2), (181, 360, True, 5), (721, 1440, True, 7), (6, 12, False, 0)],
)
def test_automatic_refinements(rows: int, columns: int, poles: bool, refinements: int) -> None:
    assert choose_refinements(LatLonGrid.equiangular(rows, columns, poles)) == refinements


def test_grid_to_mesh_edges_are_all_close_pairs() -> None:
    grid_G3 = to_unit_vectors(*list_grid_coordinates(GRID))
    mesh = IcosahedralMesh.build(2)
    distances = np.linalg.norm(grid_G3[:, None] - mesh.nodes_N3, axis=2)
    senders, receivers = mesh.list_level_edges(2).T
    longest = np.linalg.norm(mesh.nodes_N3[senders] - mesh.nodes_N3[receivers], axis=1).max()
    edges = connect_grid_to_mesh(grid_G3, mesh)
    expected = set(zip(*np.nonzero(distances <= 0.6 * longest), strict=True))
    assert {tuple(edge) for edge in edges} == expected
    assert len(edges) == len(expected)
    # Every mesh node and every grid point has an edge.
    assert len(np.unique(edges[:, 1])) == 162
    assert len(np.unique(edges[:, 0])) == 19 * 36


def test_numbers_of_edges_at_a_quarter_degree() -> None:
    """Numbers of nodes and mesh edges follow closed forms; the number of edges from the grid is a recorded figure."""
    grid = LatLonGrid.equiangular(721, 1440, True)
    mesh = IcosahedralMesh.build(6)
    assert len(mesh.nodes_N3) == 40_962
    assert len(mesh.list_multimesh_edges()) == 327_660
    assert len(connect_grid_to_mesh(to_unit_vectors(*list_grid_coordinates(grid)), mesh)) == 1_618_824


def test_three_edges_lead_to_each_grid_point() -> None:
    tables = build_constants(GRID, 2, None).tables
    receivers = tables.to_grid.index.receivers.index
    torch.testing.assert_close(receivers, torch.arange(19 * 36).repeat_interleave(3))
    # The three senders are the corners of one face, so they are different.
    senders = tables.to_grid.index.senders.index.view(-1, 3)
    assert (senders[:, 0] < senders[:, 1]).all() and (senders[:, 1] < senders[:, 2]).all()


def test_edge_features_are_a_rotated_difference() -> None:
    mesh = IcosahedralMesh.build(1)
    lat, lon = list_grid_coordinates(GRID)
    grid_G3 = to_unit_vectors(lat, lon)
    edges = connect_mesh_to_grid(grid_G3, mesh)
    features = compute_edge_features(edges, mesh.nodes_N3, lat, lon)
    lengths = np.linalg.norm(mesh.nodes_N3[edges[:, 0]] - grid_G3[edges[:, 1]], axis=1)
    assert features[:, 0].max() == 1.0
    np.testing.assert_allclose(features[:, 0], lengths / lengths.max(), atol=1e-14)
    for (sender, receiver), feature in list(zip(edges, features, strict=True))[::97]:
        # Turn the receiver to longitude 0, then to latitude 0.
        a, b = lon[receiver], lat[receiver]
        turn = np.array([[np.cos(a), np.sin(a), 0], [-np.sin(a), np.cos(a), 0], [0, 0, 1]])
        tilt = np.array([[np.cos(b), 0, np.sin(b)], [0, 1, 0], [-np.sin(b), 0, np.cos(b)]])
        np.testing.assert_allclose(tilt @ turn @ grid_G3[receiver], [1, 0, 0], atol=1e-14)
        difference = tilt @ turn @ (mesh.nodes_N3[sender] - grid_G3[receiver])
        np.testing.assert_allclose(feature[1:], difference / lengths.max(), atol=1e-14)


def test_edge_features_do_not_change_if_the_sphere_turns() -> None:
    mesh = IcosahedralMesh.build(2)
    lat, lon = find_mesh_coordinates(mesh.nodes_N3)
    edges = mesh.list_multimesh_edges()
    features = compute_edge_features(edges, to_unit_vectors(lat, lon), lat, lon)
    rotated_features = compute_edge_features(edges, to_unit_vectors(lat, lon + 0.7), lat, lon + 0.7)
    np.testing.assert_allclose(rotated_features, features, atol=1e-13)
    tilted_features = compute_edge_features(edges, to_unit_vectors(lat + 0.1, lon), lat, lon)
    assert np.abs(tilted_features - features).max() > 0.01


def test_local_axes_at_the_poles_follow_the_longitude() -> None:
    tables = build_constants(GRID, 2, None).tables
    features = tables.to_grid.features_E4.view(19, 36, 3, 4).double()
    assert features.isfinite().all()
    # All points of the row have the same distances. From column to column, the local axes turn 10 degrees eastward, so
    # the horizontal components turn back by 10 degrees.
    north_row = features[0]
    torch.testing.assert_close(north_row[..., 0], north_row[:1, :, 0].expand(36, 3), rtol=0, atol=1e-6)
    components = torch.complex(north_row[..., 2], north_row[..., 3])
    turn = torch.polar(torch.ones(36), torch.arange(36) * torch.pi / 18).to(components.dtype)
    expected = torch.stack([components[0] * turn[column].conj() for column in range(36)])
    torch.testing.assert_close(components, expected, rtol=0, atol=1e-6)
    assert (components[0] - components[9]).abs().max() > 0.1


def test_the_order_of_edges_has_no_effect() -> None:
    mesh = IcosahedralMesh.build(1)
    coordinates = find_mesh_coordinates(mesh.nodes_N3)
    edges_E2 = mesh.list_multimesh_edges()
    shuffled_E2 = np.random.default_rng(0).permutation(edges_E2)
    edges, shuffled = (build_edges(array, mesh.nodes_N3, coordinates) for array in (edges_E2, shuffled_E2))
    assert torch.equal(edges.features_E4, shuffled.features_E4)
    for selection, other in zip(edges.index, shuffled.index, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(selection, other, strict=True))


def test_constants_are_built_once_for_a_grid() -> None:
    same_grid = LatLonGrid.equiangular(19, 36, True)
    assert build_constants(GRID, 2, None) is build_constants(same_grid, 2, None)
    assert build_constants(GRID, 2, None) is not build_constants(GRID, 1, None)


def test_node_features_tell_the_hemispheres_apart() -> None:
    north, south = (compute_node_features(np.array([lat]), np.array([0.3])) for lat in (0.5, -0.5))
    assert not np.allclose(north, south)
