"""Commands of Slurm. A chain is a single job; its script requeues the job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from credit.errors import CreditError
from credit.hpc.scheduler import run_command, sanitize_name


def make_job_name(text: str) -> str:
    """Return a valid Slurm job name of at most 64 characters, which is short enough for the tables of Slurm."""
    return sanitize_name(text, 64)


def build_commands(script: Path, links: int, after: Sequence[str] = ()) -> list[list[str]]:
    """Return a list with the command that submits a script; the script itself counts how often it has been requeued.

    If a job in `after` fails, Slurm deletes the submitted job, which is also the default behaviour of PBS.

    Args:
        script: path of the job script.
        links: not used; present because the function for PBS has the same parameters.
        after: ids of jobs that must end without an error before the submitted job starts.
    """
    words = ["sbatch", "--parsable"]
    if after:
        dependency = ":".join(["afterok", *after])
        words += [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"]
    return [[*words, str(script)]]


def submit(script: Path, folder: Path, links: int, after: Sequence[str] = ()) -> list[str]:
    """Submit a script from `folder`, where Slurm writes the log, and return a list with the id of the job.

    Args:
        script: path of the job script.
        folder: working folder of the command ``sbatch``.
        links: not used; present because the function for PBS has the same parameters.
        after: ids of jobs that must end without an error before the submitted job starts.

    Raises:
        CreditError: if the command ``sbatch`` fails.
    """
    (command,) = build_commands(script, links, after)
    _, output = run_command(command, folder)
    # sbatch may append the name of the cluster to the id.
    return [output.split(";")[0]]


def release(ids: list[str]) -> None:
    """Do nothing, because a chain of Slurm is never on hold; the function for PBS releases the first link."""


def is_alive(job_id: str) -> bool:
    """Return True if a job is queued or running.

    Raises:
        CreditError: if the command ``squeue`` fails for a reason other than an unknown job.
    """
    try:
        # Without a header, `squeue` prints the id of the job (%i) or nothing.
        _, output = run_command(["squeue", "--noheader", "--format=%i", f"--jobs={job_id}"])
    except CreditError as error:
        # Slurm removes the record of a job some minutes after its end.
        if "Invalid job id" in str(error):
            return False
        raise
    return output != ""


def delete(job_id: str) -> None:
    """Delete a job; do nothing if the job has already ended.

    Raises:
        CreditError: if the command ``scancel`` fails.
    """
    # `scancel` fails for a job whose record Slurm has removed, so the job is looked up first.
    if is_alive(job_id):
        run_command(["scancel", job_id])
