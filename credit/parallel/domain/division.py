"""Division of the cells of a field among the ranks of a domain group.

The ranks form M rows and N columns. Rank ``i * N + j`` has the i-th part of the latitude rows and the j-th part of the
longitude columns. This module needs neither torch nor a process group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from credit.errors import ConfigError


@dataclass(frozen=True)
class AxisDivision:
    """Division of the cells along one axis (rows or columns) into consecutive parts.

    The cells form windows of equal length, which are never cut. If there are more parts than windows, some parts have
    no cells. Layers need at least one cell, so the rank of an empty part computes a copy of a neighbour's cells, and
    its results are discarded. Only for empty parts, the ranges `owned` and `held` differ.

    Attributes:
        size: number of cells along the axis.
        owned: for each part, the cells that belong to it. Every cell belongs to exactly one part; a part may be empty.
        held: for each part, the cells that its rank stores and computes; never empty.
    """

    size: int
    owned: tuple[range, ...]
    held: tuple[range, ...]

    @property
    def largest_part(self) -> int:
        """Number of cells of the largest part."""
        return max(len(part) for part in self.held)


def divide_axis(size: int, num_parts: int, multiple: int = 1) -> AxisDivision:
    """Divide an axis into parts whose bounds are multiples of `multiple`, for example of the length of a window.

    All parts except the last have equal length, so that chunks of a store can be aligned with the parts. If the last
    part would then be empty, the lengths of the parts differ by at most one window instead. If there are more parts
    than windows, some parts are empty. The first part is the largest.

    Args:
        size: number of cells along the axis, a positive multiple of `multiple`.
        num_parts: number of parts.
        multiple: number of cells of a window; windows are never cut.
    """
    num_windows = size // multiple
    # `-(-a // b)` is a / b, rounded up.
    largest_part = -(-num_windows // num_parts)
    if (num_parts - 1) * largest_part < num_windows:
        bounds = [part * largest_part for part in range(num_parts)]
    else:
        bounds = [-(-part * num_windows // num_parts) for part in range(num_parts)]
    owned = []
    held = []
    for first_window, end_window in itertools.pairwise([*bounds, num_windows]):
        owned.append(range(first_window * multiple, end_window * multiple))
        # The rank of an empty part stores the window at the position of the part, or the last window.
        first_held = min(first_window, num_windows - 1)
        end_held = max(end_window, first_held + 1)
        held.append(range(first_held * multiple, end_held * multiple))
    return AxisDivision(size, tuple(owned), tuple(held))


@dataclass(frozen=True)
class FieldPart:
    """Rows and columns of a rank's part of a field.

    Attributes:
        rows: range of latitude rows.
        columns: range of longitude columns.
    """

    rows: range
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        """(number of rows, number of columns) of the part."""
        return len(self.rows), len(self.columns)

    @property
    def slices(self) -> tuple[slice, slice]:
        """Slices that select the part from the last two dimensions of a whole field."""
        return slice(self.rows.start, self.rows.stop), slice(self.columns.start, self.columns.stop)


@dataclass(frozen=True)
class FieldDivision:
    """Division of the cells of a field among the ranks of a domain group.

    Attributes:
        rows: division of the latitude rows into M parts.
        columns: division of the longitude columns into N parts.
    """

    rows: AxisDivision
    columns: AxisDivision

    @property
    def shape(self) -> tuple[int, int]:
        """(number of rows, number of columns) of the whole field."""
        return self.rows.size, self.columns.size

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the domain group, M x N."""
        return len(self.rows.owned) * len(self.columns.owned)

    def owned(self, rank: int) -> FieldPart:
        """Return the cells that belong to a rank; each cell belongs to exactly one rank."""
        i, j = self._find_position(rank)
        return FieldPart(self.rows.owned[i], self.columns.owned[j])

    def held(self, rank: int) -> FieldPart:
        """Return the cells that a rank stores and computes, see `AxisDivision`."""
        i, j = self._find_position(rank)
        return FieldPart(self.rows.held[i], self.columns.held[j])

    def owns_cells(self, rank: int) -> bool:
        """Return True if at least one cell belongs to a rank."""
        return min(self.owned(rank).shape) > 0

    def _find_position(self, rank: int) -> tuple[int, int]:
        """Return (i, j): the index of a rank's part of the rows, and the index of its part of the columns."""
        return divmod(rank, len(self.columns.owned))


def divide_field(shape: tuple[int, int], num_parts: tuple[int, int], multiple: int = 1) -> FieldDivision:
    """Divide a field into M x N parts whose bounds are multiples of `multiple`.

    Args:
        shape: (number of rows, number of columns) of the field; see `divide_axis`.
        num_parts: (M, N) numbers of parts of the rows and of the columns.
        multiple: number of rows and number of columns of a square window; windows are never cut.
    """
    rows = divide_axis(shape[0], num_parts[0], multiple)
    columns = divide_axis(shape[1], num_parts[1], multiple)
    return FieldDivision(rows, columns)


def require_enough_cells(grid: tuple[int, int], num_parts: tuple[int, int]) -> None:
    """Require that the grid has at least one row and one column for each part.

    Args:
        grid: (number of rows, number of columns) of the grid.
        num_parts: (M, N) numbers of parts of the rows and of the columns.

    Raises:
        ConfigError: if there are more parts than rows or columns; the message gives both numbers.
    """
    for axis, parts, size in zip(("lat", "lon"), num_parts, grid, strict=True):
        if parts > size:
            raise ConfigError(
                f"domain parallelism: {axis}: the {size} cells of the grid cannot be divided into {parts} parts; "
                f"choose at most {size}"
            )


def list_shapes(num_ranks: int) -> list[tuple[int, int]]:
    """Return all pairs (M, N) with M x N = `num_ranks`, sorted by M."""
    return [(rows, num_ranks // rows) for rows in range(1, num_ranks + 1) if num_ranks % rows == 0]


def imbalance(divisions: Iterable[FieldDivision], costs: Sequence[float]) -> float:
    """Return the time of the busiest rank divided by the mean time of the ranks, at least 1.

    Args:
        divisions: division of each stage of a network.
        costs: computing time of each whole stage, in any unit.
    """
    total = 0.0
    for division, cost in zip(divisions, costs, strict=True):
        height, width = division.shape
        largest_part = division.rows.largest_part * division.columns.largest_part
        total += cost * largest_part * division.num_ranks / (height * width)
    return total / sum(costs)
