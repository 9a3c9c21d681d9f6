"""Ranks that a run cannot use: they wait until the run is over, and may be needed after a restart.

torchrun restarts the ranks when a node is lost, and the number of ranks that are left may not divide the global batch
or may not form the mesh. The run then uses the largest number of ranks that does, and the other ranks wait.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from credit.errors import ConfigError
from credit.parallel.mesh import ParallelismSettings, plan_degrees
from credit.parallel.process_info import ProcessInfo

logger = logging.getLogger(__name__)

# Key in the store that rank 0 sets when the run is over, and the number of spare ranks that have seen it.
_OUTCOME_KEY = "spare_ranks/outcome"
_RELEASED_KEY = "spare_ranks/released"
# Longest time in which the spare ranks take note of the end of the run; afterwards they lose the store with rank 0.
_RELEASE_SECONDS = 30.0
# A wait that is this long ends in time for a signal, and is then repeated.
_WAIT_SECONDS = 1.0


def smallest_mesh(settings: ParallelismSettings) -> int:
    """Return the smallest number of ranks that the degrees of parallelism allow; larger numbers are multiples of it.

    With ``data: none``, it is the only number.

    Args:
        settings: ``trainer.parallelism`` of a config.
    """
    ranks_per_data_rank = settings.num_domain_ranks * settings.tensor
    # The data-parallel ranks form whole groups of `ensemble`, and with fsdp2 also `replicate` equal replicas.
    if settings.data == "fsdp2":
        return ranks_per_data_rank * math.lcm(settings.replicate, settings.ensemble)
    return ranks_per_data_rank * settings.ensemble


def choose_num_ranks(settings: ParallelismSettings, global_batch: int, available: int) -> int:
    """Return the largest number of ranks that form a mesh and divide the global batch equally.

    Args:
        settings: ``trainer.parallelism`` of a config.
        global_batch: number of samples of an optimizer step over all ranks.
        available: number of ranks that were started.

    Raises:
        ConfigError: if there are fewer ranks than the smallest mesh needs.
    """
    unit = smallest_mesh(settings)
    largest = unit if settings.data == "none" else available - available % unit
    if available < unit:
        raise ConfigError(
            f"trainer.parallelism: the smallest mesh has {unit} ranks, and {available} are left; raise min_nodes of "
            "the job, so that it waits for more nodes, or lower tensor, domain, replicate or ensemble"
        )
    for num_ranks in range(largest, 0, -unit):
        if global_batch % plan_degrees(settings, num_ranks).num_sample_ranks == 0:
            return num_ranks
    # The smallest mesh of fsdp2 may have several data-parallel ranks.
    num_sample_ranks = plan_degrees(settings, unit).num_sample_ranks
    raise ConfigError(
        f"trainer.global_batch_size: {global_batch} must be a multiple of {num_sample_ranks}, the ranks with different "
        "samples in the smallest mesh of trainer.parallelism"
    )


def wait_for_end(process: ProcessInfo) -> bool:
    """Wait on a spare rank until the run of the other ranks is over.

    Args:
        process: position of this process among all processes that were started.

    Returns:
        True if the run ended without an error.

    Raises:
        torch.distributed.DistError: if rank 0 has died.
    """
    store = _connect(process)
    while True:
        try:
            # `wait` in steps, because a signal is handled only between two calls.
            store.wait([_OUTCOME_KEY], timedelta(seconds=_WAIT_SECONDS))
        except dist.DistStoreError:
            # The time-out of one step; a lost connection is another error.
            continue
        is_success = store.get(_OUTCOME_KEY) == b"success"
        store.add(_RELEASED_KEY, 1)
        return is_success


@contextmanager
def release_spare_ranks(process: ProcessInfo, num_ranks: int) -> Iterator[None]:
    """Context around the run, at whose end rank 0 releases the spare ranks; on other ranks it does nothing.

    Args:
        process: position of this process among all processes that were started.
        num_ranks: number of ranks that the run uses.
    """
    num_spare_ranks = process.world - num_ranks
    if num_spare_ranks == 0 or not process.is_main:
        yield
        return
    logger.warning(
        "%d of %d ranks train: with this number, the ranks form a mesh and divide trainer.global_batch_size; %d are "
        "spare and wait",
        *(num_ranks, process.world, num_spare_ranks),
    )
    store = _connect(process)
    outcome = "failure"
    try:
        yield
        outcome = "success"
    finally:
        store.set(_OUTCOME_KEY, outcome)
        # The store lives in this process, so it must not end before the spare ranks have read the outcome.
        deadline = time.monotonic() + _RELEASE_SECONDS
        while store.add(_RELEASED_KEY, 0) < num_spare_ranks and time.monotonic() < deadline:
            time.sleep(0.1)


def _connect(process: ProcessInfo) -> dist.Store:
    """Return the key-value store of all processes that were started; rank 0 serves it unless torchrun does."""
    host, port = process.store_address
    store = dist.TCPStore(
        host,
        port,
        is_master=process.is_main and not process.has_agent_store,
        wait_for_workers=False,
        # The process group of the run opens the same port again.
        multi_tenant=True,
    )
    return dist.PrefixStore(process.store_prefix, store)
