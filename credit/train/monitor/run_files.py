"""Readers of the files of a run: its logs, metrics.jsonl, STATUS and summary.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from credit.errors import CheckpointError

# Errors after which a restart may succeed: a lost rank or host, a full disk, an interruption by the user. torch also
# raises RuntimeError for errors in the program. A program error is recognised because it occurs again at the restart.
RETRYABLE_ERRORS = (CheckpointError, OSError, RuntimeError, KeyboardInterrupt)

# Number of bytes that are read from the end of a log file, which may be several gigabytes long.
_MAX_TAIL_BYTES = 2**18


def read_last_lines(path: Path, max_bytes: int = _MAX_TAIL_BYTES) -> list[str]:
    """Return the last lines of a text file, without line ends; an empty list if the file cannot be read.

    Args:
        path: the file.
        max_bytes: largest number of bytes to read from the end of the file. A line that begins before these bytes is
            omitted.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - max_bytes))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    if size > max_bytes:
        # The first line is incomplete, because it began before the bytes that were read.
        return lines[1:]
    return lines


def read_last_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the last complete rows of a run's metrics.jsonl, oldest first; an empty list if the file is missing."""
    rows = []
    for line in read_last_lines(folder / "metrics.jsonl"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def iterate_rows_with_key(folder: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of a run's metrics.jsonl that contain `key`; yield nothing if the file is missing."""
    with suppress(OSError), (folder / "metrics.jsonl").open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError):
                # Searching the line for the key avoids parsing most of the lines.
                if f'"{key}"' in line:
                    yield json.loads(line)


def read_preview_scores(folder: Path) -> dict[int, dict[str, float | None]]:
    """Return step -> scores of the preview after this step, from metrics.jsonl in the run folder.

    The scores are the output of `credit.train.monitor.preview.Preview.score`.
    """
    return {row["step"]: row["early"] for row in iterate_rows_with_key(folder, "early")}


def read_status(folder: Path) -> dict[str, Any]:
    """Return the contents of STATUS in a run folder; empty if the file is missing.

    The contents are described in `credit.train.monitor.metrics_log.write_status`.
    """
    return _read_json_object(folder / "STATUS")


def read_heartbeat(folder: Path) -> dict[str, Any]:
    """Return the contents of heartbeat.json in a run folder; empty if no run is active in the folder.

    The contents are described in `credit.train.monitor.run_lock`.
    """
    return _read_json_object(folder / "heartbeat.json")


def is_repeated_failure(status: Mapping[str, Any], step: int, reason: str) -> bool:
    """Return True if the previous start of the run failed for the same reason, without a new checkpoint in between.

    Args:
        status: contents of STATUS before this start.
        step: step of the newest checkpoint.
        reason: reason of the current failure.
    """
    has_failed = status.get("status") in ("requeue", "failed")
    return has_failed and status.get("step") == step and status.get("reason") == reason


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the contents of summary.json (see `credit.train.monitor.summary`); empty if the file is missing."""
    return _read_json_object(folder / "summary.json")


def _read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty dict if the file is missing or does not contain a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
