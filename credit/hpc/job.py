"""Description of a job, a chain of jobs or a job array: resources and command.

A chain is a sequence of jobs that continue the same training run. A job array is a set of jobs that share the work:
each job forecasts different initial times of a run, or trains a different trial of a sweep.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from credit.calendar import parse_duration
from credit.config.sections.execution import PbsConfig, SlurmConfig
from credit.errors import ConfigError
from credit.hpc import pbs
from credit.hpc.chain import SCHEDULERS
from credit.hpc.cluster import Cluster, resolve_settings

# Kind of a job -> True if it uses GPUs. Verification uses GPUs only if it makes the forecasts (--online).
JOB_KINDS = {"train": True, "preprocess": False, "rollout": True, "verify": False}

# Number of allowed restarts of the ranks of a job in addition to those after node failures; more restarts end the job.
_FURTHER_RESTARTS = 3


@dataclass(frozen=True)
class Job:
    """Resources, command and environment of a job script.

    The templates of the package and of users read the attributes and properties as ``job.NAME``.

    Attributes:
        kind: command that the job runs: train, preprocess, rollout or verify.
        name: name of the job; it has only characters that the scheduler allows.
        folder: absolute path of the run folder.
        workdir: working folder of the command; relative paths in the config are relative to it.
        arguments: arguments of ``python -m credit.cli.main``.
        scheduler: pbs or slurm.
        asked: settings of the job, from the cluster file and the section pbs or slurm of the config.
        start: words of the command that starts processes on nodes, with the placeholders ``{ranks}`` and
            ``{ranks_per_node}``.
        remote_shell: words of the command that starts a shell on the node ``{node}``; empty for Slurm.
        variables: name -> value of the environment variables in the config; the script sets a variable only if it is
            not set yet.
        spread: True if several ranks share one forecast or its members (``inference.parallelism``).
        after: kind of jobs of this run that must end without an error before this job starts; None if the job does not
            wait.
        trials: run folders of a sweep, one for each job of the array that trains the trials. In this case, ``folder``
            is the folder of the sweep, and its file ``configs/NAME.yml`` is the config of the run folder ``NAME``.
            Empty for jobs outside a sweep.
    """

    kind: str
    name: str
    folder: Path
    workdir: Path
    arguments: tuple[str, ...]
    scheduler: str
    asked: PbsConfig | SlurmConfig
    start: tuple[str, ...]
    variables: Mapping[str, str]
    spread: bool = False
    after: str | None = None
    trials: tuple[str, ...] = ()
    remote_shell: tuple[str, ...] = ()

    @property
    def is_collective(self) -> bool:
        """True if all processes of the job are ranks of one process group."""
        return self.kind in ("train", "verify") or self.spread

    @property
    def is_array(self) -> bool:
        """True if the work is a job array: one job for each trial, or one job on each node for some initial times."""
        return self.array_size > 1

    @property
    def array_size(self) -> int:
        """Number of jobs of the array; 1 without an array."""
        if self.trials:
            return len(self.trials)
        return 1 if self.is_collective else self.size

    @property
    def size(self) -> int:
        """Number of nodes of the job, or of the whole array."""
        return self.asked.nodes or 1

    @property
    def nodes(self) -> int:
        """Number of nodes of one job."""
        return self.size if self.is_collective else 1

    @property
    def is_elastic(self) -> bool:
        """True if the job continues with fewer nodes when nodes fail."""
        return self.kind == "train" and not self.trials and self.min_nodes < self.nodes

    @property
    def min_nodes(self) -> int:
        """Smallest number of nodes with which the job continues after node failures."""
        return self.asked.min_nodes or self.nodes

    @property
    def max_restarts(self) -> int:
        """Maximum number of restarts of the ranks: one for each node that may fail, and some for failed processes."""
        return self.nodes - self.min_nodes + _FURTHER_RESTARTS

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on a node; each rank is a process of the job's command."""
        # By default there is one rank per GPU, or a single rank without GPUs.
        return self.asked.ranks_per_node or self.gpus_per_node or 1

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs of a node."""
        return self.asked.gpus_per_node or 0

    @property
    def ranks(self) -> int:
        """Number of ranks of one job, on all its nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def parts(self) -> int:
        """Number of parts into which the initial times of a rollout are divided: one part for each process."""
        return self.size * self.ranks_per_node

    @property
    def links(self) -> int:
        """Number of jobs in the chain; 1 for jobs other than the training of a single run, which have no chains."""
        if self.kind != "train" or self.trials:
            return 1
        return self.asked.chain or 1

    @property
    def seconds(self) -> int:
        """Time limit of one job in seconds."""
        assert self.asked.walltime is not None, "resolve_settings() requires it"
        walltime_minutes = parse_duration(self.asked.walltime)
        return walltime_minutes * 60

    @property
    def clock(self) -> str:
        """Time limit of one job as HH:MM:SS."""
        hours, minutes = divmod(self.seconds // 60, 60)
        return f"{hours:02d}:{minutes:02d}:00"

    @property
    def cpus_per_rank(self) -> int | None:
        """Number of cores of a rank; None if the number of cores of a node is not set."""
        return self._divide_cpus(self.ranks_per_node)

    @property
    def tasks_per_node(self) -> int:
        """Number of processes that Slurm starts on a node: all ranks if srun is the launcher, otherwise 1."""
        if self.is_collective and self.launch == "srun":
            return self.ranks_per_node
        return 1

    @property
    def cpus_per_task(self) -> int | None:
        """Number of cores of a process that Slurm starts; None if the number of cores of a node is not set."""
        return self._divide_cpus(self.tasks_per_node)

    def _divide_cpus(self, num_processes: int) -> int | None:
        """Return the number of cores for each of `num_processes` on a node; None if the cores of a node are not set."""
        if self.asked.cpus_per_node is None:
            return None
        return max(1, self.asked.cpus_per_node // num_processes)

    @property
    def select(self) -> str:
        """Value of the PBS option ``-l select``: the number of nodes and the resources of each node."""
        return pbs.build_select_directive(self)

    @property
    def launch(self) -> str:
        """Launcher of the ranks of one process group: torchrun, mpiexec or srun."""
        return self.asked.launch or "torchrun"

    @property
    def python(self) -> str:
        """Path of the Python interpreter of the job."""
        return self.asked.python or sys.executable

    @property
    def script(self) -> Path:
        """Path of the job script."""
        return self.folder / "jobs" / f"{self.kind}.sh"

    def starter(self, ranks: int, ranks_per_node: int) -> list[str]:
        """Return the words of the command that starts processes on the nodes of the job.

        Args:
            ranks: number of processes on all nodes.
            ranks_per_node: number of processes on each node.

        Raises:
            ConfigError: if the command in the cluster file has other placeholders.
        """
        try:
            return [word.format(ranks=ranks, ranks_per_node=ranks_per_node) for word in self.start]
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"cluster file: start: {list(self.start)}: the only placeholders are {{ranks}} and {{ranks_per_node}}"
            ) from error


@dataclass(frozen=True)
class JobRequest:
    """Description of the command that a job runs; it does not depend on the cluster.

    Attributes:
        kind: kind of the job, a key of `JOB_KINDS`.
        experiment: name of the run.
        folder: the run folder.
        config: path of the config file.
        overrides: overrides ``section.key=value`` of the config; overrides of the sections pbs and slurm are not passed
            to the command.
        variables: name -> value of the environment variables in the config.
        spread: True if several ranks share one forecast (``inference.parallelism``).
        online: True if verification makes the forecasts itself.
        model: config or folder of the run whose model makes the forecasts for verification; None for this run.
        after: kind of jobs of this run that must end without an error before this job starts; None if the job does not
            wait.
        trials: run folders of a sweep, see `Job`.
    """

    kind: str
    experiment: str
    folder: Path
    config: Path
    overrides: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    spread: bool = False
    online: bool = False
    model: Path | None = None
    after: str | None = None
    trials: tuple[str, ...] = ()


def build_job(request: JobRequest, cluster: Cluster, section: PbsConfig | SlurmConfig) -> Job:
    """Build the description of a job that runs a command on a cluster.

    Args:
        request: description of the command.
        cluster: cluster file of the site.
        section: section pbs or slurm of the config, for the scheduler of the site.

    Raises:
        ConfigError: if the section is incomplete, exceeds the limits of the site, or has an impossible ``min_nodes``.
    """
    kind = request.kind
    assert kind in JOB_KINDS, kind
    uses_gpus = JOB_KINDS[kind] or request.online
    asked = resolve_settings(cluster, section, uses_gpus)
    # Preprocessing is a single process, which starts its worker processes.
    if kind == "preprocess":
        asked = asked.model_copy(update={"nodes": 1, "ranks_per_node": 1})
    # The settings of the job are not arguments of the command that runs in the job.
    command_arguments = [text for text in request.overrides if not text.startswith(("pbs.", "slurm."))]
    if request.online:
        command_arguments.append("--online")
    if request.model is not None:
        command_arguments += ["--model", str(request.model.absolute())]
    # Training is the main job of a run, so its name is the name of the experiment.
    name = request.experiment if kind == "train" else f"{kind}_{request.experiment}"
    makes_forecasts = kind == "rollout" or request.online
    job = Job(
        kind=kind,
        name=SCHEDULERS[cluster.scheduler].make_job_name(name),
        folder=request.folder.absolute(),
        workdir=Path.cwd(),
        arguments=(kind, str(request.config.absolute()), *command_arguments),
        scheduler=cluster.scheduler,
        asked=asked,
        start=tuple(cluster.start),
        variables=request.variables,
        spread=request.spread and makes_forecasts,
        after=request.after,
        trials=request.trials,
        remote_shell=tuple(cluster.remote_shell) if cluster.scheduler == "pbs" else (),
    )
    _require_valid_min_nodes(job)
    return job


def _require_valid_min_nodes(job: Job) -> None:
    """Raise a ConfigError if a training job cannot continue with ``min_nodes`` nodes."""
    if job.kind != "train" or job.asked.min_nodes is None:
        return
    key = f"{job.scheduler}.min_nodes: {job.min_nodes}"
    if job.min_nodes > job.nodes:
        raise ConfigError(f"{key}: must not exceed the {job.nodes} nodes of the job")
    if job.is_elastic and job.launch != "torchrun":
        raise ConfigError(
            f"{key}: {job.launch} ends all ranks if a node fails; set {job.scheduler}.launch: torchrun, which restarts "
            "the ranks"
        )
