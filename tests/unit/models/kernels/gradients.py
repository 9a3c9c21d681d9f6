"""Values, gradients and saved bytes of an operation, for comparing a kernel with its plain formulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def count_saved_bytes(compute: Callable[[], Tensor]) -> int:
    """Return the bytes of all storages that the graph of the result of `compute` saves for its backward pass."""
    storages: dict[int, torch.UntypedStorage] = {}

    def record_storage(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record_storage, lambda tensor: tensor):
        compute()
    return sum(storage.nbytes() for storage in storages.values())


def collect_gradients(result: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return `result` and the gradients of a weighted sum of it."""
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    return [result, *torch.autograd.grad((result.float() * weights).sum(), inputs)]


def bfloat16_autocast(enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    """Require that the norm of each difference is less than `tolerance` times the norm of the expected tensor."""
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        assert actual_tensor.dtype == expected_tensor.dtype
        assert (actual_tensor - expected_tensor).norm() < tolerance * expected_tensor.norm()
