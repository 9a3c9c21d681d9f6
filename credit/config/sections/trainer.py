"""The ``trainer`` section, and the base of the sections of training objectives."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, model_validator

from credit.config.registry import OBJECTIVES, RegisteredSection
from credit.config.sections.base import Duration, PathText, StrictModel

Beta = Annotated[float, Field(ge=0, lt=1)]


class ObjectiveSection(StrictModel):
    """Keys that every training objective has: `trainer.objective`, what one training step asks of the model."""

    kind: str


ObjectiveEntry = Annotated[
    SerializeAsAny[ObjectiveSection], RegisteredSection(OBJECTIVES, default="deterministic", base=ObjectiveSection)
]


def default_objective() -> ObjectiveSection:
    """Return the objective of a config that names none: a deterministic rollout."""
    return OBJECTIVES.find_section("deterministic").model_validate({"kind": "deterministic"})


class ScheduleConfig(StrictModel):
    """Learning rate over the run. Its length is the length of the run."""

    kind: Literal["cosine", "constant"] = Field("cosine", description="Shape after the warm-up.")
    warmup: float = Field(0.05, ge=0, lt=1, description="Fraction of the run with a linear warm-up.")
    final: float = Field(
        0.01, ge=0, le=1, description="For `cosine`: learning rate at the end, as a fraction of the peak."
    )


class LossSpikeConfig(StrictModel):
    """Definition of a loss spike, after which the run returns to a checkpoint and skips the batch."""

    factor: float = Field(5.0, gt=1, description="A loss above this factor times the median of recent losses.")
    window: int = Field(50, ge=5, description="Number of recent losses in the median.")
    limit: int = Field(
        3, ge=1, description="Largest number of returns to a checkpoint; later spikes are only reported in the log."
    )


class ParallelismConfig(StrictModel):
    """Degrees of parallelism: replicate x shard x tensor = number of ranks; shard follows from the others."""

    data: Literal["fsdp2", "ddp", "none"] = Field(
        "fsdp2",
        description="Data parallelism. `fsdp2` shards weights, gradients and optimizer state over the data-parallel "
        "ranks, `ddp` keeps full copies, `none` uses tensor parallelism only. It has no effect on one process.",
    )
    tensor: int = Field(
        1,
        ge=1,
        description="Ranks that share the layers of one sample, best within one host. With `replicate` it must divide "
        "the number of ranks. Layers whose heads or hidden units it does not divide stay whole.",
    )
    replicate: int = Field(
        1,
        ge=1,
        description="Number of groups that each hold a full set of shards (hybrid sharding), often one for each host.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="Free the gathered weights after the forward pass and gather them again for the backward pass: "
        "less memory, more communication.",
    )
    cpu_offload: bool = Field(False, description="Keep weights, gradients and optimizer state in host memory.")
    timeout: Duration = Field("30min", description="Time after which a collective that waits for a slow rank fails.")


class MixedPrecisionConfig(StrictModel):
    """Data types of FSDP2's mixed precision, which is active with trainer.amp on several ranks."""

    param_dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Weights and activations.")
    reduce_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Reduction of gradients.")
    output_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Output of the model.")
    cast_forward_inputs: bool = Field(
        True,
        description="Cast the inputs of the model and of its blocks to param_dtype. false: inputs keep their types (a "
        "float32 noise level keeps its precision), and the model must cast those that meet its weights.",
    )


class LoraConfig(StrictModel):
    """Fine-tuning with low-rank adapters: the trained model is frozen, and adapters of some weights are trained."""

    rank: int = Field(8, ge=1, description="Rank of an adapter.")
    alpha: float = Field(16.0, gt=0, description="The product of an adapter's matrices is scaled by alpha / rank.")
    targets: list[str] = Field(
        min_length=1,
        description="Linear and convolution layers with adapters, by their paths in the model; `*` matches anything: "
        '["*.to_qkv", "*.to_out"].',
    )


class PreviewConfig(StrictModel):
    """Forecasts that a training run makes, scores and draws now and then, to show early how good they are."""

    every: int = Field(1, ge=1, description="Number of validations between previews; the last step has one, too.")
    lead_time: Duration = Field(
        "72h", description="Length of the forecasts. The default is rounded up to a multiple of `data.timestep`."
    )
    cases: int = Field(
        4, ge=1, description="Number of forecasts; their initial times are spread over the validation period."
    )
    channels: list[str] | None = Field(
        None,
        min_length=1,
        description="Channels that are scored and drawn. Default: those of `verification.figure_channels`.",
    )


class TrainerConfig(StrictModel):
    """Training by `credit train`."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: a GPU if there is one.")
    max_steps: int | None = Field(
        None, ge=1, description="Length of the run in optimizer steps. Give this or num_epoch."
    )
    num_epoch: int | None = Field(None, ge=1, description="Length of the run in passes over the training period.")
    train_batch_size: int = Field(
        1, ge=1, description="Training samples in a batch on each data-parallel rank; see `grad_accum_every`."
    )
    valid_batch_size: int = Field(1, ge=1, description="Samples in a validation batch.")
    valid_samples: int = Field(
        64, ge=1, description="Number of initial times of a validation, spread over the validation period."
    )
    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of AdamW; norms and biases are excluded from it.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="Betas of AdamW.")
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="Learning rate over the run.")
    amp: bool = Field(
        False,
        description="Compute in bfloat16 while parameters stay in float32: by autocast, or by `fsdp2_mp_policy` where "
        "the model is sharded.",
    )
    tf32: bool = Field(
        True,
        description="On a GPU, use TF32 (10 bits of mantissa) for float32 matrix products and convolutions, in "
        "training and in forecasts; sums stay in float32. It is 7 to 14 times as fast by the data sheets of GPUs, "
        "which was not measured yet.",
    )
    fsdp2_mp_policy: MixedPrecisionConfig | None = Field(
        None,
        description="Data types with amp on several ranks. Default: bfloat16 weights, float32 reduction and output.",
    )
    grad_accum_every: int = Field(1, ge=1, description="Number of batches (micro-steps) for each optimizer step.")
    grad_max_norm: float | None = Field(
        1.0, gt=0, description="Clip the global norm of the gradient to this. null: no clipping."
    )
    backprop_on_timestep: list[int] | None = Field(
        None, description="Rollout steps (counted from 1) that contribute to the loss. Default: all."
    )
    forecast_len_from: dict[float, int] | None = Field(
        None,
        description="Lengthen the training rollout during the run: fraction of the run -> number of steps. {0: 1, 0.6: "
        "2, 0.85: 4} starts with one step and uses four from 85 % on. The last value must be data.forecast_len. "
        "Default: a constant length.",
    )
    recompute_steps: bool = Field(
        True,
        description="With data.forecast_len above 1: recompute the activations of all rollout steps but the last in "
        "the backward pass, which saves memory. A few small results that are expensive to compute are kept.",
    )
    activation_checkpoint: bool | Literal["selective"] = Field(
        False,
        description="Recompute the activations of each block in the backward pass. `selective` keeps the results of "
        "matrix products and attention.",
    )
    lora: LoraConfig | None = Field(
        None, description="Train adapters of the checkpoint in `resume` instead of its weights. Default: train all."
    )
    use_ema: bool = Field(
        True,
        description="Keep an exponential moving average of the weights, which is used for validation, forecasts and "
        "the checkpoint `best`.",
    )
    ema_decay: float = Field(0.999, gt=0, lt=1, description="Decay of the moving average for each optimizer step.")
    compile: bool = Field(
        False,
        description="Compile each block with torch.compile, for fewer and longer kernels. Needs a C++ compiler; on a "
        "GPU, triton and a C compiler. Its effect on a GPU was not measured yet.",
    )
    validate_every: int | None = Field(
        None, ge=1, description="Number of steps between validations. Default: one for each epoch."
    )
    checkpoint_every: int | None = Field(
        None, ge=1, description="Number of steps between checkpoints. Default: one for each epoch."
    )
    keep_last: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    keep_best: int = Field(1, ge=1, description="Number of checkpoints with the best validations to keep as well.")
    keep_every: int | None = Field(
        None, ge=1, description="Also keep the checkpoints of steps that are multiples of this. Default: none."
    )
    log_every: int = Field(10, ge=1, description="Number of steps between rows of metrics.jsonl.")
    monitor: str = Field(
        "skill",
        description="Validation value that selects the best weights; lower is better. `skill` is the RMSE divided by "
        "the RMSE of persistence, averaged over channels and lead times. Or another value, such as rmse/z500/24h.",
    )
    patience: int | None = Field(
        None, ge=1, description="Stop after this number of validations without improvement. Default: never."
    )
    resume: PathText = Field(
        "auto",
        description="Start of the run. `auto`: the run's last checkpoint if there is one. `never`: from scratch, "
        "an error if there are checkpoints. Or the path of a checkpoint or of a file with weights.",
    )
    max_bad_steps: int = Field(
        10,
        ge=1,
        description="After this number of consecutive steps with a non-finite loss or gradient, return to the last "
        "checkpoint and skip their batches. The second time, stop and name the first layer with such values.",
    )
    loss_spike: LossSpikeConfig | None = Field(
        None, description="Return to a checkpoint after a spike of the loss, and skip the batch. Default: never."
    )
    walltime: Duration | None = Field(
        None,
        description="Save and stop before this time has passed, or before the time in CREDIT_JOB_END (seconds since "
        "1970).",
    )
    deterministic: bool = Field(False, description="Use deterministic kernels only.")
    tensorboard: bool = Field(False, description="Also write TensorBoard files. Needs the extra `tensorboard`.")
    preview: PreviewConfig | None = Field(
        None, description="Forecasts during training, with RMSE curves and a map in `figures/`. Default: none."
    )
    objective: ObjectiveEntry = Field(
        default_factory=default_objective, description="What one training step asks of the model."
    )
    metrics: list[str] = Field(
        ["rmse"], min_length=1, description="Metrics of the validation: `rmse`, and those that plugins register."
    )
    parallelism: ParallelismConfig = Field(ParallelismConfig(), description="Degrees of parallelism.")

    @model_validator(mode="after")
    def _require_consistent(self) -> TrainerConfig:
        if (self.max_steps is None) == (self.num_epoch is None):
            raise ValueError("give exactly one of max_steps and num_epoch")
        if self.lora is not None and self.fsdp2_mp_policy is not None:
            raise ValueError(
                "lora and fsdp2_mp_policy exclude each other, because weights in bfloat16 would lose the small changes "
                "of the adapters; remove fsdp2_mp_policy, and amp computes by autocast"
            )
        return self
