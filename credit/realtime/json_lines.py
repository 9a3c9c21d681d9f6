"""Reading and appending of JSON lines files, which have one record per line; one process at a time may append."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; ignore an incomplete last line, which a killed process may have left."""
    if not path.exists():
        return []
    return [json.loads(line) for line in _select_complete_lines(path.read_text(encoding="utf-8")).splitlines()]


def append_json_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append records to a file and flush them to the disk; an incomplete last line is removed first.

    Raises:
        OSError: if the file cannot be written.
    """
    if not records:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        complete = _select_complete_lines(file.read().decode("utf-8"))
        file.truncate(len(complete.encode("utf-8")))
        for record in records:
            file.write((json.dumps(record) + "\n").encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())


def _select_complete_lines(text: str) -> str:
    """Return the complete lines of a string, up to and including its last newline."""
    return text[: text.rfind("\n") + 1]
