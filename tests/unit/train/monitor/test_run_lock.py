"""Tests of the run lock: a live job excludes others from its folder, and a dead job does not."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from credit.errors import CheckpointError, ConfigError
from credit.train.monitor.run_lock import RunLock

QUICK = {"beat": 0.05, "silence": 0.5}
HOLDER = """
import sys, time
from pathlib import Path
from credit.train.monitor.run_lock import RunLock
with RunLock(Path(sys.argv[1]), "job.1", beat=0.05, silence=0.5):
    print("held", flush=True)
    time.sleep(60)
"""


def read_heartbeat(folder: Path) -> dict:
    return json.loads((folder / "heartbeat.json").read_text())


def test_the_heartbeat_is_updated_and_finally_removed(tmp_path: Path) -> None:
    with RunLock(tmp_path, "77", **QUICK) as run_lock:
        run_lock.update(12, "step 13")
        time.sleep(0.3)
        heartbeat = read_heartbeat(tmp_path)
        assert (heartbeat["pid"], heartbeat["job_id"], heartbeat["step"], heartbeat["doing"]) == (
            os.getpid(),
            "77",
            12,
            "step 13",
        )
        assert heartbeat["beat"] >= 2
    assert not list(tmp_path.iterdir())


def test_a_live_process_keeps_its_folder_and_a_killed_one_loses_it(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"in use by job job\.1, process {holder.pid} on"), RunLock(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        # The process is not waited for, because a zombie is dead, too.
        deadline = time.monotonic() + 10
        while Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
        with RunLock(tmp_path, **QUICK):
            assert read_heartbeat(tmp_path)["pid"] == os.getpid()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_a_reused_process_id_is_another_process(tmp_path: Path) -> None:
    with RunLock(tmp_path, **QUICK):
        heartbeat_left = read_heartbeat(tmp_path) | {"started": "1"}
    (tmp_path / "heartbeat.json").write_text(json.dumps(heartbeat_left))
    with RunLock(tmp_path, **QUICK):
        assert read_heartbeat(tmp_path)["started"] != "1"


def test_a_job_on_another_host_has_time_to_update_its_heartbeat(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    remote_heartbeat = {"host": "elsewhere", "pid": 5, "started": "9", "job_id": "", "beat": 3}
    path.write_text(json.dumps(remote_heartbeat))
    remote_job = subprocess.Popen(
        [sys.executable, "-c", "import json, sys, time\nfor n in range(400):\n"
         "    facts = json.loads(sys.argv[2]) | {'beat': n}\n    open(sys.argv[1], 'w').write(json.dumps(facts))\n"
         "    time.sleep(0.1)", str(path), json.dumps(remote_heartbeat)]
    )  # fmt: skip
    try:
        with pytest.raises(ConfigError, match="in use by process 5 on elsewhere"), RunLock(tmp_path, silence=20):
            pass
    finally:
        remote_job.kill()
        remote_job.wait()
    with RunLock(tmp_path, **QUICK):
        assert read_heartbeat(tmp_path)["pid"] == os.getpid()


def test_a_job_that_has_lost_its_folder_does_not_change_it(tmp_path: Path) -> None:
    with RunLock(tmp_path, **QUICK) as run_lock:
        run_lock.require_ownership()
        (tmp_path / "heartbeat.json").write_text(json.dumps(read_heartbeat(tmp_path) | {"pid": 5}))
        time.sleep(0.3)
        with pytest.raises(CheckpointError, match="another job .* has taken this folder"):
            run_lock.require_ownership()
    assert read_heartbeat(tmp_path)["pid"] == 5


@pytest.mark.parametrize(
    ("removed", "says"), [("run", "run was removed with all its files"), ("run/heartbeat.json", "may take")]
)
def test_a_removed_folder_is_not_reported_as_taken(tmp_path: Path, removed: str, says: str) -> None:
    (tmp_path / "run").mkdir()
    with RunLock(tmp_path / "run", **QUICK) as run_lock:
        run_lock.require_ownership()
        path = tmp_path / removed
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        time.sleep(0.3)
        with pytest.raises(CheckpointError, match=says) as caught:
            run_lock.require_ownership()
    assert "has taken" not in str(caught.value)
    assert not (tmp_path / "run" / "heartbeat.json").exists()


def test_a_truncated_heartbeat_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "heartbeat.json").write_text('{"host": "el')
    with RunLock(tmp_path, **QUICK):
        assert read_heartbeat(tmp_path)["pid"] == os.getpid()


def test_a_transient_file_system_error_does_not_stop_the_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLock(tmp_path, **QUICK) as run_lock:
        with monkeypatch.context() as failing:
            failing.setattr(Path, "read_bytes", raise_stale_handle)
            time.sleep(0.3)
        before = read_heartbeat(tmp_path)["beat"]
        time.sleep(0.3)
        assert read_heartbeat(tmp_path)["beat"] > before, "others would take the folder from a job that lives"
        run_lock.require_ownership()
    with pytest.raises(KeyError), RunLock(tmp_path, **QUICK):
        monkeypatch.setattr(Path, "read_bytes", raise_stale_handle)
        raise KeyError("what ends the run is not hidden")


def raise_stale_handle(path: Path) -> bytes:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_truncated_heartbeat_of_this_job_is_written_again(tmp_path: Path) -> None:
    with RunLock(tmp_path, "77", **QUICK) as run_lock:
        (tmp_path / "heartbeat.json").write_text('{"host": "el')
        deadline = time.monotonic() + 20
        while not (tmp_path / "heartbeat.json").read_text().startswith('{"host": "' + socket.gethostname()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run_lock.require_ownership()
    assert not list(tmp_path.iterdir())


def test_the_lock_does_not_wait_for_a_host_of_the_same_launch(tmp_path: Path) -> None:
    """torchrun restarts the ranks on other nodes; with another launch, the lock waits for a heartbeat."""
    remote_heartbeat = {"host": "elsewhere", "pid": 5, "started": "9", "job_id": "7", "launch_id": "7.1", "beat": 3}
    for launch_id, waits in (("7.1", False), ("7.2", True)):
        (tmp_path / "heartbeat.json").write_text(json.dumps(remote_heartbeat))
        start_time = time.monotonic()
        with RunLock(tmp_path, "7", launch_id, beat=0.05, silence=1.5):
            assert read_heartbeat(tmp_path)["launch_id"] == launch_id
        assert (time.monotonic() - start_time > 1.5) == waits
