"""Levels of the U-Net: the rows and columns of each resolution, and the rows that padding copies beyond the poles."""

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
        pole_skip: number of rows at the (north, south) pole that padding must not copy beyond the pole.
    """

    shape: tuple[int, int]
    pole_skip: tuple[int, int]


def find_levels(grid: LatLonGrid, num_levels: int) -> list[Level]:
    """Return the levels of a grid, the finest level first.

    A level has the rows and columns 0, 2, 4, ... of the next finer level, so the first rows of all levels have the same
    latitude. If the finer level has an even number of rows, its last row is dropped.

    Args:
        grid: the grid of the finest level.
        num_levels: number of levels.
    """
    height, width = grid.shape
    # Distances of the outermost rows from the poles, in row spacings: 0 if the row is on the pole, 1/2 for the usual
    # grid without rows on the poles.
    north = (90.0 - grid.lat[0]) / (grid.lat[0] - grid.lat[1])
    south = (90.0 + grid.lat[-1]) / (grid.lat[-2] - grid.lat[-1])
    levels = []
    for _ in range(num_levels):
        levels.append(Level((height, width), (_find_pole_skip(north), _find_pole_skip(south))))
        north /= 2
        if height % 2 == 0:
            south += 1
        south /= 2
        height = (height + 1) // 2
        width //= 2
    return levels


def _find_pole_skip(distance: float) -> int:
    """Return the number of rows, 0 or 1, that padding must not copy beyond a pole.

    Padding copies rows at the opposite longitude. The rows of the grid have the distances d, 1 + d, ... from the pole.
    The first row beyond the pole has the distance 1 - d from the pole. So the copy is exact for d = 0 (skip 1: copy the
    row at 1 + d) and for d = 1/2 (skip 0: copy the row at d). For other d, padding copies the nearest row, and the
    outermost row if two rows are equally near.

    Args:
        distance: distance d of the outermost row from the pole, in row spacings.
    """
    return int(distance < 0.25 - _TOLERANCE)
