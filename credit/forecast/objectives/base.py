"""Training objectives: base class and registry of the kinds of ``trainer.objective``.

An objective runs the model on a batch and returns the loss. The training step does not depend on how the objective runs
the model.

Shape suffixes: B batch, M ensemble members, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from credit.config.registry import OBJECTIVES
from credit.config.sections.trainer import ObjectiveSection
from credit.data.samples.batch import Batch
from credit.forecast.stepper import Stepper, slice_forcing_by_step
from credit.losses.base import Loss
from credit.losses.member_loss import BuildPartLosses
from credit.models.noise.base import NoiseGenerator
from credit.utils.profiling.phases import Phase, phase


@dataclass(frozen=True)
class ObjectiveContext:
    """Stepper, loss and settings of a run, from which an objective is built.

    Attributes:
        stepper: stepper that runs the network.
        loss: loss of normalised predictions and targets.
        recompute: True to compute the steps of a rollout again in the backward pass, which saves memory
            (``trainer.recompute_steps``).
        noise: generator of the noise inside the network (``model.noise``); None if the objective uses no noise.
        seed: seed of the run, on which the noise depends.
        members: number of ensemble members in training (``trainer.members``).
        members_at_once: number of members that are computed in one batch (``trainer.members_at_once``).
        valid_members: number of ensemble members in validation (``trainer.valid_members``).
        field_shape: (C, H, W) of the output; used only by the ensemble objective.
        build_part_losses: function that builds the losses of parts of the fields (some of the channels or rows). The
            ensemble objective computes these losses one after another or on different ranks. None for other objectives.
        ensemble_group: ranks that share the members of a sample; None if each rank computes all members.
    """

    stepper: Stepper
    loss: Loss
    recompute: bool = False
    noise: NoiseGenerator | None = None
    seed: int = 0
    members: int = 1
    members_at_once: int = 1
    valid_members: int = 1
    field_shape: tuple[int, int, int] = (0, 0, 0)
    build_part_losses: BuildPartLosses | None = None
    ensemble_group: ProcessGroup | None = None


@dataclass(frozen=True)
class MicroStep:
    """Settings of a micro-step: the forward and backward pass of one batch.

    With gradient accumulation, an optimizer step consists of several micro-steps.

    Attributes:
        optimizer_step: number of the optimizer step, from 0.
        loss_steps: rollout steps (from 1) at which the loss is computed; the rollout ends with the last of these steps.
        num_micro_steps: number of micro-steps of the optimizer step; the gradients are divided by this number.
        reduce_gradients: True to reduce the gradients over the ranks in this backward pass. With gradient accumulation,
            this is True only for the last micro-step (`credit.parallel.fsdp2.set_gradient_sync`).
    """

    optimizer_step: int
    loss_steps: Sequence[int]
    num_micro_steps: int = 1
    reduce_gradients: bool = True


@dataclass(frozen=True)
class EncodedBatch:
    """Batch of training or validation samples in normalised space.

    Attributes:
        history_BCTHW: prognostic channels of the input frames.
        forcing: function that takes a step number, from 0, and returns the dynamic forcing (B, C, T, H, W) of the input
            frames of this step.
        target_BCTHW: output channels of the truth; T is the number of steps of the rollout.
        initial_minutes: initial time of each of the B samples in minutes, on which the noise of the sample depends.
    """

    history_BCTHW: Tensor
    forcing: Callable[[int], Tensor]
    target_BCTHW: Tensor
    initial_minutes: Sequence[int]


class Objective(ABC):
    """Base class of training objectives.

    Args:
        context: stepper and loss of the run.
        section: ``trainer.objective`` of the config.

    Attributes:
        supports_domain: True if the class supports domain parallelism, in which this rank has the part
            ``stepper.domain.part`` of the fields. With domain parallelism, a class without this support is an
            error. A subclass does not inherit the attribute, and must declare it again.
    """

    supports_domain: ClassVar[bool] = False

    def __init__(self, context: ObjectiveContext, section: ObjectiveSection) -> None:
        self.context = context
        self.stepper = context.stepper
        self.loss = context.loss
        self.recompute = context.recompute

    @abstractmethod
    def training_loss(self, batch: Batch, micro_step: MicroStep) -> Tensor:
        """Collective: return the loss of a batch, a scalar tensor with its autograd graph.

        Args:
            batch: samples of this data-parallel rank, on its device, in physical units.
            micro_step: settings of the micro-step.
        """

    def accumulate_gradients(self, batch: Batch, micro_step: MicroStep) -> Tensor:
        """Collective: add the gradients of the loss of a batch to the gradients of the parameters.

        A subclass can override this method to differentiate the loss in pieces, which needs less memory than the graph
        of the whole loss. The override must run its backward passes inside ``phase(Phase.BACKWARD)``.

        Args:
            batch: samples of this data-parallel rank, on its device, in physical units.
            micro_step: settings of the micro-step.

        Returns:
            The loss, a scalar without a graph. Unlike the gradients, it is not divided by the number of micro-steps.
        """
        loss = self.training_loss(batch, micro_step)
        with phase(Phase.BACKWARD):
            (loss / micro_step.num_micro_steps).backward()
        return loss.detach()

    @abstractmethod
    def predict(self, batch: EncodedBatch, num_steps: int) -> Iterator[Tensor]:
        """Collective: yield the normalised prediction of each step, for validation.

        Args:
            batch: samples in normalised space.
            num_steps: number of rollout steps.

        Yields:
            (B, M, C, H, W) output channels of the M members; M is 1 for a deterministic objective.
        """

    def encode(self, batch: Batch) -> EncodedBatch:
        """Return a batch converted from physical units to normalised space."""
        normalizer = self.stepper.normalizer
        history_BCTHW = normalizer.encode(batch.history_BCTHW, "prognostic")
        forcing_BCTHW = normalizer.encode(batch.forcing_BCTHW, "dynamic_forcing")
        target_BCTHW = normalizer.encode(batch.target_BCTHW, "output")
        return EncodedBatch(
            history_BCTHW,
            slice_forcing_by_step(forcing_BCTHW, history_BCTHW.shape[2]),
            target_BCTHW,
            batch.initial_minutes,
        )


ObjectiveClass = TypeVar("ObjectiveClass", bound=type[Objective])


def register_objective(name: str, section: type[ObjectiveSection]) -> Callable[[ObjectiveClass], ObjectiveClass]:
    """Class decorator that makes an objective available as ``trainer.objective.kind: name``.

    Args:
        name: value of ``kind`` in the config.
        section: class of the config section of the objective.

    Raises:
        ConfigError: if another class is registered under `name`, or if the class or its section does not derive from
            the base class.
    """

    return OBJECTIVES.register(name, section, Objective, ObjectiveSection)


def build_objective(section: ObjectiveSection, context: ObjectiveContext) -> Objective:
    """Return a new objective of the class that is registered for ``section.kind``."""
    return OBJECTIVES.find_class(section.kind)(context, section)
