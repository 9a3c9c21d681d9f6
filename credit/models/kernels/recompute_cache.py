"""Cache of selected results across activation-checkpoint recomputation.

Activation checkpointing computes a step of a rollout again in the backward pass, to save memory. If the result of a
module takes much work but little memory, and the tensors that the module saves for its backward pass do not depend on
the result, it is cheaper to keep the result of the first pass than to compute it again.
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
    """Return one context for a first pass and one for its recomputations, as `torch.utils.checkpoint` wants them.

    The function is passed as ``context_fn``.
    """
    # The list belongs to one checkpointed call, so calls that overlap in time do not mix their results.
    cached_results: list[Results] = []
    first_pass = _Pass(cached_results, is_recomputation=False)
    recomputation = _Pass(cached_results, is_recomputation=True)
    return first_pass, recomputation


def cache_across_recompute(compute: Callable[[], Results]) -> Results:
    """Return the results of `compute`, or in a recomputation those of the first pass.

    Call it in the forward of an autograd function. The order of the calls must be the same in both passes. While
    torch.compile traces, and outside of the contexts of `recompute_contexts`, `compute` is always called.
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
        # A recomputation that runs to its end must have made as many calls as the first pass.
        # torch ends a recomputation by an exception as soon as it has all that it needs.
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
    """Return the results as new tensors, because autograd adds the tensors that a function returns to its graph."""
    return tuple(result.detach() for result in results)
