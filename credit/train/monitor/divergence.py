"""Detection of divergence: losses or gradients that are not finite, and jumps of the loss."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from statistics import median

from credit.config.sections.trainer import TrainerConfig
from credit.train.checkpoint.train_state import TrainState

logger = logging.getLogger(__name__)


@dataclass
class RollbackRequired(Exception):
    """Exception that requests a rollback: the trainer returns to a checkpoint before `steps` and skips their samples.

    Attributes:
        steps: diverged optimizer steps, counted from 0, increasing.
        is_finite: True if the loss jumped to a finite value; False if the loss or gradient of the steps was not finite.
        problem: description of the divergence, for messages.
    """

    steps: list[int]
    is_finite: bool
    problem: str


class DivergenceGuard:
    """Monitor of the losses that raises `RollbackRequired` if a run diverges.

    All ranks call `check_step` with the same values, so all ranks make the same decision without communication.

    Args:
        conf: the section trainer of the config.
        train_state: state of the run. It stores `nonfinite_steps` and `losses`, so a resumed run makes the same
            decisions as an uninterrupted run.
    """

    def __init__(self, conf: TrainerConfig, train_state: TrainState) -> None:
        self._max_bad_steps = conf.max_bad_steps
        self._spike_config = conf.loss_spike
        self._train_state = train_state

    def check_step(self, step: int, loss: float, is_skipped: bool) -> None:
        """Record the loss of one optimizer step; the trainer calls this method once for every step, in order.

        Args:
            step: number of the step, counted from 0.
            loss: loss of the global batch.
            is_skipped: True if the step was skipped because its loss or gradient was not finite.

        Raises:
            RollbackRequired: if the run must return to an earlier checkpoint.
        """
        state = self._train_state
        if is_skipped:
            logger.warning("step %d: loss or gradient is not finite; the step was skipped", step + 1)
            state.nonfinite_steps.append(step)
            num_nonfinite = len(state.nonfinite_steps)
            if num_nonfinite >= self._max_bad_steps:
                problem = f"loss or gradient was not finite {num_nonfinite} times in a row (trainer.max_bad_steps)"
                raise RollbackRequired(list(state.nonfinite_steps), False, problem)
            return
        state.nonfinite_steps.clear()

        spike_config = self._spike_config
        if spike_config is None:
            return
        # A loss is compared with the median of the last losses, because a single bad step hardly changes the median.
        # There is no comparison before the window is full, because the loss falls steeply at the start of a run.
        if len(state.losses) >= spike_config.window:
            typical_loss = median(state.losses)
            if loss > spike_config.factor * typical_loss:
                problem = f"the loss jumped to {loss:.4g} from a usual {typical_loss:.4g} (trainer.loss_spike)"
                if state.spikes < spike_config.limit:
                    # The loss of this step is not appended, so it does not change the median.
                    raise RollbackRequired([step], True, problem)
                logger.warning("step %d: %s; trainer.loss_spike.limit is used up", step + 1, problem)
        state.losses = [*state.losses, loss][-spike_config.window :]
