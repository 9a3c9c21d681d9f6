"""Division of a parameter into shards by FSDP2, in a time that does not depend on the number of shards.

torch creates the shards of all ranks, but uses only two of them. With thousands of ranks and hundreds of parameters,
this took most of the start time of a run (benchmarks/lab_notes.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param


class LazyChunks:
    """Lazy sequence of the chunks of a tensor: a chunk is created when it is accessed.

    The chunks are those of `torch.chunk`, followed by empty tensors.

    Args:
        tensor: tensor to divide.
        num_chunks: number of chunks, including empty chunks.
        dim: tensor dimension to divide.
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._num_chunks = num_chunks
        self._dim = dim
        self._length = math.ceil(tensor.size(dim) / num_chunks)

    def __len__(self) -> int:
        return self._num_chunks

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._num_chunks:
            # This error ends a Python loop over the chunks.
            raise IndexError(f"chunk {index} of {self._num_chunks}")
        size = self._tensor.size(self._dim)
        start = index * self._length
        if start >= size > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, size - start))


@contextmanager
def shard_lazily() -> Iterator[None]:
    """Context in which ``fully_shard`` creates only the shards that this rank needs."""
    # FSDP2 has no option for a different function, but it looks up this function in its module.
    torch_function = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = LazyChunks
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = torch_function
