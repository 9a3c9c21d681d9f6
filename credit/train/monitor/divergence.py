"""Judges each step by its loss: which ones lead a run astray, and when it has to go back."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from statistics import median

from credit.config.schema_trainer import TrainerConfig
from credit.train.checkpoint.train_state import TrainState

logger = logging.getLogger(__name__)


@dataclass
class RollbackRequired(Exception):
    """The run must go back to a checkpoint from before `steps`, and pass over their samples.

    Attributes:
        steps: optimizer steps (from 0), in order.
        finite: True for a jump of the loss, False for steps that were skipped.
        what: in words.
    """

    steps: list[int]
    finite: bool
    what: str


class DivergenceGuard:
    """Looks at every step in turn. All ranks give it the same numbers, so all come to the same verdict.

    Args:
        conf: of the run.
        at: where it stands; `streak` and `losses` are kept there, so that a run that was interrupted judges alike.
    """

    def __init__(self, conf: TrainerConfig, at: TrainState) -> None:
        self._most = conf.max_bad_steps
        self._spike = conf.loss_spike
        self._at = at

    def judge(self, step: int, loss: float, bad: bool) -> None:
        """Judge optimizer step `step` (from 0).

        Args:
            step: the step.
            loss: over the global batch.
            bad: whether it was skipped because loss or gradient were not finite.

        Raises:
            Astray: if the run must go back.
        """
        at = self._at
        if bad:
            logger.warning("step %d: loss or gradient is not finite; the step was skipped", step + 1)
            at.streak.append(step)
            if len(at.streak) >= self._most:
                what = f"loss or gradient was not finite {len(at.streak)} times in a row (trainer.max_bad_steps)"
                raise RollbackRequired(list(at.streak), False, what)
            return
        at.streak.clear()
        if self._spike is None:
            return
        usual = median(at.losses) if len(at.losses) >= self._spike.window else None
        if usual is not None and loss > self._spike.factor * usual:
            what = f"the loss jumped to {loss:.4g} from a usual {usual:.4g} (trainer.loss_spike)"
            if at.spikes < self._spike.limit:
                raise RollbackRequired([step], True, what)
            logger.warning("step %d: %s; trainer.loss_spike.limit is used up", step + 1, what)
        at.losses = [*at.losses, loss][-self._spike.window :]
