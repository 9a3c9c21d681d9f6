"""Deterministic objective: a rollout of one forecast, compared with the truth at the steps that the loss uses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from credit.data.samples.batch import Batch
from credit.forecast.objectives.base import EncodedBatch, MicroStep, Objective, register_objective
from credit.forecast.objectives.section import DeterministicSection
from credit.parallel.fsdp2 import set_gradient_sync


@register_objective("deterministic", DeterministicSection)
class DeterministicRollout(Objective):
    """Objective with one forecast per sample. Its loss is the mean over the steps in `MicroStep.loss_steps`.

    Gradients flow through all steps of the rollout.
    """

    supports_domain = True

    def training_loss(self, batch: Batch, micro_step: MicroStep) -> Tensor:
        """Collective: return the mean loss over the steps in `MicroStep.loss_steps`; see `Objective.training_loss`."""
        encoded = self.encode(batch)
        loss_steps = micro_step.loss_steps
        reduce_gradients = micro_step.reduce_gradients
        num_steps = max(loss_steps)
        model = self.stepper.model
        # The backward pass runs from the last step to the first step, so the gradients are complete only at the first
        # step. A rollout of several steps therefore switches the reduction of gradients on at the first step.
        set_gradient_sync(model, reduce_gradients and num_steps == 1)
        losses = []
        # The last step of a rollout is never recomputed, so a single step needs no recomputation.
        recompute = self.recompute and num_steps > 1
        rollout = self.stepper.rollout(encoded.history_BCTHW, encoded.forcing, num_steps, recompute=recompute)
        for number, output_BCHW in enumerate(rollout, start=1):
            if reduce_gradients and number == 1 and num_steps > 1:
                # The hook runs when the backward pass reaches the output of the first step.
                output_BCHW.register_hook(lambda gradient: set_gradient_sync(model, True))
            if number in loss_steps:
                truth_BCHW = encoded.target_BCTHW[:, :, number - 1]
                # The loss expects an ensemble; here it has a single member.
                losses.append(self.loss(output_BCHW[:, None], truth_BCHW))
        return torch.stack(losses).mean()

    def predict(self, batch: EncodedBatch, num_steps: int) -> Iterator[Tensor]:
        """Collective: yield the prediction (B, 1, C, H, W) of each step; see `Objective.predict`."""
        for output_BCHW in self.stepper.rollout(batch.history_BCTHW, batch.forcing, num_steps):
            yield output_BCHW[:, None]
