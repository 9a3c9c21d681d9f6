"""Memory is given again only when nothing shares it any more."""

from __future__ import annotations

import pickle

from credit.data.samples.buffer_pool import BufferPool

SHAPE = (2, 3, 1, 16, 24)


def test_what_is_gone_is_used_again() -> None:
    buffers = BufferPool()
    address = buffers.take(*SHAPE).data_ptr()
    assert [buffers.take(*SHAPE).data_ptr() for _ in range(3)] == [address] * 3
    other = buffers.take(*SHAPE)
    assert buffers.take(*SHAPE).data_ptr() != other.data_ptr() == address


def test_views_and_arrays_hold_it() -> None:
    buffers = BufferPool()
    for hold in (
        lambda tensor: tensor[1, :, 0],
        lambda tensor: tensor.numpy()[0],
        lambda tensor: tensor.detach().flatten(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: (tensor.clone().requires_grad_() * tensor).sum().grad_fn,
    ):
        tensor = buffers.take(*SHAPE)
        address = tensor.data_ptr()
        reference = hold(tensor)
        del tensor
        assert buffers.take(*SHAPE).data_ptr() != address
        del reference
        # Both new tensors are held at once, so one of them must be the freed memory.
        new_tensors = [buffers.take(*SHAPE) for _ in range(2)]
        assert address in [new_tensor.data_ptr() for new_tensor in new_tensors]


def test_other_sizes_and_none() -> None:
    buffers = BufferPool()
    first = buffers.take(4, 5)
    assert buffers.take(5, 4).shape == (5, 4)
    assert buffers.take(0, 5).shape == (0, 5)
    assert first.shape == (4, 5)
    assert pickle.loads(pickle.dumps(buffers)).take(4, 5).shape == (4, 5)
