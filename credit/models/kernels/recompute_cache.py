"""Cache of selected results across activation-checkpoint recomputation.

A step of a rollout is computed again in the backward pass to save memory. Where the result of a module is small against
the work that it takes, and what the module keeps for its own gradients does not depend on the result, it is cheaper to
keep the result of the first pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import Tensor

Results = tuple[Tensor, ...]
_current_pass: ContextVar[_Pass | None] = ContextVar("current_pass", default=None)


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a first pass and of its recomputations, a ``context_fn`` of `torch.utils.checkpoint`."""
    cached_results: list[Results] = []
    first_pass = _Pass(cached_results, is_recomputation=False)
    recomputation = _Pass(cached_results, is_recomputation=True)
    return first_pass, recomputation


def cache_across_recompute(compute: Callable[[], Results]) -> Results:
    """Return the results of `compute`, or in a recomputation those of the first pass.

    To be called in the forward of autograd functions, in the same order in both passes. Where the compiler traces,
    everything is computed.
    """
    current_pass = None if torch.compiler.is_compiling() else _current_pass.get()
    if current_pass is None:
        return compute()
    return current_pass.next_results(compute)


class _Pass(AbstractContextManager):
    """Pass through the checkpointed function, while the context is entered.

    Args:
        cached_results: results of the first pass, in the order of calls.
        is_recomputation: False for the first pass, which fills the list.
    """

    def __init__(self, cached_results: list[Results], is_recomputation: bool) -> None:
        self._cached_results = cached_results
        self._is_recomputation = is_recomputation

    def __enter__(self) -> None:
        self._num_read = 0
        self._token = _current_pass.set(self)

    def __exit__(self, exception_type: type[BaseException] | None, *exception: object) -> None:
        _current_pass.reset(self._token)
        # torch ends a recomputation by an exception as soon as it has all that it needs.
        if exception_type is None and self._is_recomputation:
            assert self._num_read == len(self._cached_results), (self._num_read, len(self._cached_results))

    def next_results(self, compute: Callable[[], Results]) -> Results:
        """Return the results that come next, computed in the first pass and cached afterwards."""
        if not self._is_recomputation:
            results = compute()
            self._cached_results.append(_detach(results))
            return results
        self._num_read += 1
        return _detach(self._cached_results[self._num_read - 1])


def _detach(results: Results) -> Results:
    """Return the results as new tensors, because those that a function returns become nodes of a graph."""
    return tuple(result.detach() for result in results)
