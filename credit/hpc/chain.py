"""Decisions of a chain of training jobs: continue or end.

The job script runs ``python -m credit.hpc.chain FOLDER JOB_ID begin|end [SIGNAL]`` at its start and after the launcher
has ended. A job that continues after node failures also runs this command with ``again``. The command prints a single
word: `go`, `done` or `failed`. The script reads the word and not the exit status, so the chain also ends if this
command cannot start.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from credit.errors import CreditError
from credit.hpc import pbs, slurm
from credit.utils.atomic import atomic_write_text

# File in the run folder with the ids of the submitted jobs.
JOBS = "jobs.json"
SCHEDULERS: dict[str, ModuleType] = {"pbs": pbs, "slurm": slurm}


def decide_at_start(folder: Path, job_id: str) -> str:
    """Decide, at the start of a job, if the job trains; if it does not, delete the later jobs of the chain.

    A job does not train if an earlier job of the chain ended the run, or if the two previous jobs completed no new
    step.

    Args:
        folder: the run folder.
        job_id: id of this job.

    Returns:
        ``go`` to train, otherwise ``done`` or ``failed``.
    """
    _remove_stop_file(folder)
    ids = _read_chain_ids(folder, job_id)
    status = _read_status(folder)
    state = status.get("status")
    # STATUS of a run outside this chain, for example of an earlier run, does not end the chain.
    is_of_chain = _is_listed(status.get("job_id", ""), ids)
    verdict = "go"
    if state in ("done", "failed") and is_of_chain:
        _print_reason(f"the run is {state}: {status.get('reason', '')}")
        verdict = str(state)
    else:
        # The steps at which the earlier jobs of the chain started, and the step at which this job starts.
        steps = [*_read_start_steps(folder, ids), _read_step(status)]
        _write_start(folder, job_id, steps[-1])
        if _makes_no_progress(steps):
            _print_reason(f"the two previous jobs completed no step after step {steps[-1]}")
            verdict = "failed"
    if verdict != "go":
        _delete_later_jobs(folder, ids, job_id)
    return verdict


def decide_at_end(folder: Path, job_id: str, signal: str = "") -> str:
    """Decide, after the end of a job, if the chain continues; if it does not, delete the later jobs of the chain.

    Args:
        folder: the run folder.
        job_id: id of this job.
        signal: name of the signal that the script received and forwarded; empty if it received no signal.

    Returns:
        ``go`` to continue, otherwise ``done`` or ``failed``.
    """
    _remove_stop_file(folder)
    ids = _read_chain_ids(folder, job_id)
    status = _read_status(folder)
    # STATUS of an earlier job is ignored.
    state = None
    if _strip_server(status.get("job_id", "")) == _strip_server(job_id):
        state = status.get("status")
    if state in ("done", "failed"):
        _print_reason(f"the run is {state}: {status.get('reason', '')}")
        verdict = str(state)
    elif state is None and not signal:
        # A job that trained has written STATUS. If a signal ended the job, it may have ended before training began.
        _print_reason("training did not begin; the lines above contain the reason")
        verdict = "failed"
    elif _makes_no_progress([*_read_start_steps(folder, ids), _read_step(status)]):
        _print_reason(f"two jobs completed no step after step {_read_step(status)}")
        verdict = "failed"
    else:
        return "go"
    _delete_later_jobs(folder, ids, job_id)
    return verdict


def decide_relaunch(folder: Path, job_id: str) -> str:
    """Decide if a job starts its launcher again, after `decide_at_end` has returned ``go``.

    Args:
        folder: the run folder.
        job_id: id of this job.

    Returns:
        ``go`` if an error or the loss of ranks has ended the launcher, ``done`` if the run received a stop request.
    """
    status = _read_status(folder)
    # If all ranks of a run died, STATUS is still "running".
    has_failed = status.get("status") == "running" or status.get("is_error", False)
    if has_failed:
        _print_reason(f"job {job_id}: the launcher ended with an error; it starts again on the remaining nodes")
    return "go" if has_failed else "done"


def record_jobs(folder: Path, kind: str, scheduler: str, ids: Sequence[str]) -> None:
    """Write the ids of submitted jobs into ``jobs.json``; earlier ids of the same kind are replaced.

    Args:
        folder: the run folder.
        kind: kind of the jobs: train, preprocess, rollout or verify.
        scheduler: pbs or slurm.
        ids: ids of the jobs, in the order of the chain.

    Raises:
        CreditError: if the file cannot be written.
    """
    jobs = {**read_jobs(folder), kind: {"scheduler": scheduler, "ids": list(ids)}}
    atomic_write_text(folder / JOBS, json.dumps(jobs, indent=2))


def read_jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the last submissions: kind of job -> ``{"scheduler": NAME, "ids": [...]}``; empty if there are none.

    Args:
        folder: the run folder.

    Raises:
        CreditError: if ``jobs.json`` is damaged.
    """
    path = folder / JOBS
    try:
        if not path.exists():
            return {}
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CreditError(
            f"{path}: cannot be read ({error}); check the jobs with the commands of the scheduler, and remove the file"
        ) from error


def delete_jobs(scheduler: str, ids: Sequence[str]) -> None:
    """Delete the jobs of a chain, beginning with the last job.

    In a different order, a job would start as soon as the job on which it depends is deleted.

    Args:
        scheduler: pbs or slurm.
        ids: ids of the jobs, in the order of the chain.

    Raises:
        CreditError: if the command of the scheduler fails.
    """
    for job_id in reversed(ids):
        SCHEDULERS[scheduler].delete(job_id)


def _read_chain_ids(folder: Path, job_id: str) -> list[str]:
    """Return the ids of all jobs in a job's chain; if the user submitted the script directly, only the job's id."""
    ids = read_jobs(folder).get("train", {}).get("ids", [])
    if _is_listed(job_id, ids):
        return ids
    return [job_id]


def _delete_later_jobs(folder: Path, ids: Sequence[str], job_id: str) -> None:
    """Delete the jobs of a chain that follow a job; if the deletion fails, print the error.

    Args:
        folder: the run folder.
        ids: ids of the chain, in its order.
        job_id: id of this job, which is in `ids`.
    """
    job_numbers = [_strip_server(chain_id) for chain_id in ids]
    position = job_numbers.index(_strip_server(job_id))
    later_ids = ids[position + 1 :]
    if not later_ids:
        return
    try:
        delete_jobs(read_jobs(folder)["train"]["scheduler"], later_ids)
    except CreditError as error:
        # A job that remains in the queue ends at its start, because `decide_at_start` returns the same word.
        print(f"credit: {error}", file=sys.stderr)


def _read_status(folder: Path) -> dict[str, Any]:
    """Return the contents of STATUS; empty if the file does not exist or cannot be read."""
    try:
        return json.loads((folder / "STATUS").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _read_step(status: dict[str, Any]) -> int:
    """Return the step of the newest checkpoint from the contents of STATUS; 0 without a checkpoint."""
    return int(status.get("step", 0))


def _starts_path(folder: Path) -> Path:
    """Return the path of ``jobs/starts.jsonl``, which has one line (job id and step) for each start of a job."""
    return folder / "jobs" / "starts.jsonl"


def _write_start(folder: Path, job_id: str, step: int) -> None:
    """Append the id and the first step of a job to ``jobs/starts.jsonl``, so that a killed job is also recorded.

    If the file cannot be written, an error is printed and the job continues.
    """
    path = _starts_path(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job_id": job_id, "step": step}) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # The run itself reports a full disk.
        print(f"credit: {path}: cannot be written ({error.strerror})", file=sys.stderr)


def _read_start_steps(folder: Path, ids: Sequence[str]) -> list[int]:
    """Return the step at which each job in `ids` started, in the order of the starts; empty if there is no file."""
    path = _starts_path(folder)
    if not path.exists():
        return []
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        # A line may be incomplete, if the disk was full when the line was written.
        with suppress(ValueError):
            row = json.loads(line)
            if _is_listed(row["job_id"], ids):
                steps.append(row["step"])
    return steps


def _makes_no_progress(steps: Sequence[int]) -> bool:
    """Return True if the last two jobs saved no checkpoint of a later step.

    Args:
        steps: step of the newest checkpoint at each start of a job, and finally the step of the newest checkpoint now.
    """
    return len(steps) > 2 and steps[-1] == steps[-2] == steps[-3]


def _is_listed(job_id: str, ids: Sequence[str]) -> bool:
    """Return True if `ids` contains a job; a name of the PBS server at the end of an id is ignored."""
    job_numbers = [_strip_server(listed_id) for listed_id in ids]
    return _strip_server(job_id) in job_numbers


def _strip_server(job_id: str) -> str:
    """Return a job id without the name of the server, which PBS appends in several forms."""
    return job_id.split(".")[0]


def _remove_stop_file(folder: Path) -> None:
    """Remove the file STOP if it exists, so that a late stop request for the last job does not stop the next job."""
    (folder / "STOP").unlink(missing_ok=True)


def _print_reason(reason: str) -> None:
    """Print the reason of a decision to standard error, because the script reads standard output."""
    print(f"credit: {reason}", file=sys.stderr)


if __name__ == "__main__":
    # Only `end` may have a fourth argument, the name of a signal. It is empty if the script received no signal.
    folder_text, job_id, moment, *signals = sys.argv[1:]
    decide = {"begin": decide_at_start, "end": decide_at_end, "again": decide_relaunch}[moment]
    print(decide(Path(folder_text), job_id, *signals))
