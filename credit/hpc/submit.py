"""Writes a job's script, submits it and remembers its ids; takes them back."""

from __future__ import annotations

import shlex
from pathlib import Path

from credit.errors import ConfigError, CreditError
from credit.hpc.chain import SCHEDULERS, delete_all, read_jobs, record
from credit.hpc.job import Job
from credit.hpc.script import render


def preview(job: Job) -> str:
    """Return the script, and the commands that would submit it as comments."""
    wanted = SCHEDULERS[job.scheduler].commands(job.script, job.links, _waits_for(job))
    commands = "".join("".join(f"# {line}\n" for line in shlex.join(words).splitlines()) for words in wanted)
    return f"{render(job)}\n# To be submitted from save_loc/logs by\n{commands}"


def submit(job: Job) -> list[str]:
    """Write the script, submit it, and return the ids of the chain's links.

    Raises:
        CreditError: if jobs of the same kind wait or run, those to be waited for do not, or the scheduler refuses.
    """
    scheduler, text = SCHEDULERS[job.scheduler], render(job)
    _require_none(job)
    after = [job_id for job_id in _waits_for(job) if scheduler.is_alive(job_id)]
    if job.after is not None and not after:
        # a scheduler soon forgets how a job ended
        raise CreditError(
            f"--after {job.after}: {', '.join(_waits_for(job))}: none of these jobs waits or runs any more, and how "
            f"they ended is not known here; see {job.folder / 'logs'} whether all went well, and leave --after out"
        )
    logs = job.folder / "logs"
    try:
        for folder in (logs, job.script.parent):
            folder.mkdir(parents=True, exist_ok=True)
        job.script.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"save_loc: {job.folder}: cannot be written ({error.strerror})") from error
    ids = scheduler.submit(job.script, logs, job.links, after)
    try:
        record(job.folder, job.kind, job.scheduler, ids)
    except OSError as error:
        delete_all(job.scheduler, ids)
        raise ConfigError(f"save_loc: {job.folder}: cannot be written ({error.strerror})") from error
    scheduler.release(ids)
    return ids


def cancel(folder: Path, kind: str) -> list[str]:
    """Delete what was submitted last of a kind, the last link first, and return the ids.

    Raises:
        ConfigError: if nothing was submitted.
    """
    jobs = read_jobs(folder)
    if kind not in jobs:
        others = ", ".join(jobs) or "none"
        raise ConfigError(f"{folder}: no job of the kind {kind} was submitted from here; {others} was")
    delete_all(jobs[kind]["scheduler"], jobs[kind]["ids"])
    return jobs[kind]["ids"]


def _waits_for(job: Job) -> list[str]:
    """Return the ids of the jobs that must have ended well before.

    Raises:
        ConfigError: if none was submitted, or to another scheduler.
    """
    if job.after is None:
        return []
    known = read_jobs(job.folder).get(job.after)
    if known is None or known["scheduler"] != job.scheduler:
        where = "from here" if known is None else f"to {job.scheduler}"
        raise ConfigError(f"--after {job.after}: {job.folder}: no such job was submitted {where}; leave it out")
    return known["ids"]


def _require_none(job: Job) -> None:
    """Two jobs of one kind would write the same files, and the ids of the first would be forgotten."""
    known = read_jobs(job.folder).get(job.kind)
    if known is None:
        return
    alive = [job_id for job_id in known["ids"] if SCHEDULERS[known["scheduler"]].is_alive(job_id)]
    if alive:
        raise CreditError(
            f"{job.folder}: {job.kind} waits or runs already: {', '.join(alive)}; wait, or remove it with --cancel"
        )
