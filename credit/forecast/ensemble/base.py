"""Perturbations of an ensemble's members: the contracts, and their registry.

A perturbation draws its numbers from the seed, the initial time and the member alone (`member_rng`), so that they do
not depend on batches, ranks or devices. Shape suffixes: B batch, C channels, T time frames, H rows, W columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from credit.config.registry import PERTURBATIONS
from credit.config.sections.inference import InitialPerturbationSection, TendencyPerturbationSection
from credit.data.samples.frames import FrameReader
from credit.forecast.rollout import ForecastStart
from credit.forecast.stepper import Stepper
from credit.grid import LatLonGrid


@dataclass(frozen=True)
class PerturbationContext:
    """Everything that a perturbation is built from beside its own section.

    Attributes:
        grid: of the fields.
        step_minutes: time step.
        seed: of all random numbers (``inference.ensemble.seed``).
        has_control: whether member 0 is unperturbed.
        stepper: runs the network; None for a perturbation of tendencies.
        frames: analyses and forcing; None for a perturbation of tendencies.
        history_len: input frames.
        reading: held while fields are read.
    """

    grid: LatLonGrid
    step_minutes: int
    seed: int
    has_control: bool
    stepper: Stepper | None = None
    frames: FrameReader | None = None
    history_len: int = 1
    reading: AbstractContextManager = field(default_factory=nullcontext)


class InitialPerturbation(ABC):
    """Base class of perturbations of the initial states.

    Members come in pairs: members 1 and 2, 3 and 4, ... have the same perturbation with opposite signs, so that an even
    number of them has the analysis as its mean. The caller sees to the pairs, the sign, the amplitude and the control.

    Args:
        context: what it is built from.
        section: ``inference.ensemble.perturbation`` of the config.
    """

    def __init__(self, context: PerturbationContext, section: InitialPerturbationSection) -> None:
        self.context = context

    @abstractmethod
    def draw(self, starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
        """Return a perturbation (B, C, H, W) of about unit size for each start, on the device of the state.

        Its unit is the standard deviation of a channel's change over a step.

        Args:
            starts: what is drawn for; the two members of a pair come as the same start.
            state_BCTHW: normalised prognostic channels of the input frames.
        """


class TendencyPerturbation(ABC):
    """Base class of perturbations of what the network predicts as change over a step.

    Args:
        context: what it is built from.
        section: ``inference.ensemble.stochastic`` of the config.
    """

    def __init__(self, context: PerturbationContext, section: TendencyPerturbationSection) -> None:
        self.context = context

    @abstractmethod
    def factors(self, starts: Sequence[ForecastStart], device: torch.device) -> Iterator[Tensor]:
        """Yield for each step the factors (B, 1, H, W) of the change; those of an unperturbed member 0 are 1."""


PerturbationClass = TypeVar("PerturbationClass", bound=type)


def register_perturbation(
    name: str, section: type[InitialPerturbationSection] | type[TendencyPerturbationSection]
) -> Callable[[PerturbationClass], PerturbationClass]:
    """Class decorator that makes a perturbation available as a ``kind`` of ``inference.ensemble``.

    Args:
        name: the kind.
        section: an `InitialPerturbationSection` for ``inference.ensemble.perturbation``, a
            `TendencyPerturbationSection` for ``inference.ensemble.stochastic``.

    Raises:
        ConfigError: if another class has the name, or the class or its section does not derive from its base.
    """

    if issubclass(section, InitialPerturbationSection):
        return PERTURBATIONS.register(name, section, InitialPerturbation)
    return PERTURBATIONS.register(name, section, TendencyPerturbation, TendencyPerturbationSection)
