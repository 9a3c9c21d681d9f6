"""Collectives of Python objects in which a failure of one rank is raised on all ranks.

Otherwise the ranks without an error would wait for the failed rank in the next collective, until they time out.
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
    """Error of a collective that another rank has left or not reached in time.

    Every later collective of the process group fails as well, because gloo closes the connections.
    """


@dataclass
class _Outcome(Generic[T]):
    """Result of a function on one or several ranks, or the error of the lowest rank on which it failed."""

    result: T | None = None
    error: CreditError | None = None

    def __getstate__(self) -> dict[str, T | CreditError | None]:
        # The cause of an error stays on its rank, because it may be of a class that cannot be pickled. Pickle leaves it
        # out, unless a library such as `distributed` has taught it to include causes and tracebacks.
        error = copy.copy(self.error)
        if error is not None:
            error.__cause__ = error.__context__ = error.__traceback__ = None
        return {"result": self.result, "error": error}


def current_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return the rank of this process in `group` (None for all ranks of the run); 0 without a process group."""
    if not dist.is_initialized():
        return 0
    return dist.get_rank(group)


# Ranks that take part in a collective: those of a process group, neighbouring ranks of the run, or (None) all ranks.
Ranks = dist.ProcessGroup | range | None


def run_on_all_ranks(function: Callable[[], T], group: Ranks = None) -> list[T]:
    """Collective: call `function` on every rank and return the results of all ranks, in the order of ranks.

    Neighbouring ranks with equal results share one copy of it, on the way and in the list. If N ranks have different
    results, each rank receives all of them: use `reduce_over_ranks` where a sum or another summary is enough.

    Args:
        function: function without arguments that calls no collective; its result must be picklable.
        group: ranks that take part. Without a process group this process is the only one.

    Raises:
        CreditError: on every rank, if `function` failed on any rank. A rank on which it failed raises its own error,
            the other ranks raise the error of the lowest rank that failed. An error that is no CreditError becomes a
            CheckpointError.
        LostRanksError: if another rank has died, or did not answer within the timeout of the group.
    """
    if not dist.is_initialized():
        return [_call(function)]

    def run_and_pickle() -> list[tuple[int, bytes]]:
        # A result that cannot be pickled must be an error of all ranks, too.
        return [(1, pickle.dumps(function()))]

    results: list[T] = []
    for count, pickled in reduce_over_ranks(run_and_pickle, _join_runs, group):
        results += [pickle.loads(pickled)] * count
    return results


def reduce_over_ranks(function: Callable[[], T], combine: Callable[[T, T], T], group: Ranks = None) -> T:
    """Collective: call `function` on every rank, and return the combination of all results on every rank.

    No rank receives more than log2(N) messages, each as large as the combination of some ranks' results.

    Args:
        function: see `run_on_all_ranks`.
        combine: associative function of two results, of which the first is that of lower ranks.
        group: see `run_on_all_ranks`.

    Raises:
        CreditError: on every rank, see `run_on_all_ranks`; also if `combine` failed.
        LostRanksError: if another rank has died, or did not answer within the timeout of the group.
    """
    if not dist.is_initialized():
        return _call(function)
    local_outcome = _run(function)

    def join(low: _Outcome[T], high: _Outcome[T]) -> _Outcome[T]:
        # One error is enough for all ranks: that of the lowest rank that failed.
        if low.error is not None or high.error is not None:
            return _Outcome(error=low.error or high.error)
        # An error of `combine` must not end this rank alone.
        return _run(lambda: combine(low.result, high.result))

    # Errors travel with the results, so that every rank takes part in the collective whether it failed or not.
    tree = RankTree.of_ranks(group)
    with _report_lost_ranks():
        outcome = tree.share(tree.reduce(local_outcome, join))
    # The error of this rank has a traceback, those of other ranks have lost theirs.
    error = local_outcome.error or outcome.error
    if error is not None:
        raise error
    return outcome.result


def run_on_rank0(function: Callable[[], T]) -> T:
    """Collective: call `function` on rank 0 only and return its result on every rank.

    Use this function to read files. Then all ranks agree on the contents, and the file system is not slowed down by a
    thousand ranks that read at once. The result may be large, because each rank receives only this one. Rank 0 does not
    wait for the other ranks.

    Args:
        function: function without arguments that calls no collective; its result must be picklable.

    Raises:
        CreditError: on every rank, if `function` failed; an error that is no CreditError becomes a CheckpointError.
            Without a process group any error is raised as it is.
    """
    if not dist.is_initialized():
        return function()
    tree = RankTree.of_ranks()
    local_outcome: _Outcome[bytes] = _Outcome()
    if tree.index == 0:
        # A result that cannot be pickled must be an error of all ranks, so it is pickled before the broadcast.
        local_outcome = _run(lambda: pickle.dumps(function()))
    with _report_lost_ranks():
        outcome = tree.share(local_outcome)
    if outcome.error is not None:
        raise outcome.error
    return pickle.loads(outcome.result)


def gather_on_rank0(value: T) -> list[T] | None:
    """Collective: return the values of all ranks, in the order of ranks, on rank 0, and None on other ranks.

    Use it for values that only rank 0 needs and that cannot be summarised on the way.

    Raises:
        LostRanksError: if another rank has died, or did not answer within the timeout of the group.
    """
    if not dist.is_initialized():
        return [value]
    tree = RankTree.of_ranks()
    with _report_lost_ranks():
        values = tree.reduce([value], operator.add)
    return values if tree.index == 0 else None


def _call(function: Callable[[], T]) -> T:
    """Return the result of a function; an error that is no CreditError becomes a CheckpointError."""
    try:
        return function()
    except CreditError:
        raise
    except Exception as error:
        # The texts of these two kinds are written for users; of others the kind belongs into the message.
        message = str(error) if isinstance(error, OSError | SafetensorError) else repr(error)
        raise CheckpointError(message) from error


def _run(function: Callable[[], T]) -> _Outcome[T]:
    """Return the result of a function, or its error as one that other ranks can unpickle."""
    try:
        return _Outcome(_call(function))
    except CreditError as error:
        try:
            pickle.loads(pickle.dumps(_Outcome(error=error)))
        except Exception:
            # A class whose constructor takes more than the message. Its base keeps the kind and the exit code.
            bases = [base for base in type(error).__mro__ if base.__module__ == CreditError.__module__]
            portable_error = bases[0](str(error))
            portable_error.__cause__ = error
            return _Outcome(error=portable_error)
        return _Outcome(error=error)


def _join_runs(low: list[tuple[int, bytes]], high: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return the runs of equal results, as (number of ranks, pickled result), of lower and of higher ranks."""
    (last_count, last_result), (first_count, first_result) = low[-1], high[0]
    if last_result != first_result:
        return low + high
    return [*low[:-1], (last_count + first_count, last_result), *high[1:]]


@contextmanager
def _report_lost_ranks() -> Iterator[None]:
    """Context in which a RuntimeError of a collective, raised if another rank has died, becomes a LostRanksError."""
    try:
        yield
    except RuntimeError as error:
        raise LostRanksError(f"the ranks have lost each other: {error}") from error
