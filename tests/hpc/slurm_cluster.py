"""A Slurm of one node on this machine, in a folder of its own, for the time of a test."""

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

# no cgroups and no accounting: those need a machine that is set up for them
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
SlurmctldPort={controller}
SlurmdPort={node}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
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
SlurmdTimeout=60
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=short Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class CannotStart(Exception):
    """Why there is no Slurm here."""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run munged, slurmctld and slurmd; yield the environment that its commands need; stop all three, whatever happens.

    Raises:
        CannotStart: where the programs or the rights are missing, or the node does not come up.
    """
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    programs = {name: shutil.which(name, path=path) for name in PROGRAMS}
    missing = [name for name, where in programs.items() if where is None]
    if missing:
        raise CannotStart(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        raise CannotStart("slurmd needs root")
    configure(folder)
    environment = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as daemons:
        socket_file = folder / "munge.socket"
        munge = [programs["munged"], "--foreground", "--force", f"--socket={socket_file}"]
        munge += [f"--{kind}-file={folder / name}" for kind, name in MUNGE_FILES.items()]
        daemons.enter_context(running(munge, folder, environment))
        wait_until(socket_file.exists, "munged made no socket", folder / "munged.log")
        daemons.enter_context(running([programs["slurmctld"], "-D"], folder, environment))
        daemons.enter_context(running([programs["slurmd"], "-D"], folder, environment))
        ask = [programs["sinfo"], "--noheader", "--format=%t"]
        wait_until(lambda: output_of(ask, environment).strip() == "idle", "no node came up", folder / "slurmctld.log")
        try:
            yield environment
        finally:
            # a daemon that stops leaves its jobs running
            subprocess.run(
                [programs["scancel"], "--full", "--signal=KILL", "--user=root"], env=environment, check=False
            )
            subprocess.run([programs["scancel"], "--user=root"], env=environment, check=False)
            ask = [programs["squeue"], "--noheader"]
            wait_until(lambda: output_of(ask, environment) == "", "jobs are left", folder / "slurmctld.log")


MUNGE_FILES = {"key": "munge.key", "log": "munged.log", "pid": "munged.pid", "seed": "munged.seed"}


def configure(folder: Path) -> None:
    """Write slurm.conf and the key."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    settings = {"host": socket.gethostname().split(".")[0], "folder": folder, "cpus": os.cpu_count()}
    ports = free_ports(2)
    (folder / "slurm.conf").write_text(CONF.format(**settings, controller=ports[0], node=ports[1]))


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


@contextmanager
def running(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Keep a daemon running."""
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


def output_of(command: list[str], environment: dict[str, str]) -> str:
    """Return what a command prints, whether it succeeds or not."""
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout


def wait_until(condition, problem: str, log: Path, seconds: float = 40) -> None:
    """Wait for `condition`.

    Raises:
        CannotStart: with the end of `log`, if it does not come true.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            end = log.read_text(errors="replace")[-600:] if log.exists() else "no log"
            raise CannotStart(f"{problem}: {end}")
        time.sleep(0.1)
