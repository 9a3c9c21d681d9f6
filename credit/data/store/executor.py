"""Execution of the parts of a task in this process, in several processes of this machine, or in cluster jobs.

The parts are numbered. A part is a range of times of a training store, or a block of a climatology.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from credit.config.sections.data import PreprocessConfig
from credit.errors import ConfigError, DataError
from credit.utils.installation import install_command
from credit.utils.interrupts import start_without_interrupts
from credit.utils.progress import ProgressBar

# Mapping from a value of `preprocess.cluster` to the class of dask_jobqueue.
_CLUSTER_CLASSES = {"pbs": "PBSCluster", "slurm": "SLURMCluster"}
# Interval in seconds at which this process checks if other processes have finished their parts.
_POLL_SECONDS = 2.0
_WORKER_KILLED = (
    "a process that was writing the store has been killed, perhaps for lack of memory; run the same command again (it "
    "continues where it stopped), with a smaller preprocess.workers"
)
# Function that writes the part with a given number and returns the number of times that it wrote. The function is
# pickled and sent to other processes.
WritePart = Callable[[int], int]


def run_until_done(
    write_part: WritePart, list_pending: Callable[[], list[int]], conf: PreprocessConfig, bar: ProgressBar
) -> None:
    """Write all parts that are not yet written, and wait for the parts that other processes are writing.

    Args:
        write_part: function that writes the part with a given number, unless another process is writing it.
        list_pending: function that returns the numbers of the parts that are not yet written.
        conf: settings; ``workers`` and ``cluster`` determine where the parts are written.
        bar: progress bar, which is advanced by the numbers that `write_part` returns.

    Raises:
        ConfigError: see `run_parts`.
        DataError: see `run_parts`.
    """
    pending = list_pending()
    while pending:
        for count in run_parts(write_part, pending, conf):
            bar.update(count)
        pending = list_pending()
        if pending:
            # Another process holds the locks of these parts. If it is killed, the next round writes them here.
            time.sleep(_POLL_SECONDS)


def run_parts(write_part: WritePart, numbers: Sequence[int], conf: PreprocessConfig) -> Iterator[int]:
    """Write parts and yield the result of `write_part` for each finished part, in any order.

    Args:
        write_part: function that writes the part with a given number.
        numbers: numbers of the parts to write.
        conf: settings; ``workers`` and ``cluster`` determine where the parts are written.

    Raises:
        ConfigError: if the libraries for a cluster are not installed, or reject ``preprocess.cluster_options``.
        DataError: if fields are bad, or a process was killed.
    """
    if conf.cluster != "none":
        yield from _run_in_jobs(write_part, numbers, conf)
    elif conf.workers > 1 and len(numbers) > 1:
        yield from _run_in_processes(write_part, numbers, min(conf.workers, len(numbers)))
    else:
        for number in numbers:
            yield write_part(number)


class _PartQueue:
    """Queue of the parts to write, from which each worker gets adjacent parts.

    A chunk of the sources may contain times of two adjacent parts. A worker that writes both parts reads this chunk
    only once.

    Args:
        numbers: numbers of the parts, at least one part for each worker.
        num_workers: number of workers.
    """

    def __init__(self, numbers: Sequence[int], num_workers: int) -> None:
        bounds = [worker * len(numbers) // num_workers for worker in range(num_workers + 1)]
        self._runs = [list(numbers[start:stop]) for start, stop in itertools.pairwise(bounds)]

    def take(self, worker: int) -> int | None:
        """Return the next part for a worker; None if no part is left.

        If the worker has no parts left, it gets the last part of the worker with the most parts.

        Args:
            worker: index of the worker.
        """
        if self._runs[worker]:
            return self._runs[worker].pop(0)
        longest_run = max(self._runs, key=len)
        return longest_run.pop() if longest_run else None


def _run_in_processes(write_part: WritePart, numbers: Sequence[int], num_workers: int) -> Iterator[int]:
    """Write parts in worker processes, each with a separate pipe; yield the result of each part.

    The processes of a `multiprocessing.Pool` share locks, and would wait forever for a lock of a process that was
    killed. With one pipe for each process, a process that is killed only closes its pipe.
    """
    # A forked process would share open files of netCDF and HDF5, which these libraries do not support.
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    failure: Exception | None = None
    queue = _PartQueue(numbers, num_workers)
    try:
        for _ in range(num_workers):
            pipe, worker_pipe = context.Pipe()
            process = context.Process(target=_write_parts_from_pipe, args=(worker_pipe,), daemon=True)
            pipes.append(pipe)
            processes.append(process)
            start_without_interrupts(process)
            worker_pipe.close()
        # Give each worker the function and its first number.
        for worker, pipe in enumerate(pipes):
            # `write_part` is sent through the pipe, because passing it as an argument to a dead process would hang.
            pipe.send(write_part)
            pipe.send(queue.take(worker))
        busy_pipes = set(pipes)
        while busy_pipes and failure is None:
            for pipe in wait(busy_pipes):
                result = pipe.recv()
                if isinstance(result, Exception):
                    failure = result
                    break
                yield result
                number = queue.take(pipes.index(pipe))
                if number is None:
                    busy_pipes.remove(pipe)
                else:
                    pipe.send(number)
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise DataError(_WORKER_KILLED) from error
    except KeyboardInterrupt:
        # Chunks are written atomically, so the next command only writes the interrupted parts again.
        for process in processes:
            process.terminate()
        raise
    finally:
        # After its pipe is closed, a process finishes its current part and ends.
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()
    if failure is not None:
        raise failure


def _write_parts_from_pipe(pipe: Connection) -> None:
    """Run a worker process: write the parts whose numbers are received from the pipe, until the pipe is closed.

    The first object in the pipe is the `WritePart` function. The result of each part, or its error, is sent back.
    """
    try:
        write_part: WritePart = pipe.recv()
        while True:
            number = pipe.recv()
            try:
                result = write_part(number)
            except Exception as error:
                # The error is sent to the parent, which raises it. The traceback cannot be pickled.
                error.add_note(traceback.format_exc())
                # With dask, `tblib` also pickles the cause, which fails for errors of aiohttp; the note names it.
                error.__cause__ = error.__context__ = None
                result = error.with_traceback(None)
            pipe.send(result)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _run_in_jobs(write_part: WritePart, numbers: Sequence[int], conf: PreprocessConfig) -> Iterator[int]:
    """Write parts in jobs that dask_jobqueue submits to PBS or Slurm; for errors see `run_parts`."""
    try:
        jobqueue = importlib.import_module("dask_jobqueue")
        distributed = importlib.import_module("distributed")
    except ImportError as error:
        raise ConfigError(
            f"preprocess.cluster: {conf.cluster} needs dask-jobqueue and distributed ({error}); install them with: "
            f"{install_command('cluster')}"
        ) from error
    # The options in the config override this default of one worker process in a job.
    class_name = _CLUSTER_CLASSES[conf.cluster]
    options: dict[str, Any] = {"processes": 1, **conf.cluster_options}
    cluster_class = getattr(jobqueue, class_name)
    try:
        cluster = cluster_class(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"preprocess.cluster_options: {conf.cluster_options}: {error}; give the arguments of dask_jobqueue's "
            f"{class_name}, for example {{cores: 1, memory: 16GB, walltime: '04:00:00', account: AB01}}"
        ) from error
    with cluster, distributed.Client(cluster) as client:
        cluster.scale(jobs=min(conf.workers, len(numbers)))
        yield from run_on_dask(client, write_part, numbers)


def run_on_dask(client: Any, write_part: WritePart, numbers: Sequence[int]) -> Iterator[int]:
    """Write parts on the workers of a `distributed.Client`, and yield the result of each finished part.

    Args:
        client: the client; its workers must have access to the same files.
        write_part: function that writes the part with a given number.
        numbers: numbers of the parts.
    """
    distributed = importlib.import_module("distributed")
    # The function is sent to each worker only once, because the sources that it contains may be large.
    scattered_write_part = client.scatter(write_part, broadcast=True)
    # With `pure=True`, dask would return a cached result when a part is written a second time.
    futures = [client.submit(_call_write_part, scattered_write_part, number, pure=False) for number in numbers]
    try:
        for future in distributed.as_completed(futures):
            yield future.result()
    finally:
        client.cancel(futures)


def _call_write_part(write_part: WritePart, number: int) -> int:
    """Write a part by calling `write_part`.

    dask can pass a scattered object such as `write_part` to a task only as an argument, not as the task's function.
    Therefore this function is the function of the task.
    """
    return write_part(number)
