"""The ``trainer`` section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from credit.config.schema_base import Duration, PathText, StrictModel
from credit.config.schema_objective import ObjectiveEntry, default_objective

Beta = Annotated[float, Field(ge=0, lt=1)]


class ScheduleConfig(StrictModel):
    """Learning rate over the run, sized from the run's own number of steps."""

    kind: Literal["cosine", "constant"] = Field("cosine", description="Shape after the warm-up.")
    warmup: float = Field(0.05, ge=0, lt=1, description="Share of the run spent in linear warm-up.")
    final: float = Field(0.01, ge=0, le=1, description="Learning rate at the end as a share of the peak (cosine).")


class LossSpikeConfig(StrictModel):
    """What counts as a jump of the loss, after which the run goes back and leaves the batch out."""

    factor: float = Field(5.0, gt=1, description="Times the median of the losses before.")
    window: int = Field(50, ge=5, description="How many losses before.")
    limit: int = Field(3, ge=1, description="How often the run goes back for it; later jumps get a warning.")


class ParallelismConfig(StrictModel):
    """How the run's ranks share the work: replicate x shard x tensor = number of ranks; shard is what is left."""

    data: Literal["fsdp2", "ddp", "none"] = Field(
        "fsdp2",
        description="`fsdp2` shards weights, gradients and optimizer over the data-parallel ranks, `ddp` keeps whole "
        "copies, `none` leaves tensor parallelism alone. One process has nothing to share.",
    )
    tensor: int = Field(
        1,
        ge=1,
        description="Ranks that share the layers of one sample, best within one host. With `replicate` it must divide "
        "the number of ranks. Layers whose heads or hidden units it does not divide stay whole.",
    )
    replicate: int = Field(
        1, ge=1, description="Groups that each hold a whole set of shards (hybrid sharding): often one a host."
    )
    reshard_after_forward: bool = Field(
        True, description="Free whole weights after the forward and gather them again: less memory, one gather more."
    )
    cpu_offload: bool = Field(False, description="Keep weights, gradients and optimizer state in host memory.")
    timeout: Duration = Field("30min", description="How long a collective waits for the slowest rank before it fails.")


class MixedPrecisionConfig(StrictModel):
    """FSDP2's mixed precision, in force with trainer.amp on several ranks."""

    param_dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Weights and activations.")
    reduce_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Reduction of gradients.")
    output_dtype: Literal["float32", "bfloat16"] = Field("float32", description="The model's output.")
    cast_forward_inputs: bool = Field(
        True,
        description="Cast what the model and its blocks are given to param_dtype. false: inputs keep their dtypes (a "
        "float32 noise level keeps its digits), and the model must cast those that meet its weights.",
    )


class LoraConfig(StrictModel):
    """Fine-tuning of a trained model: it is frozen, and low-rank adapters of some of its weights train."""

    rank: int = Field(8, ge=1, description="Rank of an adapter.")
    alpha: float = Field(16.0, gt=0, description="An adapter's product counts alpha / rank times.")
    targets: list[str] = Field(
        min_length=1,
        description="Which Linear and convolution layers, by their paths in the model; `*` stands for anything: "
        '["*.to_qkv", "*.to_out"].',
    )


class PreviewConfig(StrictModel):
    """Forecasts that a training run makes, scores and draws, so that one sees early what it comes to."""

    every: int = Field(1, ge=1, description="A view every so many validations, and one at the end.")
    lead_time: Duration = Field(
        "72h", description="Length of the forecasts; the default is rounded up to a multiple of `data.timestep`."
    )
    cases: int = Field(
        4, ge=1, description="Forecasts of a view, their initial times spread evenly over the validation period."
    )
    channels: list[str] | None = Field(
        None, min_length=1, description="What is scored and drawn; default: as verification.figure_channels."
    )


class TrainerConfig(StrictModel):
    """How training runs."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: a GPU where there is one.")
    max_steps: int | None = Field(None, ge=1, description="Length in optimizer steps (this or num_epoch).")
    num_epoch: int | None = Field(None, ge=1, description="Length in passes over the training period.")
    train_batch_size: int = Field(1, ge=1, description="Samples a data-parallel rank and micro-step.")
    valid_batch_size: int = Field(1, ge=1, description="Samples of a validation batch.")
    valid_samples: int = Field(
        64, ge=1, description="Initial times of a validation, spread evenly over the whole validation period."
    )
    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decay; never on norms and biases.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW's betas.")
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="Learning rate over the run.")
    amp: bool = Field(
        False,
        description="Compute in bfloat16, parameters stay float32: by autocast, or by fsdp2_mp_policy where sharded.",
    )
    tf32: bool = Field(
        True,
        description="On a GPU, take float32 products and convolutions in TF32, with 10 bits of mantissa (sums stay "
        "float32), in training and in forecasts; false: in float32; TF32 is 7 to 14 times as fast by the "
        "data sheets. Not measured on a GPU yet.",
    )
    fsdp2_mp_policy: MixedPrecisionConfig | None = Field(
        None, description="Dtypes under amp on several ranks. Default: bfloat16 weights, float32 reduction and output."
    )
    grad_accum_every: int = Field(1, ge=1, description="Micro-steps an optimizer step.")
    grad_max_norm: float | None = Field(1.0, gt=0, description="Clip the global gradient norm; null: never.")
    backprop_on_timestep: list[int] | None = Field(
        None, description="Rollout steps (from 1) whose loss counts; default: all."
    )
    forecast_len_from: dict[float, int] | None = Field(
        None,
        description="Lengthen the training rollout during the run: share of the run -> steps. {0: 1, 0.6: 2, 0.85: 4} "
        "trains on one step first and on four from 85 % on; the last must be data.forecast_len. Default: no change.",
    )
    recompute_steps: bool = Field(
        True,
        description="With data.forecast_len above 1, of the rollout's steps but the last keep only the state and "
        "a few small results that are dear to compute, and recompute the rest.",
    )
    activation_checkpoint: bool | Literal["selective"] = Field(
        False,
        description="Recompute blocks in the backward pass; `selective` keeps the results of matrix products and "
        "attention.",
    )
    lora: LoraConfig | None = Field(
        None, description="Train adapters of the checkpoint in `resume` instead of its weights. Default: train all."
    )
    use_ema: bool = Field(True, description="Average the weights; the average validates, forecasts and is `best`.")
    ema_decay: float = Field(0.999, gt=0, lt=1, description="Decay of the average an optimizer step.")
    compile: bool = Field(
        False,
        description="torch.compile each block: fewer and longer kernels; not measured on a GPU yet. It needs a C++ "
        "compiler, on a GPU triton and a C compiler.",
    )
    validate_every: int | None = Field(None, ge=1, description="Steps between validations; default: each epoch.")
    checkpoint_every: int | None = Field(None, ge=1, description="Steps between checkpoints; default: each epoch.")
    keep_last: int = Field(2, ge=1, description="Newest checkpoints kept.")
    keep_best: int = Field(1, ge=1, description="Checkpoints of the best validations kept beside them.")
    keep_every: int | None = Field(None, ge=1, description="Keep those of steps that are multiples of this, too.")
    log_every: int = Field(10, ge=1, description="Steps between rows of metrics.jsonl.")
    monitor: str = Field(
        "skill",
        description="What selects the best weights, lower is better: `skill` (mean over channels and lead times of "
        "RMSE over persistence's) or a validation key such as rmse/z500/24h.",
    )
    patience: int | None = Field(None, ge=1, description="Stop after so many validations without a better one.")
    resume: PathText = Field(
        "auto", description="auto, never, the path of a checkpoint, or of a file of weights to begin with."
    )
    max_bad_steps: int = Field(
        10,
        ge=1,
        description="After so many non-finite steps in a row go back to the last checkpoint and leave their batches "
        "out; the second time, stop and say which layer is the first.",
    )
    loss_spike: LossSpikeConfig | None = Field(
        None, description="Go back to a checkpoint when the loss jumps, and leave the batch out. Default: never."
    )
    walltime: Duration | None = Field(
        None, description="Save and stop before so much time has passed, or before CREDIT_JOB_END (seconds since 1970)."
    )
    deterministic: bool = Field(False, description="Only deterministic kernels.")
    tensorboard: bool = Field(False, description="Also write TensorBoard files (extra `tensorboard`).")
    preview: PreviewConfig | None = Field(
        None, description="Forecasts during training: RMSE curves and a map in `figures/`. Default: none."
    )
    objective: ObjectiveEntry = Field(
        default_factory=default_objective, description="What one training step asks of the model."
    )
    metrics: list[str] = Field(
        ["rmse"], min_length=1, description="Metrics of the validation: `rmse`, and those that plugins register."
    )
    parallelism: ParallelismConfig = Field(ParallelismConfig(), description="Degrees of parallelism.")

    @model_validator(mode="after")
    def _consistent(self) -> TrainerConfig:
        if (self.max_steps is None) == (self.num_epoch is None):
            raise ValueError("give exactly one of max_steps and num_epoch")
        if self.lora is not None and self.fsdp2_mp_policy is not None:
            raise ValueError(
                "lora and fsdp2_mp_policy exclude each other: weights in bfloat16 round away what adapters add; leave "
                "fsdp2_mp_policy out, and amp computes by autocast"
            )
        return self
