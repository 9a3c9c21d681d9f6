"""Cache of selected results across activation-checkpoint recomputation.

Activation checkpointing saves memory: it computes a step of a rollout again in the backward pass. The result of a
module is worth caching under two conditions: it is expensive to compute but small, and the module's backward pass does
not need tensors that depend on it.
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
    """Return one context for the first pass and one for its recomputations.

    Pass this function to `torch.utils.checkpoint.checkpoint` as ``context_fn``.
    """
    # The list belongs to one checkpointed call, so calls that overlap in time do not mix their results.
    cached_results: list[Results] = []
    first_pass = _Pass(cached_results, is_recomputation=False)
    recomputation = _Pass(cached_results, is_recomputation=True)
    return first_pass, recomputation


def cache_across_recompute(compute: Callable[[], Results]) -> Results:
    """Return the results of `compute`; in a recomputation, return the cached results of the first pass instead.

    Call this function in the forward method of an autograd function, in the same order in both passes. Nothing is
    cached while torch.compile traces, or outside of the contexts of `recompute_contexts`.
    """
    current_pass = None if torch.compiler.is_compiling() else _current_pass.get()
    if current_pass is None:
        return compute()
    return current_pass.next_results(compute)


class _Pass(AbstractContextManager):
    """Context of one pass through a checkpointed function.

    Args:
        cached_results: results of the first pass, in the order of calls; both passes share this list.
        is_recomputation: False for the first pass, which fills the list; True for a recomputation, which reads it.
    """

    def __init__(self, cached_results: list[Results], is_recomputation: bool) -> None:
        self._cached_results = cached_results
        self._is_recomputation = is_recomputation

    def __enter__(self) -> None:
        self._num_read = 0
        self._token = _current_pass.set(self)

    def __exit__(self, exception_type: type[BaseException] | None, *exception: object) -> None:
        _current_pass.reset(self._token)
        # A complete recomputation has as many calls as the first pass. torch may end a recomputation earlier by an
        # exception, as soon as it has all tensors that it needs.
        if exception_type is None and self._is_recomputation:
            assert self._num_read == len(self._cached_results), (self._num_read, len(self._cached_results))

    def next_results(self, compute: Callable[[], Results]) -> Results:
        """Call `compute` and cache its results in the first pass; return the cached results in a recomputation."""
        if not self._is_recomputation:
            results = compute()
            self._cached_results.append(_detach(results))
            return results
        self._num_read += 1
        return _detach(self._cached_results[self._num_read - 1])


def _detach(results: Results) -> Results:
    """Return the results as new tensors without a graph.

    Autograd adds the tensors that an autograd function returns to its graph, so a cached tensor must not be returned.
    """
    return tuple(result.detach() for result in results)
