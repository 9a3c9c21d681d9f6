"""Times in which a CPU waits for collectives, and bytes that collectives send.

gloo runs each collective in a separate thread. The main thread waits for the collective in `Work.wait`, also in a
synchronous call, or in the operator `wait_tensor`. These waits are the exposed communication.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from credit.utils.profiling.phases import Phase, phase

# name of a dtype in torch's record of collectives -> bytes of a value
BYTES_PER_VALUE = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Short": 2,
    "Byte": 1, "Char": 1, "Bool": 1,
}  # fmt: skip


@contextmanager
def record_communication_waits() -> Iterator[None]:
    """Context manager that records each wait for a collective, in any thread, as a communication phase.

    torch has no hook for these waits, so its wait functions are replaced during the ``with`` block.
    """
    wait_tensor = torch.ops._c10d_functional.wait_tensor
    # Eager code calls the overload packet, and compiled graphs call the overload `default`.
    operators = (wait_tensor, wait_tensor.default)
    original_operations = [operator._op for operator in operators]
    original_wait = dist.Work.wait
    dist.Work.wait = _record_as_communication(original_wait)
    for operator, operation in zip(operators, original_operations, strict=True):
        operator._op = _record_as_communication(operation)
    try:
        yield
    finally:
        dist.Work.wait = original_wait
        for operator, operation in zip(operators, original_operations, strict=True):
            operator._op = operation


def _record_as_communication(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that calls `function` and records the call as a communication phase."""

    @functools.wraps(function)
    def wait(*args: Any, **kwargs: Any) -> Any:
        with phase(Phase.COMMUNICATION):
            return function(*args, **kwargs)

    return wait


def compute_sent_bytes(kind: str, input_bytes: float, output_bytes: float, ranks: int) -> float:
    """Return the minimum number of bytes that a rank has to send in a collective.

    Ring and pairwise algorithms send this number of bytes (Thakur et al. 2005, doi 10.1177/1094342005051521).

    Args:
        kind: name of the collective, such as ``all_reduce`` or ``allreduce``.
        input_bytes: bytes of the input of this rank.
        output_bytes: bytes of the output of this rank.
        ranks: number of ranks in the process group.
    """
    others = (ranks - 1) / ranks
    kind = kind.lower().replace("_", "")
    if kind.startswith("allreduce"):
        return 2 * others * input_bytes
    if "gather" in kind:
        return others * output_bytes
    if "scatter" in kind or kind.startswith("alltoall"):
        return others * input_bytes
    # The collective is a broadcast or a message from one rank to another.
    return input_bytes


def find_newest_collective() -> int:
    """Return the number of the newest collective in torch's record of CPU collectives; -1 if the record is empty."""
    return max((entry["record_id"] for entry in _read_collective_record()), default=-1)


def count_sent_bytes(newest_before: int) -> float | None:
    """Return the bytes that this rank has sent in CPU collectives; None if the record does not contain all of them.

    Args:
        newest_before: number of the last collective before the counted collectives, from `find_newest_collective`.
    """
    entries = [entry for entry in _read_collective_record() if entry["record_id"] > newest_before]
    oldest = min((entry["record_id"] for entry in entries), default=None)
    if oldest != newest_before + 1:
        # The record is disabled, or has dropped collectives: it keeps only the last TORCH_FR_BUFFER_SIZE collectives.
        return None
    group_sizes = _read_group_sizes()
    num_bytes = 0.0
    for entry in entries:
        ranks = group_sizes.get(entry["process_group"][0], dist.get_world_size())
        kind = entry["profiling_name"].split(":")[-1]
        input_bytes = _tensor_bytes(entry["input_sizes"], entry["input_dtypes"])
        output_bytes = _tensor_bytes(entry["output_sizes"], entry["output_dtypes"])
        num_bytes += compute_sent_bytes(kind, input_bytes, output_bytes, ranks)
    return num_bytes


def _read_collective_record() -> Iterable[Mapping[str, Any]]:
    """Return torch's record of the last collectives on the CPU; empty if there is no record."""
    # This function of torch is private. The bytes are unknown in releases without it or without a record of gloo.
    dump = getattr(_distributed_c10d, "_dump_fr_trace", None)
    if dump is None:
        return []
    return pickle.loads(dump()).get("entries", [])


def _read_group_sizes() -> dict[str, int]:
    """Return a dict: name of a process group -> number of its ranks."""
    return {group.group_name: group.size() for group in dist.distributed_c10d._world.pg_map}


def _tensor_bytes(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> float:
    """Return the total bytes of the input or output tensors of a collective.

    Args:
        sizes: shape of each tensor.
        dtypes: name of the dtype of each tensor in torch's record, see `BYTES_PER_VALUE`.
    """
    num_bytes = 0
    for shape, dtype in zip(sizes, dtypes, strict=True):
        num_bytes += math.prod(shape) * BYTES_PER_VALUE.get(dtype, 4)
    return num_bytes
