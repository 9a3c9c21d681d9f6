"""Runs the parts of a piece of work here, in processes of this machine, or in jobs of a cluster."""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from credit.config.schema_data import PreprocessConfig
from credit.errors import ConfigError, DataError
from credit.utils.installation import install_command
from credit.utils.interrupts import start_without_interrupts

_CLUSTERS = {"pbs": "PBSCluster", "slurm": "SLURMCluster"}
_KILLED = (
    "a process that was writing the store has been killed, perhaps for want of memory; run the same command again (it "
    "goes on where it stopped), with a smaller preprocess.workers"
)
# writes the part of a number and returns how much it brought; may be sent to other processes
Work = Callable[[int], int]


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
    """Write parts in processes, each of which has a pipe of its own: one that is killed takes nothing with it.

    A pool's processes have locks in common, and wait for ever for one that a killed process held.
    """
    # a fork would share the open files, whose libraries do not bear it
    context = multiprocessing.get_context("spawn")
    pipes, processes, failure = [], [], None
    left = iter(numbers)
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            pipes.append(ours)
            processes.append(context.Process(target=_serve, args=(theirs,), daemon=True))
            start_without_interrupts(processes[-1])
            theirs.close()
        for pipe, number in zip(pipes, left, strict=False):
            # not an argument of the process: writing that to one that is dead would not end
            pipe.send(work)
            pipe.send(number)
        busy = set(pipes)
        while busy and failure is None:
            for pipe in wait(busy):
                result = pipe.recv()
                if isinstance(result, Exception):
                    failure = result
                    break
                yield result
                number = next(left, None)
                if number is None:
                    busy.remove(pipe)
                else:
                    pipe.send(number)
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise DataError(_KILLED) from error
    except KeyboardInterrupt:
        # Chunks are written atomically, so a part that is cut off is only written again by the next command.
        for process in processes:
            process.terminate()
        raise
    finally:
        # the others finish their parts
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()
    if failure is not None:
        raise failure


def _serve(pipe: Connection) -> None:
    """Write the parts that come through the pipe, until it is closed."""
    try:
        work = pipe.recv()
        while True:
            number = pipe.recv()
            try:
                result = work(number)
            except Exception as error:
                error.add_note(traceback.format_exc())
                result = error
            pipe.send(result)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _in_jobs(work: Work, numbers: Sequence[int], conf: PreprocessConfig) -> Iterator[int]:
    try:
        jobqueue, distributed = (importlib.import_module(name) for name in ("dask_jobqueue", "distributed"))
    except ImportError as error:
        raise ConfigError(
            f"preprocess.cluster: {conf.cluster} needs dask-jobqueue and distributed ({error}); install them with: "
            f"{install_command('cluster')}"
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
        yield from run_on_dask(client, work, numbers)


def run_on_dask(client: Any, work: Work, numbers: Sequence[int]) -> Iterator[int]:
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
