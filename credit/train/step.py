"""One optimizer step: micro-steps, gradient through the rollout, clipping, update, average.

Nothing here waits for the device: loss and gradient norm stay tensors until the log wants them, and a non-finite step
is skipped by the optimizer's own `found_inf`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from credit.data.samples.batch import Batch
from credit.forecast.objectives.base import Objective
from credit.models.layers.spectral_norm import advance_power_iterations
from credit.parallel.reduce import gradient_norm
from credit.train.ema import EMA
from credit.train.monitor.nonfinite import bad_channels, first_bad_layer


@dataclass(frozen=True)
class StepResult:
    """What a step measured, still on the device.

    Attributes:
        loss: mean over this rank's part of the global batch.
        grad_norm: global norm before clipping.
        bad: 1.0 where loss or gradient was not finite and the step was skipped.
        stop: number of ranks that asked to stop when the step began.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    bad: torch.Tensor
    stop: torch.Tensor


@dataclass(frozen=True)
class StepSettings:
    """How optimizer steps are taken.

    Attributes:
        forecast_len: optimizer step -> length of the rollout.
        seed: of the run.
        accumulation: micro-steps of an optimizer step.
        grad_max_norm: clip the gradient to this norm, or None.
        counted_steps: rollout steps (from 1) whose loss counts, or None for all.
        data_rank: of this process.
    """

    forecast_len: Callable[[int], int]
    seed: int = 0
    accumulation: int = 1
    grad_max_norm: float | None = None
    counted_steps: list[int] | None = None
    data_rank: int = 0


class TrainingStep:
    """Takes optimizer steps.

    Args:
        objective: what a step asks of the model.
        optimizer: fused AdamW.
        average: moving average of the weights, or None.
        settings: how steps are taken.
    """

    def __init__(
        self, objective: Objective, optimizer: torch.optim.Optimizer, average: EMA | None, settings: StepSettings
    ) -> None:
        self._objective = objective
        self._model = objective.stepper.model
        self._optimizer = optimizer
        self._average = average
        self._settings = settings
        self._max_norm = settings.grad_max_norm if settings.grad_max_norm is not None else torch.inf
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(self, batches: Iterator[Batch], step: int, learning_rate: float, stop: bool = False) -> StepResult:
        """Take optimizer step `step` (from 0) with the next micro-batches; collective.

        Args:
            batches: of this data rank.
            step: the step.
            learning_rate: of this step.
            stop: whether this rank wants the run to end; the sum over the ranks is in the result.
        """
        # Before the first forward, so that all micro-steps and recomputations see the same normalised weights.
        advance_power_iterations(self._model)
        losses = []
        for micro in range(self._settings.accumulation):
            loss = self._micro_loss(next(batches), step, micro, micro + 1 == self._settings.accumulation)
            (loss / self._settings.accumulation).backward()
            losses.append(loss.detach() / self._settings.accumulation)
        total = torch.stack(losses).sum()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        # a loss may overflow where its gradient does not
        flags = (total.new_full((), float(stop)), 1.0 - torch.isfinite(total).float())
        grad_norm, (stops, bad_losses) = gradient_norm(gradients, flags)
        bad = 1.0 - (torch.isfinite(grad_norm) & (bad_losses == 0)).float()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        # the optimizer divides by the one and does nothing for the other, in its own pass
        self._optimizer.grad_scale = ((grad_norm + 1e-6) / self._max_norm).clamp(min=1.0)
        self._optimizer.found_inf = bad
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._average is not None:
            self._average.update(step)
        # gradients that are kept on the host have their norm there
        return StepResult(total, *(one.to(total.device, non_blocking=True) for one in (grad_norm, bad, stops)))

    def counted(self, step: int) -> list[int]:
        """Return the rollout steps (from 1) whose loss counts in optimizer step `step`; the last ends the rollout."""
        steps = range(1, self._settings.forecast_len(step) + 1)
        counted = self._settings.counted_steps
        return [number for number in steps if counted is None or number in counted]

    def explain(self, batches: Iterator[Batch], step: int) -> str | None:
        """Return in words what is the first not to be finite in optimizer step `step`, None if nothing is.

        The step is computed once more on every rank, with the weights as they are, and changes nothing.
        """
        names = [channel.name for channel in self._objective.stepper.channels.group("prognostic")]
        found = None
        for micro in range(self._settings.accumulation):
            batch = next(batches)
            infinite = bad_channels(batch.history_BCTHW, names)
            where = first_bad_layer(self._model, functools.partial(self._micro_loss, batch, step, micro, last=False))
            found = found or (f"the input channels {', '.join(infinite)}" if infinite else where)
        return found

    def _micro_loss(self, batch: Batch, step: int, micro: int, last: bool) -> torch.Tensor:
        torch.manual_seed(draw_seed(self._settings.seed, step, micro, self._settings.data_rank))
        return self._objective.training_loss(batch, self.counted(step), reduce_gradients=last)


def draw_seed(*parts: int) -> int:
    """Return a 63-bit seed that depends on every part; there is no random state to save."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
