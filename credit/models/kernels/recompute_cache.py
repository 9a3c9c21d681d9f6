"""Cache for selected results of a forward pass that activation checkpointing computes again.

Activation checkpointing saves memory by computing a step of a rollout again in the backward pass. Caching the result of
a module saves time if two conditions are satisfied: the result is small but expensive to compute, and the backward pass
of the module does not need tensors that depend on the result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import Tensor

Results = tuple[Tensor, ...]
_current_pass: ContextVar[_CheckpointedPass | None] = ContextVar("current_pass", default=None)


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return two contexts: one for the first pass, and one for the recomputations of this pass.

    Pass this function to `torch.utils.checkpoint.checkpoint` as ``context_fn``.
    """
    # Each checkpointed call has a separate list, so calls that overlap in time do not mix their results.
    cached_results: list[Results] = []
    first_pass = _CheckpointedPass(cached_results, is_recomputation=False)
    recomputation = _CheckpointedPass(cached_results, is_recomputation=True)
    return first_pass, recomputation


def cache_across_recompute(compute: Callable[[], Results]) -> Results:
    """Return the results of `compute`; in a recomputation, return the cached results of the first pass instead.

    Call this function in the forward method of an autograd function. The order of calls must be the same in both
    passes. The function does not cache results while torch.compile traces, or outside of the contexts of
    `recompute_contexts`.
    """
    current_pass = None if torch.compiler.is_compiling() else _current_pass.get()
    if current_pass is None:
        return compute()
    return current_pass.next_results(compute)


class _CheckpointedPass(AbstractContextManager):
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
        # A complete recomputation has as many calls as the first pass. torch may end a recomputation earlier with an
        # exception, when it has all tensors that it needs.
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
    """Return the results as new tensors that do not belong to an autograd graph.

    Autograd adds every tensor that an autograd function returns to a graph. The function must therefore not return the
    cached tensors themselves.
    """
    return tuple(result.detach() for result in results)
