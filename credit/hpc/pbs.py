"""Commands of PBS. A chain is several jobs; each of them (a link) starts after the link before it has ended."""

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
_UNKNOWN_JOB_STATUSES = (35, 153)


def make_job_name(text: str) -> str:
    """Return a job name that PBS accepts; it has at most 15 characters, which is the limit of old versions."""
    return sanitize_name(text, 15)


def select_directive(job: Job) -> str:
    """Return the value of ``-l select``: the number of nodes, and the resources of each."""
    settings = job.asked
    # The entries of `chunk` come last, so they replace resources of the same name.
    resources = {
        "ncpus": settings.cpus_per_node,
        "mpiprocs": job.ranks_per_node,
        "ngpus": settings.gpus_per_node,
        "mem": settings.memory,
        **(settings.chunk or {}),
    }
    # A resource without a value is left to the defaults of the site.
    words = [f"{name}={value}" for name, value in resources.items() if value]
    return ":".join([str(job.nodes), *words])


def build_qsub_command(script: Path, dependency: str | None = None, is_held: bool = False) -> list[str]:
    """Return the command that submits a job.

    Args:
        script: job script.
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
    """Return the commands that submit a chain, as word lists; ID1, ID2 and so on stand for the ids that they print.

    Args:
        script: job script.
        links: number of jobs in the chain.
        after: ids of jobs that must end without an error before the first link starts.
    """
    submissions = [build_qsub_command(script, _build_success_condition(after), is_held=links > 1)]
    # Each further link starts after the link before it, whether that failed or not: `credit.hpc.chain` decides then
    # whether the chain continues.
    for number in range(1, links):
        submissions.append(build_qsub_command(script, f"afterany:ID{number}"))
    if links > 1:
        submissions.append(["qrls", "ID1"])
    return submissions


def submit(script: Path, folder: Path, links: int, after: Sequence[str] = ()) -> list[str]:
    """Submit a chain from `folder`, where PBS writes the logs, and return the ids of its links.

    The first link of several is on hold until `release`. Otherwise it might end before the second link is submitted,
    and PBS refuses a dependency on a job that has ended.

    Args:
        script: job script.
        folder: working folder of the command ``qsub``.
        links: number of jobs in the chain.
        after: ids of jobs that must end without an error before the first link starts.

    Raises:
        CreditError: if a link cannot be submitted; the links before it are deleted again.
    """
    ids: list[str] = []
    try:
        for number in range(links):
            # Only the first link waits for the jobs of `after`; each further link waits for the link before it.
            dependency = _build_success_condition(after)
            if ids:
                dependency = f"afterany:{ids[-1]}"
            is_held = number == 0 and links > 1
            _, job_id = run_command(build_qsub_command(script, dependency, is_held), folder)
            ids.append(job_id)
    except CreditError:
        # Raise the first error. A link that cannot be deleted stays in the queue, on hold.
        for job_id in reversed(ids):
            with suppress(CreditError):
                delete(job_id)
        raise
    return ids


def _build_success_condition(after: Sequence[str]) -> str | None:
    """Return the PBS condition that the jobs with the ids `after` have ended without an error, None without such jobs.

    If one of these jobs fails, PBS deletes the job that waits for the condition.
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
        CreditError: if the command ``qstat`` fails for another reason than an unknown or ended job.
    """
    status, _ = run_command(["qstat", job_id], allowed=_UNKNOWN_JOB_STATUSES)
    return status == 0


def delete(job_id: str) -> None:
    """Delete a job; do nothing if it has ended already.

    Raises:
        CreditError: if the command ``qdel`` fails.
    """
    run_command(["qdel", job_id], allowed=_UNKNOWN_JOB_STATUSES)
