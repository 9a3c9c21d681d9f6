"""Kind and size of a collective of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

# Prefix of an operator's name -> kind of collective. The names differ between releases of torch.
_COLLECTIVES = {"allgather": "all-gather", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
                "allreduce": "all-reduce", "all_reduce": "all-reduce", "broadcast": "broadcast",
                "alltoall": "all-to-all", "all_to_all": "all-to-all"}  # fmt: skip


class Collective(NamedTuple):
    """Kind and size of a collective, and the ranks that take part in it.

    Attributes:
        kind: all-gather, reduce-scatter, all-reduce, broadcast or all-to-all.
        ranks: number of ranks that take part.
        bytes: bytes of the result on each rank.
        stride: difference between the numbers of consecutive ranks that take part. Ranks with consecutive numbers are
            on the same node.
        is_blocking: True if the kernels wait for the collective, False if kernels run at the same time.
    """

    kind: str
    ranks: int
    bytes: int
    stride: int = 1
    is_blocking: bool = True


def read_collective(func: Any, arguments: Sequence[Any], result: Any) -> tuple[str, int] | None:
    """Return the kind of a collective and the bytes of its result; None if the operator is not a collective.

    Args:
        func: operator of torch.
        arguments: positional arguments of the call.
        result: return value of the call.
    """
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    operator_name = func._schema.name.split("::")[1].strip("_")
    for beginning, kind in _COLLECTIVES.items():
        if operator_name.startswith(beginning):
            # An all-to-all returns nothing and writes into its first argument.
            outputs = arguments[0] if kind == "all-to-all" else result
            tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            return kind, sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return None
