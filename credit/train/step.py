"""One optimizer step: micro-steps, gradient through the rollout, clipping, update, moving average.

Each micro-step adds the gradient of one micro-batch. The host never waits for the device during a step: loss and
gradient norm stay tensors until they are logged, and the attribute `found_inf` of the optimizer skips non-finite steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from credit.data.samples.batch import Batch
from credit.forecast.objectives.base import MicroStep, Objective
from credit.models.layers.spectral_norm import advance_power_iterations
from credit.parallel.reduce import reduce_norm_and_flags
from credit.train.ema import EMA
from credit.train.monitor.nonfinite import find_infinite_channels, find_nonfinite_layer
from credit.utils.profiling.phases import Phase, in_phase, phase
from credit.utils.seeds import derive_seed


@dataclass(frozen=True)
class StepResult:
    """Scalar tensors of an optimizer step, on the device of the loss.

    Attributes:
        loss: mean loss of this rank's samples; the mean over all ranks is the loss of the global batch. If n ranks
            share the members or the fields of a sample, the value is n times this rank's part of the loss, so the
            mean over all ranks is still the loss.
        grad_norm: norm of the gradient of all parameters before clipping, the same on every rank.
        skipped: 1.0 if the step was skipped, because loss or gradient was not finite on a rank; else 0.0.
        num_stop_requests: number of ranks that had received a request to stop when the step began.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    num_stop_requests: torch.Tensor


@dataclass(frozen=True)
class StepSettings:
    """Settings of all optimizer steps of a run.

    Attributes:
        forecast_len: function that maps an optimizer step (from 0) to the number of rollout steps.
        seed: the seed of the run.
        accumulation: number of micro-steps in an optimizer step.
        grad_max_norm: largest norm of the gradient; larger gradients are clipped. None for no clipping.
        loss_steps: rollout steps (from 1) at which the loss is computed; None for all steps.
        data_rank: data-parallel rank of this process, which determines its dropout masks.
    """

    forecast_len: Callable[[int], int]
    seed: int = 0
    accumulation: int = 1
    grad_max_norm: float | None = None
    loss_steps: list[int] | None = None
    data_rank: int = 0


class TrainingStep:
    """Function object that takes one optimizer step per call.

    Args:
        objective: the training objective, which runs the model and returns the loss.
        optimizer: fused AdamW, or Muon.
        average: moving average of the weights; None if the run has no moving average.
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
        # With an infinite maximum norm, gradients are never clipped.
        self._max_norm = settings.grad_max_norm if settings.grad_max_norm is not None else torch.inf
        self._parameters: list[torch.nn.Parameter] = []
        for group in optimizer.param_groups:
            self._parameters += group["params"]

    def __call__(self, batches: Iterator[Batch], step: int, learning_rate: float, stop: bool = False) -> StepResult:
        """Collective: take optimizer step `step` (from 0) with the next micro-batches.

        Args:
            batches: the micro-batches of this data-parallel rank.
            step: the optimizer step.
            learning_rate: the learning rate of this step.
            stop: True if this rank has received a request to stop. `StepResult.num_stop_requests` is the number of
                these ranks.
        """
        self._objective.stepper.begin_iteration()
        # The power iterations run before the first forward pass, so that all micro-steps and recomputations use the
        # same normalised weights.
        with phase(Phase.SPECTRAL_NORM):
            advance_power_iterations(self._model)

        # Forward and backward passes; the gradients of all micro-batches are summed.
        num_micro_steps = self._settings.accumulation
        losses = []
        for micro in range(num_micro_steps):
            # Gradients are reduced over the ranks once, after the last micro-step.
            is_last = micro + 1 == num_micro_steps
            batch = next(batches)
            self._seed_dropout(step, micro)
            micro_step = MicroStep(step, self.list_loss_steps(step), num_micro_steps, reduce_gradients=is_last)
            # The objective marks its backward passes as a separate phase.
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
            stop: True if this rank has received a request to stop.
        """
        # Norm and checks. The two flags use the all-reduce of the norm, so they need no additional collective.
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        stop_flag = total_loss.new_full((), float(stop))
        # The loss is checked as well, because the loss may overflow although its gradient is finite.
        bad_loss_flag = 1.0 - torch.isfinite(total_loss).float()
        grad_norm, (num_stops, num_bad_losses) = reduce_norm_and_flags(gradients, (stop_flag, bad_loss_flag))
        is_good = torch.isfinite(grad_norm) & (num_bad_losses == 0)
        bad = 1.0 - is_good.float()

        # Clipping and update.
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_factor"]
        # The fused optimizer divides gradients by `grad_scale`, which clips them, and skips the update if `found_inf`
        # is 1. This needs no additional pass over the gradients and no value on the host.
        self._optimizer.grad_scale = ((grad_norm + 1e-6) / self._max_norm).clamp(min=1.0)
        self._optimizer.found_inf = bad
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._average is not None:
            self._average.update(step)
        # If gradients are offloaded to the host, their norm is on the host, too.
        device = total_loss.device
        return StepResult(
            loss=total_loss,
            grad_norm=grad_norm.to(device, non_blocking=True),
            skipped=bad.to(device, non_blocking=True),
            num_stop_requests=num_stops.to(device, non_blocking=True),
        )

    def list_loss_steps(self, step: int) -> list[int]:
        """Return the rollout steps (from 1) at which optimizer step `step` computes the loss.

        The rollout ends at the last of these steps.
        """
        rollout_steps = range(1, self._settings.forecast_len(step) + 1)
        if self._settings.loss_steps is None:
            return list(rollout_steps)
        return [rollout_step for rollout_step in rollout_steps if rollout_step in self._settings.loss_steps]

    def describe_first_nonfinite(self, batches: Iterator[Batch], step: int) -> str | None:
        """Collective: recompute an optimizer step and return a description of its first non-finite tensor.

        Every rank computes the step again with the current weights. Weights and optimizer are not changed.

        Args:
            batches: the micro-batches of this data-parallel rank in the step.
            step: the optimizer step, from 0.

        Returns:
            The description; None if all tensors are finite.
        """
        prognostic = self._objective.stepper.channels.group("prognostic")
        channel_names = [channel.name for channel in prognostic]
        explanation = None
        for micro in range(self._settings.accumulation):
            batch = next(batches)
            self._objective.stepper.begin_iteration()
            infinite_channels = find_infinite_channels(batch.history_BCTHW, channel_names)
            compute_loss = functools.partial(self._compute_micro_loss, batch, step, micro)
            # The search always runs, because it is collective for a sharded model.
            bad_layer = find_nonfinite_layer(self._model, compute_loss)
            if explanation is None and infinite_channels:
                # Infinite inputs are the cause of infinite layers.
                explanation = f"the input channels {', '.join(infinite_channels)}"
            elif explanation is None:
                explanation = bad_layer
        return explanation

    def _compute_micro_loss(self, batch: Batch, step: int, micro: int) -> torch.Tensor:
        """Return the loss of a micro-step, a scalar. Its backward pass does not reduce gradients over the ranks.

        Args:
            batch: the micro-batch.
            step: the optimizer step, from 0.
            micro: number of the micro-step in the optimizer step, from 0.
        """
        self._seed_dropout(step, micro)
        return self._objective.training_loss(batch, MicroStep(step, self.list_loss_steps(step), reduce_gradients=False))

    def _seed_dropout(self, step: int, micro: int) -> None:
        """Seed torch's global generator for micro-step `micro`, so that a resumed run uses the same dropout masks."""
        torch.manual_seed(derive_seed(self._settings.seed, step, micro, self._settings.data_rank))
