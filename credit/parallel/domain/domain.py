"""Group of ranks that share the fields of a sample, and this rank's part of the grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from credit.parallel.domain.division import FieldDivision, FieldPart
from credit.parallel.domain.exchange import CellExchange, Cells, as_cells
from credit.parallel.tensor.collectives import AllReduceBothWays


def allows_divided_fields(cls: type) -> bool:
    """Return True if a class itself declares ``supports_domain = True``, so that it can compute on divided fields.

    The declaration is not inherited, because a subclass may change the computation.
    """
    return bool(vars(cls).get("supports_domain", False))


@dataclass(frozen=True)
class Domain:
    """Domain group of this rank, and the division of the grid among the ranks of the group.

    Attributes:
        group: ranks that share the grid, in the order of the parts.
        grid: division of the grid.
    """

    group: dist.ProcessGroup
    grid: FieldDivision

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the domain group."""
        return self.grid.num_ranks

    @property
    def part(self) -> FieldPart:
        """Rows and columns of this rank's part of the grid."""
        return self.grid.owned(dist.get_rank(self.group))

    def sum(self, x: Tensor) -> Tensor:
        """Collective: return the sum of a tensor over the ranks; the backward pass also sums the gradient."""
        return AllReduceBothWays.apply(self.group, x)

    def build_exchange(self, needed: Sequence[Cells]) -> CellExchange:
        """Build the exchange that sends each rank the cells that it needs, for example whole rows.

        Args:
            needed: cells that each rank needs.
        """
        parts = self._list_parts()
        return CellExchange(self.group, parts, parts, [[cells] for cells in needed])

    def build_return(self, owned: Sequence[Cells], held: Sequence[Cells]) -> CellExchange:
        """Build the inverse of `build_exchange`: an exchange that sends each rank the cells of its part.

        Args:
            owned: cells that each rank may send; every cell occurs exactly once.
            held: cells of each rank's input tensor, a superset of its `owned` cells.
        """
        return CellExchange(self.group, owned, held, [[cells] for cells in self._list_parts()])

    def build_gather(self) -> CellExchange:
        """Build the exchange that sends every rank all cells of the grid."""
        height, width = self.grid.shape
        return self.build_exchange([Cells(range(height), range(width))] * self.num_ranks)

    def _list_parts(self) -> list[Cells]:
        """Return the cells of the part of each rank, in the order of ranks."""
        return [as_cells(self.grid.owned(rank)) for rank in range(self.num_ranks)]
