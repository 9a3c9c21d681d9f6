"""Levels of the U-Net: the rows and columns of each resolution, and how its outermost rows lie to the poles."""

from __future__ import annotations

from dataclasses import dataclass

from credit.grid import LatLonGrid

# Tolerance of distances from a pole, in rows.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Level:
    """One resolution of the network.

    Attributes:
        shape: number of rows and columns.
        pole_skip: numbers of rows at the north pole and at the south pole that padding does not repeat beyond the pole.
    """

    shape: tuple[int, int]
    pole_skip: tuple[int, int]


def find_levels(grid: LatLonGrid, num_levels: int) -> list[Level]:
    """Return the levels of a grid, the finest level first.

    A level consists of the rows and columns 0, 2, 4, ... of the level before. So its first row keeps its latitude. Its
    last row does so if the number of rows before was odd; otherwise the last row is left out.

    Args:
        grid: the grid of the finest level.
        num_levels: number of levels.
    """
    height, width = grid.shape
    # Distances of the outermost rows from the poles, in distances between rows: 0 for a row on the pole, 1/2 for the
    # rows of a grid without rows on the poles.
    north = (90.0 - grid.lat[0]) / (grid.lat[0] - grid.lat[1])
    south = (90.0 + grid.lat[-1]) / (grid.lat[-2] - grid.lat[-1])
    levels = []
    for _ in range(num_levels):
        levels.append(Level((height, width), (_find_skip(north), _find_skip(south))))
        north /= 2
        if height % 2 == 0:
            south += 1
        south /= 2
        height = (height + 1) // 2
        width //= 2
    return levels


def _find_skip(distance: float) -> int:
    """Return the number of rows that padding must not repeat beyond a pole.

    The first row beyond the pole is a copy of the row at the opposite longitude whose latitude is nearest. With a
    distance d of the outermost row, the first row beyond the pole has the distance 1 - d on the other side. The rows of
    the grid have the distances d, 1 + d and so on. The copy is exact for d = 0 (skip 1) and d = 1/2 (skip 0); in
    between the nearest row is taken, and the outermost row if two are equally near.

    Args:
        distance: distance of the outermost row from the pole, in distances between rows.
    """
    return int(distance < 0.25 - _TOLERANCE)
