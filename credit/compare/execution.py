"""Processes of a comparison: each training, forecast and scoring is a public command with a log file of its own.

`parts.json` in the folder of the comparison records which parts are done. A second call repeats only what is missing.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from credit.train.monitor.run_files import tail_lines
from credit.utils.atomic import atomic_write_text

logger = logging.getLogger(__name__)

# Exit code of `credit train` after a stop in time.
STOPPED_IN_TIME = 85
DONE = "done"
FAILED = "failed"
# Lines at the end of a log that are searched for the error message of a command.
_SEARCHED_LINES = 200


@dataclass(frozen=True)
class Part:
    """One step of a comparison, which a process of its own does.

    Attributes:
        name: text such as ``train a, seed 1000``, unique in the comparison.
        command: command of the package: ``train``, ``rollout`` or ``verify``.
        config: config file of the command.
        overrides: ``section.key=value`` of the command.
        result: file or folder that the command writes last.
        depends_on: texts that identify inputs which are no overrides. The part is repeated if they change.
        ranks: number of processes; more than one are started by torchrun.
    """

    name: str
    command: str
    config: Path
    overrides: tuple[str, ...]
    result: Path
    depends_on: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def stop_file(self) -> Path | None:
        """File that makes a training save and stop; None for other commands."""
        if self.command != "train":
            return None
        return self.result.parent / "STOP"

    def command_line(self) -> list[str]:
        """Return the words of the process."""
        words = [sys.executable]
        if self.ranks > 1:
            words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [*words, "-m", "credit.cli.main", self.command, str(self.config), *self.overrides, "--quiet"]


class Executor:
    """Runs parts of a comparison and remembers their outcome in ``parts.json``.

    Args:
        folder: folder of the comparison; it must exist.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "parts.json"
        self._log_folder = folder / "logs"
        self._log_folder.mkdir(exist_ok=True)
        self._records: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            self._records = json.loads(self._path.read_text(encoding="utf-8"))
        # Names of the parts of this call, for the page.
        self._names: list[str] = []

    def run(self, part: Part, is_repeated: bool = False) -> bool:
        """Run a part unless it is done, and return True if it is done afterwards.

        A part whose inputs have changed, or whose result was removed, is repeated. A failure is logged with the path of
        its log file.

        Args:
            part: the part.
            is_repeated: True to run the part although it is done.
        """
        self._names.append(part.name)
        record = self._records.get(part.name, {})
        inputs = {"command": part.command, "overrides": list(part.overrides), "depends_on": list(part.depends_on)}
        has_same_inputs = all(record.get(key) == value for key, value in inputs.items())
        is_done = record.get("status") == DONE and has_same_inputs and part.result.exists()
        if is_done and not is_repeated:
            logger.info("%s: done before", part.name)
            return True
        log_path = self._log_folder / (re.sub(r"[^\w.-]+", "_", part.name) + ".log")
        logger.info("%s: started, log %s", part.name, log_path)
        start_time = time.monotonic()
        exit_code = run_process(part.command_line(), log_path, part.stop_file)
        seconds = time.monotonic() - start_time
        status = FAILED if exit_code else DONE
        if exit_code == STOPPED_IN_TIME:
            # A time limit of the config; the next call continues.
            logger.warning("%s: stopped before its end; the same command continues it", part.name)
        self._records[part.name] = {
            **inputs, "status": status, "exit_code": exit_code, "seconds": round(seconds, 1), "log": str(log_path)
        }  # fmt: skip
        self.save()
        if exit_code:
            logger.error("%s: failed with exit code %s: %s", part.name, exit_code, describe_failure(log_path))
        return exit_code == 0

    def mark_failed(self, part: Part, reason: str) -> None:
        """Record that a part whose process succeeded did not do its work.

        Args:
            part: the part.
            reason: reason for the readers of the page.
        """
        self._records[part.name] |= {"status": FAILED, "reason": reason}
        self.save()
        logger.error("%s: %s", part.name, reason)

    def save(self) -> None:
        """Write ``parts.json`` atomically."""
        atomic_write_text(self._path, json.dumps(self._records, indent=1) + "\n")

    def list_failures(self) -> list[str]:
        """Return a sentence for each part of this call that failed, with its log."""
        sentences = []
        for name in self._names:
            record = self._records[name]
            if record["status"] == FAILED:
                reason = record.get("reason") or describe_failure(Path(record["log"]))
                sentences.append(f"{name} failed: {reason}")
        return sentences

    def seconds_of(self, name: str) -> float | None:
        """Return the duration of the last process of a part in seconds; None if the part never ran."""
        return self._records.get(name, {}).get("seconds")


def run_process(words: Sequence[str], log_path: Path, stop_file: Path | None = None) -> int:
    """Run a process, append its output to a log file, and return its exit code.

    If this process is interrupted meanwhile (Ctrl-C or SIGTERM), it stops the other one and waits for it.

    Args:
        words: words of the process.
        log_path: file for standard output and standard error.
        stop_file: file whose existence makes the process save its work and stop; None for a process without such a
            file, which is terminated.

    Raises:
        KeyboardInterrupt: after Ctrl-C.
        SystemExit: after SIGTERM, see `exit_on_sigterm`.
    """
    if stop_file is not None:
        # A file that an earlier process did not see would stop this one at once.
        stop_file.unlink(missing_ok=True)
    with log_path.open("ab") as log:
        log.write(f"$ {' '.join(words)}\n".encode())
        log.flush()
        # Progress bars and colours do not belong into a log file.
        environment = {**os.environ, "NO_COLOR": "1"}
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            return process.wait()
        except (KeyboardInterrupt, SystemExit):
            _stop_process(process, stop_file)
            raise


def _stop_process(process: subprocess.Popen, stop_file: Path | None) -> None:
    """Stop a process and wait until it has ended; see `run_process`.

    A training gets no signal but a file: the terminal may have sent it the signal already, and it takes a second one as
    a request to end without saving.

    Args:
        process: the process.
        stop_file: file that makes a training stop; None for other commands.
    """
    if stop_file is None or not stop_file.parent.is_dir():
        process.terminate()
        process.wait()
        return
    stop_file.touch()
    process.wait()
    stop_file.unlink(missing_ok=True)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Context in which SIGTERM raises SystemExit with status 143, so that the process of a part is stopped as well."""

    def handle_signal(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, handle_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def describe_failure(log_path: Path) -> str:
    """Return the last error message in a log file of a command, followed by the path of the file."""
    message = ""
    for line in tail_lines(log_path)[-_SEARCHED_LINES:]:
        # Messages of the commands, and the last lines of tracebacks.
        if re.match(r"credit \w+: |\w*(Error|Exception)\b.*: ", line):
            message = f"{line.strip()} "
        elif line.startswith("$ "):
            # Messages of earlier attempts are in the same file.
            message = ""
    return f"{message}(log {log_path})"
