"""Rank of this process, and process group of the run; only this module reads the environment variables of launchers."""

from __future__ import annotations

import logging
import os
import resource
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from credit.errors import ConfigError
from credit.parallel.groups.object_tree import RankTree

logger = logging.getLogger(__name__)

# Variables of each launcher: rank, number of ranks, rank on the host, number of ranks on the host. The first launcher
# whose rank and number of ranks are set is used. MPI precedes Slurm, because mpirun starts its daemons with srun, and
# Slurm's variables then describe the daemons.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "pals": ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}  # fmt: skip
# Variables of torchrun: number of restarts so far, maximum number of restarts, name of the launch, and a flag that is
# set if torchrun's own process on the first node hosts the store of the ranks.
_ATTEMPT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
_MAX_ATTEMPTS_VARIABLE = "TORCHELASTIC_MAX_RESTARTS"
_LAUNCH_VARIABLE = "TORCHELASTIC_RUN_ID"
_AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
# Port numbers from which the port of rank 0 is chosen if the launcher does not set a port.
_PORTS = range(20000, 60000)
# Number of open files that a process needs in addition to its connections.
_NUM_OTHER_FILES = 1024
# Upper bound of the number of process groups of all ranks that a run creates.
_NUM_PROCESS_GROUPS = 8


@dataclass(frozen=True)
class ProcessInfo:
    """Position of this process among the processes of the run.

    Attributes:
        rank: rank of this process, from 0.
        world: number of processes.
        local_rank: rank among the processes on this host, from 0. It selects the GPU.
        launcher: program that started the processes: torchrun, slurm, openmpi, pals, mpich or none.
        job_id: id of the scheduler's job; empty outside a job.
        attempt: number of times that torchrun has restarted the ranks; 0 with other launchers.
        address: (host, port) of rank 0; None for a single process, and if MASTER_ADDR and MASTER_PORT are both set.
        can_restart: True if torchrun restarts the ranks after a failure (``--max-restarts``).
        launch_id: name of the launch (``--rdzv-id`` of torchrun), which is the same after a restart; empty if unknown.
        has_agent_store: True if torchrun hosts the store of the ranks. The store then survives a restart of the ranks.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    launcher: str = "none"
    job_id: str = ""
    attempt: int = 0
    address: tuple[str, int] | None = None
    can_restart: bool = False
    launch_id: str = ""
    has_agent_store: bool = False

    @property
    def store_address(self) -> tuple[str, int]:
        """(host, port) of the store of all ranks; not available for a single process."""
        return self.address or (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    @property
    def store_prefix(self) -> str:
        """Prefix of all keys in the store.

        torchrun's own store survives a restart (torch 2.13) and still contains the addresses of dead ranks. Each
        attempt therefore has a separate prefix. A store on rank 0 is new in each attempt. In this case the prefix must
        not depend on the attempt: torchrun counts restarts separately on each node, and a node that joins later has a
        lower count.
        """
        return f"attempt_{self.attempt}" if self.has_agent_store else "run"

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes logs and files."""
        return self.rank == 0


def read_process_info(environ: Mapping[str, str] = os.environ) -> ProcessInfo:
    """Return the position of this process, read from the environment variables of its launcher.

    Without a launcher there is a single process, even in a shell inside a Slurm or PBS allocation.

    Args:
        environ: environment variables.

    Raises:
        ConfigError: if the variables contain no valid ranks, the local rank is missing, or the address of rank 0 cannot
            be found.
    """
    job_id = environ.get("SLURM_JOB_ID") or environ.get("PBS_JOBID") or ""
    for launcher, (rank_key, world_key, local_rank_key, local_world_key) in _LAUNCHERS.items():
        if rank_key not in environ or world_key not in environ:
            continue
        rank = _read_int(environ, rank_key)
        world = _read_int(environ, world_key)
        if not 0 <= rank < world:
            raise ConfigError(
                f"{rank_key}={rank} and {world_key}={world}: a rank must be less than the number of ranks"
            )
        local_rank = None
        if local_rank_key in environ:
            local_rank = _read_int(environ, local_rank_key)
        if world > 1 and local_rank is None:
            raise ConfigError(
                f"{rank_key} is set by {launcher} but {local_rank_key} is not, so no GPU can be chosen; export "
                f"{local_rank_key}"
            )
        # All ranks run on this host if the number of ranks on this host equals the number of all ranks.
        is_one_host = environ.get(local_world_key) == str(world)
        address = _find_address(environ, launcher, world, is_one_host, job_id)
        process = ProcessInfo(rank, world, local_rank or 0, launcher, job_id, address=address)
        if _ATTEMPT_VARIABLE not in environ:
            return process
        # "none" is torchrun's default for all launches.
        launch_id = environ.get(_LAUNCH_VARIABLE, "none")
        return replace(
            process,
            attempt=_read_int(environ, _ATTEMPT_VARIABLE),
            can_restart=int(environ.get(_MAX_ATTEMPTS_VARIABLE, 0)) > 0,
            launch_id="" if launch_id == "none" else launch_id,
            has_agent_store=environ.get(_AGENT_STORE_VARIABLE) == str(True),
        )
    return ProcessInfo(job_id=job_id)


def require_one_process(command: str) -> None:
    """Require that a command runs on a single process, because several processes would write the same files.

    Args:
        command: name of the command for the message, such as ``"preprocess"``.

    Raises:
        ConfigError: if a launcher has started several processes.
    """
    process = read_process_info()
    if process.world > 1:
        raise ConfigError(
            f"credit {command} runs on one process, but {process.launcher} has started {process.world} processes; "
            f"start the command without {process.launcher}"
        )


@contextmanager
def process_group(process: ProcessInfo, device: torch.device, timeout_minutes: int) -> Iterator[dist.Store | None]:
    """Collective: context in which the process group of the run exists, with gloo on CPUs and nccl on GPUs.

    A single process needs no process group, so no group is created.

    Args:
        process: position of this process.
        device: device of the model; a GPU must be the current device (`torch.cuda.set_device`).
        timeout_minutes: minutes that a collective waits for the slowest rank before the run fails.

    Yields:
        The key-value store that all ranks share; None for a single process.

    Raises:
        torch.distributed.DistError: if a rank does not join within the timeout.
    """
    if process.world == 1:
        yield None
        return
    _raise_open_file_limit(process.world)
    _lower_debug_level(process)
    # With this setting, gloo connects two ranks at their first communication, and not all pairs of ranks at the start
    # (benchmarks/lab_notes.md).
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # Size of torch's record of the last collectives. The record shows the missing ranks if a collective does not end.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if device.type == "cpu" and hasattr(os, "SCHED_BATCH"):
        # With this policy, a thread that gloo wakes up does not interrupt a thread that computes. A small all-reduce
        # then needs a quarter of the time (benchmarks/lab_notes.md). Threads that are started later inherit the policy.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    url = "env://"
    if process.address is not None:
        host, port = process.address
        url = f"tcp://{host}:{port}"
    timeout = timedelta(minutes=timeout_minutes)
    # `rendezvous` yields (store, rank, number of ranks); rank and number of ranks are already known.
    store, *_ = next(rendezvous(url, process.rank, process.world, timeout=timeout))
    store = dist.PrefixStore(process.store_prefix, store)
    backend = "gloo"
    bound_device = None
    if device.type == "cuda":
        # GPU runs also communicate tensors on the CPU.
        backend = "cpu:gloo,cuda:nccl"
        bound_device = device
    dist.init_process_group(
        backend, store=store, rank=process.rank, world_size=process.world, timeout=timeout, device_id=bound_device
    )
    try:
        # Connect the ranks that will exchange objects. From here on, the loss of a connected rank is noticed at once.
        RankTree.of_ranks().broadcast_object(None)
        yield store
        # Without a barrier, a process that finishes early could end Python while gloo's threads still free a tensor.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _lower_debug_level(process: ProcessInfo) -> None:
    """Replace torch's debug level DETAIL, under which a correct run with more than two ranks would fail.

    With this level, torch numbers the messages of each rank and requires equal numbers on all ranks. Along a tree,
    however, ranks send different numbers of messages (`credit.parallel.groups.object_tree`).
    """
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return
    dist.set_debug_level(dist.DebugLevel.INFO)
    if process.is_main:
        logger.warning(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL is not supported, because the ranks send different numbers of messages; "
            "the level INFO is used instead"
        )


def _raise_open_file_limit(world: int) -> None:
    """Raise the limit of open files of this process to the needed number, or to the hard limit if this is lower.

    gloo needs an open file for each connection. An all-to-all exchange, such as the exchange of the optimizer Muon,
    connects each rank with every other rank. Rank 0 also has two connections to the store from every rank. The usual
    limit of a shell, 1024, would be too low for a few hundred ranks.

    Args:
        world: number of ranks.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = _NUM_OTHER_FILES + _NUM_PROCESS_GROUPS * world
    if soft_limit == resource.RLIM_INFINITY or soft_limit >= num_files:
        return
    if hard_limit != resource.RLIM_INFINITY:
        num_files = min(num_files, hard_limit)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard_limit))


@contextmanager
def fake_process_group(world: int, rank: int = 0) -> Iterator[None]:
    """Context with a fake process group of `world` ranks, of which only this process exists.

    Collectives return at once and communicate nothing. A single rank needs no group, so no group is created.

    Args:
        world: number of ranks.
        rank: rank of this process, from 0.
    """
    if world == 1:
        yield
        return
    # Without a store, torch creates a fake store.
    dist.init_process_group("fake", rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _read_int(environ: Mapping[str, str], name: str) -> int:
    """Return the value of the environment variable `name` as a whole number.

    Raises:
        ConfigError: if the value is not a whole number.
    """
    try:
        return int(environ[name])
    except ValueError as error:
        raise ConfigError(
            f"{name}={environ[name]!r} is not a whole number; the launcher sets this variable, so do not change it"
        ) from error


def _find_address(
    environ: Mapping[str, str], launcher: str, world: int, is_one_host: bool, job_id: str
) -> tuple[str, int] | None:
    """Return host and port of rank 0; None for a single process, or if MASTER_ADDR and MASTER_PORT are both set.

    Args:
        environ: environment variables.
        launcher: program that started the processes, see `ProcessInfo`.
        world: number of ranks.
        is_one_host: True if all ranks run on this host.
        job_id: id of the scheduler's job, from which the port is derived; empty outside a job.

    Raises:
        ConfigError: if the ranks run on several hosts and neither the launcher nor MASTER_ADDR names the first host.
    """
    if world == 1 or ("MASTER_ADDR" in environ and "MASTER_PORT" in environ):
        return None
    # All ranks must choose the same port without communication, so the port is computed from the id of the job.
    job_digits = "".join(character for character in job_id if character.isdigit())
    job_number = int(job_digits or 0)
    port = _PORTS[job_number % len(_PORTS)]
    if environ.get("MASTER_PORT"):
        port = int(environ["MASTER_PORT"])
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"], port
    if is_one_host:
        return "localhost", port
    if launcher == "slurm" and environ.get("SLURM_STEP_NODELIST"):
        return parse_first_host(environ["SLURM_STEP_NODELIST"]), port
    raise ConfigError(
        f"{world} ranks of {launcher} run on several hosts, and MASTER_ADDR is not set; add to the job script: "
        f"export MASTER_ADDR={socket.gethostname()} (the host of rank 0)"
    )


def parse_first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: for ``gpu[003-007,9],login1`` it is ``gpu003``."""
    prefix, bracket, remainder = nodes.partition("[")
    if not bracket or "," in prefix:
        return nodes.split(",")[0]
    numbers, _, suffix = remainder.partition("]")
    first_number = numbers.split(",")[0].split("-")[0]
    # A name may have several brackets.
    return prefix + first_number + parse_first_host(suffix)
