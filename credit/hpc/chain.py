"""Whether a chain of jobs goes on: what a training job's script asks as it begins, and when the launcher has ended.

``python -m credit.hpc.chain FOLDER JOB_ID begin|end [SIGNAL]`` prints one word: `go`, `done` or `failed`. The script
reads the word, not the exit code, so that a helper that cannot even start ends the chain too.
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
    """Return whether a job of the chain has something to do; if not, the jobs after it are deleted.

    It has nothing to do if an earlier job of the chain came to an end, or if the two before it made no new step.
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
    """Return how the run stands after a job; unless it goes on, the jobs after it are deleted.

    Args:
        folder: the run's folder.
        job_id: of this job.
        signal: that the script got and handed on, if any.
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
    """Write the ids of what was submitted into ``jobs.json``, in place of those of the same kind."""
    jobs = {**read_jobs(folder), kind: {"scheduler": scheduler, "ids": list(ids)}}
    atomic_write_text(folder / JOBS, json.dumps(jobs, indent=2))


def read_jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return kind -> scheduler and ids of what was submitted last.

    Raises:
        CreditError: if ``jobs.json`` is damaged.
    """
    path = folder / JOBS
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise CreditError(f"{path}: cannot be read ({error}); look after the jobs by hand and remove it") from error


def delete_all(scheduler: str, ids: Sequence[str]) -> None:
    """Delete jobs, the last first: a job that waits for another would start as soon as that one is gone."""
    for job_id in reversed(ids):
        SCHEDULERS[scheduler].delete(job_id)


def _chain(folder: Path, job_id: str) -> list[str]:
    """Return the ids of this job's chain; a script that was submitted by hand is a chain of its own."""
    ids = read_jobs(folder).get("train", {}).get("ids", [])
    return ids if _number(job_id) in map(_number, ids) else [job_id]


def _delete_after(folder: Path, ids: Sequence[str], job_id: str) -> None:
    later = ids[[_number(one) for one in ids].index(_number(job_id)) + 1 :]
    if not later:
        return
    try:
        delete_all(read_jobs(folder)["train"]["scheduler"], later)
    except CreditError as error:
        # each of them will see for itself that it has nothing to do
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
    """Note at which step a job found the run: of a job that is killed, this is all that is known."""
    path = _starts(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job_id": job_id, "step": step}) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # a full disk is the run's to deal with
        print(f"credit: {path}: cannot be written ({error.strerror})", file=sys.stderr)


def _steps(folder: Path, ids: Sequence[str]) -> list[int]:
    """Return the steps at which the chain's jobs began so far."""
    path, numbers, steps = _starts(folder), [_number(one) for one in ids], []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        # the disk may have been full in the middle of a line
        with suppress(ValueError):
            row = json.loads(line)
            if _number(row["job_id"]) in numbers:
                steps.append(row["step"])
    return steps


def _stands_still(steps: Sequence[int]) -> bool:
    """Whether the last two jobs changed nothing."""
    return len(steps) > 2 and steps[-1] == steps[-2] == steps[-3]


def _number(job_id: str) -> str:
    """PBS adds its server's name to an id, and not everywhere the same."""
    return job_id.split(".")[0]


def _forget_stop(folder: Path) -> None:
    # a request to stop that came too late for one job is not meant for the next
    (folder / "STOP").unlink(missing_ok=True)


def _say(verdict: str, why: str) -> str:
    print(f"credit: {why}", file=sys.stderr)
    return verdict


if __name__ == "__main__":
    place, job, when, *rest = sys.argv[1:]
    print({"begin": begin, "end": end}[when](Path(place), job, *rest))
