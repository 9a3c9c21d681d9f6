"""The ``pbs`` and ``slurm`` sections: what a job asks for. `None` means: what the cluster file says."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from credit.config.schema_base import PathText, Section
from credit.config.schema_data import Duration

# what stands in a directive: one word, which cannot begin another line or another option
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.@:+=,&|*()\[\]%/~-]+$")]
Line = Annotated[str, Field(pattern=r"^[^\p{Cc}\x{2028}\x{2029}]+$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class SchedulerConfig(Section):
    """What jobs of either scheduler ask for."""

    cluster: PathText | None = Field(
        None, description="The site: a name that `credit submit` knows, or a cluster file."
    )
    account: Word | None = Field(None, description="Project that pays.")
    walltime: Duration | None = Field(None, description="Time of a job, of each link of a chain.")
    nodes: int | None = Field(
        None, ge=1, description="Nodes; for a rollout, jobs of one node in an array. preprocess takes one."
    )
    gpus_per_node: int | None = Field(
        None, ge=0, description="GPUs of a node. preprocess asks for none, verify with --online alone."
    )
    ranks_per_node: int | None = Field(
        None, ge=1, description="Processes of a node; default: one a GPU, or one. preprocess is one process."
    )
    cpus_per_node: int | None = Field(None, ge=1, description="Cores of a node.")
    memory: Annotated[str, Field(pattern=r"^[0-9]+[KMGT]B?$")] | None = Field(
        None, description="Memory of a node, e.g. 200GB; default: the scheduler's."
    )
    chain: int | None = Field(
        None, ge=1, description="How many jobs at most a training run may take, one after another. Default: 1."
    )
    modules: list[Word] | None = Field(None, description="Modules to load.")
    setup: list[Line] | None = Field(
        None, description="Lines of shell to run first, as they are. `$VAR` is expanded when the job is written."
    )
    environment: dict[Name, str] | None = Field(
        None, description="Variables to export, besides those of the cluster file."
    )
    directives: list[Line] | None = Field(None, description="Further options of the scheduler, one a line.")
    python: PathText | None = Field(None, description="Interpreter of the job; default: the one that submits.")
    template: PathText | None = Field(None, description="A Jinja2 template of your own for the job script.")


class PbsConfig(SchedulerConfig):
    """Jobs under PBS; see [on a cluster](hpc.md). A key that is not given is taken from the cluster file."""

    scheduler: ClassVar[str] = "pbs"

    queue: Word | None = Field(None, description="Queue.")
    chunk: dict[Name, Word] | None = Field(
        None, description="Further resources of a node in `select`, e.g. {gpu_type: a100_80gb}."
    )
    resources: dict[Name, Word] | None = Field(
        None, description="Further resources of a job, e.g. {job_priority: economy}."
    )
    launch: Literal["torchrun", "mpiexec"] | None = Field(
        None, description="Who starts the ranks: torchrun on each node, or mpiexec all of them."
    )

    @property
    def queue_name(self) -> str | None:
        """Name by which a cluster file lists the limits of the job."""
        return self.queue


class SlurmConfig(SchedulerConfig):
    """Jobs under Slurm; see [on a cluster](hpc.md). A key that is not given is taken from the cluster file."""

    scheduler: ClassVar[str] = "slurm"

    partition: Word | None = Field(None, description="Partition.")
    qos: Word | None = Field(None, description="Quality of service.")
    constraint: Word | None = Field(None, description="Features that a node must have, e.g. gpu&hbm80g.")
    signal_seconds: int | None = Field(
        None, ge=1, description="How long before its end a job is told to save; Slurm may do it a minute earlier."
    )
    launch: Literal["torchrun", "srun"] | None = Field(
        None, description="Who starts the ranks: torchrun on each node, or srun all of them."
    )

    @property
    def queue_name(self) -> str | None:
        """Name by which a cluster file lists the limits of the job."""
        return self.qos or self.partition
