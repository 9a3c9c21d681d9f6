"""Writer of the file STATUS and of the list of finished cycles, in the folder ``realtime`` of a run."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from credit.calendar import Calendar
from credit.realtime.clock import Clock
from credit.realtime.json_lines import append_json_lines, read_json_lines
from credit.utils.atomic import atomic_write_text


class StatusFiles:
    """Writer of STATUS, which contains the cycle and the state, and of ``cycles.jsonl``, which lists finished cycles.

    Args:
        folder: folder of the two files.
        clock: clock that provides the current time.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock

    def write(self, state: str, cycle: int | None, message: str = "") -> None:
        """Write the current state to STATUS, which replaces the previous state.

        Args:
            state: ``waiting``, ``fetching``, ``forecasting``, ``scoring``, ``done``, ``earlier_cycle`` or ``failed``.
            cycle: cycle of the state, in minutes since 1900; None if no cycle was chosen.
            message: reason for the state; written as one line.
        """
        cycle_text = "none" if cycle is None else Calendar().format(cycle)
        lines = [f"state: {state}", f"cycle: {cycle_text}", f"updated: {self._now()}"]
        if message:
            lines.append(f"message: {' '.join(message.split())}")
        self._folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(self._folder / "STATUS", "\n".join(lines) + "\n")

    def is_finished(self, cycle: int, forecast_folder: str) -> bool:
        """Return True if the forecast of a cycle was written to a folder, and earlier forecasts were scored."""
        key = (Calendar().format(cycle), forecast_folder)
        records = read_json_lines(self._folder / "cycles.jsonl")
        return any((record["cycle"], record["folder"]) == key for record in records)

    def add_finished_cycle(self, cycle: int, forecast_folder: str, extra_entries: dict[str, Any]) -> None:
        """Append a finished cycle, with its forecast folder and `extra_entries`, to ``cycles.jsonl``."""
        record = {
            "cycle": Calendar().format(cycle),
            "folder": forecast_folder,
            "finished": self._now(),
            **extra_entries,
        }
        append_json_lines(self._folder / "cycles.jsonl", [record])

    def _now(self) -> str:
        """Return the current time as an ISO 8601 string in UTC."""
        return datetime.fromtimestamp(self._clock.seconds(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
