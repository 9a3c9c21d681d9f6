"""Config sections for the execution of a run: degrees of parallelism, and jobs of a scheduler (``pbs``, ``slurm``).

In the sections of jobs, None means the value in the cluster file.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from credit.config.sections.base import DomainSection, Duration, PathText, StrictModel

# One word of a scheduler directive. It cannot contain a line break or a second option.
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.@:+=,&|*()\[\]%/~-]+$")]
# A line of the job script, without line breaks and other control characters. U+2028 and U+2029 are line separators.
Line = Annotated[str, Field(pattern=r"^[^\p{Cc}\x{2028}\x{2029}]+$")]
# Name of an environment variable or of a resource.
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class ParallelismConfig(DomainSection):
    """Degrees of parallelism.

    The number of ranks is replicate x shard x domain x tensor; shard is computed from the other degrees.
    """

    data: Literal["fsdp2", "ddp", "none"] = Field(
        "fsdp2",
        description="Data parallelism. `fsdp2` shards weights, gradients and optimizer state over the ranks. `ddp` "
        "keeps full copies. `none` uses tensor parallelism only. On one process, this key has no effect.",
    )
    tensor: int = Field(
        1,
        ge=1,
        description="Number of ranks that share the layers of one sample; they should be on one host. tensor x "
        "replicate must divide the number of ranks. A layer is not split if `tensor` does not divide its "
        "heads or hidden units.",
    )
    sequence_parallel: bool = Field(
        False,
        description="Divide the fields of a sample among the ranks of `tensor` as well (sequence parallelism); it then "
        "has domain x tensor parts. Each layer that is split gathers the tokens of the ranks of `tensor`.",
    )
    replicate: int = Field(
        1,
        ge=1,
        description="Number of replicas: groups of ranks that each store all shards (hybrid sharding). A common "
        "choice is one "
        "group per host.",
    )
    ensemble: int = Field(
        1,
        ge=1,
        description="Number of data-parallel ranks that share the members of one sample. It must divide the number of "
        "data-parallel ranks (replicate x shard) and `trainer.members`. Weights are also sharded over these ranks.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="Free the gathered weights after the forward pass and gather them again in the backward pass. "
        "This needs less memory and more communication.",
    )
    cpu_offload: bool = Field(False, description="Keep weights, gradients and optimizer state in host memory.")
    timeout: Duration = Field(
        "30min", description="Time after which a collective that waits for a different rank fails."
    )

    @property
    def divides_fields(self) -> bool:
        """True if the fields of a sample are divided among ranks."""
        return self.num_domain_ranks > 1 or self.sequence_parallel

    @property
    def needs_several_ranks(self) -> bool:
        """True if a run of a single rank is impossible."""
        return max(self.tensor, self.replicate, self.ensemble, self.num_domain_ranks) > 1

    @model_validator(mode="after")
    def _require_compatible_sequence_parallelism(self) -> ParallelismConfig:
        """Raise ValueError if sequence parallelism is combined with incompatible keys."""
        if not self.sequence_parallel:
            return self
        if self.tensor == 1 or self.data != "fsdp2":
            raise ValueError(
                "sequence_parallel: needs tensor above 1, because it divides the fields among these ranks, and data: "
                f"fsdp2, which sums the gradients over them; tensor is {self.tensor}, data is {self.data}"
            )
        if self.domain_parts is not None:
            raise ValueError(
                "domain: {lat: M, lon: N} does not work with sequence_parallel, which divides the fields into domain x "
                "tensor parts; write the number M x N"
            )
        return self


class MixedPrecisionConfig(StrictModel):
    """Data types of the mixed precision of FSDP2, which a sharded model uses with `trainer.amp`."""

    param_dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Type of weights and activations.")
    reduce_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type in which gradients are reduced.")
    output_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type of the model's output.")
    cast_forward_inputs: bool = Field(
        True,
        description="Cast the inputs of the model and its blocks to param_dtype. false: inputs keep their types, for "
        "example a float32 noise level. The model must then cast inputs where a layer uses them.",
    )


class SchedulerConfig(StrictModel):
    """Base class of the config sections of schedulers, with the keys that both schedulers have."""

    cluster: PathText | None = Field(None, description="Name of a built-in cluster, or the path of a cluster file.")
    account: Word | None = Field(None, description="Account or project that pays for the job.")
    walltime: Duration | None = Field(None, description="Time limit of a job; in a chain, of each job.")
    nodes: int | None = Field(
        None,
        ge=1,
        description="Number of nodes. A rollout uses an array of this number of single-node jobs. Preprocessing uses "
        "one node.",
    )
    min_nodes: int | None = Field(
        None,
        ge=1,
        description="Smallest number of nodes with which a training job continues after nodes have failed; see [Node "
        "failures](failures.md). It needs `trainer.global_batch_size` and launch: torchrun. Default: a job ends if a "
        "node fails.",
    )
    gpus_per_node: int | None = Field(
        None,
        ge=0,
        description="Number of GPUs on a node. Preprocessing uses none; verification uses them only with --online.",
    )
    ranks_per_node: int | None = Field(
        None,
        ge=1,
        description="Number of processes on a node. Default: one per GPU, or one without GPUs. Preprocessing starts "
        "one process.",
    )
    cpus_per_node: int | None = Field(None, ge=1, description="Number of CPU cores on a node.")
    memory: Annotated[str, Field(pattern=r"^[0-9]+[KMGT]B?$")] | None = Field(
        None, description="Memory of a node, for example 200GB. Default: the default of the scheduler."
    )
    chain: int | None = Field(
        None,
        ge=1,
        description="Largest number of jobs for a training run; each job continues the run of the previous one. "
        "Default: 1.",
    )
    modules: list[Word] | None = Field(None, description="Environment modules to load.")
    setup: list[Line] | None = Field(
        None,
        description="Shell commands to run first, one per line. `$VAR` is expanded when the job script is written.",
    )
    environment: dict[Name, str] | None = Field(
        None, description="Environment variables to export, in addition to the variables of the cluster file."
    )
    directives: list[Line] | None = Field(None, description="Further options of the scheduler, one per line.")
    python: PathText | None = Field(
        None, description="Python interpreter of the job. Default: the interpreter that runs `credit submit`."
    )
    template: PathText | None = Field(None, description="Path of a Jinja2 template for the job script.")


class PbsConfig(SchedulerConfig):
    """PBS jobs; see [Run on a cluster](hpc.md). Keys that you omit come from the cluster file."""

    scheduler: ClassVar[str] = "pbs"

    queue: Word | None = Field(None, description="Name of the queue.")
    chunk: dict[Name, Word] | None = Field(
        None, description="Further resources of a node in `select`, for example {gpu_type: a100_80gb}."
    )
    resources: dict[Name, Word] | None = Field(
        None, description="Further resources of the whole job, for example {job_priority: economy}."
    )
    launch: Literal["torchrun", "mpiexec"] | None = Field(
        None, description="Launcher of the ranks: torchrun on each node, or mpiexec for all nodes."
    )

    @property
    def queue_name(self) -> str | None:
        """Name of the queue in the table of limits of the cluster file; None for the default queue of the cluster."""
        return self.queue


class SlurmConfig(SchedulerConfig):
    """Slurm jobs; see [Run on a cluster](hpc.md). Keys that you omit come from the cluster file."""

    scheduler: ClassVar[str] = "slurm"

    partition: Word | None = Field(None, description="Name of the partition.")
    qos: Word | None = Field(None, description="Quality of service.")
    constraint: Word | None = Field(None, description="Features that a node must have, for example gpu&hbm80g.")
    signal_seconds: int | None = Field(
        None,
        ge=1,
        description="Seconds before the time limit at which Slurm signals the job to save. Slurm may send the signal "
        "up to a minute earlier.",
    )
    launch: Literal["torchrun", "srun"] | None = Field(
        None, description="Launcher of the ranks: torchrun on each node, or srun for all nodes."
    )

    @property
    def queue_name(self) -> str | None:
        """Name of the QOS, or otherwise of the partition, in the table of limits of the cluster file; None if neither
        is set.
        """
        return self.qos or self.partition
