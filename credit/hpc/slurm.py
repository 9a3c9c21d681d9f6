"""Slurm: a chain is one job that puts itself back into the queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from credit.errors import CreditError
from credit.hpc.scheduler import call, plain_name


def job_name(text: str) -> str:
    """Return a name that is easy to read in Slurm's lists."""
    return plain_name(text, 64)


def commands(script: Path, links: int, after: Sequence[str] = ()) -> list[list[str]]:
    """Return the command that submits a script; how often it goes back into the queue stands in the script.

    What waits for a job that ends with an error is deleted, as PBS does by itself.
    """
    wait = [f"--dependency={':'.join(['afterok', *after])}", "--kill-on-invalid-dep=yes"] if after else []
    return [["sbatch", "--parsable", *wait, str(script)]]


def submit(script: Path, folder: Path, links: int, after: Sequence[str] = ()) -> list[str]:
    """Submit a script from `folder`, where its log will lie, and return the job's id."""
    (command,) = commands(script, links, after)
    # the cluster's name may follow
    return [call(command, folder)[1].split(";")[0]]


def release(ids: list[str]) -> None:
    """Nothing is held: no other job waits for this one."""


def is_alive(job_id: str) -> bool:
    """Return whether a job waits or runs."""
    try:
        return call(["squeue", "--noheader", "--format=%i", f"--jobs={job_id}"])[1] != ""
    except CreditError as error:
        if "Invalid job id" in str(error):
            return False
        raise


def delete(job_id: str) -> None:
    """Delete a job; one that has ended already is left alone."""
    if is_alive(job_id):
        call(["scancel", job_id])
