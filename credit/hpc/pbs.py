"""PBS: a chain is as many jobs as it has links, each waiting for the one before."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from credit.errors import CreditError
from credit.hpc.scheduler import call, plain_name

if TYPE_CHECKING:
    from credit.hpc.job import Job

# of qstat and qdel: the job is unknown, or has ended
_GONE = (35, 153)


def job_name(text: str) -> str:
    """Return a name that PBS takes: older ones allow 15 characters."""
    return plain_name(text, 15)


def select_directive(job: Job) -> str:
    """Return the value of ``-l select``: the number of nodes, and the resources of each."""
    settings = job.asked
    resources = {
        "ncpus": settings.cpus_per_node,
        "mpiprocs": job.ranks_per_node,
        "ngpus": settings.gpus_per_node,
        "mem": settings.memory,
        **(settings.chunk or {}),
    }
    words = [f"{name}={value}" for name, value in resources.items() if value]
    return ":".join([str(job.nodes), *words])


def command(script: Path, wait: str | None = None, held: bool = False) -> list[str]:
    """Return the command that submits a job, to run when another has ended: `wait` is ``afterany:ID``, for example."""
    return ["qsub", *(["-h"] if held else []), *(["-W", f"depend={wait}"] if wait else []), str(script)]


def commands(script: Path, links: int, after: Sequence[str] = ()) -> list[list[str]]:
    """Return the commands that submit a chain, with ID1, ID2 and so on for what they print."""
    first = [command(script, _when_well(after), held=links > 1)]
    return first + [command(script, f"afterany:ID{n}") for n in range(1, links)] + [["qrls", "ID1"]] * (links > 1)


def submit(script: Path, folder: Path, links: int, after: Sequence[str] = ()) -> list[str]:
    """Submit a chain from `folder`, where the logs will lie, and return its ids.

    The first link is held until `release`: a link may not wait for one that is gone.

    Raises:
        CreditError: if a link cannot be submitted; those before it are deleted again.
    """
    ids: list[str] = []
    try:
        for n in range(links):
            wait = f"afterany:{ids[-1]}" if ids else _when_well(after)
            ids.append(call(command(script, wait, held=n == 0 and links > 1), folder)[1])
    except CreditError:
        for job_id in reversed(ids):
            with suppress(CreditError):
                delete(job_id)
        raise
    return ids


def _when_well(after: Sequence[str]) -> str | None:
    """Return what waits until jobs have ended without an error; PBS deletes what waits for one that had one."""
    return ":".join(["afterok", *after]) if after else None


def release(ids: list[str]) -> None:
    """Let a chain begin."""
    if len(ids) > 1:
        call(["qrls", ids[0]])


def is_alive(job_id: str) -> bool:
    """Return whether a job waits or runs."""
    return call(["qstat", job_id], allowed=_GONE)[0] == 0


def delete(job_id: str) -> None:
    """Delete a job; one that has ended already is left alone."""
    call(["qdel", job_id], allowed=_GONE)
