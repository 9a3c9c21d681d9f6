"""Tests of the buffer pool: memory is reused only if nothing refers to it."""

from __future__ import annotations

import pickle

from credit.data.samples.buffer_pool import BufferPool

SHAPE = (2, 3, 1, 16, 24)


def test_released_memory_is_reused() -> None:
    buffers = BufferPool()
    address = buffers.take(*SHAPE).data_ptr()
    assert [buffers.take(*SHAPE).data_ptr() for _ in range(3)] == [address] * 3
    other = buffers.take(*SHAPE)
    assert buffers.take(*SHAPE).data_ptr() != other.data_ptr() == address


def test_memory_with_views_or_arrays_is_not_reused() -> None:
    buffers = BufferPool()
    for build_reference in (
        lambda tensor: tensor[1, :, 0],
        lambda tensor: tensor.numpy()[0],
        lambda tensor: tensor.detach().flatten(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: (tensor.clone().requires_grad_() * tensor).sum().grad_fn,
    ):
        tensor = buffers.take(*SHAPE)
        address = tensor.data_ptr()
        reference = build_reference(tensor)
        del tensor
        assert buffers.take(*SHAPE).data_ptr() != address
        del reference
        # Two new tensors exist at the same time, so one of them must have the freed memory.
        new_tensors = [buffers.take(*SHAPE) for _ in range(2)]
        assert address in [new_tensor.data_ptr() for new_tensor in new_tensors]


def test_other_sizes_and_empty_tensors() -> None:
    buffers = BufferPool()
    first = buffers.take(4, 5)
    assert buffers.take(5, 4).shape == (5, 4)
    assert buffers.take(0, 5).shape == (0, 5)
    assert first.shape == (4, 5)
    assert pickle.loads(pickle.dumps(buffers)).take(4, 5).shape == (4, 5)
