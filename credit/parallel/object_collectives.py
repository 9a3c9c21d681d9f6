"""A failure of one rank is a failure of all, so that no rank waits for the others in vain."""

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


def rank_of(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank, 0 where there is no process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def together(what: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Collective: call `what` on every rank and return what each of them returned, in the order of ranks.

    Args:
        what: has no collectives in it; its result can be pickled.
        group: ranks that take part, all of the run by default. Without a process group there is this process alone.

    Raises:
        CreditError: on every rank, if `what` failed on any: a rank's own error, or the first of the others'. What is no
            CreditError becomes a CheckpointError.
    """
    mine, own = None, None
    try:
        mine = what()
    except CreditError as error:
        own = error
    except Exception as error:
        # the texts of these two are made to be read
        own = CheckpointError(str(error) if isinstance(error, OSError | SafetensorError) else repr(error))
        own.__cause__ = error
    results = [(mine, own)]
    if dist.is_initialized():
        results *= dist.get_world_size(group)
        with _connected():
            dist.all_gather_object(results, (mine, own), group=group)
    problem = own or next((error for _, error in results if error is not None), None)
    if problem is not None:
        raise problem
    return [value for value, _ in results]


def run_on_rank0(what: Callable[[], T]) -> T:
    """Collective: call `what` on the main process alone and return its result on every rank.

    What files tell must not differ by rank, and a thousand ranks that ask are a load for a file system. The result may
    be large: it is sent to each rank once. `together` would give every rank room for the largest times the number of
    ranks.

    Args:
        what: has no collectives in it; its result can be pickled.

    Raises:
        CreditError: on every rank, if `what` failed.
    """
    if not dist.is_initialized():
        return what()
    pickled: list[bytes] = []
    # Pickling here, not in the broadcast, makes a result that cannot be pickled an error of all ranks: there rank 0
    # alone would raise, and the others would wait for it.
    together(lambda: pickled.append(pickle.dumps(what())) if rank_of() == 0 else None)
    box = [pickled[0] if pickled else None]
    with _connected():
        dist.broadcast_object_list(box, src=0)
    return pickle.loads(box[0])


def scatter_from_rank0(offer: T, deal: Callable[[list[T]], list[U]], group: dist.ProcessGroup | None = None) -> U:
    """Collective: return this rank's part of what rank 0 makes of the offers of all; no other rank sees them.

    Args:
        offer: of this rank; can be pickled.
        deal: turns the offers, in the order of ranks, into as many parts; has no collectives in it.
        group: ranks that take part, all of the run by default. Without a process group there is this process alone.

    Raises:
        CreditError: on every rank, if `deal` failed.
    """
    if not dist.is_initialized():
        return deal([offer])[0]
    main = rank_of(group) == 0
    offers = [offer] * dist.get_world_size(group) if main else None
    with _connected():
        dist.gather_object(offer, offers, group=group, group_dst=0)
    parts: list[U] = []
    together(lambda: parts.extend(deal(offers)) if main else None, group)
    mine: list[U | None] = [None]
    with _connected():
        dist.scatter_object_list(mine, parts if main else None, group=group, group_src=0)
    return mine[0]


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(f"the ranks have lost each other: {error}") from error
