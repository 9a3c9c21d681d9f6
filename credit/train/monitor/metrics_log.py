"""Records of a run's progress: metrics.jsonl, loggers, a progress bar, log files and the file STATUS."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch

from credit.config import Config
from credit.errors import CreditError
from credit.train.loggers.background import BackgroundLogger, close_loggers
from credit.train.loggers.base import LoggedPicture, LoggedRow
from credit.train.loggers.open_loggers import open_loggers
from credit.train.monitor.run_files import RETRYABLE_ERRORS, is_repeated_failure, read_status
from credit.utils.atomic import atomic_write_text
from credit.utils.progress import ProgressBar, is_quiet

logger = logging.getLogger(__name__)


class MetricsLog:
    """Writer of ``metrics.jsonl``, which has one JSON object per line; loggers get the same values.

    Only the main process writes. Rows that cannot be written because the disk is full are written with later ones.

    Args:
        folder: the run's folder.
        start_step: step of the checkpoint that the run continues. Rows of later steps are removed, so that no step has
            two rows.
        enabled: False on all processes but the main one.
        loggers: loggers of ``trainer.loggers``; none on all processes but the main one.
    """

    def __init__(self, folder: Path, start_step: int, enabled: bool, loggers: Sequence[BackgroundLogger] = ()) -> None:
        self._path = folder / "metrics.jsonl"
        self._file = None
        self._loggers = loggers
        self._pending = bytearray()
        if enabled:
            self._open(start_step)

    @classmethod
    def from_config(cls, config: Config, start_step: int, enabled: bool) -> MetricsLog:
        """Return the log of a run, with the loggers of ``trainer.loggers``.

        Args:
            config: the config of the run.
            start_step: step of the checkpoint that the run continues.
            enabled: False on all processes but the main one.
        """
        loggers = open_loggers(config, start_step) if enabled else []
        return cls(Path(config.save_loc), start_step, enabled, loggers)

    def _open(self, start_step: int) -> None:
        """Remove the rows after `start_step` and open the file for appending."""
        _remove_rows_after(self._path, start_step)
        self._file = self._path.open("ab", buffering=0)

    def rewind(self, step: int) -> None:
        """Remove the rows after `step`, because the run repeats those steps."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._open(step)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row; numbers that are not finite become null.

        Loggers get the finite numbers of the row, and those of the mappings ``valid`` (metrics of a validation) and
        ``early`` (scores of a preview) in it.

        Args:
            row: name -> value, ready for JSON; it has the key ``step``.
        """
        if self._file is None:
            return
        row = _replace_nonfinite(row)
        self._pending += json.dumps(row, allow_nan=False).encode() + b"\n"
        if self._loggers:
            # Loggers take single numbers, so the nested mappings are flattened. The loss of a validation is not that of
            # the step.
            values = dict(row)
            for name in ("valid", "early"):
                values |= {f"{name}/{key}": value for key, value in row.get(name, {}).items()}
            # This leaves out the mappings themselves, and values that were not finite.
            metrics = {key: value for key, value in values.items() if isinstance(value, int | float) and key != "step"}
            for run_logger in self._loggers:
                run_logger.log(LoggedRow(row["step"], metrics))

    def add_picture(self, picture: Path, step: int) -> None:
        """Add a PNG file to the loggers."""
        if not self._loggers:
            return
        # The file is read now, because the next preview replaces it.
        logged_picture = LoggedPicture(picture.stem, picture.read_bytes(), step)
        for run_logger in self._loggers:
            run_logger.log_image(logged_picture)

    def flush(self) -> None:
        """Write the pending rows to the disk; if that fails, log a warning and keep the rows."""
        if self._file is None:
            return
        try:
            # A write to an unbuffered file may take only some of the bytes; the others stay pending.
            while self._pending:
                num_written = self._file.write(self._pending)
                del self._pending[:num_written]
            os.fsync(self._file.fileno())
        except OSError as error:
            logger.warning("%s: cannot be written (%s); tried again later", self._path, error.strerror)

    def close(self) -> None:
        """Write the pending rows, close the file, and let the loggers complete their records with the run's STATUS."""
        if self._file is not None:
            self.flush()
            with suppress(OSError):
                self._file.close()
        if self._loggers:
            # STATUS cannot be written on a full disk, and may then still be that of a run at work.
            status = read_status(self._path.parent).get("status")
            close_loggers(self._loggers, status if status in ("done", "requeue") else "failed")


class Progress:
    """Progress bar of the training on a terminal; without a terminal nothing is shown.

    Args:
        start: steps taken so far.
        total: steps of the whole run.
        enabled: False on all processes but the main one.
    """

    def __init__(self, start: int, total: int, enabled: bool) -> None:
        self._enabled = enabled
        # None lets the bar find out whether there is a terminal.
        is_hidden = None if enabled else True
        self._bar = ProgressBar(
            initial=start, total=total, desc="training", unit="step", disable=is_hidden, file=sys.stderr
        )

    def update(self) -> None:
        """Advance by one step."""
        self._bar.update()

    def rewind(self, step: int) -> None:
        """Move the bar back to `step`, the number of steps taken after a rollback."""
        self._bar.n = step
        self._bar.refresh()

    def show_values(self, **values: str) -> None:
        """Show each name with its value next to the bar."""
        self._bar.set_postfix(values, refresh=False)

    def print_line(self, text: str) -> None:
        """Print a line above the bar, unless the user asked for quiet output."""
        if self._enabled and not is_quiet():
            ProgressBar.write(text, file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        """Stop updating the bar; it stays on the terminal."""
        self._bar.close()


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory so far in GB (1e9 bytes).

    For a GPU, this is the memory that torch has allocated on it; for a CPU, the resident memory of the process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    # Linux counts in units of 1024 bytes, macOS in bytes.
    bytes_per_unit = 1024
    if sys.platform == "darwin":
        bytes_per_unit = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit / 1e9


def write_status(folder: Path, state: str, step: int, reason: str, job_id: str, is_error: bool = False) -> None:
    """Replace the file STATUS atomically.

    If the file cannot be written, a warning is logged, because the run must not fail for that.

    Args:
        folder: the run's folder.
        state: ``running``, ``done``, ``requeue`` if the same command continues the run, or ``failed`` if another start
            would fail as well.
        step: step of the newest checkpoint.
        reason: reason for the state in one line, empty for none.
        job_id: id of the scheduler's job, empty for none.
        is_error: True for ``requeue`` after an error; False if the run was asked to stop.
    """
    status: dict[str, Any] = {"status": state, "step": step, "reason": reason, "job_id": job_id}
    if is_error:
        status["is_error"] = True
    try:
        atomic_write_text(folder / "STATUS", json.dumps(status) + "\n")
    except CreditError as error:
        logger.warning("%s", error)


def write_failure(
    folder: Path, before: Mapping[str, Any], error: BaseException, step: int, job_id: str, every_rank: bool
) -> None:
    """Write the error that ended a start into STATUS: ``requeue`` if another start may succeed, else ``failed``.

    Args:
        folder: the run's folder.
        before: contents of STATUS before this start. If they have the same error and the same step, the error is
            permanent.
        error: the error that ended this start of the run.
        step: step of the newest checkpoint.
        job_id: id of the scheduler's job, empty for none.
        every_rank: True if each rank calls this function. Then the first reason stays, because the other ranks only
            report that a rank is gone.
    """
    # STATUS has the first line of the message; further lines are advice.
    message_lines = str(error).splitlines()
    reason = message_lines[0] if message_lines else type(error).__name__
    # A person may interrupt twice at the same step, which says nothing about the run.
    is_permanent = is_repeated_failure(before, step, reason) and not isinstance(error, KeyboardInterrupt)
    if is_permanent or not isinstance(error, RETRYABLE_ERRORS):
        write_status(folder, "failed", step, reason, job_id)
    elif not every_rank or read_status(folder).get("status") not in ("failed", "requeue"):
        is_error = not isinstance(error, KeyboardInterrupt)
        write_status(folder, "requeue", step, reason, job_id, is_error)


class _LateFileHandler(logging.FileHandler):
    """Handler that creates its file, and the folder of the file, at the first message."""

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


@contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[None]:
    """Write log messages, and the error that ends the block, to ``logs/rank_NNNNN.log`` in the run's folder.

    Messages below a warning are those of rank 0 only: the other ranks would repeat them. They have a file once they
    have a message, so that thousands of ranks do not create as many files at the start.

    Args:
        folder: the run's folder.
        rank: number of this rank.
    """
    path = folder / "logs" / f"rank_{rank:05d}.log"
    handler = _LateFileHandler(path, encoding="utf-8", delay=True)
    if rank > 0:
        handler.setLevel(logging.WARNING)
    formatter = logging.Formatter("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    # The times are in UTC, as the Z behind them says.
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    except BaseException as error:
        # The error goes to the file only, because the caller that catches it shows it to the user.
        handler.handle(root.makeRecord(root.name, logging.ERROR, path.name, 0, "%s", (error,), sys.exc_info()))
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


def _remove_rows_after(path: Path, start_step: int) -> None:
    """Remove the rows of steps after `start_step`, and an incomplete last line, from the metrics.jsonl at `path`."""
    if not path.exists():
        return
    remaining_lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            # A killed run may have left half a row.
            continue
        if row["step"] <= start_step:
            remaining_lines.append(line + "\n")
    atomic_write_text(path, "".join(remaining_lines))


def _replace_nonfinite(value: Any) -> Any:
    """Return a row, or a value of it, with None for each number that is not finite, which JSON cannot express."""
    if isinstance(value, Mapping):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
