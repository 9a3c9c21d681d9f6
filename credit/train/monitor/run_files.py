"""What a run has left: the end of its logs, the last rows of metrics.jsonl, STATUS, summary.json. Only reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from credit.errors import CheckpointError

# Another start may survive these: a lost rank or host, a full disk, an interruption by hand. torch raises RuntimeError
# for an error in the program, too; the next start repeats that one, and so it is recognised.
PASSING = (CheckpointError, OSError, RuntimeError, KeyboardInterrupt)

_MOST_BYTES = 2**18


def tail(path: Path, most_bytes: int = _MOST_BYTES) -> list[str]:
    """Return the last lines of a text file, whole ones; nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most_bytes))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[1:] if size > most_bytes else lines


def read_last_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the last rows of a run's metrics.jsonl; a torn one is left out."""
    rows = []
    for line in tail(folder / "metrics.jsonl"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def rows_with(folder: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's metrics.jsonl that have `key`; a torn one is left out."""
    with suppress(OSError), (folder / "metrics.jsonl").open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError):
                if f'"{key}"' in line:
                    yield json.loads(line)


def early_rows(folder: Path) -> dict[int, dict[str, float | None]]:
    """Return step -> scores of a run's early views, from its metrics.jsonl."""
    return {row["step"]: row["early"] for row in rows_with(folder, "early")}


def read_status(folder: Path) -> dict[str, Any]:
    """Return what STATUS says, nothing where there is none that can be read."""
    return _read_object(folder / "STATUS")


def is_repeated(status: Mapping[str, Any], step: int, reason: str) -> bool:
    """Return whether a failure is that of the start before, without a new checkpoint in between.

    Args:
        status: what STATUS said before this start.
        step: of the newest checkpoint.
        reason: of the failure now.
    """
    ended = status.get("status") in ("requeue", "failed")
    return ended and status.get("step") == step and status.get("reason") == reason


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary of the run's parts so far, nothing where there is none that can be read."""
    return _read_object(folder / "summary.json")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
