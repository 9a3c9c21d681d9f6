"""What a run says of itself: metrics.jsonl, TensorBoard, a progress bar, and the file STATUS."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from credit.errors import ConfigError, CreditError
from credit.train.monitor.run_files import PASSING, is_repeated, read_status
from credit.utils.atomic import atomic_write_text
from credit.utils.installation import install_command
from credit.utils.progress import ProgressBar, is_quiet

logger = logging.getLogger(__name__)


class MetricsLog:
    """Appends JSON objects to ``metrics.jsonl``, one row a step; only the main process writes.

    Rows that a full disk does not take are kept and tried again with the next.

    Args:
        folder: the run's folder.
        start_step: steps taken by the checkpoint that the run continues; later rows are cut, so that no step has two.
        enabled: False on all but the main process.
        tensorboard: also write TensorBoard files.
    """

    def __init__(self, folder: Path, start_step: int, enabled: bool, tensorboard: bool) -> None:
        self._path = folder / "metrics.jsonl"
        self._file = None
        self._board = None
        self._waiting = bytearray()
        if not enabled:
            return
        if tensorboard:
            self._board = _open_tensorboard(folder / "tensorboard", start_step)
        self._open(start_step)

    def _open(self, start_step: int) -> None:
        _cut_rows(self._path, start_step)
        self._file = self._path.open("ab", buffering=0)

    def rewind(self, step: int) -> None:
        """Cut the rows beyond `step`, which the run takes again."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._open(step)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row, numbers that are not finite as null; nested mappings become TensorBoard groups."""
        if self._file is None:
            return
        row = _finite(row)
        self._waiting += json.dumps(row, allow_nan=False).encode() + b"\n"
        if self._board is not None:
            early = {f"early/{key}": value for key, value in row.get("early", {}).items()}
            scalars = {**row, **row.get("valid", {}), **early}
            for key, value in scalars.items():
                if isinstance(value, int | float) and key != "step":
                    self._board.add_scalar(key, value, row["step"])

    def show(self, picture: Path, step: int) -> None:
        """Put a PNG file into TensorBoard, where there is one."""
        if self._board is not None:
            from PIL import Image

            with Image.open(picture) as image:
                self._board.add_image(picture.stem, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def flush(self) -> None:
        """Hand the rows to the disk; a disk that takes none gets a warning."""
        if self._file is None:
            return
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
            os.fsync(self._file.fileno())
        except OSError as error:
            logger.warning("%s: cannot be written (%s); tried again later", self._path, error.strerror)

    def close(self) -> None:
        """Write what waits, and close."""
        if self._file is not None:
            self.flush()
            with suppress(OSError):
                self._file.close()
        if self._board is not None:
            self._board.close()


class Progress:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, start: int, total: int, enabled: bool) -> None:
        self._enabled = enabled
        hidden = None if enabled else True
        self._bar = ProgressBar(
            initial=start, total=total, desc="training", unit="step", disable=hidden, file=sys.stderr
        )

    def update(self) -> None:
        """Advance by one step."""
        self._bar.update()

    def back_to(self, step: int) -> None:
        """Show `step` as the steps taken."""
        self._bar.n = step
        self._bar.refresh()

    def show(self, **shown: str) -> None:
        """Show figures beside the bar."""
        self._bar.set_postfix(shown, refresh=False)

    def say(self, text: str) -> None:
        """Print a line above the bar, unless the user asked for quiet."""
        if self._enabled and not is_quiet():
            ProgressBar.write(text, file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def peak_memory_gb(device: torch.device) -> float:
    """Return the most memory used so far, GB (1e9 bytes): the device's on a GPU, the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    # Linux counts kilobytes, macOS bytes
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def write_status(folder: Path, state: str, step: int, reason: str, job_id: str) -> None:
    """Replace the file STATUS atomically; `state` is done, running, requeue or failed.

    A disk that is too full for it gets a warning: what the file is about matters more.
    """
    told = {"status": state, "step": step, "reason": reason, "job_id": job_id}
    try:
        atomic_write_text(folder / "STATUS", json.dumps(told) + "\n")
    except CreditError as error:
        logger.warning("%s", error)


def write_failure(
    folder: Path, before: Mapping[str, Any], error: BaseException, step: int, job_id: str, every_rank: bool
) -> None:
    """Write into STATUS why a start ended: ``requeue`` where another one may pass, else ``failed``.

    Args:
        folder: of the run.
        before: what STATUS said before this start. The same error again, without a new checkpoint, is no passing one.
        error: what ended it.
        step: of the newest checkpoint.
        job_id: of the scheduler.
        every_rank: whether each rank calls this. Then the first reason stays: the others only see that a rank is gone.
    """
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    repeated = is_repeated(before, step, reason) and not isinstance(error, KeyboardInterrupt)
    if repeated or not isinstance(error, PASSING):
        write_status(folder, "failed", step, reason, job_id)
    elif not every_rank or read_status(folder).get("status") not in ("failed", "requeue"):
        write_status(folder, "requeue", step, reason, job_id)


@contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[None]:
    """Write all that this rank logs, and the error that ends it, to ``logs/rank_00000.log`` in the run's folder."""
    path = folder / "logs" / f"rank_{rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    formatter = logging.Formatter("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    except BaseException as error:
        # into the file alone: whoever catches the error tells the user
        handler.handle(root.makeRecord(root.name, logging.ERROR, path.name, 0, "%s", (error,), sys.exc_info()))
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


def _cut_rows(path: Path, start_step: int) -> None:
    """Keep the rows up to `start_step`; a torn last line goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= start_step:
                kept.append(line + "\n")
        except ValueError:
            continue
    atomic_write_text(path, "".join(kept))


def _open_tensorboard(folder: Path, start_step: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"trainer.tensorboard: true needs TensorBoard; install it with: {install_command('tensorboard')}"
        ) from error
    return SummaryWriter(str(folder), purge_step=start_step + 1)


def _finite(value: Any) -> Any:
    """Return a row with None for each number that is not finite: JSON has none."""
    if isinstance(value, Mapping):
        return {key: _finite(own) for key, own in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
