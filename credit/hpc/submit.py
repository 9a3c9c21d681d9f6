"""Submission and cancellation of jobs, and the record of their ids."""

from __future__ import annotations

import shlex
from pathlib import Path

from credit.errors import ConfigError, CreditError
from credit.hpc.chain import SCHEDULERS, delete_jobs, read_jobs, record_jobs
from credit.hpc.job import Job
from credit.hpc.script import render_script


def render_preview(job: Job) -> str:
    """Return the script of a job, followed by comments with the commands that would submit the script.

    Raises:
        ConfigError: if the user's template cannot be rendered, or no job of the kind in ``--after`` was submitted.
    """
    lines = [render_script(job), "# Submit this script from save_loc/logs with"]
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
        CreditError: if jobs of the same kind are queued or running, if all jobs of the kind in ``--after`` have ended,
            or if the scheduler rejects the job.
        ConfigError: if the user's template cannot be rendered, no job of the kind in ``--after`` was submitted, or the
            run folder cannot be written.
    """
    scheduler = SCHEDULERS[job.scheduler]
    # All checks are done before the first change of the run folder.
    text = render_script(job)
    _require_no_active_job(job)
    predecessors = _find_predecessors(job)
    # PBS rejects a dependency on a job that has ended.
    after = [job_id for job_id in predecessors if scheduler.is_alive(job_id)]
    if job.after is not None and not after:
        # A scheduler deletes the exit status of a job after some minutes, so the condition cannot be checked.
        raise CreditError(
            f"--after {job.after}: {', '.join(predecessors)}: all of these jobs have ended, and their success is "
            f"unknown; read the logs in {job.folder / 'logs'}, and omit --after if the jobs succeeded"
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
    """Delete the jobs of the last submission of a kind, and return their ids; the last job of a chain is deleted first.

    Args:
        folder: the run folder.
        kind: kind of the jobs: train, preprocess, rollout or verify.

    Raises:
        ConfigError: if no job of this kind was submitted.
        CreditError: if the command of the scheduler fails.
    """
    jobs = read_jobs(folder)
    if kind not in jobs:
        others = ", ".join(jobs) or "none"
        raise ConfigError(f"{folder}: no job of the kind {kind} was submitted from this folder; submitted: {others}")
    delete_jobs(jobs[kind]["scheduler"], jobs[kind]["ids"])
    return jobs[kind]["ids"]


def _find_predecessors(job: Job) -> list[str]:
    """Return the ids of the jobs that must end without an error before this job starts.

    Raises:
        ConfigError: if no job of the kind in ``--after`` was submitted, or if it was submitted to another scheduler.
    """
    if job.after is None:
        return []
    submitted = read_jobs(job.folder).get(job.after)
    if submitted is None:
        raise ConfigError(
            f"--after {job.after}: {job.folder}: no such job was submitted from this folder; omit the option"
        )
    if submitted["scheduler"] != job.scheduler:
        raise ConfigError(
            f"--after {job.after}: {job.folder}: no such job was submitted to {job.scheduler}; omit the option"
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
    """Require that no job of the same kind is queued or running, because both jobs would write the same files.

    Raises:
        CreditError: if a job of this kind is queued or running; the message contains its id.
    """
    active_ids = find_active_jobs(job)
    if active_ids:
        raise CreditError(
            f"{job.folder}: {job.kind} is already queued or running: {', '.join(active_ids)}; wait for the end of the "
            "job, or delete it with --cancel"
        )
