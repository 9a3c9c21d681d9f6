"""PBS: each link of a chain is a job of its own, which starts after the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from credit.errors import CreditError
from credit.hpc.scheduler import run_command, sanitize_name

if TYPE_CHECKING:
    from credit.hpc.job import Job

# Exit statuses of qstat and qdel for a job that is unknown or has ended.
_GONE = (35, 153)


def make_job_name(text: str) -> str:
    """Return a name that PBS accepts; old versions allow 15 characters."""
    return sanitize_name(text, 15)


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


def build_qsub_command(script: Path, dependency: str | None = None, is_held: bool = False) -> list[str]:
    """Return the command that submits a job.

    Args:
        script: job script.
        dependency: condition for the start, for example ``afterany:ID``.
        is_held: submit the job on hold.
    """
    words = ["qsub"]
    if is_held:
        words.append("-h")
    if dependency is not None:
        words += ["-W", f"depend={dependency}"]
    return [*words, str(script)]


def build_commands(script: Path, links: int, after: Sequence[str] = ()) -> list[list[str]]:
    """Return the commands that submit a chain; ID1, ID2 and so on stand for the ids that they print.

    Args:
        script: job script.
        links: number of jobs in the chain.
        after: ids of jobs that must end without an error before the first link starts.
    """
    submissions = [build_qsub_command(script, _after_success(after), is_held=links > 1)]
    for number in range(1, links):
        submissions.append(build_qsub_command(script, f"afterany:ID{number}"))
    if links > 1:
        submissions.append(["qrls", "ID1"])
    return submissions


def submit(script: Path, folder: Path, links: int, after: Sequence[str] = ()) -> list[str]:
    """Submit a chain from `folder`, where PBS writes the logs, and return its ids.

    The first link is on hold until `release`, because no link can depend on a job that has ended.

    Args:
        script: job script.
        folder: working folder of the command.
        links: number of jobs in the chain.
        after: ids of jobs that must end without an error before the first link starts.

    Raises:
        CreditError: if a link cannot be submitted; those before it are deleted again.
    """
    ids: list[str] = []
    try:
        for number in range(links):
            dependency = f"afterany:{ids[-1]}" if ids else _after_success(after)
            is_held = number == 0 and links > 1
            _, job_id = run_command(build_qsub_command(script, dependency, is_held), folder)
            ids.append(job_id)
    except CreditError:
        # The error that is raised is the first one; a link that cannot be deleted either is left on hold.
        for job_id in reversed(ids):
            with suppress(CreditError):
                delete(job_id)
        raise
    return ids


def _after_success(after: Sequence[str]) -> str | None:
    """Return the dependency on jobs that end without an error; PBS deletes the job if one of them fails."""
    if not after:
        return None
    return ":".join(["afterok", *after])


def release(ids: list[str]) -> None:
    """Release the first link of a chain, which `submit` has put on hold.

    Raises:
        CreditError: if PBS refuses.
    """
    if len(ids) > 1:
        run_command(["qrls", ids[0]])


def is_alive(job_id: str) -> bool:
    """Return whether a job is queued or running.

    Raises:
        CreditError: if PBS gives no answer.
    """
    return run_command(["qstat", job_id], allowed=_GONE)[0] == 0


def delete(job_id: str) -> None:
    """Delete a job; one that has ended already is left alone.

    Raises:
        CreditError: if PBS refuses.
    """
    run_command(["qdel", job_id], allowed=_GONE)
