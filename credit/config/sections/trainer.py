"""The ``trainer`` section, and the base class of the sections of training objectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, model_validator

from credit.config.registry import OBJECTIVES, RegisteredSection
from credit.config.sections.base import (
    Duration,
    PathText,
    StrictModel,
)
from credit.config.sections.execution import MixedPrecisionConfig, ParallelismConfig

Beta = Annotated[float, Field(ge=0, lt=1)]


class ObjectiveSection(StrictModel):
    """Base class of the config sections of training objectives (`trainer.objective`), with the key of all objectives.

    An objective defines how a training step runs the model and computes the loss.

    Attributes:
        shares_members: True if the objective can divide the members of a sample among several ranks
            (`trainer.parallelism.ensemble`).
    """

    shares_members: ClassVar[bool] = False
    kind: str


ObjectiveEntry = Annotated[
    SerializeAsAny[ObjectiveSection], RegisteredSection(OBJECTIVES, default="deterministic", base=ObjectiveSection)
]


def default_objective() -> ObjectiveSection:
    """Return the section of the default objective, a deterministic rollout."""
    return OBJECTIVES.find_section("deterministic").model_validate({"kind": "deterministic"})


class ScheduleConfig(StrictModel):
    """Learning rate over the run."""

    kind: Literal["cosine", "constant", "warmup_stable_decay"] = Field(
        "cosine", description="Shape of the learning rate after the warm-up."
    )
    warmup: float = Field(0.05, ge=0, lt=1, description="Length of the linear warm-up, as a fraction of the run.")
    decay: float = Field(
        0.2,
        gt=0,
        le=1,
        description="For `warmup_stable_decay`: length of the decay at the end, as a fraction of the run.",
    )
    final: float = Field(
        0.01,
        ge=0,
        le=1,
        description="For `cosine` and `warmup_stable_decay`: learning rate at the end, as a fraction of the peak.",
    )

    @model_validator(mode="after")
    def _require_decay_in_run(self) -> ScheduleConfig:
        """Raise ValueError if warm-up and decay together are longer than the run."""
        if self.kind == "warmup_stable_decay" and self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup ({self.warmup:g}) and decay ({self.decay:g}) are fractions of the run: their sum must not "
                "exceed 1"
            )
        return self


class LossSpikeConfig(StrictModel):
    """Definition of a loss spike. After a spike, the run returns to a checkpoint and skips the batch."""

    factor: float = Field(
        5.0, gt=1, description="A loss is a spike if it exceeds this factor times the median of recent losses."
    )
    window: int = Field(50, ge=5, description="Number of recent losses from which the median is computed.")
    limit: int = Field(3, ge=1, description="Largest number of returns to a checkpoint. Later spikes are only logged.")


class LoraConfig(StrictModel):
    """Fine-tuning with low-rank adapters: the weights are frozen, and only the adapters are trained."""

    rank: int = Field(8, ge=1, description="Rank of an adapter.")
    alpha: float = Field(
        16.0, gt=0, description="The product of the two matrices of an adapter is multiplied by alpha / rank."
    )
    targets: list[str] = Field(
        min_length=1,
        description='Paths of the linear and convolution layers that get adapters; `*` matches any text: ["*.to_qkv", '
        '"*.to_out"].',
    )


class PreviewConfig(StrictModel):
    """Previews: a few forecasts that a training run makes, scores and plots after every `every`-th validation."""

    every: int = Field(
        1,
        ge=1,
        description="Number of validations from one preview to the next. There is also a preview after the last step.",
    )
    lead_time: Duration = Field(
        "72h", description="Length of the forecasts. The default is rounded up to a multiple of `data.timestep`."
    )
    cases: int = Field(
        4, ge=1, description="Number of forecasts; their initial times are spread over the validation period."
    )
    channels: list[str] | None = Field(
        None,
        min_length=1,
        description="Channels to score and plot. Default: the channels of `verification.figure_channels`.",
    )


class TrainerConfig(StrictModel):
    """Training by `credit train`."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device of the model. `auto`: a GPU if there is one."
    )
    max_steps: int | None = Field(
        None, ge=1, description="Length of the run in optimizer steps. Set either this key or num_epoch."
    )
    num_epoch: int | None = Field(
        None, ge=1, description="Length of the run in epochs (passes over the training period)."
    )
    train_batch_size: int = Field(
        1,
        ge=1,
        description="Number of samples in a training batch on each data-parallel rank; see also `grad_accum_every`. "
        "With `global_batch_size`, the largest number.",
    )
    global_batch_size: int | None = Field(
        None,
        ge=1,
        description="Number of samples of an optimizer step over all ranks. Each rank computes an equal part, in "
        "equal batches of at most `train_batch_size` samples, so that a step has the same samples on any number of "
        "ranks. Leave out `grad_accum_every`; it is computed from this key. Default: train_batch_size x "
        "grad_accum_every x number of ranks "
        "with different samples.",
    )
    valid_batch_size: int = Field(1, ge=1, description="Number of samples in a validation batch.")
    members: int = Field(
        1,
        ge=1,
        description="Number of forecasts (ensemble members) of each sample in a training step. A number above 1 needs "
        "a loss for ensembles, such as "
        "`crps`, and noise inside the network (`model.noise`).",
    )
    members_at_once: int = Field(
        1,
        ge=1,
        description="Number of members that are computed in one batch. A number below `members` saves memory, but "
        "the network then runs once more for all members outside the last batch. The gradients are the same.",
    )
    valid_members: int = Field(
        8,
        ge=2,
        description="Number of forecasts of each sample in the validation of an ensemble. All validations use the "
        "same noise.",
    )
    valid_samples: int = Field(
        64, ge=1, description="Number of initial times of a validation, spread over the validation period."
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="`adamw`: AdamW for all weights. `muon`: Muon for the matrices of linear layers and convolutions "
        "inside the network, AdamW for all other weights. Both use the same learning rate and weight decay.",
    )
    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay; norms and biases have no weight decay.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="Betas of AdamW.")
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="Learning rate over the run.")
    amp: bool = Field(
        False,
        description="Compute in bfloat16 while parameters stay float32. It uses autocast, or `fsdp2_mp_policy` if the "
        "model is sharded.",
    )
    tf32: bool = Field(
        True,
        description="On a GPU, use TF32 (10 bits of mantissa) for float32 matrix products and convolutions, in "
        "training and in forecasts. Sums stay float32. According to data sheets, TF32 is 7 to 14 times as fast as "
        "float32, but small networks wait for the host and do not become faster.",
    )
    fsdp2_mp_policy: MixedPrecisionConfig | None = Field(
        None,
        description="Data types of a sharded model with `amp`. Default: bfloat16 weights, float32 reduction and "
        "output.",
    )
    grad_accum_every: int = Field(1, ge=1, description="Number of batches (micro-steps) per optimizer step.")
    grad_max_norm: float | None = Field(
        1.0,
        gt=0,
        description="Largest global norm of the gradient; larger gradients are scaled down. null: no clipping.",
    )
    backprop_on_timestep: list[int] | None = Field(
        None, description="Rollout steps (counted from 1) whose errors contribute to the loss. Default: all."
    )
    forecast_len_from: dict[float, int] | None = Field(
        None,
        description="Lengthen the training rollout during the run: fraction of the run -> number of steps. {0: 1, "
        "0.6: 2, 0.85: 4} starts with one step and uses four steps from 85 % of the run. The last value "
        "must equal data.forecast_len. Default: a constant length.",
    )
    recompute_steps: bool = Field(
        True,
        description="For data.forecast_len above 1: recompute all rollout steps except the last one in the backward "
        "pass, which saves memory. Some small results that are expensive to compute are stored.",
    )
    activation_checkpoint: bool | Literal["selective"] = Field(
        False,
        description="Recompute the activations of each block in the backward pass, which saves memory. `selective` "
        "stores the results of matrix products and attention; on a GPU it was slower than `true`.",
    )
    lora: LoraConfig | None = Field(
        None,
        description="Freeze the weights of the checkpoint in `resume` and train adapters. Default: train all weights.",
    )
    learning_rate_factors: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {},
        description="Path of a module or weight -> factor on the learning rate of its weights; 0 freezes them. `*` "
        "matches any text, and the first matching pattern is used.",
    )
    use_ema: bool = Field(
        True,
        description="Keep an exponential moving average of the weights. Validation, forecasts and the checkpoint "
        "`best` use it.",
    )
    ema_decay: float = Field(0.999, gt=0, lt=1, description="Decay of the moving average per optimizer step.")
    compile: bool | Literal["reduce-overhead"] = Field(
        False,
        description="Compile each block with torch.compile. This needs a C++ compiler; on a GPU, it needs triton and "
        "a C compiler. `reduce-overhead` also replays the kernels of a block as one CUDA graph, for small networks on "
        "one GPU, in which the GPU waits for the host. Neither option has been measured on a GPU.",
    )
    validate_every: int | None = Field(
        None, ge=1, description="Number of steps between validations. Default: one validation per epoch."
    )
    checkpoint_every: int | None = Field(
        None, ge=1, description="Number of steps between checkpoints. Default: one checkpoint per epoch."
    )
    keep_last: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    keep_best: int = Field(
        1,
        ge=1,
        description="Number of best checkpoints (by validation) to keep, in addition to the newest checkpoints.",
    )
    keep_every: int | None = Field(
        None, ge=1, description="Also keep the checkpoints of steps that are multiples of this number. Default: none."
    )
    log_every: int = Field(
        10, ge=1, description="Number of steps after which rows are written to metrics.jsonl. Each step has a row."
    )
    monitor: str = Field(
        "skill",
        description="Value of the validation that selects the best weights; lower is better. `skill` is the RMSE "
        "divided by the RMSE of persistence, averaged over channels and lead times. You may name a different value, "
        "such as rmse/z500/24h.",
    )
    patience: int | None = Field(
        None, ge=1, description="Stop the run after this number of validations without improvement. Default: never."
    )
    resume: PathText = Field(
        "auto",
        description="Start of the run. `auto`: the last checkpoint of the run, if there is one. `never`: step 0; an "
        "undamaged checkpoint is then an error. The path of a checkpoint: its weights, optimizer state and "
        "step. The folder of a different run: its best weights, at step 0. A file: its weights, at step 0.",
    )
    resume_changes: list[Literal["channels", "grid"]] = Field(
        [],
        description="Ways in which this run may differ from the run in `resume`. `channels`: this run has more "
        "channels. `grid`: its fields are on a different grid.",
    )
    max_bad_steps: int = Field(
        10,
        ge=1,
        description="After this number of consecutive steps with a non-finite loss or gradient, return to the last "
        "checkpoint and skip their samples. The second time, stop and name the first layer with such "
        "values.",
    )
    loss_spike: LossSpikeConfig | None = Field(
        None, description="Return to a checkpoint after a spike of the loss, and skip the batch. Default: never."
    )
    walltime: Duration | None = Field(
        None,
        description="Time limit: the run saves and stops before this time has passed. CREDIT_JOB_END (seconds since "
        "1970) sets the limit as a time; the earlier limit applies.",
    )
    deterministic: bool = Field(False, description="Use only deterministic kernels.")
    loggers: list[str] = Field(
        [],
        description="Programs to which the metrics are sent: `tensorboard`, `wandb`, `mlflow`, and loggers that "
        "plugins register. Each logger needs the extra of the same name.",
    )
    preview: PreviewConfig | None = Field(
        None, description="Forecasts during training, with RMSE curves and maps in `figures/`. Default: none."
    )
    objective: ObjectiveEntry = Field(
        default_factory=default_objective,
        description="How a training step runs the model and computes the loss.",
    )
    metrics: list[str] = Field(
        ["rmse"],
        min_length=1,
        description="Metrics of the validation: `rmse`, `crps`, and metrics that plugins register. Default: `rmse`, "
        "and for an ensemble also `crps`.",
    )
    parallelism: ParallelismConfig = Field(ParallelismConfig(), description="Degrees of parallelism.")

    @model_validator(mode="before")
    @classmethod
    def _fill_ensemble_defaults(cls, raw: Any) -> Any:
        """Set the objective and the metrics of ensembles if there are several members and the config does not set these
        keys.
        """
        if not isinstance(raw, Mapping) or raw.get("members", 1) in (1, None):
            return raw
        # Keys of the config come last, so that they override these defaults.
        return {"objective": {"kind": "ensemble"}, "metrics": ["rmse", "crps"], **raw}

    @property
    def compile_mode(self) -> str | None:
        """The mode of torch.compile; None for the default mode."""
        return self.compile if isinstance(self.compile, str) else None

    def require_divisible_fields(self) -> None:
        """Raise an error if a key of this section cannot be used when ranks divide the fields.

        Raises:
            ValueError: if such a key is set; the message names the key.
        """
        if self.preview is not None:
            raise ValueError(
                "preview: plots whole fields, which no rank has with parallelism.domain or sequence_parallel; remove "
                "preview"
            )

    @model_validator(mode="after")
    def _require_consistent(self) -> TrainerConfig:
        """Raise ValueError if keys contradict each other."""
        if self.members > 1 and self.objective.kind == "deterministic":
            raise ValueError(
                f"members: {self.members} forecasts of each sample need objective.kind: ensemble; remove objective"
            )
        if self.members_at_once > self.members:
            raise ValueError(f"members_at_once: {self.members_at_once} is more than members {self.members}; lower it")
        if self.parallelism.divides_fields:
            self.require_divisible_fields()
        if self.compile == "reduce-overhead" and self.parallelism.needs_several_ranks:
            raise ValueError(
                "compile: reduce-overhead records the kernels of one GPU, but parallelism needs several ranks; set "
                "compile to true"
            )
        if (self.max_steps is None) == (self.num_epoch is None):
            raise ValueError("give exactly one of max_steps and num_epoch")
        if self.global_batch_size is not None and self.grad_accum_every != 1:
            raise ValueError(
                f"grad_accum_every: {self.grad_accum_every} is computed from global_batch_size and the number of "
                f"ranks; remove grad_accum_every"
            )
        if self.resume_changes and self.resume in ("auto", "never", "best", "latest"):
            raise ValueError(
                f"resume_changes: {self.resume_changes} needs resume: the folder of a different run, or a file of "
                f"weights"
            )
        if self.resume_changes and self.lora is not None:
            raise ValueError(
                "resume_changes: does not work with lora, because lora does not change the base weights; "
                "remove one of these keys"
            )
        if self.lora is not None and self.fsdp2_mp_policy is not None:
            raise ValueError(
                "lora and fsdp2_mp_policy cannot be combined, because weights in bfloat16 would lose the small "
                "changes of the adapters; remove fsdp2_mp_policy, so that amp uses autocast"
            )
        return self
