"""State of a run that is not a tensor, such as its step and best validation; saved with every checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from credit.config import Config
from credit.errors import CreditError
from credit.train.build.assets import ModelAssets

# Attribute of `TrainState` -> key in meta.json, for all attributes whose key differs from their name.
_META_KEYS = {
    "validations_since_best": "worse",
    "nonfinite_steps": "streak",
    "skipped_blocks": "left_out",
    "usage": "spent",
}


@dataclass
class TrainState:
    """State of a run that is not a tensor.

    The attributes are saved in meta.json under their names; `_META_KEYS` lists the exceptions.

    Attributes:
        step: number of optimizer steps taken.
        best: best (smallest) value of ``trainer.monitor`` so far, infinity before the first validation.
        best_step: step of the validation with the value `best`, 0 before the first validation.
        validations_since_best: number of validations since `best_step`.
        best_saved: [value, step] of the best validations whose checkpoints are retained, best first.
        nonfinite_steps: latest consecutive steps (counted from 0) without a finite loss or gradient; empty if the last
            step was finite.
        skipped_blocks: indices of the blocks of samples that the run skips, because their steps diverged; a block is
            the samples of one optimizer step.
        rollbacks: number of rollbacks because of steps that were not finite.
        spikes: number of rollbacks because of a jump of the loss.
        losses: losses of the latest ``trainer.loss_spike.window`` steps.
        saved: step of the newest checkpoint, -1 without one.
        validated: step of the newest validation, -1 without one.
        usage: resources that the run has used, as a mapping of the fields of `credit.train.monitor.usage.Usage`.
    """

    step: int = 0
    best: float = float("inf")
    best_step: int = 0
    validations_since_best: int = 0
    best_saved: list[list[float]] = field(default_factory=list)
    nonfinite_steps: list[int] = field(default_factory=list)
    skipped_blocks: list[int] = field(default_factory=list)
    rollbacks: int = 0
    spikes: int = 0
    losses: list[float] = field(default_factory=list)
    saved: int = -1
    validated: int = -1
    usage: dict[str, Any] = field(default_factory=dict)

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Set all attributes from a checkpoint; attributes that an older version did not store get their defaults.

        Args:
            stored: output of `to_meta`, read from JSON.
        """
        # An instance has all defaults, including the defaults from a factory.
        initial_state = TrainState()
        for attribute in fields(self):
            key = _META_KEYS.get(attribute.name, attribute.name)
            value = stored.get(key, getattr(initial_state, attribute.name))
            setattr(self, attribute.name, value)

    def forget_checkpoints(self) -> None:
        """Reset the values about checkpoints and usage, for a new run that starts from the checkpoint of an old run."""
        initial_state = TrainState()
        for name in ("best", "best_step", "validations_since_best", "best_saved", "saved", "usage"):
            setattr(self, name, getattr(initial_state, name))

    def require_finite_best(self, monitor: str) -> None:
        """Raise CreditError if the run had validations, but none with a finite value of ``trainer.monitor``.

        Args:
            monitor: value of ``trainer.monitor``, for the message.

        Raises:
            CreditError: if all values were infinite or NaN; the message contains advice.
        """
        # `best` is infinity until a validation has a finite value; NaN is never smaller than infinity.
        if self.validations_since_best and math.isinf(self.best):
            raise CreditError(
                f"trainer.monitor: {monitor} was finite in none of {self.validations_since_best} validations, so there "
                "is no best checkpoint; values that were not finite are null in metrics.jsonl. Check the fields of "
                "data.splits.valid (credit check, the report next to data.store): skill is infinite if a field never "
                "changes there. If only the forecasts grow without bounds, lower trainer.learning_rate"
            )

    def to_meta(self) -> dict[str, Any]:
        """Return the state for meta.json, as values that JSON can express."""
        stored = {}
        for name, value in asdict(self).items():
            stored[_META_KEYS.get(name, name)] = value
        return stored


def build_checkpoint_meta(
    config: Config,
    assets: ModelAssets,
    train_state: TrainState,
    calendar: str,
    num_sample_ranks: int,
    base: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return the contents of a checkpoint's meta.json: the state of the run, its config and the assets of the model.

    Args:
        config: the config of the run.
        assets: the assets of the model.
        train_state: state of the run at the checkpoint.
        calendar: name of the data's CF calendar.
        num_sample_ranks: number of ranks, or groups of ranks, with different samples.
        base: for a checkpoint of LoRA adapters, the output of `credit.train.build.fine_tuning.describe_base`.
    """
    # Only a checkpoint of adapters contains the key "base".
    base_entry = {}
    if base:
        base_entry["base"] = base
    trainer = config.trainer
    samples_per_step = trainer.train_batch_size * trainer.grad_accum_every * num_sample_ranks
    stored_config = config.model_dump(mode="json")
    if trainer.global_batch_size is not None:
        samples_per_step = trainer.global_batch_size
        # The accumulation is computed from the global batch; a config with both keys would be rejected.
        stored_config["trainer"]["grad_accum_every"] = 1
    return {
        "progression": train_state.to_meta(),
        "config": stored_config,
        "calendar": calendar,
        "samples_a_step": samples_per_step,
        **base_entry,
        **assets.to_meta(),
    }
