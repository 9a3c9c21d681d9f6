"""Part of the fields in a zarr store that a rank writes under domain parallelism.

Two ranks must not write to the same chunk, so no chunk may contain cells of two ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from credit.errors import ConfigError
from credit.parallel.domain.division import AxisDivision, FieldDivision, FieldPart

# Largest number of chunks per part along an axis in a new store. Many small chunks are slow to write and to read.
_MAX_CHUNKS_PER_PART = 16


@dataclass(frozen=True)
class StorePart:
    """Part of the fields that this rank writes to a zarr store under domain parallelism.

    Attributes:
        division: division of the fields among the ranks.
        rank: index of this rank among the ranks that share the fields.
    """

    division: FieldDivision
    rank: int

    @property
    def part(self) -> FieldPart:
        """Rows and columns that this rank writes."""
        return self.division.owned(self.rank)

    @property
    def is_first(self) -> bool:
        """True for the rank that also writes the values that describe the whole forecast, such as checksums."""
        return self.rank == 0

    def choose_chunks(self) -> tuple[int, int]:
        """Return the number of rows and the number of columns of a chunk for a new store.

        The size is the largest with which the part of every rank consists of whole chunks. If all parts have the same
        size, each part is one chunk.

        Raises:
            ConfigError: if there would be too many chunks, because the bounds of the parts have no large common
                divisor.
        """
        chunks = []
        for axis in (self.division.rows, self.division.columns):
            length = math.gcd(*_list_inner_bounds(axis)) or axis.size
            if math.ceil(axis.size / length) > _MAX_CHUNKS_PER_PART * len(axis.owned):
                sizes = ", ".join(str(len(part)) for part in axis.owned)
                raise ConfigError(
                    f"inference.format: zarr: inference.parallelism.domain divides the {axis.size} cells of an axis "
                    f"into parts of {sizes}, which need chunks of {length}; chunks of this size are slow to read; set "
                    "format to netcdf, or domain to other numbers of parts ({lat: M, lon: N})"
                )
            chunks.append(length)
        return chunks[0], chunks[1]

    def require_aligned(self, chunks: Sequence[int], path: object) -> None:
        """Raise ConfigError if a chunk of an existing store contains cells of two ranks.

        Args:
            chunks: number of rows and number of columns of a chunk of the store.
            path: path of the store, for the message.

        Raises:
            ConfigError: if a chunk contains cells of two ranks; the message gives the chunks and a remedy.
        """
        for axis, length in zip((self.division.rows, self.division.columns), chunks, strict=True):
            if any(bound % length for bound in _list_inner_bounds(axis)):
                raise ConfigError(
                    f"{path}: has chunks of {chunks[0]} rows x {chunks[1]} columns, which contain cells of several "
                    f"ranks of inference.parallelism.domain ({self.division.num_ranks}); set domain to 1 or to the "
                    "value of the run that created the store, choose another inference.folder, or remove the store"
                )

    def find_chunks(self, chunks: Sequence[int]) -> list[tuple[int, int]]:
        """Return the index (along rows, along columns) of each chunk that this rank writes.

        Args:
            chunks: number of rows and number of columns of a chunk of the store.
        """
        indices = []
        for cells, length in zip((self.part.rows, self.part.columns), chunks, strict=True):
            indices.append(range(cells.start // length, math.ceil(cells.stop / length)))
        return list(itertools.product(*indices))


def _list_inner_bounds(axis: AxisDivision) -> list[int]:
    """Return the bounds between the parts of an axis: the first cell of each part after the first part."""
    return [part.start for part in axis.owned[1:]]
