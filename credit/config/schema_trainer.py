"""The ``loss`` and ``trainer`` sections."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from credit.config.base import Section
from credit.config.schema_data import Duration


class LossConfig(Section):
    """Training loss, taken in normalised space."""

    kind: Literal["mse", "mae", "huber"] = Field("mse", description="Pointwise loss.")
    huber_delta: float = Field(1.0, gt=0, description="Where Huber's loss turns linear, in normalised units.")
    scaling: Literal["tendency", "state"] = Field(
        "tendency",
        description="Unit of the error of a prognostic channel: the standard deviation of its own tendency (then "
        "persistence scores about 1) or of its state. Diagnostic channels use their state's.",
    )
    latitude_weights: bool = Field(True, description="Weight cells by area.")
    level_weights: Literal["none", "pressure"] = Field("none", description="Weight levels equally or by pressure.")
    global_mean: float = Field(
        0.0,
        ge=0,
        description="Weight of the squared error of each channel's global mean, added to the loss. Errors of the mean "
        "are a few hundredths of those in a cell, too small to be seen, and add up over a long free run; 100 shows "
        "them.",
    )
    weights: dict[str, float] = Field({}, description="Weight of a variable (z) or channel (z500); default 1.")


class ScheduleConfig(Section):
    """Learning rate over the run, sized from the run's own number of steps."""

    kind: Literal["cosine", "constant"] = Field("cosine", description="Shape after the warm-up.")
    warmup: float = Field(0.05, ge=0, lt=1, description="Share of the run spent in linear warm-up.")
    final: float = Field(0.01, ge=0, le=1, description="Learning rate at the end as a share of the peak (cosine).")


class ParallelismConfig(Section):
    """Degrees of parallelism; one process is a mesh of size one."""

    data: Literal["none", "ddp", "fsdp2"] = Field("none", description="Data parallelism.")
    tensor: int = Field(1, ge=1, description="Tensor-parallel ranks.")
    replicate: int = Field(1, ge=1, description="Replicas of a sharded group.")


class TrainerConfig(Section):
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
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's betas.")
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="Learning rate over the run.")
    amp: bool = Field(False, description="Compute in bfloat16 (autocast); parameters stay float32.")
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
        True, description="With data.forecast_len above 1, keep only the state between rollout steps and recompute."
    )
    activation_checkpoint: bool = Field(False, description="Recompute blocks in the backward pass.")
    use_ema: bool = Field(True, description="Average the weights; the average validates, forecasts and is `best`.")
    ema_decay: float = Field(0.999, gt=0, lt=1, description="Decay of the average an optimizer step.")
    compile: bool = Field(False, description="torch.compile each block.")
    validate_every: int | None = Field(None, ge=1, description="Steps between validations; default: each epoch.")
    checkpoint_every: int | None = Field(None, ge=1, description="Steps between checkpoints; default: each epoch.")
    keep_last: int = Field(2, ge=1, description="Checkpoints kept beside the best.")
    log_every: int = Field(10, ge=1, description="Steps between rows of metrics.jsonl.")
    monitor: str = Field(
        "skill",
        description="What selects the best weights, lower is better: `skill` (mean over channels and lead times of "
        "RMSE over persistence's) or a validation key such as rmse/z500/24h.",
    )
    patience: int | None = Field(None, ge=1, description="Stop after so many validations without a better one.")
    resume: str = Field("auto", description="auto, never, or the path of a checkpoint.")
    max_bad_steps: int = Field(10, ge=1, description="Stop after so many non-finite steps in a row.")
    walltime: Duration | None = Field(None, description="Save and stop before so much time has passed.")
    deterministic: bool = Field(False, description="Only deterministic kernels.")
    tensorboard: bool = Field(False, description="Also write TensorBoard files (extra `tensorboard`).")
    parallelism: ParallelismConfig = Field(ParallelismConfig(), description="Degrees of parallelism.")

    @model_validator(mode="after")
    def _consistent(self) -> TrainerConfig:
        if (self.max_steps is None) == (self.num_epoch is None):
            raise ValueError("give exactly one of max_steps and num_epoch")
        return self
