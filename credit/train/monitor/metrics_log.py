"""Output of a run's progress: metrics.jsonl, loggers, a progress bar, log files and the file STATUS."""

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

    Only the main process writes rows. Rows that cannot be written, because the disk is full, are written later.

    Args:
        folder: the run's folder.
        start_step: step of the checkpoint that the run continues. Rows of later steps are removed, so that no step has
            two rows.
        enabled: True on the main process, False on all other processes.
        loggers: loggers of ``trainer.loggers``; empty on all processes other than the main process.
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
        """Return the `MetricsLog` of a run, with the loggers of ``trainer.loggers``.

        Args:
            config: the config of the run.
            start_step: step of the checkpoint that the run continues.
            enabled: True on the main process, False on all other processes.
        """
        loggers = open_loggers(config, start_step) if enabled else []
        return cls(Path(config.save_loc), start_step, enabled, loggers)

    def _open(self, start_step: int) -> None:
        """Remove the rows after `start_step` from the file, and open the file for appending."""
        _remove_rows_after(self._path, start_step)
        self._file = self._path.open("ab", buffering=0)

    def rewind(self, step: int) -> None:
        """Remove the rows after `step`, because the run repeats these steps."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._open(step)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row; numbers that are not finite become null.

        Loggers get the finite numbers of the row. They also get the finite numbers in its mappings ``valid`` (metrics
        of a validation) and ``early`` (scores of a preview).

        Args:
            row: name -> value that JSON can express; the key ``step`` is required.
        """
        if self._file is None:
            return
        row = _replace_nonfinite(row)
        self._pending += json.dumps(row, allow_nan=False).encode() + b"\n"
        if self._loggers:
            # Loggers accept single numbers, so the nested mappings are flattened. The prefixes distinguish the loss of
            # a validation from the loss of the step.
            values = dict(row)
            for name in ("valid", "early"):
                values |= {f"{name}/{key}": value for key, value in row.get(name, {}).items()}
            # This leaves out the mappings themselves, and values that were not finite.
            metrics = {key: value for key, value in values.items() if isinstance(value, int | float) and key != "step"}
            for run_logger in self._loggers:
                run_logger.log(LoggedRow(row["step"], metrics))

    def add_picture(self, picture: Path, step: int) -> None:
        """Send a PNG file to all loggers."""
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
            # A write to an unbuffered file may write only some of the bytes; the remaining bytes stay pending.
            while self._pending:
                num_written = self._file.write(self._pending)
                del self._pending[:num_written]
            os.fsync(self._file.fileno())
        except OSError as error:
            logger.warning("%s: cannot be written (%s); the run tries again later", self._path, error.strerror)

    def close(self) -> None:
        """Write the pending rows, close the file, and close the loggers with the status of the run."""
        if self._file is not None:
            self.flush()
            with suppress(OSError):
                self._file.close()
        if self._loggers:
            # On a full disk, STATUS could not be written and may still be "running".
            status = read_status(self._path.parent).get("status")
            close_loggers(self._loggers, status if status in ("done", "requeue") else "failed")


class Progress:
    """Progress bar of a training run on a terminal; nothing is shown if the output is not a terminal.

    Args:
        start: number of steps taken so far.
        total: number of steps of the whole run.
        enabled: True on the main process, False on all other processes.
    """

    def __init__(self, start: int, total: int, enabled: bool) -> None:
        self._enabled = enabled
        # With None, the bar is hidden if the output is not a terminal.
        is_hidden = None if enabled else True
        self._bar = ProgressBar(
            initial=start, total=total, desc="training", unit="step", disable=is_hidden, file=sys.stderr
        )

    def update(self) -> None:
        """Advance the progress bar by one step."""
        self._bar.update()

    def rewind(self, step: int) -> None:
        """Move the progress bar back to `step`, the number of steps taken after a rollback."""
        self._bar.n = step
        self._bar.refresh()

    def show_values(self, **values: str) -> None:
        """Show names and values next to the progress bar."""
        self._bar.set_postfix(values, refresh=False)

    def print_line(self, text: str) -> None:
        """Print a line above the progress bar, unless the option ``--quiet`` is set."""
        if self._enabled and not is_quiet():
            ProgressBar.write(text, file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        """Stop updating the progress bar, and leave its last state on the terminal."""
        self._bar.close()


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory of this process so far in GB (1e9 bytes).

    For a GPU, the value is the peak of the GPU memory that torch has allocated. For a CPU, the value is the peak of the
    resident memory of the process.
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

    If the file cannot be written, a warning is logged, because the run must not fail for this reason.

    Args:
        folder: the run's folder.
        state: ``running``, ``done``, ``requeue`` if the same command can continue the run, or ``failed`` if a restart
            would fail again.
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
    """Write the error that ended the run into STATUS: ``requeue`` if a restart may succeed, else ``failed``.

    Args:
        folder: the run's folder.
        before: contents of STATUS before this start of the run. If the error and the step in it are the same, the error
            is permanent.
        error: the error that ended this start of the run.
        step: step of the newest checkpoint.
        job_id: id of the scheduler's job, empty for none.
        every_rank: True if every rank calls this function. The first reason is then kept in STATUS, because the errors
            of later ranks only report the loss of a rank.
    """
    # STATUS contains the first line of the message; further lines are advice.
    message_lines = str(error).splitlines()
    reason = message_lines[0] if message_lines else type(error).__name__
    # Two interrupts by the user at the same step do not mean that the run fails permanently.
    is_permanent = is_repeated_failure(before, step, reason) and not isinstance(error, KeyboardInterrupt)
    if is_permanent or not isinstance(error, RETRYABLE_ERRORS):
        write_status(folder, "failed", step, reason, job_id)
    elif not every_rank or read_status(folder).get("status") not in ("failed", "requeue"):
        is_error = not isinstance(error, KeyboardInterrupt)
        write_status(folder, "requeue", step, reason, job_id, is_error)


class _LateFileHandler(logging.FileHandler):
    """Log handler that creates its file, and the folder of the file, at the first message."""

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


@contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[None]:
    """Write log messages, and the error that ends the block, to ``logs/rank_NNNNN.log`` in the run's folder.

    Rank 0 writes all messages. Other ranks write only warnings and errors, because their further messages repeat the
    messages of rank 0. Each rank creates its file at its first message, to avoid thousands of empty files.

    Args:
        folder: the run's folder.
        rank: number of this rank.
    """
    path = folder / "logs" / f"rank_{rank:05d}.log"
    handler = _LateFileHandler(path, encoding="utf-8", delay=True)
    if rank > 0:
        handler.setLevel(logging.WARNING)
    formatter = logging.Formatter("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    # The Z after each time means UTC.
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    except BaseException as error:
        # Write the error only to the file, because the caller prints it for the user.
        handler.handle(root.makeRecord(root.name, logging.ERROR, path.name, 0, "%s", (error,), sys.exc_info()))
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


def _remove_rows_after(path: Path, start_step: int) -> None:
    """Remove the rows of steps after `start_step`, and incomplete lines, from the file metrics.jsonl at `path`."""
    if not path.exists():
        return
    remaining_lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            # A killed run may have written only a part of its last row.
            continue
        if row["step"] <= start_step:
            remaining_lines.append(line + "\n")
    atomic_write_text(path, "".join(remaining_lines))


def _replace_nonfinite(value: Any) -> Any:
    """Return a row or a value with None instead of each number that is not finite, because JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
