"""Commands of PBS. A chain consists of several jobs (links); each link starts after the previous link has ended."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from credit.errors import CreditError
from credit.hpc.scheduler import run_command, sanitize_name

if TYPE_CHECKING:
    from credit.hpc.job import Job

# Exit statuses of qstat and qdel if a job is unknown or has ended.
_UNKNOWN_JOB_STATUSES = (35, 153)


def make_job_name(text: str) -> str:
    """Return a valid PBS job name of at most 15 characters, which is the limit of old versions of PBS."""
    return sanitize_name(text, 15)


def build_select_directive(job: Job) -> str:
    """Return the value of the PBS option ``-l select``: the number of nodes, and the resources of each node."""
    settings = job.asked
    # The entries of `chunk` come last, so that they replace resources of the same name.
    resources = {
        "ncpus": settings.cpus_per_node,
        "mpiprocs": job.ranks_per_node,
        "ngpus": settings.gpus_per_node,
        "mem": settings.memory,
        **(settings.chunk or {}),
    }
    # A resource without a value is omitted, so that the default of the site is used.
    words = [f"{name}={value}" for name, value in resources.items() if value]
    return ":".join([str(job.nodes), *words])


def build_qsub_command(script: Path, dependency: str | None = None, is_held: bool = False) -> list[str]:
    """Return the command that submits a job.

    Args:
        script: path of the job script.
        dependency: condition for the start, for example ``afterany:ID``; None without a condition.
        is_held: True to submit the job on hold, so that it does not start before ``qrls``.
    """
    words = ["qsub"]
    if is_held:
        words.append("-h")
    if dependency is not None:
        words += ["-W", f"depend={dependency}"]
    return [*words, str(script)]


def build_commands(script: Path, links: int, after: Sequence[str] = ()) -> list[list[str]]:
    """Return the commands that submit a chain, as lists of words.

    In the commands, ID1, ID2 and so on are placeholders for the ids that the first, second and later command print.

    Args:
        script: path of the job script.
        links: number of jobs in the chain.
        after: ids of jobs that must end without an error before the first link starts.
    """
    submissions = [build_qsub_command(script, _build_success_condition(after), is_held=links > 1)]
    # Each later link starts after the previous link has ended, even with an error. At its start, `credit.hpc.chain`
    # decides if the chain continues.
    for number in range(1, links):
        submissions.append(build_qsub_command(script, f"afterany:ID{number}"))
    if links > 1:
        submissions.append(["qrls", "ID1"])
    return submissions


def submit(script: Path, folder: Path, links: int, after: Sequence[str] = ()) -> list[str]:
    """Submit a chain from `folder`, where PBS writes the logs, and return the ids of its links.

    If there are several links, the first link is on hold until `release`. Otherwise it might end before the second link
    is submitted, and PBS rejects a dependency on a job that has ended.

    Args:
        script: path of the job script.
        folder: working folder of the command ``qsub``.
        links: number of jobs in the chain.
        after: ids of jobs that must end without an error before the first link starts.

    Raises:
        CreditError: if a link cannot be submitted; the links that were already submitted are deleted.
    """
    ids: list[str] = []
    try:
        for number in range(links):
            # Only the first link waits for the jobs in `after`; each later link waits for the previous link.
            dependency = _build_success_condition(after)
            if ids:
                dependency = f"afterany:{ids[-1]}"
            is_held = number == 0 and links > 1
            _, job_id = run_command(build_qsub_command(script, dependency, is_held), folder)
            ids.append(job_id)
    except CreditError:
        # Raise the first error. A link that cannot be deleted remains in the queue, on hold.
        for job_id in reversed(ids):
            with suppress(CreditError):
                delete(job_id)
        raise
    return ids


def _build_success_condition(after: Sequence[str]) -> str | None:
    """Return the PBS condition that all jobs in `after` have ended without an error; None if `after` is empty.

    If a job in `after` fails, PBS deletes the job that waits for the condition.
    """
    if not after:
        return None
    return ":".join(["afterok", *after])


def release(ids: list[str]) -> None:
    """Release the first link of a chain, which `submit` has put on hold.

    Args:
        ids: ids of the chain, from `submit`.

    Raises:
        CreditError: if the command ``qrls`` fails.
    """
    if len(ids) > 1:
        run_command(["qrls", ids[0]])


def is_alive(job_id: str) -> bool:
    """Return True if a job is queued or running.

    Raises:
        CreditError: if the command ``qstat`` fails for a reason other than an unknown or ended job.
    """
    status, _ = run_command(["qstat", job_id], allowed=_UNKNOWN_JOB_STATUSES)
    return status == 0


def delete(job_id: str) -> None:
    """Delete a job; do nothing if the job has already ended.

    Raises:
        CreditError: if the command ``qdel`` fails.
    """
    run_command(["qdel", job_id], allowed=_UNKNOWN_JOB_STATUSES)
