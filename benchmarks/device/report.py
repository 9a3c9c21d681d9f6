"""Results in the output folder: records of the worker, and a JSON document and a page with tables from these records.

The worker process appends a record to ``records.jsonl`` at the beginning and the end of a part, and after each row.
The process that started the worker reads the records and rewrites ``results.json`` and ``results.md``.
After a time limit or a crash, only the result of the current case is therefore lost.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.device.parts import PARTS, Row
from credit.utils.atomic import atomic_write_text

RECORDS = "records.jsonl"


@dataclass
class PartResult:
    """Result of a part so far.

    Attributes:
        status: "running", "done", "failed" (with `error`), "stopped" (at the time limit) or "not reached".
        seconds: time of the part.
        rows: rows of the table of the part.
        error: error that ended the part; empty if there was no error.
    """

    status: str = "running"
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    error: str = ""


@dataclass
class Results:
    """Results of all parts so far.

    Attributes:
        header: command, date and options of the measurement.
        parts: name of a part -> its result.
    """

    header: dict[str, Any]
    parts: dict[str, PartResult] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> None:
        """Add a record of the worker."""
        event = record["event"]
        if event == "begin":
            self.parts[record["part"]] = PartResult()
            return
        result = self.parts[record["part"]]
        result.seconds = record["seconds"]
        if event == "row":
            result.rows.append(record["row"])
        elif event == "end":
            result.status = "failed" if record["error"] else "done"
            result.error = record["error"]

    def write(self, folder: Path) -> None:
        """Write ``results.json`` and ``results.md`` into a folder."""
        document = {"header": self.header, "parts": {name: asdict(result) for name, result in self.parts.items()}}
        atomic_write_text(folder / "results.json", json.dumps(document, indent=1) + "\n")
        atomic_write_text(folder / "results.md", self.format())

    def format(self) -> str:
        """Return the results as a page in Markdown: failed checks first, then a table for each part."""
        lines = ["# Measurements on one device", ""]
        lines += [f"- {name}: {value}" for name, value in self.header.items()]
        lines += ["", "## Failed checks", ""]
        problems = self.list_problems()
        lines += [f"- {problem}" for problem in problems] or ["none"]
        questions = {part.name: part.question for part in PARTS}
        for name, result in self.parts.items():
            lines += ["", f"## {name}: {result.status} after {result.seconds:.0f} s", "", questions[name], ""]
            if result.error:
                lines += ["```", result.error, "```", ""]
            lines += format_table(result.rows)
        return "\n".join(lines) + "\n"

    def list_problems(self) -> list[str]:
        """Return a line for each part that did not finish, each error of a case, and each failed check."""
        problems = []
        for name, result in self.parts.items():
            if result.status not in ("running", "done"):
                problems.append(f"{name}: {result.status}")
            for row in result.rows:
                if row.get("error"):
                    problems.append(f"{name}, {row['case']}: {row['error']}")
                elif row.get("ok") is False:
                    problems.append(f"{name}, {row['case']}: outside the tolerance, or the slower choice")
        return problems


def append_record(folder: Path, record: dict[str, Any]) -> None:
    """Append a record of the worker to ``records.jsonl``."""
    with (folder / RECORDS).open("a") as records:
        records.write(json.dumps(record) + "\n")


def read_records(folder: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the complete records after a byte offset, and the offset of the end of the last complete record."""
    path = folder / RECORDS
    if not path.exists():
        return [], offset
    with path.open("rb") as records:
        records.seek(offset)
        text = records.read()
    # The last line may be incomplete, because the worker is still writing it, or was stopped there.
    complete = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in complete.splitlines()], offset + len(complete)


def format_table(rows: list[Row]) -> list[str]:
    """Return the lines of a Markdown table; it has a column for each key that occurs in at least one row."""
    titles: dict[str, None] = {}
    for row in rows:
        titles |= dict.fromkeys(row)
    if not titles:
        return []
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [format_value(row.get(title)) for title in titles]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def format_value(value: str | float | int | bool | None) -> str:
    """Return a value as a cell of a table; None is an empty cell, and a number has four digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "/")
