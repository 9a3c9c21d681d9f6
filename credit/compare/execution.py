"""Processes of a comparison or sweep: each training run, forecast and verification is a process with a log file.

Such a process executes one part of the comparison. ``parts.json`` in the folder of the comparison records which parts
are done, and a second call runs only the missing parts. Parts that do not depend on each other can run at the same
time, each on its share of the processor cores and GPUs.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from credit.errors import ConfigError
from credit.train.monitor.run_files import read_last_lines
from credit.utils.atomic import atomic_write_text

logger = logging.getLogger(__name__)

# Exit code of `credit train` if it saved a checkpoint and stopped before its time limit.
STOPPED_IN_TIME = 85
DONE = "done"
FAILED = "failed"
# Interval in seconds at which the running processes are checked.
_POLL_SECONDS = 0.1
# Lines at the end of a log that are searched for the error message of a command.
_SEARCHED_LINES = 200


@dataclass(frozen=True)
class ComparisonPart:
    """One part of a comparison or sweep: a ``credit`` command that a separate process executes.

    Attributes:
        name: name that is unique in the comparison, such as ``train a, seed 1000``.
        command: ``credit`` command: ``train``, ``rollout`` or ``verify``.
        config: config file of the command.
        overrides: ``section.key=value`` arguments of the command.
        result: file or folder that the command writes last.
        depends_on: strings that identify inputs other than the overrides. The part is repeated if one of them changes.
        ranks: number of processes; torchrun starts them if there is more than one.
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
        """File whose existence makes a training run save a checkpoint and stop; None for other commands."""
        if self.command != "train":
            return None
        return self.result.parent / "STOP"

    @property
    def inputs(self) -> dict[str, Any]:
        """All inputs that determine the result, in the form in which ``parts.json`` records them."""
        return {"command": self.command, "overrides": list(self.overrides), "depends_on": list(self.depends_on)}

    def command_line(self) -> list[str]:
        """Return the program and the arguments of the process that executes the part."""
        words = [sys.executable]
        if self.ranks > 1:
            words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [*words, "-m", "credit.cli.main", self.command, str(self.config), *self.overrides, "--quiet"]


@dataclass(frozen=True)
class HostSlots:
    """Equal shares (slots) of this host for the parts that run at the same time.

    Attributes:
        num_slots: number of slots; each slot runs one part at a time.
        num_threads: number of threads of each process; with None, the commands choose the number.
        devices: names of the GPUs for ``CUDA_VISIBLE_DEVICES``, divided equally between the slots; empty without GPUs.
    """

    num_slots: int = 1
    num_threads: int | None = None
    devices: Sequence[str] = ()

    def build_environment(self, slot: int) -> dict[str, str]:
        """Return the environment variables for a part that runs in a slot.

        Args:
            slot: number of the slot, from 0.
        """
        # Log files must not contain colours.
        environment = {**os.environ, "NO_COLOR": "1"}
        if self.num_threads is not None:
            # A job script may have set the number of threads for a process that uses the complete host.
            requested = environment.get("OMP_NUM_THREADS", "")
            num_threads = min(int(requested), self.num_threads) if requested.isdigit() else self.num_threads
            environment["OMP_NUM_THREADS"] = str(max(1, num_threads))
        devices_per_slot = len(self.devices) // self.num_slots
        if devices_per_slot:
            start = slot * devices_per_slot
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices[start : start + devices_per_slot])
        return environment


def divide_host_into_slots(jobs: int, ranks: int) -> HostSlots:
    """Divide the cores and GPUs of this host between `jobs` simultaneous parts of `ranks` processes each.

    Raises:
        ConfigError: if the host has GPUs, but fewer than all parts need, or if the number of GPUs in
            ``CUDA_VISIBLE_DEVICES`` differs from the number that torch finds.
    """
    if jobs == 1:
        return HostSlots()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = [name.strip() for name in visible.split(",") if name.strip()]
    num_devices = torch.cuda.device_count()
    if not devices:
        devices = [str(number) for number in range(num_devices)]
    elif num_devices and len(devices) != num_devices:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES: {visible} names {len(devices)} GPUs, but torch finds {num_devices}; name GPUs that "
            "exist, or unset the variable"
        )
    if not num_devices:
        devices = []
    num_processes = jobs * ranks
    if devices and len(devices) < num_processes:
        raise ConfigError(
            f"--jobs {jobs} --ranks {ranks}: need {num_processes} GPUs, but this host has {len(devices)}; "
            "reduce --jobs or --ranks"
        )
    num_cores = len(os.sched_getaffinity(0))
    return HostSlots(jobs, max(1, num_cores // num_processes), devices[:num_processes])


@dataclass(frozen=True)
class RunningPart:
    """A part of a comparison and its running process.

    Attributes:
        part: the part.
        slot: number of the slot of the host that the process uses.
        process: process that executes the part.
        start_time: value of `time.monotonic` at the start of the process, in seconds.
    """

    part: ComparisonPart
    slot: int
    process: subprocess.Popen
    start_time: float


class Executor:
    """Executor of the parts of a comparison, which records their outcomes in ``parts.json``.

    Args:
        folder: folder of the comparison; it must exist.
        slots: shares of the host for the parts that run at the same time; None to run one part at a time.
    """

    def __init__(self, folder: Path, slots: HostSlots | None = None) -> None:
        self._path = folder / "parts.json"
        self._log_folder = folder / "logs"
        self._log_folder.mkdir(exist_ok=True)
        self._slots = slots or HostSlots()
        self._records: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            self._records = json.loads(self._path.read_text(encoding="utf-8"))
        # Names of the parts that this call has to do, for the list of failures on the page.
        self._names: list[str] = []

    def run(self, part: ComparisonPart, is_repeated: bool = False) -> bool:
        """Run one part unless it is done, and return True if it is done afterwards; see `run_all`.

        Args:
            part: the part.
            is_repeated: True to run the part even if it is done already.
        """
        return self.run_all([part], is_repeated)[0]

    def run_all(self, parts: Sequence[ComparisonPart], is_repeated: bool = False) -> list[bool]:
        """Run the parts that are not done, some at the same time, and return True for each part that is then done.

        A part is repeated if its inputs have changed or its result was removed. If a part fails, the failure is logged
        with the path of the log file, and the other parts continue. If this process is interrupted (Ctrl-C or SIGTERM),
        it stops the processes of all parts and waits for them.

        Args:
            parts: parts that do not depend on each other.
            is_repeated: True to run all parts, including parts that are done already.
        """
        self._names += [part.name for part in parts]
        pending = []
        for part in parts:
            if self._is_done(part) and not is_repeated:
                logger.info("%s: done before", part.name)
            else:
                pending.append(part)
        free_slots = list(range(self._slots.num_slots))
        running: list[RunningPart] = []
        try:
            while pending or running:
                while pending and free_slots:
                    running.append(self._start(pending.pop(0), free_slots.pop(0)))
                for running_part in list(running):
                    exit_code = running_part.process.poll()
                    if exit_code is not None:
                        running.remove(running_part)
                        free_slots.append(running_part.slot)
                        self._record_outcome(running_part.part, exit_code, time.monotonic() - running_part.start_time)
                if running:
                    time.sleep(_POLL_SECONDS)
        finally:
            # Processes are still running only if Ctrl-C, SIGTERM or an error (such as a full disk) ended the loop.
            stop_parts(running)
        return [self._is_done(part) for part in parts]

    def _start(self, part: ComparisonPart, slot: int) -> RunningPart:
        """Start the process of a part in a slot."""
        log_path = self._log_path(part)
        logger.info("%s: started, log %s", part.name, log_path)
        if part.stop_file is not None:
            # A STOP file that an earlier process did not read would stop the new process at once.
            part.stop_file.unlink(missing_ok=True)
        process = start_process(part.command_line(), log_path, self._slots.build_environment(slot))
        return RunningPart(part, slot, process, time.monotonic())

    def _is_done(self, part: ComparisonPart) -> bool:
        """Return True if a part was done with the same inputs and its result exists."""
        record = self._records.get(part.name, {})
        has_same_inputs = all(record.get(key) == value for key, value in part.inputs.items())
        return record.get("status") == DONE and has_same_inputs and part.result.exists()

    def _log_path(self, part: ComparisonPart) -> Path:
        """Return the log file of a part."""
        return self._log_folder / (re.sub(r"[^\w.-]+", "_", part.name) + ".log")

    def _record_outcome(self, part: ComparisonPart, exit_code: int, seconds: float) -> None:
        """Write the outcome of a process to ``parts.json``, and log a failure."""
        log_path = self._log_path(part)
        if exit_code == STOPPED_IN_TIME:
            # The config has a time limit (trainer.walltime); the next call continues the training run.
            logger.warning("%s: stopped before its end; the same command continues it", part.name)
        self._records[part.name] = {
            **part.inputs,
            "status": DONE,
            "exit_code": exit_code,
            "seconds": round(seconds, 1),
            "log": str(log_path),
        }
        if exit_code:
            self._records[part.name]["status"] = FAILED
            logger.error("%s: failed with exit code %s: %s", part.name, exit_code, describe_failure(log_path))
        elif not part.result.exists():
            self.mark_failed(part, f"{part.result} is missing (log {log_path})")
        self.save()

    def mark_failed(self, part: ComparisonPart, reason: str) -> None:
        """Record a part as failed although its process succeeded.

        Args:
            part: the part.
            reason: reason of the failure, for readers of the page.
        """
        self._records[part.name] |= {"status": FAILED, "reason": reason}
        self.save()
        logger.error("%s: %s", part.name, reason)

    def save(self) -> None:
        """Write ``parts.json`` atomically."""
        atomic_write_text(self._path, json.dumps(self._records, indent=1) + "\n")

    def list_failures(self) -> list[str]:
        """Return a sentence for each failed part of this call, with its error message and its log file."""
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


def start_process(words: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> subprocess.Popen:
    """Start a process, append its output to a log file, and return the process.

    Args:
        words: program and arguments of the process.
        log_path: file for standard output and standard error.
        environment: environment variables of the process.
    """
    with log_path.open("ab") as log:
        log.write(f"$ {' '.join(words)}\n".encode())
        log.flush()
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=dict(environment)
        )


def stop_parts(running: Sequence[RunningPart]) -> None:
    """Stop the processes of all running parts, and wait until the processes have ended.

    A training run is stopped by its STOP file instead of a signal. The terminal may already have sent a signal, and
    after a second signal a training run ends without saving a checkpoint.

    Args:
        running: running parts.
    """
    stop_files = []
    for running_part in running:
        if running_part.process.poll() is not None:
            continue
        stop_file = running_part.part.stop_file
        if stop_file is not None and stop_file.parent.is_dir():
            stop_file.touch()
            stop_files.append(stop_file)
        else:
            running_part.process.terminate()
    for running_part in running:
        running_part.process.wait()
    for stop_file in stop_files:
        stop_file.unlink(missing_ok=True)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Context manager in which SIGTERM raises SystemExit with status 143, so that running parts are stopped as well."""

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
    for line in read_last_lines(log_path)[-_SEARCHED_LINES:]:
        # This pattern matches error messages of the commands and the last lines of tracebacks.
        if re.match(r"credit \w+: |\w*(Error|Exception)\b.*: ", line):
            message = f"{line.strip()} "
        elif line.startswith("$ "):
            # A new attempt begins here; messages of earlier attempts in the same file are ignored.
            message = ""
    return f"{message}(log {log_path})"
