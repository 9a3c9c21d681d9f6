"""Validation: a rollout from times spread over the whole validation period, scored in physical units."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from credit.data.batch import Batch
from credit.forecast.step import Stepper, forcing_windows
from credit.metrics import ErrorSums


def spread_evenly(initial: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` of the initial times, evenly over the whole of them."""
    if len(initial) <= most:
        return initial
    return initial[np.linspace(0, len(initial) - 1, most).round().astype(int)]


@torch.no_grad()
def validate(
    stepper: Stepper, loss: nn.Module, loader: DataLoader, weight_CHW: torch.Tensor, step_minutes: int, loss_steps: int
) -> dict[str, float]:
    """Return the metrics of the weights that are in the model now.

    Args:
        stepper: runs the network, which is put in eval mode and back.
        loss: the training loss, averaged over the first `loss_steps` steps.
        loader: validation batches.
        weight_CHW: cell weights by output channel, summing to 1 over each.
        step_minutes: time step.
        loss_steps: as many as training's rollout has.
    """
    model = stepper.model
    was_training = model.training
    model.eval()
    sums, losses, cases = None, 0.0, 0
    for host_batch in loader:
        batch: Batch = host_batch.to(weight_CHW.device)
        steps = batch.target_BCTHW.shape[2]
        sums = sums or ErrorSums(weight_CHW, steps)
        losses += _batch(stepper, loss, batch, sums, min(loss_steps, steps))
        cases += len(batch.initial_B)
    model.train(was_training)
    assert sums is not None, "a validation loader is never empty"
    hours = [(number + 1) * step_minutes / 60 for number in range(sums.model_LC.shape[0])]
    return {"loss": losses / cases, **sums.summary(stepper.channels, hours)}


def _batch(stepper: Stepper, loss: nn.Module, batch: Batch, sums: ErrorSums, loss_steps: int) -> float:
    """Add one batch to `sums` and return its loss times its size."""
    normalizer = stepper.normalizer
    history = normalizer.encode(batch.history_BCTHW, "prognostic")
    windows = forcing_windows(normalizer.encode(batch.forcing_BCTHW, "dynamic_forcing"), history.shape[2])
    target = normalizer.encode(batch.target_BCTHW, "output")
    std = normalizer.std("output")[None, :, None, None]
    start = history[:, :, -1]
    # diagnostics have no initial value, so persistence is their mean
    persistence = torch.cat([start, torch.zeros_like(target[:, start.shape[1] :, 0])], dim=1)
    total = 0.0
    for number, output in enumerate(stepper.rollout(history, windows, target.shape[2])):
        truth = target[:, :, number]
        sums.add(number, output * std, persistence * std, truth * std)
        if number < loss_steps:
            total += loss(output, truth).item() * len(output) / loss_steps
    return total
