"""Results that a recomputation takes from the first pass instead of computing them again.

A step of a rollout is computed again in the backward pass to save memory. Where a module's result is small against what
it takes to compute, and what it keeps does not depend on it, the result is worth keeping.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import Tensor

Results = tuple[Tensor, ...]
_under_way: ContextVar[_Pass | None] = ContextVar("pass", default=None)


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a first pass and of its recomputations, a ``context_fn`` of `torch.utils.checkpoint`."""
    kept: list[Results] = []
    return _Pass(kept, again=False), _Pass(kept, again=True)


def recall(compute: Callable[[], Results]) -> Results:
    """Return what `compute` returns, in a recomputation what it returned in the first pass.

    To be called in the forward of autograd functions, in the same order in both passes. Where the compiler traces, all
    is computed.
    """
    now = None if torch.compiler.is_compiling() else _under_way.get()
    return compute() if now is None else now.results_of(compute)


class _Pass(AbstractContextManager):
    """One pass, while it is entered.

    Args:
        kept: what has been computed in the first pass.
        again: whether this is a recomputation.
    """

    def __init__(self, kept: list[Results], again: bool) -> None:
        self._kept, self._again = kept, again

    def __enter__(self) -> None:
        self._taken = 0
        self._token = _under_way.set(self)

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        _under_way.reset(self._token)
        # torch ends a recomputation by an exception where it has all that it needs
        assert kind or not self._again or self._taken == len(self._kept), (self._taken, len(self._kept))

    def results_of(self, compute: Callable[[], Results]) -> Results:
        """Return the results that come next."""
        if not self._again:
            results = compute()
            self._kept.append(_apart(results))
            return results
        self._taken += 1
        return _apart(self._kept[self._taken - 1])


def _apart(results: Results) -> Results:
    """Return the results as other tensors; those that a function returns become part of a graph."""
    return tuple(result.detach() for result in results)
