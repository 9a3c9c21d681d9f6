"""Collectives of Python objects in which the failure of a single rank raises an error on all ranks.

Otherwise, the ranks without an error would wait in the next collective for the failed rank until the timeout.
"""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from credit.errors import CheckpointError, CreditError
from credit.parallel.groups.object_tree import RankTree

T = TypeVar("T")


class LostRanksError(CheckpointError):
    """Error of a collective during which another rank died, or did not respond before the timeout.

    Every later collective of the process group fails as well, because gloo closes the connections.
    """


@dataclass
class _Outcome(Generic[T]):
    """Result of a function on one or several ranks, or the error of the lowest rank on which it failed."""

    result: T | None = None
    error: CreditError | None = None

    def __getstate__(self) -> dict[str, T | CreditError | None]:
        # The cause of an error is not sent, because its class may not support pickling. Pickle omits the cause by
        # default, but a library such as `distributed` may change pickle so that it includes causes and tracebacks.
        error = copy.copy(self.error)
        if error is not None:
            error.__cause__ = error.__context__ = error.__traceback__ = None
        return {"result": self.result, "error": error}


def current_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return the rank of this process in `group` (None for all ranks of the run); 0 without a process group."""
    if not dist.is_initialized():
        return 0
    return dist.get_rank(group)


# Ranks that take part in a collective: a process group, a range of ranks of the run, or None for all ranks.
Ranks = dist.ProcessGroup | range | None


def run_on_all_ranks(function: Callable[[], T], group: Ranks = None) -> list[T]:
    """Collective: call `function` on every rank and return the results of all ranks, in the order of ranks.

    If neighbouring ranks have equal results, only one copy is sent and stored for them. If N ranks have different
    results, each rank receives all N results. Use `reduce_over_ranks` if a sum or a different summary is enough.

    Args:
        function: function without arguments that calls no collective; its result must be picklable.
        group: ranks that take part. Without an initialised process group, only this process takes part.

    Raises:
        CreditError: on every rank, if `function` failed on any rank. A rank on which `function` failed raises the error
            of this rank; the other ranks raise the error of the lowest failed rank. An error of a class other than
            CreditError is converted to a CheckpointError.
        LostRanksError: if another rank has died, or did not answer within the timeout of the group.
    """
    if not dist.is_initialized():
        return [_call_with_credit_errors(function)]

    def run_and_pickle() -> list[tuple[int, bytes]]:
        # A result that cannot be pickled must also raise an error on all ranks.
        return [(1, pickle.dumps(function()))]

    results: list[T] = []
    for count, pickled in reduce_over_ranks(run_and_pickle, _merge_equal_results, group):
        results += [pickle.loads(pickled)] * count
    return results


def reduce_over_ranks(function: Callable[[], T], combine: Callable[[T, T], T], group: Ranks = None) -> T:
    """Collective: call `function` on every rank, and return the combination of all results on every rank.

    With N ranks, a rank receives at most log2(N) messages. Each message contains the combined results of some ranks.

    Args:
        function: function without arguments that calls no collective; its result must be picklable.
        combine: associative function `combine(low, high)` of two results; `low` comes from lower ranks.
        group: ranks that take part. Without an initialised process group, only this process takes part.

    Raises:
        CreditError: on every rank, if `function` or `combine` failed on any rank; for the error see `run_on_all_ranks`.
        LostRanksError: if another rank has died, or did not answer within the timeout of the group.
    """
    if not dist.is_initialized():
        return _call_with_credit_errors(function)
    local_outcome = _capture_outcome(function)

    def join(low: _Outcome[T], high: _Outcome[T]) -> _Outcome[T]:
        # All ranks raise the same error: the error of the lowest failed rank.
        if low.error is not None or high.error is not None:
            return _Outcome(error=low.error or high.error)
        # An error of `combine` must end all ranks, not only this rank.
        return _capture_outcome(lambda: combine(low.result, high.result))

    # Errors are sent like results, so that a failed rank takes part in the collective as well.
    tree = RankTree.of_ranks(group)
    with _report_lost_ranks():
        outcome = tree.broadcast_object(tree.reduce(local_outcome, join))
    # The error of this rank has a traceback; errors that were received from other ranks have none.
    error = local_outcome.error or outcome.error
    if error is not None:
        raise error
    return outcome.result


def run_on_rank0(function: Callable[[], T]) -> T:
    """Collective: call `function` on rank 0 only and return its result on every rank.

    Use this function to read files. All ranks then have the same contents, and the file system is not slowed down by a
    thousand ranks that read at once. The result may be large, because each rank receives a single result. Rank 0 does
    not wait for the other ranks.

    Args:
        function: function without arguments that calls no collective; its result must be picklable.

    Raises:
        CreditError: on every rank, if `function` failed. An error of a class other than CreditError is converted to a
            CheckpointError. Without a process group, any error is raised unchanged.
    """
    if not dist.is_initialized():
        return function()
    tree = RankTree.of_ranks()
    local_outcome: _Outcome[bytes] = _Outcome()
    if tree.index == 0:
        # A result that cannot be pickled must raise an error on all ranks, so it is pickled before the broadcast.
        local_outcome = _capture_outcome(lambda: pickle.dumps(function()))
    with _report_lost_ranks():
        outcome = tree.broadcast_object(local_outcome)
    if outcome.error is not None:
        raise outcome.error
    return pickle.loads(outcome.result)


def gather_on_rank0(value: T) -> list[T] | None:
    """Collective: return the values of all ranks, in the order of ranks, on rank 0, and None on other ranks.

    Use this function for values that only rank 0 needs and that cannot be combined with `reduce_over_ranks`.

    Raises:
        LostRanksError: if another rank has died, or did not answer within the timeout of the group.
    """
    if not dist.is_initialized():
        return [value]
    tree = RankTree.of_ranks()
    with _report_lost_ranks():
        values = tree.reduce([value], operator.add)
    return values if tree.index == 0 else None


def _call_with_credit_errors(function: Callable[[], T]) -> T:
    """Return the result of a function; convert an error of a class other than CreditError to a CheckpointError."""
    try:
        return function()
    except CreditError:
        raise
    except Exception as error:
        # The messages of these two classes are written for users. For other errors, the message includes the class.
        message = str(error) if isinstance(error, OSError | SafetensorError) else repr(error)
        raise CheckpointError(message) from error


def _capture_outcome(function: Callable[[], T]) -> _Outcome[T]:
    """Return the outcome of a function: its result, or its error in a form that other ranks can unpickle."""
    try:
        return _Outcome(_call_with_credit_errors(function))
    except CreditError as error:
        try:
            pickle.loads(pickle.dumps(_Outcome(error=error)))
        except Exception:
            # The constructor of this class needs more than the message. The base class has the same exit code.
            bases = [base for base in type(error).__mro__ if base.__module__ == CreditError.__module__]
            portable_error = bases[0](str(error))
            portable_error.__cause__ = error
            return _Outcome(error=portable_error)
        return _Outcome(error=error)


def _merge_equal_results(low: list[tuple[int, bytes]], high: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Join the results of lower and of higher ranks; each entry is (number of ranks with this result, pickled result).

    If the last entry of `low` and the first entry of `high` have equal results, these entries are merged.
    """
    (last_count, last_result), (first_count, first_result) = low[-1], high[0]
    if last_result != first_result:
        return low + high
    return [*low[:-1], (last_count + first_count, last_result), *high[1:]]


@contextmanager
def _report_lost_ranks() -> Iterator[None]:
    """Context that converts a RuntimeError of a collective to a LostRanksError; torch raises it if a rank has died."""
    try:
        yield
    except RuntimeError as error:
        raise LostRanksError(f"the connection to another rank was lost: {error}") from error
