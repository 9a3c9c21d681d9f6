"""Job with `min_nodes` under a real Slurm whose nodes are daemons on this machine: one node is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from credit.cli.main import main
from tests.hpc.slurm_cluster import CannotStart, run_slurm
from tests.smoke.conftest import world
from tests.smoke.test_train import rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SITE = {
    "title": "This machine",
    "scheduler": "slurm",
    "start": ["srun", "--ntasks", "{ranks}", "--ntasks-per-node", "{ranks_per_node}"],
    "defaults": {"partition": "short", "walltime": "30min", "launch": "torchrun", "gpus_per_node": 0,
                 "cpus_per_node": 1, "signal_seconds": 60},
}  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a Slurm with four nodes, and put its commands on PATH."""
    try:
        (tmp_path / "slurm").mkdir()
        with run_slurm(tmp_path / "slurm", num_nodes=4) as environment:
            for name in ("PATH", "SLURM_CONF"):
                monkeypatch.setenv(name, environment[name])
            yield
    except CannotStart as reason:
        pytest.skip(f"no Slurm: {reason}")


def kill_node(name: str) -> None:
    """Kill the daemon of a node and all processes of its jobs."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_daemon = command[0].endswith(b"slurmd") and name.encode() in command
        if is_daemon or f"SLURMD_NODENAME={name}".encode() in environment:
            pids.append(int(folder.name))
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (Path(f"/proc/{parent}/cmdline").read_bytes()).startswith(b"slurmstepd"):
                pids.append(parent)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def find_node_of_listener(port: int) -> str:
    """Return the node of the process that listens on a port."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            # State 0A is LISTEN.
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) in inodes for link in (folder / "fd").iterdir()):
                variables = (folder / "environ").read_text().split("\0")
                return next(text for text in variables if text.startswith("SLURMD_NODENAME=")).partition("=")[2]
        except OSError:
            continue
    raise AssertionError(f"nobody listens on {port}")


def test_job_continues_after_loss_of_a_node(tmp_path: Path, cluster: None) -> None:
    folder = world(tmp_path)
    run, config = folder / "run", folder / "config.yml"
    (folder / "site.yml").write_text(yaml.safe_dump(SITE))
    raw = yaml.safe_load(config.read_text())
    raw["slurm"] = {"cluster": str(folder / "site.yml"), "nodes": 4, "min_nodes": 3}
    raw["trainer"] |= {"train_batch_size": 3, "global_batch_size": 12, "max_steps": 30, "checkpoint_every": 5,
                       "log_every": 1, "validate_every": 1000, "valid_samples": 1}  # fmt: skip
    config.write_text(yaml.safe_dump(raw))
    assert main(["submit", str(config)]) == 0
    (job_id,) = json.loads((run / "jobs.json").read_text())["train"]["ids"]

    def log() -> str:
        return "".join(path.read_text() for path in (run / "logs").glob("*"))

    deadline = time.monotonic() + 800
    while not (run / "metrics.jsonl").exists() or '"step": 7,' not in (run / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline, log()
        time.sleep(0.05)
    # On a cluster, the node of the job script hosts the rendezvous, and its loss ends the job. Here all nodes have one
    # address, so any of them may host it.
    host = find_node_of_listener(20_000 + int(job_id))
    kill_node(next(f"node{number}" for number in (4, 3, 2) if f"node{number}" != host))
    kill_time = time.monotonic()
    while json.loads((run / "STATUS").read_text())["status"] != "done":
        assert time.monotonic() < deadline, log()
        time.sleep(0.2)
    print(f"done {time.monotonic() - kill_time:.0f} s after the kill")
    while subprocess.run(["squeue", "--noheader"], capture_output=True, text=True).stdout:
        assert time.monotonic() < deadline, log()
        time.sleep(0.5)
    assert [row[0] for row in rows(run)] == list(range(1, 31))
    starts = [json.loads(line) for line in (run / "jobs" / "starts.jsonl").read_text().splitlines()]
    assert [start["job_id"] for start in starts] == [job_id], "one job, one start of the launcher"
    job_text = subprocess.run(["scontrol", "--oneliner", "show", "job", job_id], capture_output=True, text=True).stdout
    assert "JobState=COMPLETED" in job_text and "Restarts=0" in job_text, job_text
    assert "trainer.train_batch_size" not in log()
