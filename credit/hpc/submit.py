"""Submission of job scripts, the record of the jobs' ids, and the cancelling of jobs."""

from __future__ import annotations

import shlex
from pathlib import Path

from credit.errors import ConfigError, CreditError
from credit.hpc.chain import SCHEDULERS, delete_jobs, read_jobs, record_jobs
from credit.hpc.job import Job
from credit.hpc.script import render_script


def render_preview(job: Job) -> str:
    """Return the script of a job, followed by comments with the commands that would submit it.

    Raises:
        ConfigError: if the user's template cannot be rendered, or no jobs of the kind that ``--after`` names were
            submitted.
    """
    lines = [render_script(job), "# Submit it from save_loc/logs with"]
    scheduler = SCHEDULERS[job.scheduler]
    commands = scheduler.build_commands(job.script, job.links, _find_predecessors(job))
    for words in commands:
        # A word may contain line breaks, and every line must be a comment.
        for line in shlex.join(words).splitlines():
            lines.append(f"# {line}")
    return "\n".join([*lines, ""])


def submit_job(job: Job) -> list[str]:
    """Write the script of a job, submit it, and return the ids of the jobs of the chain.

    Raises:
        CreditError: if jobs of the same kind are queued or running, if all jobs of the kind that ``--after`` names have
            ended, or if the scheduler refuses the job.
        ConfigError: if the user's template cannot be rendered, no jobs of the kind that ``--after`` names were
            submitted, or the run's folder cannot be written.
    """
    scheduler = SCHEDULERS[job.scheduler]
    # All checks come before the first change of the run's folder.
    text = render_script(job)
    _require_no_active_job(job)
    predecessors = _find_predecessors(job)
    # PBS refuses a dependency on a job that has ended.
    after = [job_id for job_id in predecessors if scheduler.is_alive(job_id)]
    if job.after is not None and not after:
        # A scheduler forgets after some minutes how a job ended, so the condition could not be checked.
        raise CreditError(
            f"--after {job.after}: {', '.join(predecessors)}: all of these jobs have ended, and whether they failed is "
            f"unknown; look at {job.folder / 'logs'}, and leave --after out if they succeeded"
        )
    logs = job.folder / "logs"
    try:
        for folder in (logs, job.script.parent):
            folder.mkdir(parents=True, exist_ok=True)
        job.script.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"save_loc: {job.folder}: cannot be written ({error.strerror})") from error
    # On PBS, a chain is on hold until its ids are recorded, because its first job reads them.
    ids = scheduler.submit(job.script, logs, job.links, after)
    try:
        record_jobs(job.folder, job.kind, job.scheduler, ids)
    except OSError as error:
        delete_jobs(job.scheduler, ids)
        raise ConfigError(f"save_loc: {job.folder}: cannot be written ({error.strerror})") from error
    scheduler.release(ids)
    return ids


def cancel_jobs(folder: Path, kind: str) -> list[str]:
    """Delete the jobs of the last submission of a kind, the last link of a chain first, and return their ids.

    Args:
        folder: the run's folder.
        kind: kind of the jobs: train, preprocess, rollout or verify.

    Raises:
        ConfigError: if no job of this kind was submitted.
        CreditError: if the command of the scheduler fails.
    """
    jobs = read_jobs(folder)
    if kind not in jobs:
        others = ", ".join(jobs) or "none"
        raise ConfigError(f"{folder}: no job of the kind {kind} was submitted from here; submitted were: {others}")
    delete_jobs(jobs[kind]["scheduler"], jobs[kind]["ids"])
    return jobs[kind]["ids"]


def _find_predecessors(job: Job) -> list[str]:
    """Return the ids of the jobs that must end without an error before this job starts.

    Raises:
        ConfigError: if no job of the kind that ``--after`` names was submitted, or only to another scheduler.
    """
    if job.after is None:
        return []
    submitted = read_jobs(job.folder).get(job.after)
    if submitted is None:
        raise ConfigError(f"--after {job.after}: {job.folder}: no such job was submitted from here; leave it out")
    if submitted["scheduler"] != job.scheduler:
        raise ConfigError(
            f"--after {job.after}: {job.folder}: no such job was submitted to {job.scheduler}; leave it out"
        )
    return submitted["ids"]


def find_active_jobs(job: Job) -> list[str]:
    """Return the ids of the jobs of the same kind and run folder that are queued or running.

    Raises:
        CreditError: if the command of the scheduler fails.
    """
    submitted = read_jobs(job.folder).get(job.kind)
    if submitted is None:
        return []
    scheduler = SCHEDULERS[submitted["scheduler"]]
    return [job_id for job_id in submitted["ids"] if scheduler.is_alive(job_id)]


def _require_no_active_job(job: Job) -> None:
    """Refuse to submit a job if another one of its kind is queued or running, because both would write the same files.

    Raises:
        CreditError: if there is such a job; the message has its id.
    """
    active_ids = find_active_jobs(job)
    if active_ids:
        raise CreditError(
            f"{job.folder}: {job.kind} is queued or running already: {', '.join(active_ids)}; wait for it, or delete "
            "it with --cancel"
        )
