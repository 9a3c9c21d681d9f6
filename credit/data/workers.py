"""Runs the parts of a piece of work here, in processes of this machine, or in jobs of a cluster."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from credit.config.schema_data import PreprocessConfig
from credit.errors import ConfigError, DataError

_CLUSTERS = {"pbs": "PBSCluster", "slurm": "SLURMCluster"}
_KILLED = (
    "a process that was writing the store has been killed, perhaps for want of memory; run the same command again (it "
    "goes on where it stopped), with a smaller preprocess.workers"
)
# writes the part of a number and returns how much it brought; may be sent to other processes
Work = Callable[[int], int]
_work: Work | None = None


def run_parts(work: Work, numbers: Sequence[int], conf: PreprocessConfig) -> Iterator[int]:
    """Write parts and yield, as each is done, how much it brought.

    Raises:
        ConfigError: if the libraries for a cluster are not installed, or refuse ``preprocess.cluster_options``.
        DataError: for bad fields, or if a process was killed.
    """
    if conf.cluster != "none":
        yield from _in_jobs(work, numbers, conf)
    elif conf.workers > 1 and len(numbers) > 1:
        yield from _in_processes(work, numbers, min(conf.workers, len(numbers)))
    else:
        for number in numbers:
            yield work(number)


def _in_processes(work: Work, numbers: Sequence[int], workers: int) -> Iterator[int]:
    # a fork would share the open files, whose libraries do not bear it
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin, (work,)) as pool:
        try:
            futures = [pool.submit(_write, number) for number in numbers]
        except (BrokenProcessPool, OSError) as error:  # the pool's own pipe is closed when a process dies at once
            raise DataError(_KILLED) from error
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise DataError(_KILLED) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(work: Work) -> None:
    global _work
    _work = work


def _write(number: int) -> int:
    assert _work is not None, "_begin comes first"
    return _work(number)


def _in_jobs(work: Work, numbers: Sequence[int], conf: PreprocessConfig) -> Iterator[int]:
    try:
        jobqueue, distributed = (importlib.import_module(name) for name in ("dask_jobqueue", "distributed"))
    except ImportError as error:
        raise ConfigError(
            f"preprocess.cluster: {conf.cluster} needs dask-jobqueue and distributed ({error}); install the extra: "
            'pip install "credit[cluster]"'
        ) from error
    options: dict[str, Any] = {"processes": 1, **conf.cluster_options}
    try:
        cluster = getattr(jobqueue, _CLUSTERS[conf.cluster])(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"preprocess.cluster_options: {conf.cluster_options}: {error}; they are the arguments of dask_jobqueue's "
            f"{_CLUSTERS[conf.cluster]}, for example {{cores: 1, memory: 16GB, walltime: '04:00:00', account: AB01}}"
        ) from error
    with cluster, distributed.Client(cluster) as client:
        cluster.scale(jobs=min(conf.workers, len(numbers)))
        yield from on_client(client, work, numbers)


def on_client(client: Any, work: Work, numbers: Sequence[int]) -> Iterator[int]:
    """Write parts on the workers of a `distributed.Client`, which must see the same files."""
    distributed = importlib.import_module("distributed")
    sent = client.scatter(work, broadcast=True)
    # the same part on the same store is another piece of work the next time
    futures = [client.submit(_call, sent, number, pure=False) for number in numbers]
    try:
        for future in distributed.as_completed(futures):
            yield future.result()
    finally:
        client.cancel(futures)


def _call(work: Work, number: int) -> int:
    return work(number)
