"""Lock of a run folder, with a heartbeat in ``heartbeat.json`` that shows that the job is alive."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from credit.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

# Seconds between heartbeats, and seconds without a heartbeat after which a job on another host is treated as dead.
BEAT_SECONDS = 10.0
SILENCE_SECONDS = 60.0
# Length of heartbeat.json in bytes. It is fixed, so that rewriting the file in place needs no further disk space.
_LENGTH = 1024
# Contents that are used for a file that cannot be parsed; no job has this process id or beat number.
_UNREADABLE: dict[str, Any] = {"host": "", "pid": 0, "started": None, "job_id": "", "beat": -1}


class RunLock:
    """Context manager that locks a run folder and rewrites ``heartbeat.json`` in the folder every few seconds.

    The file contains the host, process and job of the run, the number of heartbeats, and the current activity. If a new
    job finds the file of an old job on the same host, the new job checks whether the old process is alive. If the old
    job is on a different host, the new job waits for its next heartbeat. A dead or silent process loses the lock. If
    two new jobs find a dead process at the same moment, the later of them gets the lock. The other new job detects this
    at its next heartbeat. Clocks of different hosts are never compared.

    Args:
        folder: the run's folder.
        job_id: id of the scheduler's job, empty for none.
        launch_id: name of the launch under torchrun, which stays the same when torchrun restarts the ranks; empty for
            none. torchrun ends all ranks before a restart, so an old process of the same launch is treated as dead.
        beat: seconds between heartbeats.
        silence: seconds without a heartbeat after which a job on another host is treated as dead.

    Raises:
        ConfigError: on entry, if another job is active in the folder.
    """

    def __init__(
        self,
        folder: Path,
        job_id: str = "",
        launch_id: str = "",
        beat: float = BEAT_SECONDS,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        self._path = folder / "heartbeat.json"
        self._beat = beat
        self._silence = silence
        pid = os.getpid()
        self._contents: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": pid,
            "started": _read_process_start(pid),
            "job_id": job_id,
            "launch_id": launch_id,
            "beat": 0,
            "time": "",
            "step": None,
            "doing": "starting",
        }
        self._released = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_released, name="heartbeat", daemon=True)

    def update(self, step: int, doing: str) -> None:
        """Set the step and the activity that the next heartbeat writes.

        Args:
            step: number of optimizer steps taken.
            doing: the activity, such as "validation at step 100".
        """
        self._contents.update(step=step, doing=doing)

    def require_ownership(self) -> None:
        """Raise CheckpointError unless this process still has the lock of the folder.

        Raises:
            CheckpointError: if the folder or the file was removed, or if another job took the lock while this process
                wrote no heartbeats.
        """
        if not self._lost.is_set():
            return
        if not self._path.parent.is_dir():
            raise CheckpointError(
                f"save_loc: {self._path.parent} was removed with all its files while this run was active; the run "
                "ends. The same command starts a new run"
            )
        other = self._read()
        if other is None:
            raise CheckpointError(
                f"{self._path} was removed while this run was active, so another job may take the folder; the run "
                "ends. The same command continues the run"
            )
        raise CheckpointError(
            f"{self._path}: another job ({_describe(other)}) has taken this folder, because this job wrote no "
            "heartbeat; this job ends and leaves the folder to the other job"
        )

    def __enter__(self) -> RunLock:
        while not self._create_file():
            other = self._read()
            if other is not None and self._is_alive(other):
                raise ConfigError(
                    f'save_loc: "{self._path.parent}" is in use by {_describe(other)}; stop that job (touch '
                    f"{self._path.parent / 'STOP'}), or choose another save_loc. If the job is dead, remove "
                    f"{self._path}"
                )
            logger.warning("%s is the file of %s, which is dead; it is removed", self._path, _describe(other))
            self._path.unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._thread.join()
        # The file stays if another job has taken the lock meanwhile.
        with suppress(OSError):
            if self._is_from_this_process(self._read()):
                self._path.unlink(missing_ok=True)

    def _create_file(self) -> bool:
        """Create heartbeat.json and return True; return False if the file exists.

        If two jobs call this method at the same moment, only one of them creates the file.

        Raises:
            ConfigError: if the folder cannot be written.
        """
        try:
            # Mode "x" creates the file or fails, in one operation of the file system.
            with self._path.open("xb") as file:
                file.write(self._encode())
        except FileExistsError:
            return False
        except OSError as error:
            raise ConfigError(f'save_loc: "{self._path}" cannot be written ({error.strerror})') from error
        return True

    def _is_alive(self, other: dict[str, Any]) -> bool:
        """Return True if the job that wrote a heartbeat file is alive.

        For a job on another host, wait for its next heartbeat, at most `silence` seconds.

        Args:
            other: contents of the file.
        """
        if other["host"] == self._contents["host"]:
            # The start time is None if the process was not alive when the file was written.
            if other["started"] is None:
                return False
            return _read_process_start(other["pid"]) == other["started"]
        # torchrun restarted this launch after the loss of the other host, so waiting a minute is not necessary.
        if self._contents["launch_id"] and other.get("launch_id") == self._contents["launch_id"]:
            return False
        logger.warning("%s: waiting for a heartbeat of %s", self._path, _describe(other))
        deadline = time.monotonic() + self._silence
        while time.monotonic() < deadline:
            # Checking every second ends the wait soon after a heartbeat.
            time.sleep(min(self._beat, 1.0))
            contents = self._read()
            if contents is None:
                return False
            # A changed process id means that a third job has taken the folder in the meantime.
            if contents["beat"] != other["beat"] or contents["pid"] != other["pid"]:
                return True
        return False

    def _beat_until_released(self) -> None:
        """Rewrite heartbeat.json every few seconds until the lock is released or lost; this method runs in a thread."""
        while not self._released.wait(self._beat):
            # A temporary failure of the file system does not end the heartbeat.
            with suppress(OSError):
                contents = self._read()
                # A failing file system may have damaged the file of this process; it is then written again.
                if contents is not _UNREADABLE and not self._is_from_this_process(contents):
                    self._lost.set()
                    return
                self._contents["beat"] += 1
                # Overwriting the file in place also works on a full disk.
                with self._path.open("r+b") as file:
                    file.write(self._encode())

    def _is_from_this_process(self, contents: dict[str, Any] | None) -> bool:
        """Return True if this process wrote the contents of the file; `contents` is None for a missing file."""
        if contents is None:
            return False
        return all(contents[key] == self._contents[key] for key in ("host", "pid", "started"))

    def _read(self) -> dict[str, Any] | None:
        """Return the contents of heartbeat.json; None if it does not exist, `_UNREADABLE` if it cannot be parsed."""
        for _ in range(5):
            try:
                return json.loads(self._path.read_bytes())
            except FileNotFoundError:
                return None
            except ValueError:
                # The other process may be writing the file at this moment.
                time.sleep(0.05)
        return _UNREADABLE

    def _encode(self) -> bytes:
        """Return the current contents for heartbeat.json as bytes, padded to a fixed length."""
        self._contents["time"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return json.dumps(self._contents).encode().ljust(_LENGTH - 1) + b"\n"


def _read_process_start(pid: int) -> str | None:
    """Return the start time of a process on this host as a string; None if the process is not alive.

    Process ids are reused, so only the id together with the start time identifies a process. The string is used only
    for comparison. It is the start time in Linux's /proc, or "unknown" on other systems.
    """
    # Without Linux's /proc, it can only be checked that the process exists.
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return "unknown"
    try:
        # The name in parentheses may contain anything. After it come the state and, 19 fields later, the start time.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    is_zombie = fields[0] == "Z"
    return None if is_zombie else fields[19]


def _describe(contents: dict[str, Any] | None) -> str:
    """Return a string with the job, process and host in the contents of a heartbeat file."""
    if contents is None:
        return "a job"
    job = ""
    if contents["job_id"]:
        job = f"job {contents['job_id']}, "
    return f"{job}process {contents['pid']} on {contents['host']}"
