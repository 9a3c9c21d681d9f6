"""Ensemble objective: a rollout of several members with a loss that compares all members with the truth.

The gradient of the loss with respect to one member's output depends on the outputs of the other members, but not on
their autograd graphs. So the members can be computed one after another, with the activations of only one member in
memory. Gao et al. (2021, arXiv:2101.06983) compute contrastive losses in this way:

1. Compute the outputs of all members without a graph, but keep the graph of the last member.
2. Compute the gradient of the loss with respect to the outputs.
3. Backpropagate the gradient of the last member's output. Compute every other member again, with the same noise and
   with a graph, and backpropagate the gradient of its output.

The gradients are exact. A backward pass takes about as long as two forward passes. So with M members, the second
forward passes add (M - 1) / (3 M) to the operations of a training step: a sixth for two members, a quarter for four. If
all members are computed in one batch, their graph is kept and nothing is computed twice.

Several ranks may share the members of a sample (``trainer.parallelism.ensemble``). Each rank computes its members with
this method, and `credit.losses.member_loss` compares them with the members of the other ranks.

Shape suffixes: B batch, M ensemble members, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from credit.config.sections.trainer import ObjectiveSection
from credit.data.samples.batch import Batch
from credit.forecast.objectives.base import EncodedBatch, MicroStep, Objective, ObjectiveContext, register_objective
from credit.forecast.objectives.section import EnsembleObjectiveSection
from credit.losses.member_loss import MemberLoss
from credit.models.noise.base import MemberKey
from credit.parallel.fsdp2 import set_gradient_sync
from credit.utils.profiling.phases import Phase, phase
from credit.utils.seeds import derive_seed


@dataclass(frozen=True)
class _MemberBatch:
    """Several ensemble members of all samples of a batch, which are computed together as one larger batch.

    The first dimension of all tensors has a row for each member and sample: all samples of the first member, then all
    samples of the next member, and so on.

    Attributes:
        members: numbers of the members.
        history_BCTHW: normalised prognostic channels of the input frames.
        forcing: function that takes a step number, from 0, and returns the dynamic forcing of the input frames of this
            step.
        keys: seed, initial time and member of each row, on which the noise of the row depends.
    """

    members: range
    history_BCTHW: Tensor
    forcing: Callable[[int], Tensor]
    keys: list[MemberKey]


@register_objective("ensemble", EnsembleObjectiveSection)
class EnsembleRollout(Objective):
    """Objective with several members per sample. Its loss is the mean ensemble loss over `MicroStep.loss_steps`.

    The members of a sample start from the same state and differ by the noise inside the network. Gradients flow through
    all steps of the rollout.

    Args:
        context: stepper, loss, noise and number of members of the run.
        section: ``trainer.objective`` of the config.
    """

    supports_domain = True

    def __init__(self, context: ObjectiveContext, section: ObjectiveSection) -> None:
        super().__init__(context, section)
        group = context.ensemble_group
        num_ranks = dist.get_world_size(group) if group is not None else 1
        rank = dist.get_rank(group) if group is not None else 0
        members_per_rank = context.members // num_ranks
        # Members that this rank computes.
        self._members = range(rank * members_per_rank, (rank + 1) * members_per_rank)
        self._members_at_once = min(context.members_at_once, members_per_rank)
        assert context.build_part_losses is not None
        self._member_loss = MemberLoss(
            self.loss, context.build_part_losses, context.members, context.field_shape, group
        )

    def training_loss(self, batch: Batch, micro_step: MicroStep) -> Tensor:
        """Collective: return the loss with the graph of all members of this rank; see `Objective.training_loss`.

        If several ranks share the members, the result is this rank's contribution. The mean of the contributions over
        the ranks of the ensemble group is the loss.
        """
        encoded = self.encode(batch)
        members = self._build_member_batch(encoded, self._members, micro_step.optimizer_step)
        self._set_gradient_sync(micro_step, is_last_backward=True)
        outputs = list(self._rollout(members, micro_step, is_last_backward=True))
        return self._compute_loss(outputs, encoded, micro_step.loss_steps)

    def accumulate_gradients(self, batch: Batch, micro_step: MicroStep) -> Tensor:
        """Collective: add the gradients of the loss to the gradients of the parameters, for a few members at a time.

        ``trainer.members_at_once`` members are computed together. See `Objective.accumulate_gradients` for arguments
        and result, and the docstring of this module for the method.
        """
        if self._members_at_once == len(self._members):
            return super().accumulate_gradients(batch, micro_step)
        encoded = self.encode(batch)
        # Only the first chunk may be shorter: the last chunk is not recomputed, so it should be as large as possible.
        chunks = []
        start = self._members.start
        length = len(self._members) % self._members_at_once or self._members_at_once
        while start < self._members.stop:
            members = range(start, start + length)
            chunks.append(self._build_member_batch(encoded, members, micro_step.optimizer_step))
            start += length
            length = self._members_at_once

        # 1. Outputs of all members of this rank at the steps in `loss_steps`. The last chunk keeps its graph.
        outputs_of_chunks = []
        for chunk in chunks[:-1]:
            with torch.no_grad():
                outputs_of_chunks.append(list(self._rollout(chunk, micro_step, is_last_backward=False)))
        self._set_gradient_sync(micro_step, is_last_backward=False)
        last_outputs = list(self._rollout(chunks[-1], micro_step, is_last_backward=False))
        outputs_of_chunks.append(last_outputs)

        # 2. Gradient of the loss with respect to these outputs, which are the leaves of a new graph.
        leaves = []
        for outputs in zip(*outputs_of_chunks, strict=True):
            leaves.append(torch.cat(outputs).detach().requires_grad_())
        # Only the concatenated copies and the graph of the last chunk stay in memory.
        del outputs_of_chunks, outputs
        loss = self._compute_loss(leaves, encoded, micro_step.loss_steps)
        with phase(Phase.BACKWARD):
            gradients = torch.autograd.grad(loss / micro_step.num_micro_steps, leaves)
        # Detach the loss, because its graph would keep the outputs of all members in memory.
        loss = loss.detach()
        del leaves

        # 3. Backpropagation: the last chunk is first, so its graph is freed. Then every other chunk is computed again
        # with a graph. The gradients of the parameters add up and are reduced over the ranks in the last backward pass.
        forecasts_per_chunk = [len(chunk.keys) for chunk in chunks]
        gradients_by_step = [gradient_NCHW.split(forecasts_per_chunk) for gradient_NCHW in gradients]
        *gradients_by_chunk, last_gradients = zip(*gradients_by_step, strict=True)
        with phase(Phase.BACKWARD):
            torch.autograd.backward(last_outputs, last_gradients)
        del last_outputs
        num_recomputed = len(chunks) - 1
        for number, chunk in enumerate(chunks[:-1]):
            is_last_backward = number + 1 == num_recomputed
            self._set_gradient_sync(micro_step, is_last_backward)
            outputs = list(self._rollout(chunk, micro_step, is_last_backward))
            with phase(Phase.BACKWARD):
                torch.autograd.backward(outputs, gradients_by_chunk[number])
            del outputs
        return loss

    def predict(self, batch: EncodedBatch, num_steps: int) -> Iterator[Tensor]:
        """Collective: yield the prediction (B, M, C, H, W) of each step; see `Objective.predict`.

        The noise is the same in every validation, so the scores of different validations are comparable.
        """
        members = range(self.context.valid_members)
        # All members make one step before a member makes the next step, but each member is computed separately. So
        # memory contains only the states of all members, and the activations of one member.
        chunks = [self._build_member_batch(batch, range(member, member + 1), None) for member in members]
        rollouts = []
        for chunk in chunks:
            conditions = self._generate_noise(chunk)
            rollouts.append(self.stepper.rollout(chunk.history_BCTHW, chunk.forcing, num_steps, conditions=conditions))
        for outputs in zip(*rollouts, strict=True):
            yield torch.stack(outputs, dim=1)

    def _build_member_batch(self, encoded: EncodedBatch, members: range, optimizer_step: int | None) -> _MemberBatch:
        """Return a batch that is repeated for each of the given members, with the noise keys of its rows.

        Args:
            encoded: samples in normalised space.
            members: numbers of the members.
            optimizer_step: number of the optimizer step, on which the noise depends; None in validation.
        """
        keys = []
        for member in members:
            for initial_minutes in encoded.initial_minutes:
                keys.append(MemberKey(self.context.seed, initial_minutes, member, optimizer_step))

        def repeat(fields: Tensor) -> Tensor:
            """Return fields (B, ...) repeated for each member, (members * B, ...)."""
            if len(members) == 1:
                return fields
            other_dims = [1] * (fields.dim() - 1)
            return fields.repeat(len(members), *other_dims)

        return _MemberBatch(
            members=members,
            history_BCTHW=repeat(encoded.history_BCTHW),
            forcing=lambda step: repeat(encoded.forcing(step)),
            keys=keys,
        )

    def _generate_noise(self, chunk: _MemberBatch) -> Iterator[dict[str, Tensor] | None] | None:
        """Return an iterator over the noise of each step, by kind of noise; None if ``model.noise`` is not set."""
        if self.context.noise is None:
            return None
        return self.context.noise.sequence(chunk.keys, chunk.history_BCTHW.device)

    def _rollout(self, chunk: _MemberBatch, micro_step: MicroStep, is_last_backward: bool) -> Iterator[Tensor]:
        """Yield the normalised outputs (members * B, C, H, W) of the rollout steps in `loss_steps` of the micro-step.

        The seed of dropout depends only on the members and samples, so a recomputation returns the same outputs.

        Args:
            chunk: members to compute.
            micro_step: settings of the micro-step.
            is_last_backward: True if the backward pass of this chunk is the last of the micro-step. If the micro-step
                reduces gradients, they are reduced in this pass.
        """
        num_steps = max(micro_step.loss_steps)
        # The seed is derived from all fields of all keys: seed, initial time, member and optimizer step.
        key_values: list[int | None] = []
        for key in chunk.keys:
            key_values += vars(key).values()
        torch.manual_seed(derive_seed(*key_values))
        rollout = self.stepper.rollout(
            chunk.history_BCTHW,
            chunk.forcing,
            num_steps,
            recompute=self.recompute and num_steps > 1,
            conditions=self._generate_noise(chunk),
        )
        model = self.stepper.model
        for number, output_NCHW in enumerate(rollout, start=1):
            is_first_of_several = number == 1 and num_steps > 1
            reduces_later = micro_step.reduce_gradients and is_last_backward and is_first_of_several
            # Outputs that are computed without a graph have no backward pass.
            if reduces_later and output_NCHW.requires_grad:
                # The gradients are complete only when the backward pass reaches the first step, at its end.
                output_NCHW.register_hook(lambda gradient: set_gradient_sync(model, True))
            if number in micro_step.loss_steps:
                yield output_NCHW

    def _set_gradient_sync(self, micro_step: MicroStep, is_last_backward: bool) -> None:
        """Collective: switch the reduction of gradients over the ranks on or off for the start of a backward pass.

        For a rollout of several steps, the reduction is off at the start. `_rollout` switches it on when the backward
        pass reaches the first step.

        Args:
            micro_step: settings of the micro-step.
            is_last_backward: True if the next backward pass is the last of the micro-step.
        """
        is_single_step = max(micro_step.loss_steps) == 1
        set_gradient_sync(self.stepper.model, micro_step.reduce_gradients and is_last_backward and is_single_step)

    def _compute_loss(self, outputs: Sequence[Tensor], encoded: EncodedBatch, loss_steps: Sequence[int]) -> Tensor:
        """Collective over the ensemble group: return the mean loss over the rollout steps in `loss_steps`.

        Args:
            outputs: (members * B, C, H, W) output of this rank's members, for each step of `loss_steps` in ascending
                order.
            encoded: samples in normalised space, with the truth.
            loss_steps: rollout steps (from 1) at which the loss is computed.
        """
        losses = []
        for step, output_NCHW in zip(sorted(loss_steps), outputs, strict=True):
            losses.append(self._member_loss(output_NCHW, encoded.target_BCTHW[:, :, step - 1]))
        return torch.stack(losses).mean()
