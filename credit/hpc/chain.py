"""Decide whether a chain of jobs continues; training job scripts ask at their start and after the launcher has ended.

``python -m credit.hpc.chain FOLDER JOB_ID begin|end [SIGNAL]`` prints one word: `go`, `done` or `failed`. The script
reads the word and not the exit status, so that a helper that cannot even start ends the chain, too.
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

JOBS = "jobs.json"
SCHEDULERS: dict[str, ModuleType] = {"pbs": pbs, "slurm": slurm}


def begin(folder: Path, job_id: str) -> str:
    """Return ``go`` if a job of the chain has work to do; else the verdict, and the jobs after it are deleted.

    It has no work if an earlier job of the chain ended the run, or if the two jobs before it made no step.
    """
    _forget_stop(folder)
    ids, status = _chain(folder, job_id), _status(folder)
    verdict = "go"
    if status.get("status") in ("done", "failed") and _number(status.get("job_id", "")) in map(_number, ids):
        verdict = _say(str(status["status"]), f"the run is {status['status']}: {status.get('reason', '')}")
    else:
        steps = [*_steps(folder, ids), _step(status)]
        _write_start(folder, job_id, steps[-1])
        if _stands_still(steps):
            verdict = _say("failed", f"the two jobs before this made no step beyond {steps[-1]}")
    if verdict != "go":
        _delete_after(folder, ids, job_id)
    return verdict


def end(folder: Path, job_id: str, signal: str = "") -> str:
    """Return ``go`` if the run continues after a job; else the verdict, and the jobs after it are deleted.

    Args:
        folder: the run's folder.
        job_id: id of this job.
        signal: signal that the script received and passed on, if any.
    """
    _forget_stop(folder)
    ids, status = _chain(folder, job_id), _status(folder)
    state = status.get("status") if _number(status.get("job_id", "")) == _number(job_id) else None
    if state in ("done", "failed"):
        verdict = _say(str(state), f"the run is {state}: {status.get('reason', '')}")
    elif state is None and not signal:
        verdict = _say("failed", "training did not begin; the lines above say why")
    elif _stands_still([*_steps(folder, ids), _step(status)]):
        verdict = _say("failed", f"two jobs made no step beyond {_step(status)}")
    else:
        return "go"
    _delete_after(folder, ids, job_id)
    return verdict


def record(folder: Path, kind: str, scheduler: str, ids: Sequence[str]) -> None:
    """Write the ids of submitted jobs into ``jobs.json``, in place of earlier ids of the same kind."""
    jobs = {**read_jobs(folder), kind: {"scheduler": scheduler, "ids": list(ids)}}
    atomic_write_text(folder / JOBS, json.dumps(jobs, indent=2))


def read_jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return kind -> scheduler and ids of the jobs submitted last.

    Raises:
        CreditError: if ``jobs.json`` is damaged.
    """
    path = folder / JOBS
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise CreditError(
            f"{path}: cannot be read ({error}); check the jobs with the commands of the scheduler, and remove the file"
        ) from error


def delete_all(scheduler: str, ids: Sequence[str]) -> None:
    """Delete jobs, the last first, because a job starts as soon as the one that it depends on is deleted."""
    for job_id in reversed(ids):
        SCHEDULERS[scheduler].delete(job_id)


def _chain(folder: Path, job_id: str) -> list[str]:
    """Return the ids of this job's chain; a script submitted by hand is a chain of one job."""
    ids = read_jobs(folder).get("train", {}).get("ids", [])
    return ids if _number(job_id) in map(_number, ids) else [job_id]


def _delete_after(folder: Path, ids: Sequence[str], job_id: str) -> None:
    numbers = [_number(chain_id) for chain_id in ids]
    later_ids = ids[numbers.index(_number(job_id)) + 1 :]
    if not later_ids:
        return
    try:
        delete_all(read_jobs(folder)["train"]["scheduler"], later_ids)
    except CreditError as error:
        # Each of them finds out at its start that it has no work.
        print(f"credit: {error}", file=sys.stderr)


def _status(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "STATUS").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _step(status: dict[str, Any]) -> int:
    return int(status.get("step", 0))


def _starts(folder: Path) -> Path:
    return folder / "jobs" / "starts.jsonl"


def _write_start(folder: Path, job_id: str, step: int) -> None:
    """Record the step at which a job starts; nothing else remains of a job that is killed."""
    path = _starts(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job_id": job_id, "step": step}) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # The run itself reports a full disk.
        print(f"credit: {path}: cannot be written ({error.strerror})", file=sys.stderr)


def _steps(folder: Path, ids: Sequence[str]) -> list[int]:
    """Return the steps at which the jobs of the chain started so far."""
    path = _starts(folder)
    if not path.exists():
        return []
    numbers = [_number(job_id) for job_id in ids]
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        # The disk may have been full in the middle of a line.
        with suppress(ValueError):
            row = json.loads(line)
            if _number(row["job_id"]) in numbers:
                steps.append(row["step"])
    return steps


def _stands_still(steps: Sequence[int]) -> bool:
    """Return whether the last two jobs made no step."""
    return len(steps) > 2 and steps[-1] == steps[-2] == steps[-3]


def _number(job_id: str) -> str:
    """Return an id without the name of the server, which PBS appends in different forms."""
    return job_id.split(".")[0]


def _forget_stop(folder: Path) -> None:
    # A request to stop that came too late for one job does not concern the next.
    (folder / "STOP").unlink(missing_ok=True)


def _say(verdict: str, why: str) -> str:
    print(f"credit: {why}", file=sys.stderr)
    return verdict


if __name__ == "__main__":
    folder_text, job_id, moment, *signals = sys.argv[1:]
    decide = {"begin": begin, "end": end}[moment]
    print(decide(Path(folder_text), job_id, *signals))
