"""Description of a job, a chain of jobs or a job array: resources and command."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from credit.calendar import parse_duration
from credit.config.schema_jobs import PbsConfig, SlurmConfig
from credit.errors import ConfigError
from credit.hpc import pbs
from credit.hpc.chain import SCHEDULERS
from credit.hpc.cluster import Cluster, resolve

# Kinds of jobs -> whether they use GPUs. Verification uses them only if it makes the forecasts (--online).
KINDS = {"train": True, "preprocess": False, "rollout": True, "verify": False}


@dataclass(frozen=True)
class Job:
    """Resources, command and environment of a job script.

    Attributes:
        kind: the command that runs: train, preprocess, rollout or verify.
        name: as the scheduler allows it.
        folder: the run's folder, absolute.
        workdir: where the command runs; relative paths of the config count from here.
        arguments: of ``python -m credit.cli.main``.
        scheduler: pbs or slurm.
        asked: the section with the cluster's values filled in.
        start: the words of the command that starts processes on nodes, with placeholders.
        variables: of the environment that the config names; a job that lacks them gets them.
        spread: whether one forecast is spread over ranks (``inference.parallelism``).
        after: kind of the jobs of this run that must have ended well before this one starts, None for none.
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

    @property
    def is_collective(self) -> bool:
        """Whether the processes are ranks of one process group."""
        return self.kind in ("train", "verify") or self.spread

    @property
    def is_array(self) -> bool:
        """Whether each node is a job of an array; the jobs share the initial times."""
        return not self.is_collective and self.size > 1

    @property
    def size(self) -> int:
        """Number of nodes, of the job or of the whole array."""
        return self.asked.nodes or 1

    @property
    def nodes(self) -> int:
        """Number of nodes of one job."""
        return self.size if self.is_collective else 1

    @property
    def ranks_per_node(self) -> int:
        """Processes of a node."""
        return self.asked.ranks_per_node or self.gpus_per_node or 1

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node."""
        return self.asked.gpus_per_node or 0

    @property
    def ranks(self) -> int:
        """Processes of one job."""
        return self.nodes * self.ranks_per_node

    @property
    def parts(self) -> int:
        """Number of parts that the initial times of a rollout are split into."""
        return self.size * self.ranks_per_node

    @property
    def links(self) -> int:
        """Number of jobs of the chain; jobs other than training continue when they are submitted again."""
        return self.asked.chain or 1 if self.kind == "train" else 1

    @property
    def seconds(self) -> int:
        """Time of one job."""
        assert self.asked.walltime is not None, "resolve() requires it"
        return parse_duration(self.asked.walltime) * 60

    @property
    def clock(self) -> str:
        """Time of one job as HH:MM:SS."""
        return f"{self.seconds // 3600:02d}:{self.seconds // 60 % 60:02d}:00"

    @property
    def cpus_per_rank(self) -> int | None:
        """Cores of a process."""
        return self.asked.cpus_per_node and max(1, self.asked.cpus_per_node // self.ranks_per_node)

    @property
    def tasks_per_node(self) -> int:
        """Processes of a node that Slurm starts: the ranks if srun is the launcher, else one."""
        return self.ranks_per_node if self.is_collective and self.launch == "srun" else 1

    @property
    def cpus_per_task(self) -> int | None:
        """Cores of such a process."""
        return self.asked.cpus_per_node and max(1, self.asked.cpus_per_node // self.tasks_per_node)

    @property
    def select(self) -> str:
        """Nodes and their resources in the words of PBS."""
        return pbs.select_directive(self)

    @property
    def launch(self) -> str:
        """Launcher of the ranks of one process group: torchrun, mpiexec or srun."""
        return self.asked.launch or "torchrun"

    @property
    def python(self) -> str:
        """Interpreter of the job."""
        return self.asked.python or sys.executable

    @property
    def script(self) -> Path:
        """Where the script is written."""
        return self.folder / "jobs" / f"{self.kind}.sh"

    def starter(self, ranks: int, ranks_per_node: int) -> list[str]:
        """Return the words of the command that starts `ranks` processes, `ranks_per_node` on each node."""
        try:
            return [word.format(ranks=ranks, ranks_per_node=ranks_per_node) for word in self.start]
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"cluster file: start: {list(self.start)}: the only placeholders are {{ranks}} and {{ranks_per_node}}"
            ) from error


def build_job(
    kind: str,
    cluster: Cluster,
    section: PbsConfig | SlurmConfig,
    *,
    experiment: str,
    folder: Path,
    config: Path,
    overrides: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    spread: bool = False,
    online: bool = False,
    model: Path | None = None,
    after: str | None = None,
) -> Job:
    """Return a job.

    Args:
        kind: a key of `KINDS`.
        cluster: the site.
        section: the config's section of the site's scheduler.
        experiment: the run's name.
        folder: the run's folder.
        config: the config file.
        overrides: ``section.key=value``, handed on but for those of the sections pbs and slurm.
        variables: of the environment that the config names.
        spread: whether the config spreads one forecast over ranks.
        online: whether forecasts are made while they are scored.
        model: the config or the folder of the run that makes them, where it is another.
        after: kind of the jobs that must have ended well before.

    Raises:
        ConfigError: for what the site does not allow.
    """
    assert kind in KINDS, kind
    asked = resolve(cluster, section, KINDS[kind] or online)
    if kind == "preprocess":
        asked = asked.model_copy(update={"nodes": 1, "ranks_per_node": 1})
    command_arguments = [text for text in overrides if not text.startswith(("pbs.", "slurm."))]
    if online:
        command_arguments.append("--online")
    if model is not None:
        command_arguments += ["--model", str(model.absolute())]
    return Job(
        kind=kind,
        name=SCHEDULERS[cluster.scheduler].job_name(experiment if kind == "train" else f"{kind}_{experiment}"),
        folder=folder.absolute(),
        workdir=Path.cwd(),
        arguments=(kind, str(config.absolute()), *command_arguments),
        scheduler=cluster.scheduler,
        asked=asked,
        start=tuple(cluster.start),
        variables=variables or {},
        spread=spread and (kind == "rollout" or online),
        after=after,
    )
