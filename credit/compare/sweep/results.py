"""Results of a sweep: state and best validation of each trial, as JSON objects and as a CSV table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from credit.compare.sweep.trials import Trial
from credit.train.monitor.run_overview import read_overview
from credit.utils.atomic import atomic_write_text

# State of a trial that has no run folder yet.
WAITING = "waiting"


@dataclass(frozen=True)
class TrialResult:
    """State and best validation of a trial; the trial may still be running.

    Attributes:
        trial: the trial.
        state: ``waiting`` before the trial starts; otherwise the state of its
            `credit.train.monitor.run_overview.RunOverview`.
        step: number of completed optimizer steps; None before the first step.
        best: best value of the monitored metric; smaller is better. None without a validation.
        best_step: optimizer step of the best value; None without a validation.
        reason: present activity of the trial, or the reason why it stopped; empty if unknown.
    """

    trial: Trial
    state: str
    step: int | None = None
    best: float | None = None
    best_step: int | None = None
    reason: str = ""

    def to_dict(self, monitor: str) -> dict[str, Any]:
        """Return the result as a dict for a JSON document.

        Args:
            monitor: name of the monitored metric.
        """
        return {
            "trial": self.trial.name,
            "state": self.state,
            "values": self.trial.values,
            "monitor": monitor,
            "best": self.best,
            "best_step": self.best_step,
            "step": self.step,
            "reason": self.reason,
        }


def read_results(folder: Path, trials: Sequence[Trial]) -> list[TrialResult]:
    """Return the results of the trials, the best trial first.

    Trials without a validation come last, in the order of their names.

    Args:
        folder: folder of the sweep.
        trials: trials of the sweep.
    """
    results = []
    for trial in trials:
        run_folder = folder / trial.name
        if not (run_folder / "STATUS").exists():
            results.append(TrialResult(trial, WAITING))
            continue
        overview = read_overview(run_folder)
        results.append(
            TrialResult(trial, overview.state, overview.step, overview.best, overview.best_step, overview.activity)
        )
    return sorted(results, key=lambda result: (result.best is None, result.best or 0.0, result.trial.name))


def list_changed_keys(results: Sequence[TrialResult]) -> list[str]:
    """Return the dotted config keys that the trials change, in the order of their first occurrence."""
    return list(dict.fromkeys(key for result in results for key in result.trial.values))


def write_csv(path: Path, results: Sequence[TrialResult], monitor: str) -> None:
    """Write the results of a sweep to a CSV file, one row for each trial.

    Args:
        path: path of the CSV file.
        results: results of the trials, in the order of the rows.
        monitor: name of the monitored metric; it becomes the title of the column with the best values.
    """
    keys = list_changed_keys(results)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", *keys, monitor, "best_step", "step", "state", "reason"])
    for result in results:
        values = [result.trial.values.get(key, "") for key in keys]
        row = [result.trial.name, *values, result.best, result.best_step, result.step, result.state, result.reason]
        writer.writerow(["" if value is None else value for value in row])
    atomic_write_text(path, text.getvalue())
