"""Icosahedral mesh: an icosahedron whose triangles are repeatedly divided into four (GraphCast, arXiv 2212.12794).

All computations are in float64. Shape suffixes: N nodes, F faces, P points; a trailing 3 is either the coordinates of a
vector or the corners of a face.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Angle between neighbouring vertices of an icosahedron, in degrees: atan(2).
ICOSAHEDRON_EDGE_DEGREES = float(np.rad2deg(np.arctan(2.0)))
# Number of points per chunk of the face search, which limits the memory of the search.
_CHUNK = 2**16
# A point is on the edge between two faces if the smallest barycentric weights of both faces differ by less than this.
_TIE_TOLERANCE = 5e-13


@dataclass(frozen=True, eq=False)
class IcosahedralMesh:
    """Nodes on the unit sphere, and the triangles of each level of refinement.

    The nodes of level l are the first 10 * 4^l + 2 nodes of the finest level. The children of face f are the faces
    4f, ..., 4f + 3 of the next level.

    Attributes:
        nodes_N3: (N, 3) unit vectors of the nodes of the finest level. The north pole is (0, 0, 1), and longitude 0 is
            in the direction of (1, 0, 0).
        faces: for each level (F, 3) indices of the corners, counter-clockwise seen from outside, F = 20 * 4^l.
    """

    nodes_N3: np.ndarray
    faces: tuple[np.ndarray, ...]

    @classmethod
    def build(cls, refinements: int) -> IcosahedralMesh:
        """Return an icosahedral mesh that is refined `refinements` times."""
        nodes_N3, faces_F3 = build_icosahedron()
        levels = [faces_F3]
        for _ in range(refinements):
            nodes_N3, faces_F3 = _refine(nodes_N3, faces_F3)
            levels.append(faces_F3)
        return cls(nodes_N3, tuple(levels))

    def list_level_edges(self, level: int) -> np.ndarray:
        """Return the directed edges (E, 2) of a level as (sender, receiver), E = 60 * 4^level."""
        a, b, c = self.faces[level].T
        # Each edge belongs to two faces, and the two faces have it in opposite directions.
        return np.concatenate([np.stack(pair, axis=1) for pair in ((a, b), (b, c), (c, a))])

    def list_multimesh_edges(self) -> np.ndarray:
        """Return the directed edges (E, 2) of all levels as (sender, receiver); no edge belongs to two levels."""
        return np.concatenate([self.list_level_edges(level) for level in range(len(self.faces))])

    def compute_longest_edge(self) -> float:
        """Return the length of the longest edge of the finest level, as a chord of the unit sphere."""
        senders, receivers = self.list_level_edges(len(self.faces) - 1).T
        return float(np.linalg.norm(self.nodes_N3[senders] - self.nodes_N3[receivers], axis=1).max())

    def find_faces(self, points_P3: np.ndarray) -> np.ndarray:
        """Return the indices (P,) of the faces of the finest level that contain the points.

        The search proceeds from the coarsest level to the finest, because the four children of a spherical triangle
        cover it exactly. For a point on the edge between two faces, the face with the lower index is chosen, so
        rounding has no effect.

        Args:
            points_P3: unit vectors.
        """
        inverses = [compute_barycentric_matrices(self.nodes_N3, faces_F3) for faces_F3 in self.faces]
        chunks = []
        for start in range(0, len(points_P3), _CHUNK):
            chunk_P3 = points_P3[start : start + _CHUNK]
            face_P = np.zeros(len(chunk_P3), dtype=np.int64)
            for level, inverse_F33 in enumerate(inverses):
                # Candidates are all faces of the icosahedron, or the four children of the face in the previous level.
                num_candidates = 4 if level else 20
                candidates = num_candidates * face_P[:, None] + np.arange(num_candidates)
                weights = np.einsum("pfij,pj->pfi", inverse_F33[candidates], chunk_P3)
                # The smallest weight is negative if the point is outside of the face.
                smallest = weights.min(axis=2)
                is_best = smallest >= smallest.max(axis=1, keepdims=True) - _TIE_TOLERANCE
                face_P = np.take_along_axis(candidates, is_best.argmax(axis=1)[:, None], axis=1)[:, 0]
            chunks.append(face_P)
        return np.concatenate(chunks)


def compute_barycentric_matrices(nodes_N3: np.ndarray, faces_F3: np.ndarray) -> np.ndarray:
    """Return a matrix for each face, (F, 3, 3), that maps a point to its barycentric weights for the three corners.

    The sum of the corners, each multiplied by its weight, is the point. The point is inside the spherical triangle if
    and only if all weights are at least 0.

    Args:
        nodes_N3: unit vectors of the nodes.
        faces_F3: indices of the corners.
    """
    # The corners are the columns of a matrix that maps weights to points.
    return np.linalg.inv(nodes_N3[faces_F3].transpose(0, 2, 1))


def build_icosahedron() -> tuple[np.ndarray, np.ndarray]:
    """Return the vertices (12, 3) and faces (20, 3) of an icosahedron that has a face at each pole.

    The icosahedron has the same orientation as in GraphCast. If a vertex were at a pole, this node would have edges to
    many more grid points than other nodes. The mesh is symmetric about the plane y = 0.
    """
    golden_ratio = (1.0 + np.sqrt(5.0)) / 2.0
    # The cyclic permutations of (0, +-1, +-golden_ratio).
    vertices = []
    for sign in (1.0, -1.0):
        for other_sign in (1.0, -1.0):
            vertices.append((0.0, sign, other_sign * golden_ratio))
            vertices.append((sign, other_sign * golden_ratio, 0.0))
            vertices.append((other_sign * golden_ratio, 0.0, sign))
    nodes_N3 = np.array(vertices) / np.hypot(1.0, golden_ratio)
    # The scalar product of two vertices is 1 / sqrt(5) if they are neighbours, and smaller otherwise. A face is a set
    # of three vertices that are all neighbours of each other.
    is_edge = np.abs(nodes_N3 @ nodes_N3.T - 1.0 / np.sqrt(5.0)) < 1e-6
    a, b, c = np.nonzero(is_edge[:, :, None] & is_edge[None, :, :] & is_edge[:, None, :])
    is_ordered = (a < b) & (b < c)
    faces_F3 = np.stack([a, b, c], axis=1)[is_ordered]
    # Swap two corners of the faces that are clockwise seen from outside.
    is_clockwise = np.linalg.det(nodes_N3[faces_F3]) < 0
    faces_F3[is_clockwise] = faces_F3[is_clockwise][:, [0, 2, 1]]
    # One face has its centre in the direction (1 / golden_ratio^2, 0, 1). Rotate it around the y axis to the pole.
    angle = np.arctan(1.0 / golden_ratio**2)
    rotation = np.array([[np.cos(angle), 0.0, -np.sin(angle)], [0.0, 1.0, 0.0], [np.sin(angle), 0.0, np.cos(angle)]])
    return nodes_N3 @ rotation.T, faces_F3


def _refine(nodes_N3: np.ndarray, faces_F3: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes and faces of the next level: each face is divided into four at the midpoints of its edges."""
    edges_F32 = np.sort(np.stack([faces_F3, np.roll(faces_F3, -1, axis=1)], axis=2), axis=2)
    # Two faces share each edge. Remove duplicates, so that each edge gets a single midpoint.
    unique_edges, edge_index = np.unique(edges_F32.reshape(-1, 2), axis=0, return_inverse=True)
    midpoints = nodes_N3[unique_edges].sum(axis=1)
    midpoints /= np.linalg.norm(midpoints, axis=1, keepdims=True)
    a, b, c = faces_F3.T
    ab, bc, ca = len(nodes_N3) + edge_index.reshape(-1, 3).T
    # Three children are at the corners and one is in the middle; all have the orientation of their parent.
    children = [(a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca)]
    children_F43 = np.stack([np.stack(child, axis=1) for child in children], axis=1)
    return np.concatenate([nodes_N3, midpoints]), children_F43.reshape(-1, 3)
