"""One optimizer step: micro-steps, gradient through the rollout, clipping, update, moving average.

Each micro-step adds the gradient of one micro-batch. Nothing here waits for the device: loss and gradient norm stay
tensors until they are logged, and the optimizer skips a non-finite step through its attribute `found_inf`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from credit.data.samples.batch import Batch
from credit.forecast.objectives.base import MicroStep, Objective
from credit.models.layers.spectral_norm import advance_power_iterations
from credit.parallel.reduce import gradient_norm
from credit.train.ema import EMA
from credit.train.monitor.nonfinite import find_infinite_channels, find_nonfinite_layer
from credit.utils.profiling.phases import Phase, in_phase, phase
from credit.utils.seeds import derive_seed


@dataclass(frozen=True)
class StepResult:
    """Scalar tensors of an optimizer step, on the device of the loss.

    Attributes:
        loss: mean loss of this rank's samples; the mean over all ranks is the loss of the global batch. If several
            ranks share the members or the fields of a sample, each has its part of the loss times the number of these
            ranks, so that the mean over all ranks is still the loss.
        grad_norm: norm of the gradient of all parameters before clipping, the same on every rank.
        bad: 1.0 if loss or gradient was not finite on any rank and the step was skipped, else 0.0.
        stop: number of ranks that had been asked to stop when the step began.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    bad: torch.Tensor
    stop: torch.Tensor


@dataclass(frozen=True)
class StepSettings:
    """Settings of all optimizer steps of a run.

    Attributes:
        forecast_len: function that maps an optimizer step (from 0) to the number of rollout steps.
        seed: the seed of the run.
        accumulation: number of micro-steps in an optimizer step.
        grad_max_norm: the norm that gradients are clipped to, None for no clipping.
        counted_steps: rollout steps (from 1) whose loss counts, None for all.
        data_rank: the data rank of this process, on which its dropout masks depend.
    """

    forecast_len: Callable[[int], int]
    seed: int = 0
    accumulation: int = 1
    grad_max_norm: float | None = None
    counted_steps: list[int] | None = None
    data_rank: int = 0


class TrainingStep:
    """Function object that takes one optimizer step per call.

    Args:
        objective: the training objective, which runs the model and returns the loss.
        optimizer: fused AdamW, or Muon.
        average: moving average of the weights, None without one.
        settings: the settings of all steps.
    """

    def __init__(
        self, objective: Objective, optimizer: torch.optim.Optimizer, average: EMA | None, settings: StepSettings
    ) -> None:
        self._objective = objective
        self._model = objective.stepper.model
        self._optimizer = optimizer
        self._average = average
        self._settings = settings
        # An infinite norm never clips.
        self._max_norm = settings.grad_max_norm if settings.grad_max_norm is not None else torch.inf
        self._parameters: list[torch.nn.Parameter] = []
        for group in optimizer.param_groups:
            self._parameters += group["params"]

    def __call__(self, batches: Iterator[Batch], step: int, learning_rate: float, stop: bool = False) -> StepResult:
        """Collective: take optimizer step `step` (from 0) with the next micro-batches.

        Args:
            batches: the micro-batches of this data rank.
            step: the optimizer step.
            learning_rate: the learning rate of this step.
            stop: True if this rank has been asked to stop; `StepResult.stop` is the number of ranks with True.
        """
        self._objective.stepper.begin_iteration()
        # Before the first forward, so that all micro-steps and recomputations see the same normalised weights.
        with phase(Phase.SPECTRAL_NORM):
            advance_power_iterations(self._model)

        # Forward and backward passes: the gradients of all micro-batches add up.
        num_micro_steps = self._settings.accumulation
        losses = []
        for micro in range(num_micro_steps):
            # Gradients are reduced over the ranks once, after the last micro-step.
            is_last = micro + 1 == num_micro_steps
            batch = next(batches)
            self._seed_dropout(step, micro)
            micro_step = MicroStep(step, self.counted(step), num_micro_steps, reduce_gradients=is_last)
            # The objective marks its backward passes, which do not count as forward.
            with phase(Phase.FORWARD):
                micro_loss = self._objective.accumulate_gradients(batch, micro_step)
            losses.append(micro_loss / num_micro_steps)
        total_loss = torch.stack(losses).sum()
        return self._update_weights(total_loss, step, learning_rate, stop)

    @in_phase(Phase.OPTIMIZER)
    def _update_weights(self, total_loss: torch.Tensor, step: int, learning_rate: float, stop: bool) -> StepResult:
        """Collective: clip the accumulated gradients, update the weights and their average, and free the gradients.

        Args:
            total_loss: mean loss of the micro-batches, a scalar.
            step: the optimizer step, from 0.
            learning_rate: the learning rate of this step.
            stop: True if this rank has been asked to stop.
        """
        # Norm and checks. The two flags share the all-reduce of the norm, so they cost no collective of their own.
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        stop_flag = total_loss.new_full((), float(stop))
        # The loss is checked as well, because it may overflow when its gradient does not.
        bad_loss_flag = 1.0 - torch.isfinite(total_loss).float()
        grad_norm, (num_stops, num_bad_losses) = gradient_norm(gradients, (stop_flag, bad_loss_flag))
        is_good = torch.isfinite(grad_norm) & (num_bad_losses == 0)
        bad = 1.0 - is_good.float()

        # Clipping and update.
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_factor"]
        # The fused optimizer divides gradients by `grad_scale`, which clips them, and skips the update if `found_inf`
        # is 1. Neither needs a pass over the gradients of its own, nor a value on the host.
        self._optimizer.grad_scale = ((grad_norm + 1e-6) / self._max_norm).clamp(min=1.0)
        self._optimizer.found_inf = bad
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._average is not None:
            self._average.update(step)
        # The norm of gradients that are offloaded to the host lies on the host.
        device = total_loss.device
        return StepResult(
            loss=total_loss,
            grad_norm=grad_norm.to(device, non_blocking=True),
            bad=bad.to(device, non_blocking=True),
            stop=num_stops.to(device, non_blocking=True),
        )

    def counted(self, step: int) -> list[int]:
        """Return the rollout steps (from 1) whose loss counts in optimizer step `step`; the last ends the rollout."""
        rollout_steps = range(1, self._settings.forecast_len(step) + 1)
        if self._settings.counted_steps is None:
            return list(rollout_steps)
        return [rollout_step for rollout_step in rollout_steps if rollout_step in self._settings.counted_steps]

    def explain(self, batches: Iterator[Batch], step: int) -> str | None:
        """Collective: return a description of the first non-finite tensor of an optimizer step, None for none.

        Every rank computes the step once more with the present weights. Weights and optimizer are not changed.

        Args:
            batches: the micro-batches of this data rank in that step.
            step: the optimizer step, from 0.
        """
        prognostic = self._objective.stepper.channels.group("prognostic")
        channel_names = [channel.name for channel in prognostic]
        explanation = None
        for micro in range(self._settings.accumulation):
            batch = next(batches)
            self._objective.stepper.begin_iteration()
            infinite_channels = find_infinite_channels(batch.history_BCTHW, channel_names)
            compute_loss = functools.partial(self._micro_loss, batch, step, micro)
            # Computed in any case, because the other ranks of a sharded model take part in it.
            bad_layer = find_nonfinite_layer(self._model, compute_loss)
            if explanation is None and infinite_channels:
                # Infinite inputs are the cause of infinite layers.
                explanation = f"the input channels {', '.join(infinite_channels)}"
            elif explanation is None:
                explanation = bad_layer
        return explanation

    def _micro_loss(self, batch: Batch, step: int, micro: int) -> torch.Tensor:
        """Return the loss of a micro-step, a scalar; its gradients will not be reduced over the ranks.

        Args:
            batch: the micro-batch.
            step: the optimizer step, from 0.
            micro: number of the micro-step in the optimizer step, from 0.
        """
        self._seed_dropout(step, micro)
        return self._objective.training_loss(batch, MicroStep(step, self.counted(step), reduce_gradients=False))

    def _seed_dropout(self, step: int, micro: int) -> None:
        """Seed torch's global generator for micro-step `micro`, so that a resumed run draws the same dropout masks."""
        torch.manual_seed(derive_seed(self._settings.seed, step, micro, self._settings.data_rank))
