"""Spare ranks: ranks that a run cannot use. They wait until the run ends, and may be needed after a restart.

torchrun restarts the ranks when a node is lost. If the remaining ranks cannot share the global batch equally or cannot
form a mesh, the run uses the largest number of ranks that can. The other ranks wait.
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

# Keys in the store: the outcome, which rank 0 sets at the end of the run, and the number of spare ranks that have read
# the outcome.
_OUTCOME_KEY = "spare_ranks/outcome"
_RELEASED_KEY = "spare_ranks/released"
# Longest time that rank 0 keeps the store open so that spare ranks can read the outcome.
_RELEASE_SECONDS = 30.0
# Timeout of one wait; short, so that signals are handled promptly.
_WAIT_SECONDS = 1.0


def count_smallest_mesh_ranks(settings: ParallelismSettings) -> int:
    """Return the smallest number of ranks that can form a mesh; larger valid numbers of ranks are multiples of it.

    With ``data: none``, this number is the only valid number.

    Args:
        settings: ``trainer.parallelism`` of a config.
    """
    ranks_per_data_rank = settings.num_domain_ranks * settings.tensor
    # The number of data-parallel ranks must be a multiple of `ensemble`, and with fsdp2 also of `replicate`.
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
        ConfigError: if there are too few ranks for the smallest mesh, or no number of ranks divides the global batch.
    """
    unit = count_smallest_mesh_ranks(settings)
    largest = unit if settings.data == "none" else available - available % unit
    if available < unit:
        raise ConfigError(
            f"trainer.parallelism: the smallest mesh needs {unit} ranks, but only {available} ranks remain; raise "
            "min_nodes of the job, so that the job waits for more nodes, or lower tensor, domain, replicate or ensemble"
        )
    for num_ranks in range(largest, 0, -unit):
        if global_batch % plan_degrees(settings, num_ranks).num_sample_ranks == 0:
            return num_ranks
    # The smallest mesh of fsdp2 may have several data-parallel ranks.
    num_sample_ranks = plan_degrees(settings, unit).num_sample_ranks
    raise ConfigError(
        f"trainer.global_batch_size: {global_batch} must be a multiple of {num_sample_ranks}, the number of ranks with "
        "different samples in the smallest mesh of trainer.parallelism"
    )


def wait_for_run_end(process: ProcessInfo) -> bool:
    """Wait, on a spare rank, until the run on the other ranks ends.

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
            # Each call waits only for a short time, because a signal is handled only between two calls.
            store.wait([_OUTCOME_KEY], timedelta(seconds=_WAIT_SECONDS))
        except dist.DistStoreError:
            # This error is the timeout of one call. A lost connection raises a different error.
            continue
        is_success = store.get(_OUTCOME_KEY) == b"success"
        store.add(_RELEASED_KEY, 1)
        return is_success


@contextmanager
def release_spare_ranks(process: ProcessInfo, num_ranks: int) -> Iterator[None]:
    """Context of the run: at the end of the context, rank 0 releases the spare ranks. Other ranks do nothing.

    Args:
        process: position of this process among all processes that were started.
        num_ranks: number of ranks that the run uses.
    """
    num_spare_ranks = process.world - num_ranks
    if num_spare_ranks == 0 or not process.is_main:
        yield
        return
    logger.warning(
        "%d of %d ranks train, because this number of ranks forms a mesh and divides trainer.global_batch_size; %d "
        "spare ranks wait",
        *(num_ranks, process.world, num_spare_ranks),
    )
    store = _connect(process)
    outcome = "failure"
    try:
        yield
        outcome = "success"
    finally:
        store.set(_OUTCOME_KEY, outcome)
        # This process hosts the store, so the process must not end before the spare ranks have read the outcome.
        deadline = time.monotonic() + _RELEASE_SECONDS
        while store.add(_RELEASED_KEY, 0) < num_spare_ranks and time.monotonic() < deadline:
            time.sleep(0.1)


def _connect(process: ProcessInfo) -> dist.Store:
    """Connect to the key-value store of all started processes and return it; rank 0 or torchrun hosts the store."""
    host, port = process.store_address
    store = dist.TCPStore(
        host,
        port,
        is_master=process.is_main and not process.has_agent_store,
        wait_for_workers=False,
        # The process group of the run opens the same port as well.
        multi_tenant=True,
    )
    return dist.PrefixStore(process.store_prefix, store)
