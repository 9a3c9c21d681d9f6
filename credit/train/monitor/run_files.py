"""Readers of the files of a run: its logs, metrics.jsonl, STATUS and summary.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from credit.errors import CheckpointError

# Errors after which another start may succeed: a lost rank or host, a full disk, an interruption by hand. torch raises
# RuntimeError for errors in the program, too. Such an error is recognised because the next start repeats it.
RETRYABLE_ERRORS = (CheckpointError, OSError, RuntimeError, KeyboardInterrupt)

# Number of bytes that are read from the end of a log, which may have gigabytes.
_MAX_TAIL_BYTES = 2**18


def tail_lines(path: Path, max_bytes: int = _MAX_TAIL_BYTES) -> list[str]:
    """Return the last lines of a text file, without line ends; an empty list if the file cannot be read.

    Args:
        path: the file.
        max_bytes: largest number of bytes to read from the end of the file. A line that begins before them is left out.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - max_bytes))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    if size > max_bytes:
        # The first line began before the bytes that were read.
        return lines[1:]
    return lines


def read_last_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the last rows of a run's metrics.jsonl, oldest first, without incomplete rows; empty without the file."""
    rows = []
    for line in tail_lines(folder / "metrics.jsonl"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def iterate_rows_with_key(folder: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's metrics.jsonl that have `key`, without incomplete rows; none without the file."""
    with suppress(OSError), (folder / "metrics.jsonl").open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError):
                # Searching the text first avoids parsing most of the lines.
                if f'"{key}"' in line:
                    yield json.loads(line)


def read_preview_scores(folder: Path) -> dict[int, dict[str, float | None]]:
    """Return step -> scores of a run's previews, from its metrics.jsonl.

    The scores are those of `credit.train.monitor.preview.Preview.score`.
    """
    return {row["step"]: row["early"] for row in iterate_rows_with_key(folder, "early")}


def read_status(folder: Path) -> dict[str, Any]:
    """Return the contents of STATUS (see `credit.train.monitor.metrics_log.write_status`); empty without the file."""
    return _read_json_object(folder / "STATUS")


def read_heartbeat(folder: Path) -> dict[str, Any]:
    """Return the contents of heartbeat.json (see `credit.train.monitor.run_lock`); empty if no run is at work."""
    return _read_json_object(folder / "heartbeat.json")


def is_repeated_failure(status: Mapping[str, Any], step: int, reason: str) -> bool:
    """Return True if a failure repeats that of the previous start, without a new checkpoint in between.

    Args:
        status: contents of STATUS before this start.
        step: step of the newest checkpoint.
        reason: reason of the present failure.
    """
    has_failed = status.get("status") in ("requeue", "failed")
    return has_failed and status.get("step") == step and status.get("reason") == reason


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the contents of summary.json (see `credit.train.monitor.summary`); empty without the file."""
    return _read_json_object(folder / "summary.json")


def _read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file does not exist or does not contain a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
