"""Inputs of a plan: settings from the config of the training run, and a builder of the training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from credit.config.sections.trainer import TrainerConfig
from credit.hpc.planner.memory import PassSchedule
from credit.parallel.mesh import DeviceGrid, ParallelDims

Checkpointing = bool | Literal["selective"]


@dataclass(frozen=True)
class MemberBatches:
    """Number of ensemble members that a rank computes for each sample, and their division into batches.

    Attributes:
        members: number of members; 1 for a deterministic forecast.
        at_once: number of members that are computed together, as one batch.
    """

    members: int = 1
    at_once: int = 1

    @property
    def num_batches(self) -> int:
        """Number of batches of members; the last batch may be smaller."""
        return math.ceil(self.members / self.at_once)


class StepBuilder(Protocol):
    """Builder of the network and the training step of a run.

    With this interface, the planner depends on neither the config nor the model.
    """

    def build_network(self, mesh: DeviceGrid, sharded: bool, checkpointing: Checkpointing) -> tuple[nn.Module, bool]:
        """Return the parallelized network on the meta device, and True if it runs under autocast.

        Args:
            mesh: mesh of the ranks; its degree of tensor parallelism splits the weights.
            sharded: True to shard the weights with FSDP2 as well.
            checkpointing: value of ``trainer.activation_checkpoint``.
        """
        ...

    def build_step(
        self, model: nn.Module, autocast: bool, rollout: int, members: MemberBatches, micro_steps: int
    ) -> tuple[torch.optim.Optimizer, Callable[[Callable[[], None]], object]]:
        """Return the optimizer and a function that takes one optimizer step; see `credit.hpc.planner.trace.BuildStep`.

        Args:
            model: network from `build_network`, materialised as fake tensors.
            autocast: True if the network runs under autocast.
            rollout: number of forecast steps in the rollout.
            members: ensemble members that the rank computes for each sample.
            micro_steps: number of micro-steps in an optimizer step.
        """
        ...


@dataclass(frozen=True)
class PlannedRun:
    """Settings of a training run that determine its plan.

    Attributes:
        trainer: section ``trainer`` of the config.
        rollout: fraction of the run (0 to 1) -> number of forecast steps in the training rollout after this fraction.
        samples: number of samples in the training period, one sample for each initial time.
        step_builder: builder of the network and of the training step.
        output_bytes: bytes of the output of one member at one rollout step, for a whole micro-batch in float32.
        gathers_members: True if the loss needs the whole fields of all members on every rank.
        max_samples_per_step: largest number of samples in an optimizer step; None for no limit.
        times_per_sample: number of valid times that are read for a sample, with the run's longest rollout.
        bytes_per_time: bytes of the stored fields of one valid time, as float32.
    """

    trainer: TrainerConfig
    rollout: Mapping[float, int]
    samples: int
    step_builder: StepBuilder
    output_bytes: int = 0
    gathers_members: bool = False
    max_samples_per_step: int | None = None
    times_per_sample: int = 0
    bytes_per_time: int = 0

    def build_pass_schedule(self, members: MemberBatches) -> PassSchedule:
        """Return the numbers of micro-steps, rollout steps and member batches in a step with the longest rollout."""
        return PassSchedule(
            micro_steps=self.trainer.grad_accum_every,
            rollout=max(self.rollout.values()),
            recompute=self.trainer.recompute_steps,
            member_batches=members.num_batches,
        )

    def member_batches(self, degrees: ParallelDims, at_once: int | None = None) -> MemberBatches:
        """Return the number of ensemble members that a rank computes for each sample, and their division into batches.

        Args:
            degrees: number of ranks along each axis of the mesh.
            at_once: number of members in a batch; None for ``trainer.members_at_once``.
        """
        # Each rank of an ensemble group computes the same number of members.
        members = self.trainer.members // degrees.ensemble
        batch_size = at_once or self.trainer.members_at_once
        return MemberBatches(members=members, at_once=min(batch_size, members))

    @property
    def num_loss_steps(self) -> int:
        """Number of rollout steps that contribute to the loss, in an optimizer step with the run's longest rollout."""
        if self.trainer.backprop_on_timestep is not None:
            return len(self.trainer.backprop_on_timestep)
        return max(self.rollout.values())

    @property
    def mean_rollout_fraction(self) -> float:
        """Mean length of the rollout over the run, divided by the longest length; in (0, 1]."""
        # Each length of the rollout is used until the next length starts, and the last length until the end of the run.
        starts = sorted(self.rollout)
        ends = [*starts[1:], 1.0]
        mean_steps = 0.0
        for start, end in zip(starts, ends, strict=True):
            mean_steps += (end - start) * self.rollout[start]
        return mean_steps / max(self.rollout.values())

    def samples_per_step(self, degrees: ParallelDims) -> int:
        """Return the number of samples in an optimizer step, over all ranks."""
        trainer = self.trainer
        return degrees.num_sample_ranks * trainer.train_batch_size * trainer.grad_accum_every

    def count_steps(self, degrees: ParallelDims) -> int:
        """Return the number of optimizer steps of the run; 0 if a step needs more samples than exist or are allowed."""
        samples_per_step = self.samples_per_step(degrees)
        steps_per_epoch = self.samples // samples_per_step
        is_over_limit = self.max_samples_per_step is not None and samples_per_step > self.max_samples_per_step
        if steps_per_epoch == 0 or is_over_limit:
            return 0
        # The config sets exactly one of the two keys.
        return self.trainer.max_steps or self.trainer.num_epoch * steps_per_epoch
