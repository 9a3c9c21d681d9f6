"""Commands of Slurm. A chain is one job whose script puts it back into the queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from credit.errors import CreditError
from credit.hpc.scheduler import run_command, sanitize_name


def make_job_name(text: str) -> str:
    """Return a job name of at most 64 characters, which is short enough for Slurm and its tables."""
    return sanitize_name(text, 64)


def build_commands(script: Path, links: int, after: Sequence[str] = ()) -> list[list[str]]:
    """Return the command that submits a script, in a list; the script itself counts how often it is requeued.

    If a job of `after` fails, Slurm deletes the submitted job, as PBS does by default.

    Args:
        script: job script.
        links: not used; the function of PBS has the same parameters.
        after: ids of jobs that must end without an error before this one starts.
    """
    words = ["sbatch", "--parsable"]
    if after:
        dependency = ":".join(["afterok", *after])
        words += [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"]
    return [[*words, str(script)]]


def submit(script: Path, folder: Path, links: int, after: Sequence[str] = ()) -> list[str]:
    """Submit a script from `folder`, where Slurm writes the log, and return the id of the job in a list.

    Args:
        script: job script.
        folder: working folder of the command ``sbatch``.
        links: not used; the function of PBS has the same parameters.
        after: ids of jobs that must end without an error before this one starts.

    Raises:
        CreditError: if the command ``sbatch`` fails.
    """
    (command,) = build_commands(script, links, after)
    _, output = run_command(command, folder)
    # The name of the cluster may follow the id.
    return [output.split(";")[0]]


def release(ids: list[str]) -> None:
    """Do nothing: with Slurm a chain is a single job, which is never on hold. PBS has a function of the same name."""


def is_alive(job_id: str) -> bool:
    """Return True if a job is queued or running.

    Raises:
        CreditError: if the command ``squeue`` fails for another reason than an unknown job.
    """
    try:
        # Without a header, `squeue` prints the id of the job (%i) or nothing.
        _, output = run_command(["squeue", "--noheader", "--format=%i", f"--jobs={job_id}"])
    except CreditError as error:
        # Slurm forgets a job minutes after its end.
        if "Invalid job id" in str(error):
            return False
        raise
    return output != ""


def delete(job_id: str) -> None:
    """Delete a job; do nothing if it has ended already.

    Raises:
        CreditError: if the command ``scancel`` fails.
    """
    # Not `scancel` alone, which would fail for a job that Slurm has forgotten.
    if is_alive(job_id):
        run_command(["scancel", job_id])
