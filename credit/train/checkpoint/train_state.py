"""Where a run stands: the part of its state that is no tensor. Saved with every checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from credit.config import Config
from credit.errors import CreditError
from credit.train.assets import ModelAssets


@dataclass
class TrainState:
    """Where a run stands.

    Attributes:
        step: optimizer steps taken.
        best: the best value of ``trainer.monitor`` so far.
        best_step: where it was.
        worse: validations since then.
        best_saved: [value, step] of the best validations whose checkpoints are kept, best first.
        streak: the latest steps, if they were not finite.
        left_out: blocks of samples that the run passes over, because they led it astray.
        rollbacks: how often non-finite steps led it back to a checkpoint.
        spikes: how often a jump of the loss did.
        losses: of the latest steps, as far back as ``trainer.loss_spike`` looks.
        saved: step of the newest checkpoint.
        validated: step of the newest validation.
        spent: what the run has used, see `credit.train.monitor.usage.Usage`.
    """

    step: int = 0
    best: float = float("inf")
    best_step: int = 0
    worse: int = 0
    best_saved: list[list[float]] = field(default_factory=list)
    streak: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    rollbacks: int = 0
    spikes: int = 0
    losses: list[float] = field(default_factory=list)
    saved: int = -1
    validated: int = -1
    spent: dict[str, Any] = field(default_factory=dict)

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Take over the values of a checkpoint, in place; what an older version did not store is as at the start."""
        fresh = TrainState()
        for one in fields(self):
            setattr(self, one.name, stored.get(one.name, getattr(fresh, one.name)))

    def forget_checkpoints(self) -> None:
        """Begin another run from here: what was best and saved lies elsewhere."""
        fresh = TrainState()
        for name in ("best", "best_step", "worse", "best_saved", "saved", "spent"):
            setattr(self, name, getattr(fresh, name))

    def require_best(self, monitor: str) -> None:
        """Stop where validations have taken place and `monitor` was finite in none of them.

        Raises:
            CreditError: naming what to look at.
        """
        if self.worse and math.isinf(self.best):
            raise CreditError(
                f"trainer.monitor: {monitor} was finite in none of {self.worse} validations, so no checkpoint is the "
                "best; null in metrics.jsonl is what was not finite. Look at the values of data.splits.valid (credit "
                "check, the report beside data.store): fields that never change there make skill infinite. Where only "
                "the forecasts grow without bounds, lower trainer.learning_rate"
            )

    def meta(self) -> dict[str, Any]:
        """Return the values for a checkpoint, JSON-ready."""
        return asdict(self)


def checkpoint_meta(
    config: Config,
    assets: ModelAssets,
    progression: TrainState,
    calendar: str,
    data_ranks: int,
    base: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return a checkpoint's meta.json: where the run stands and what its weights need to forecast."""
    return {
        "progression": progression.meta(),
        "config": config.model_dump(mode="json"),
        "calendar": calendar,
        "samples_a_step": config.trainer.train_batch_size * config.trainer.grad_accum_every * data_ranks,
        **({"base": base} if base else {}),
        **assets.meta(),
    }
