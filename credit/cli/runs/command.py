"""Arguments, table and JSON output of ``credit runs``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit.cli.common import parse_path
from credit.cli.console.terminal import colorize, format_table, print_json

if TYPE_CHECKING:
    from credit.train.monitor.run_overview import RunOverview

HELP = """List the runs in folders and their subfolders: state, step, best validation, speed and remaining time.

state       running, done, requeue (stopped; the same command resumes the run), failed, lost (ended without
            updating STATUS, for example after a kill), or submitted (no job has started)
best        best value of trainer.monitor so far, and its step
time left   remaining time at the speed of the last steps, including their validations and checkpoints
last sign   time since the last sign of activity of the run

example:
  credit runs runs
  credit runs runs other_runs --watch 30
  credit runs runs --json

exit code: 0 done, 1 there are no runs, 130 interrupted by Ctrl-C."""

_STATE_COLORS = {"running": "green", "failed": "red", "lost": "red", "requeue": "yellow"}
_HEADER = ("run", "state", "step", "best", "loss", "samples/s", "time left", "last sign", "activity")
_RIGHT_ALIGNED = ("step", "best", "loss", "samples/s", "time left", "last sign")
# Largest number of characters of the activity or of the reason for a stop.
_MAX_ACTIVITY = 60
# Text in the cell of an unknown value.
_UNKNOWN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit runs`: FOLDER and the options of the output."""
    parser.add_argument(
        "folders", nargs="*", metavar="FOLDER", default=["."], type=parse_path, help="folders with runs; default: ."
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        const=10.0,
        type=float,
        metavar="SECONDS",
        help="repeat the list on a cleared screen until Ctrl-C; default: every 10 s",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, with null for unknown values")


def run_command(arguments: argparse.Namespace) -> int:
    """Print the runs and return the exit status that the help text lists.

    Raises:
        ConfigError: if a folder does not exist, or an option is wrong.
    """
    from credit.errors import ConfigError

    folders = [Path(folder) for folder in arguments.folders]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: is not a folder; give folders with runs (save_loc)")
    if arguments.watch is not None and not 1 <= arguments.watch < 86400:
        raise ConfigError(f"--watch {arguments.watch:g}: the number of seconds between two lists must be at least 1")
    if arguments.watch is not None and arguments.json:
        raise ConfigError("--watch and --json: cannot be combined; a script can call credit runs --json repeatedly")
    if arguments.watch is None:
        overviews = _read_overviews(folders)
        if arguments.json:
            print_json([_to_json(overview) for overview in overviews])
        else:
            print(_format_overviews(overviews, folders))
        return 0 if overviews else 1
    while True:
        text = _format_overviews(_read_overviews(folders), folders)
        # The escape sequences clear the screen and move the cursor to the upper left corner.
        print(f"\033[2J\033[H{text}\n\nevery {arguments.watch:g} s, Ctrl-C ends", flush=True)
        time.sleep(arguments.watch)


def _read_overviews(folders: Sequence[Path]) -> list[RunOverview]:
    """Return the state of each run in the folders, without duplicates."""
    from credit.train.monitor.run_overview import find_runs, read_overview

    paths: dict[Path, Path] = {}
    for folder in folders:
        for path in find_runs(folder):
            paths.setdefault(path.resolve(), path)
    return [read_overview(path) for path in paths.values()]


def _format_overviews(overviews: Sequence[RunOverview], folders: Sequence[Path]) -> str:
    """Return the table of the runs, or a message that there are no runs."""
    if not overviews:
        return f"no runs in {', '.join(str(folder) for folder in folders)}"
    rows = [_build_row(overview) for overview in overviews]
    return format_table(_HEADER, rows, right_aligned=_RIGHT_ALIGNED)


def _build_row(overview: RunOverview) -> list[str]:
    """Return the cells of the table row of a run."""
    from datetime import UTC, datetime

    state = overview.state
    if state in _STATE_COLORS:
        state = colorize(state, _STATE_COLORS[state])
    step = _UNKNOWN if overview.step is None else str(overview.step)
    if overview.total_steps is not None:
        step += f"/{overview.total_steps}"
    best = _UNKNOWN
    if overview.best is not None:
        best = f"{overview.monitor} {overview.best:.4g} at {overview.best_step}"
    last_sign = _UNKNOWN
    if overview.last_sign is not None:
        last_sign = _format_hours((datetime.now(UTC) - overview.last_sign).total_seconds() / 3600)
    activity = overview.activity
    if len(activity) > _MAX_ACTIVITY:
        activity = activity[: _MAX_ACTIVITY - 3] + "..."
    return [
        str(overview.folder),
        state,
        step,
        best,
        _format_number(overview.loss),
        _format_number(overview.samples_per_s),
        _UNKNOWN if overview.hours_left is None else _format_hours(overview.hours_left),
        last_sign,
        activity,
    ]


def _format_number(value: float | None) -> str:
    """Return a number with four significant digits; a hyphen for None."""
    return _UNKNOWN if value is None else f"{value:.4g}"


def _format_hours(hours: float) -> str:
    """Return a duration such as 12 s, 34 min, 5.6 h or 7.8 d."""
    if hours >= 48:
        return f"{hours / 24:.1f} d"
    if hours >= 1:
        return f"{hours:.1f} h"
    if hours >= 1 / 60:
        return f"{hours * 60:.0f} min"
    return f"{max(hours, 0) * 3600:.0f} s"


def _to_json(overview: RunOverview) -> dict[str, Any]:
    """Return the state of a run as a JSON object."""
    from dataclasses import asdict

    document = asdict(overview)
    document["folder"] = str(overview.folder)
    document["last_sign"] = overview.last_sign.isoformat() if overview.last_sign is not None else None
    return document
