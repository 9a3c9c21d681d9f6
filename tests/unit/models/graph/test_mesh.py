"""The icosahedral mesh: counts in closed form, orientation, symmetry, and the face that contains a point."""

from __future__ import annotations

import numpy as np
import pytest

from credit.grid import LatLonGrid
from credit.models.graph.connections import list_grid_coordinates, to_unit_vectors
from credit.models.graph.mesh import IcosahedralMesh


def random_points(count: int) -> np.ndarray:
    points = np.random.default_rng(0).standard_normal((count, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def grid_points(rows: int, columns: int, poles: bool) -> np.ndarray:
    return to_unit_vectors(*list_grid_coordinates(LatLonGrid.equiangular(rows, columns, poles)))


@pytest.mark.parametrize("refinements", range(5))
def test_counts(refinements: int) -> None:
    mesh = IcosahedralMesh.build(refinements)
    edges = mesh.list_level_edges(refinements)
    num_nodes = 10 * 4**refinements + 2
    assert mesh.nodes_N3.shape == (num_nodes, 3)
    assert mesh.faces[-1].shape == (20 * 4**refinements, 3)
    assert edges.shape == (60 * 4**refinements, 2)
    # Each edge occurs once in each direction.
    pairs = set(map(tuple, edges.tolist()))
    assert len(pairs) == len(edges)
    assert {(b, a) for a, b in pairs} == pairs
    degrees = np.bincount(edges[:, 1], minlength=num_nodes)
    assert sorted(set(degrees)) == ([5] if refinements == 0 else [5, 6])
    assert (degrees == 5).sum() == 12
    multimesh = mesh.list_multimesh_edges()
    assert len(multimesh) == sum(60 * 4**level for level in range(refinements + 1))
    assert len(np.unique(multimesh, axis=0)) == len(multimesh)


def test_faces_are_convex_and_cover_the_sphere() -> None:
    mesh = IcosahedralMesh.build(3)
    np.testing.assert_allclose(np.linalg.norm(mesh.nodes_N3, axis=1), 1.0, atol=1e-14)
    a, b, c = (mesh.nodes_N3[mesh.faces[-1][:, corner]] for corner in range(3))
    volume = (a * np.cross(b, c)).sum(axis=1)
    assert volume.min() > 0
    # Area of a spherical triangle: Van Oosterom and Strackee 1983, doi:10.1109/TBME.1983.325207.
    denominator = 1 + (a * b).sum(1) + (b * c).sum(1) + (c * a).sum(1)
    assert 2 * np.arctan2(volume, denominator).sum() == pytest.approx(4 * np.pi, rel=1e-12)


def test_a_face_is_centred_on_each_pole() -> None:
    mesh = IcosahedralMesh.build(2)
    for faces in mesh.faces:
        centres = mesh.nodes_N3[faces].sum(axis=1)
        centres /= np.linalg.norm(centres, axis=1, keepdims=True)
        np.testing.assert_allclose(centres[centres[:, 2].argmax()], [0, 0, 1], atol=1e-14)
        np.testing.assert_allclose(centres[centres[:, 2].argmin()], [0, 0, -1], atol=1e-14)


def test_a_third_of_a_turn_maps_the_mesh_onto_itself() -> None:
    mesh = IcosahedralMesh.build(2)
    angle = 2 * np.pi / 3
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    distances = np.linalg.norm((mesh.nodes_N3 @ turn.T)[:, None] - mesh.nodes_N3, axis=2)
    image = distances.argmin(axis=1)
    assert distances.min(axis=1).max() < 1e-13
    edges = mesh.list_multimesh_edges()
    assert set(map(tuple, image[edges].tolist())) == set(map(tuple, edges.tolist()))


@pytest.mark.parametrize("refinements", [0, 1, 3])
@pytest.mark.parametrize(
    "points",
    [random_points(500), grid_points(19, 36, True), grid_points(32, 64, False)],
    ids=["random", "with poles", "without poles"],
)
def test_each_point_lies_in_its_face(points: np.ndarray, refinements: int) -> None:
    mesh = IcosahedralMesh.build(refinements)
    corners = mesh.nodes_N3[mesh.faces[-1][mesh.find_faces(points)]]
    weights = np.linalg.solve(corners.transpose(0, 2, 1), points[:, :, None])[:, :, 0]
    assert weights.min() >= -1e-12
    np.testing.assert_allclose((weights[:, :, None] * corners).sum(axis=1), points, atol=1e-14)
    assert weights.sum(axis=1).min() >= 1 - 1e-12


def test_no_other_face_contains_the_point() -> None:
    mesh = IcosahedralMesh.build(2)
    points = random_points(200)
    corners = mesh.nodes_N3[mesh.faces[-1]]
    normals = np.cross(corners, np.roll(corners, -1, axis=1))
    is_inside = (np.einsum("fij,pj->pfi", normals, points) > 0).all(axis=2)
    assert (is_inside.sum(axis=1) == 1).all()
    np.testing.assert_array_equal(is_inside.argmax(axis=1), mesh.find_faces(points))


def test_points_on_a_pole_lie_in_one_face() -> None:
    mesh = IcosahedralMesh.build(3)
    face = mesh.find_faces(grid_points(19, 36, True)).reshape(19, 36)
    assert (face[[0, -1]] == face[[0, -1], :1]).all()
    assert face[0, 0] != face[-1, 0]
