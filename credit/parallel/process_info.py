"""Rank facts of this process and its process group; the only reader of rank and job variables."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from credit.errors import ConfigError

# Where each launcher tells rank, world size, rank on the host and ranks on the host; the first complete one counts.
# MPI comes before Slurm: mpirun starts its daemons with srun, whose variables then count daemons.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "pals": ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}  # fmt: skip
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_PORTS = range(20000, 60000)
# open files of a process beside its connections; groups of all ranks, with some to spare
_FILES, _GROUPS = 1024, 8


@dataclass(frozen=True)
class ProcessInfo:
    """Where this process stands among the run's processes.

    Attributes:
        rank: of this process.
        world: number of processes.
        local_rank: among the processes of this host; selects the GPU.
        launcher: who started them: torchrun, slurm, openmpi, pals, mpich or none.
        job_id: of the scheduler, empty outside one.
        attempt: how often torchrun has started the ranks again.
        address: host and port where rank 0 is met, None where the launcher has set MASTER_ADDR and MASTER_PORT.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    launcher: str = "none"
    job_id: str = ""
    attempt: int = 0
    address: tuple[str, int] | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes logs and files."""
        return self.rank == 0


def read_process_info(environ: Mapping[str, str] = os.environ) -> ProcessInfo:
    """Return the facts of this process.

    A shell inside a Slurm or PBS allocation is not a launcher: there, one process runs.

    Raises:
        ConfigError: for variables that are no ranks, or where nothing tells where rank 0 is.
    """
    job_id = environ.get("SLURM_JOB_ID") or environ.get("PBS_JOBID") or ""
    for launcher, (rank, world, local, on_host) in _LAUNCHERS.items():
        if rank not in environ or world not in environ:
            continue
        facts = [_whole(environ, name) for name in (rank, world)]
        if not 0 <= facts[0] < facts[1]:
            raise ConfigError(f"{rank}={facts[0]} and {world}={facts[1]}: a rank must lie below the number of ranks")
        here = _whole(environ, local) if local in environ else None
        if facts[1] > 1 and here is None:
            raise ConfigError(
                f"{rank} is set by {launcher} but {local} is not, so no GPU can be chosen; export {local}"
            )
        one_host = environ.get(on_host) == str(facts[1])
        address = _address(environ, launcher, facts[1], one_host, job_id)
        attempt = _whole(environ, _ATTEMPT) if _ATTEMPT in environ else 0
        return ProcessInfo(facts[0], facts[1], here or 0, launcher, job_id, attempt, address)
    return ProcessInfo(job_id=job_id)


def require_one_process(command: str) -> None:
    """Refuse to run `command` many times over: its processes would write the same files.

    Raises:
        ConfigError: if a launcher has started several processes.
    """
    launch = read_process_info()
    if launch.world > 1:
        raise ConfigError(
            f"credit {command} runs on one process, and {launch.launcher} has started {launch.world}; start it without"
        )


@contextmanager
def process_group(launch: ProcessInfo, device: torch.device, timeout_minutes: int) -> Iterator[dist.Store | None]:
    """Hold the run's process group: gloo for tensors on the CPU, nccl for those on GPUs. One process needs none.

    Yields the store that all ranks share, None for one process.

    Args:
        launch: facts of this process.
        device: where the model lives; of GPUs the current one, which `credit.train.build_model.choose_device` makes it.
        timeout_minutes: how long a collective waits for the slowest rank before the run fails.
    """
    if launch.world == 1:
        yield None
        return
    _allow_open_files(launch.world)
    # torch's record of the last collectives, which tells who is missing when one does not end
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if device.type == "cpu" and hasattr(os, "SCHED_BATCH"):
        # a thread that gloo wakes must not interrupt one that computes: a small all-reduce takes a quarter of the time
        # (benchmarks/lab_notes.md); threads that are started from here on inherit it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    where = "env://" if launch.address is None else f"tcp://{launch.address[0]}:{launch.address[1]}"
    timeout = timedelta(minutes=timeout_minutes)
    store, *_ = next(rendezvous(where, launch.rank, launch.world, timeout=timeout))
    # torchrun's store outlives a restart (2.13), and the addresses of the ranks that have died with it
    store = dist.PrefixStore(f"attempt_{launch.attempt}", store)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=launch.rank,
        world_size=launch.world,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield store
        # gloo's threads may still free a tensor while a process that is done early shuts Python down
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _allow_open_files(world: int) -> None:
    """Let this process open as many files as its groups need: gloo connects each rank of a group with every other.

    The usual limit of a shell, 1024, would end a start on a few hundred ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES + _GROUPS * world
    if soft != resource.RLIM_INFINITY and soft < wanted:
        within = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (within, hard))


@contextmanager
def fake_process_group(world: int) -> Iterator[None]:
    """Hold a process group of `world` ranks of which this process is rank 0 and the others do not exist.

    Collectives return at once and communicate nothing. One process needs none.
    """
    if world == 1:
        yield
        return
    # Without a store torch makes the fake one itself.
    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _whole(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError as error:
        raise ConfigError(
            f"{name}={environ[name]!r} is no whole number; the launcher sets it, leave it alone"
        ) from error


def _address(
    environ: Mapping[str, str], launcher: str, world: int, one_host: bool, job_id: str
) -> tuple[str, int] | None:
    """Return where rank 0 is met, None where MASTER_ADDR and MASTER_PORT say so."""
    if world == 1 or ("MASTER_ADDR" in environ and "MASTER_PORT" in environ):
        return None
    digits = "".join(c for c in job_id if c.isdigit())
    port = int(environ.get("MASTER_PORT") or _PORTS[int(digits or 0) % len(_PORTS)])
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"], port
    if one_host:
        return "localhost", port
    if launcher == "slurm" and environ.get("SLURM_STEP_NODELIST"):
        return first_host(environ["SLURM_STEP_NODELIST"]), port
    raise ConfigError(
        f"{world} ranks of {launcher} on several hosts, and MASTER_ADDR is not set; in the job script: "
        f"export MASTER_ADDR={socket.gethostname()} (the host of rank 0)"
    )


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: ``gpu[003-007,9],login1`` -> ``gpu003``."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return nodes.split(",")[0]
    numbers, _, tail = rest.partition("]")
    return head + numbers.split(",")[0].split("-")[0] + first_host(tail)
