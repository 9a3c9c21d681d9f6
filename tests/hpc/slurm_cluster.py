"""Real Slurm daemons on this machine for a test: one node, or several nodes that represent separate hosts."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo", "squeue", "scancel")

# cgroups and accounting are off, because they need a machine that is configured for them.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
SlurmctldPort={controller}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=1
KillWait=30
OverTimeLimit=0
ReturnToService=2
SlurmdTimeout={timeout}
{nodes}
PartitionName=short Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class CannotStart(Exception):
    """Slurm cannot start on this machine; the message has the reason."""


@contextmanager
def run_slurm(folder: Path, num_nodes: int = 1) -> Iterator[dict[str, str]]:
    """Run munged, slurmctld and slurmd, and stop them at the end of the block.

    The nodes are called node1, node2 and so on. A single node has all cores; each of several nodes has one core.

    Yields:
        The environment variables that the commands of Slurm need.

    Raises:
        CannotStart: if programs or root rights are missing, or a node does not become idle.
    """
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    programs = {name: shutil.which(name, path=path) for name in PROGRAMS}
    missing = [name for name, program_path in programs.items() if program_path is None]
    if missing:
        raise CannotStart(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        raise CannotStart("slurmd needs root")
    write_slurm_files(folder, num_nodes)
    environment = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as daemons:
        socket_file = folder / "munge.socket"
        munge = [programs["munged"], "--foreground", "--force", f"--socket={socket_file}"]
        munge += [f"--{kind}-file={folder / name}" for kind, name in MUNGE_FILES.items()]
        daemons.enter_context(run_daemon(munge, folder, environment))
        wait_until(socket_file.exists, "munged made no socket", folder / "munged.log")
        daemons.enter_context(run_daemon([programs["slurmctld"], "-D"], folder, environment))
        for number in range(1, num_nodes + 1):
            daemons.enter_context(run_daemon([programs["slurmd"], "-D", "-N", f"node{number}"], folder, environment))
        query = [programs["sinfo"], "--noheader", "--format=%t %D"]
        wait_until(
            lambda: read_output(query, environment).strip() == f"idle {num_nodes}",
            "no node came up",
            folder / "slurmctld.log",
        )
        try:
            yield environment
        finally:
            # Jobs continue to run when their daemon stops, so cancel them first.
            subprocess.run(
                [programs["scancel"], "--full", "--signal=KILL", "--user=root"], env=environment, check=False
            )
            subprocess.run([programs["scancel"], "--user=root"], env=environment, check=False)
            query = [programs["squeue"], "--noheader"]
            wait_until(lambda: read_output(query, environment) == "", "jobs are left", folder / "slurmctld.log")


MUNGE_FILES = {"key": "munge.key", "log": "munged.log", "pid": "munged.pid", "seed": "munged.seed"}


def write_slurm_files(folder: Path, num_nodes: int) -> None:
    """Write slurm.conf and the munge key."""
    for name in ("state", *(f"spool.node{number}" for number in range(1, num_nodes + 1))):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    host = socket.gethostname().split(".")[0]
    cpus = os.cpu_count() if num_nodes == 1 else 1
    controller, *ports = free_ports(1 + num_nodes)
    nodes = [
        f"NodeName=node{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN"
        for number, port in enumerate(ports, 1)
    ]
    (folder / "slurm.conf").write_text(
        # With several nodes, a short timeout makes a killed node count as lost soon.
        CONF.format(
            host=host,
            folder=folder,
            controller=controller,
            nodes="\n".join(nodes),
            timeout=60 if num_nodes == 1 else 10,
        )
    )


def free_ports(count: int) -> list[int]:
    """Return free ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


@contextmanager
def run_daemon(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a daemon, and stop it at the end of the block."""
    with (folder / f"{Path(command[0]).name}.out").open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read_output(command: list[str], environment: dict[str, str]) -> str:
    """Return the stdout of a command, also if it fails."""
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout


def wait_until(condition, problem: str, log: Path, seconds: float = 40) -> None:
    """Wait until `condition` is true.

    Raises:
        CannotStart: if it is not true after `seconds`; the message has the end of `log`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            end = log.read_text(errors="replace")[-600:] if log.exists() else "no log"
            raise CannotStart(f"{problem}: {end}")
        time.sleep(0.1)
