"""Chunks that are created one by one equal those of torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param

from credit.parallel.blocks.lazy_chunks import LazyChunks, shard_lazily


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7, 8, 11])
@pytest.mark.parametrize(("shape", "dim"), [((7,), 0), ((8, 3), 0), ((1, 2), 0), ((2, 6), 1), ((0, 2), 0)])
def test_equal_to_the_chunks_of_torch(shape: tuple[int, ...], dim: int, num_chunks: int) -> None:
    tensor = torch.rand(shape)
    expected = _fsdp_param._chunk_with_empty(tensor, num_chunks, dim=dim)
    chunks = LazyChunks(tensor, num_chunks, dim=dim)
    assert len(chunks) == len(expected)
    # A loop over the chunks must end.
    for chunk, expected_chunk in itertools.zip_longest(itertools.islice(chunks, 100), expected):
        assert chunk.shape == expected_chunk.shape and torch.equal(chunk, expected_chunk)


def test_torch_is_patched_only_inside_the_context() -> None:
    torch_function = _fsdp_param._chunk_with_empty
    with shard_lazily():
        assert _fsdp_param._chunk_with_empty is LazyChunks
    assert _fsdp_param._chunk_with_empty is torch_function
