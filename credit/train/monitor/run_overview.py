"""State of training runs, read from the files in the run folders."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from credit.train.monitor.run_files import (
    iterate_rows_with_key,
    read_heartbeat,
    read_last_metrics,
    read_status,
    read_summary,
)

# Seconds without a heartbeat after which a run is treated as lost. A heartbeat is written every few seconds.
_SILENT_SECONDS = 300
# Number of last rows of metrics.jsonl that are used to estimate the remaining time.
_RECENT_ROWS = 200
# Folders in a run that contain no other runs, but many files.
_SKIPPED_FOLDERS = {"checkpoints", "forecasts", "figures", "logs", "jobs"}
# Folder in a run in which `credit realtime` works.
_REALTIME_FOLDER = "realtime"


@dataclass(frozen=True)
class RunOverview:
    """State of a training run; unknown values are None.

    Attributes:
        folder: folder of the run.
        state: ``running``, ``done``, ``requeue`` (stopped; the same command continues the run), ``failed``, ``lost``
            (ended without updating STATUS, for example after a kill) or ``submitted`` (all jobs are still waiting).
        step: number of optimizer steps taken.
        total_steps: number of optimizer steps of the complete run.
        loss: training loss of the last logged step.
        monitor: name of the validation metric that selects the best checkpoint; smaller is better.
        best: best value of the metric `monitor`.
        best_step: optimizer step of the value `best`.
        samples_per_s: samples of all ranks per second, from the last logged step.
        hours_left: estimated hours to the end of a running run.
        last_sign: time of the last heartbeat or row of metrics.
        activity: current activity of a running run, or the reason why the run stopped; empty if unknown.
        job_id: id of the scheduler's job, empty for none.
    """

    folder: Path
    state: str
    step: int | None
    total_steps: int | None
    loss: float | None
    monitor: str
    best: float | None
    best_step: int | None
    samples_per_s: float | None
    hours_left: float | None
    last_sign: datetime | None
    activity: str
    job_id: str


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the folders of all runs in a folder and its subfolders, in alphabetical order.

    A run folder contains a file ``STATUS`` or ``jobs.json``. The folder of a sweep, with ``sweep.json``, also contains
    ``jobs.json``, but is not a run folder.
    """
    for root, names, files in os.walk(folder, followlinks=True):
        if "STATUS" in files or ("jobs.json" in files and "sweep.json" not in files):
            yield Path(root)
            # `credit realtime` writes the file STATUS of its last call into this subfolder.
            names[:] = [name for name in names if name != _REALTIME_FOLDER]
        # os.walk visits only the folders that remain in this list.
        names[:] = sorted(name for name in names if name not in _SKIPPED_FOLDERS and not name.startswith("."))


def read_overview(folder: Path) -> RunOverview:
    """Return the state of the run in a folder; values from missing or unreadable files are unknown."""
    status = read_status(folder)
    heartbeat = read_heartbeat(folder)
    trainer = _read_trainer_section(folder)
    rows = read_last_metrics(folder)[-_RECENT_ROWS:]
    last_sign = _find_last_sign(folder, heartbeat)
    state = str(status.get("status") or ("submitted" if (folder / "jobs.json").exists() else "lost"))
    is_silent = last_sign is None or (datetime.now(UTC) - last_sign).total_seconds() > _SILENT_SECONDS
    if state == "running" and is_silent:
        state = "lost"
    step = _find_step(status, rows)
    total_steps = trainer.get("max_steps")
    if state == "done":
        total_steps = read_summary(folder).get("steps", total_steps)
    monitor = str(trainer.get("monitor") or "skill")
    best, best_step = _find_best(folder, monitor)
    return RunOverview(
        folder=folder,
        state=state,
        step=step,
        total_steps=total_steps,
        loss=_find_last(rows, "loss"),
        monitor=monitor,
        best=best,
        best_step=best_step,
        samples_per_s=_find_last(rows, "samples_per_s"),
        hours_left=_estimate_hours_left(rows, total_steps) if state == "running" else None,
        last_sign=last_sign,
        activity=str(heartbeat.get("doing", "") if state == "running" else status.get("reason", "")),
        job_id=str(status.get("job_id", "")),
    )


def _read_trainer_section(folder: Path) -> dict[str, Any]:
    """Return the section ``trainer`` of the run's config; an empty dict if the section is missing or unreadable."""
    try:
        config = yaml.load((folder / "config.yml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    trainer = config.get("trainer") if isinstance(config, dict) else None
    return trainer if isinstance(trainer, dict) else {}


def _find_last_sign(folder: Path, heartbeat: dict[str, Any]) -> datetime | None:
    """Return the time of the last heartbeat; without a heartbeat, the time of the last change of a file of the run."""
    try:
        return datetime.fromisoformat(str(heartbeat["time"]))
    except (KeyError, ValueError):
        # A run that has ended has no heartbeat.
        pass
    times = []
    for name in ("metrics.jsonl", "STATUS", "jobs.json"):
        path = folder / name
        if path.exists():
            times.append(datetime.fromtimestamp(path.stat().st_mtime, UTC))
    return max(times, default=None)


def _find_step(status: dict[str, Any], rows: list[dict[str, Any]]) -> int | None:
    """Return the last optimizer step of a run: the step of the last metrics row, or the step in STATUS without rows."""
    steps = [row["step"] for row in rows if "step" in row]
    return steps[-1] if steps else status.get("step")


def _find_last(rows: list[dict[str, Any]], key: str) -> float | None:
    """Return the value of a key in the last row that contains the key; None if no row contains it."""
    for row in reversed(rows):
        if row.get(key) is not None:
            return float(row[key])
    return None


def _find_best(folder: Path, monitor: str) -> tuple[float | None, int | None]:
    """Return the best value of a validation metric and its step; (None, None) if the run has no validation."""
    best, best_step = None, None
    for row in iterate_rows_with_key(folder, "valid"):
        value = row["valid"].get(monitor)
        if value is not None and math.isfinite(value) and (best is None or value < best):
            best, best_step = float(value), row["step"]
    return best, best_step


def _estimate_hours_left(rows: list[dict[str, Any]], total_steps: int | None) -> float | None:
    """Return the estimated hours to the end of a run, from the mean time per step in the last rows.

    The mean time includes validations and checkpoints. Return None if the time or the number of steps is unknown.
    """
    timed = [row for row in rows if row.get("wall_hours") is not None]
    if total_steps is None or len(timed) < 2:
        return None
    num_steps = timed[-1]["step"] - timed[0]["step"]
    hours = timed[-1]["wall_hours"] - timed[0]["wall_hours"]
    if num_steps <= 0 or hours <= 0:
        return None
    return (total_steps - timed[-1]["step"]) * hours / num_steps
