"""Collectives of Python objects in which a failure of one rank is raised on all ranks.

Otherwise the ranks without an error would wait for the failed rank in the next collective, until they time out.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from credit.errors import CheckpointError, CreditError

T = TypeVar("T")
U = TypeVar("U")


def current_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return the rank of this process in `group` (None for all ranks of the run); 0 without a process group."""
    if not dist.is_initialized():
        return 0
    return dist.get_rank(group)


def run_on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Collective: call `function` on every rank and return the results of all ranks, in the order of ranks.

    Args:
        function: function without arguments that calls no collective; its result must be picklable.
        group: ranks that take part; None for all ranks of the run. Without a process group this process is the only
            one.

    Raises:
        CreditError: on every rank, if `function` failed on any rank. A rank on which it failed raises its own error,
            the other ranks raise the error of the lowest rank that failed. An error that is no CreditError becomes a
            CheckpointError.
        CheckpointError: if another rank has died.
    """
    result: T | None = None
    local_error: CreditError | None = None
    try:
        result = function()
    except CreditError as error:
        local_error = error
    except Exception as error:
        # The texts of these two kinds are written for users; of others the kind belongs into the message.
        message = str(error) if isinstance(error, OSError | SafetensorError) else repr(error)
        local_error = CheckpointError(message)
        local_error.__cause__ = error
    # Errors travel with the results, so that every rank takes part in the collective whether it failed or not.
    outcome = (result, local_error)
    outcomes = [outcome]
    if dist.is_initialized():
        # torch replaces the items of a list that has one item for each rank.
        outcomes = [outcome] * dist.get_world_size(group)
        with _report_lost_ranks():
            dist.all_gather_object(outcomes, outcome, group=group)
    # The error of this rank has a traceback, those of other ranks have lost theirs.
    if local_error is not None:
        raise local_error
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]


def run_on_rank0(function: Callable[[], T]) -> T:
    """Collective: call `function` on rank 0 only and return its result on every rank.

    Use this function to read files. Then all ranks agree on the contents, and the file system is not slowed down by a
    thousand ranks that read at once. The result may be large, because each rank receives only this one.
    `run_on_all_ranks` would need memory for the largest result times the number of ranks.

    Args:
        function: function without arguments that calls no collective; its result must be picklable.

    Raises:
        CreditError: on every rank, if `function` failed; an error that is no CreditError becomes a CheckpointError.
            Without a process group any error is raised as it is.
    """
    if not dist.is_initialized():
        return function()
    pickled: list[bytes] = []

    def run_and_pickle() -> None:
        # A result that cannot be pickled must be an error of all ranks, so pickling is done before the broadcast.
        if current_rank() == 0:
            pickled.append(pickle.dumps(function()))

    run_on_all_ranks(run_and_pickle)
    # The broadcast replaces the item of this list on the other ranks.
    payload: list[bytes | None] = [None]
    if pickled:
        payload[0] = pickled[0]
    with _report_lost_ranks():
        dist.broadcast_object_list(payload, src=0)
    return pickle.loads(payload[0])


def scatter_from_rank0(value: T, transform: Callable[[list[T]], list[U]], group: dist.ProcessGroup | None = None) -> U:
    """Collective: gather values on rank 0, transform them there, and scatter one result to each rank.

    Args:
        value: value of this rank; it must be picklable.
        transform: function that takes the list of all values, in the order of ranks, and returns a list with one result
            for each rank. It calls no collective.
        group: ranks that take part; None for all ranks of the run. Without a process group this process is the only
            one.

    Returns:
        The result for this rank.

    Raises:
        CreditError: on every rank, if `transform` failed; an error that is no CreditError becomes a CheckpointError.
    """
    if not dist.is_initialized():
        return transform([value])[0]
    is_rank0 = current_rank(group) == 0
    # torch takes the list to be filled on the receiving rank only.
    values = None
    if is_rank0:
        values = [value] * dist.get_world_size(group)
    with _report_lost_ranks():
        dist.gather_object(value, values, group=group, group_dst=0)
    results: list[U] = []

    def transform_on_rank0() -> None:
        if is_rank0:
            results.extend(transform(values))

    # A failure of `transform` must be an error of all ranks before they wait for their results.
    run_on_all_ranks(transform_on_rank0, group)
    received: list[U | None] = [None]
    # torch takes the list of results on the sending rank only.
    sent_results = results if is_rank0 else None
    with _report_lost_ranks():
        dist.scatter_object_list(received, sent_results, group=group, group_src=0)
    return received[0]


@contextmanager
def _report_lost_ranks() -> Iterator[None]:
    """Context in which a RuntimeError of a collective, raised if another rank has died, becomes a CheckpointError."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(f"the ranks have lost each other: {error}") from error
