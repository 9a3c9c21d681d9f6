"""Perturbations of an ensemble's members: the contracts, and their registry.

A perturbation draws its numbers from the seed, the initial time and the member alone (`member_rng`), so that they do
not depend on batches, ranks or devices. Shape suffixes: B batch, C channels, T time frames, H rows, W columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from credit.config.registry import PERTURBATIONS
from credit.config.sections.inference import InitialPerturbationSection, TendencyPerturbationSection
from credit.forecast.rollout import ForecastInputs, ForecastStart
from credit.forecast.stepper import Stepper
from credit.grid import LatLonGrid


@dataclass(frozen=True)
class PerturbationContext:
    """Everything that a perturbation is built from, apart from its config section.

    Attributes:
        grid: grid of the fields.
        step_minutes: time step of the model in minutes.
        seed: seed of all random numbers (``inference.ensemble.seed``).
        has_control: True if member 0 is unperturbed.
        stepper: runs the network; None for a perturbation of tendencies.
        inputs: source of analyses and forcing; None for a perturbation of tendencies.
    """

    grid: LatLonGrid
    step_minutes: int
    seed: int
    has_control: bool
    stepper: Stepper | None = None
    inputs: ForecastInputs | None = None


class InitialPerturbation(ABC):
    """Base class of perturbations of the initial states.

    Members come in pairs: members 1 and 2, 3 and 4, ... have the same perturbation with opposite signs, so that an even
    number of them has the analysis as its mean. `build_perturbation` makes the pairs and applies sign, amplitude and
    control; a subclass only draws.

    Args:
        context: grid, seed, model and data of the run.
        section: ``inference.ensemble.perturbation`` of the config.
    """

    def __init__(self, context: PerturbationContext, section: InitialPerturbationSection) -> None:
        self.context = context

    @abstractmethod
    def draw(self, starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
        """Return a perturbation of about unit size for each start.

        Args:
            starts: forecasts of the batch; the two members of a pair come as the same start.
            state_BCTHW: normalised prognostic channels of the input frames.

        Returns:
            (B, C, H, W) float32 on the device of the state, in standard deviations of a channel's change over a step.
        """


class TendencyPerturbation(ABC):
    """Base class of perturbations of the change over a step that the network predicts.

    Args:
        context: grid, time step and seed of the run.
        section: ``inference.ensemble.stochastic`` of the config.
    """

    def __init__(self, context: PerturbationContext, section: TendencyPerturbationSection) -> None:
        self.context = context

    @abstractmethod
    def factors(self, starts: Sequence[ForecastStart], device: torch.device) -> Iterator[Tensor]:
        """Yield the factors of the change for each step, without end.

        Args:
            starts: forecasts of the batch.
            device: device of the result.

        Yields:
            (B, 1, H, W) float32 without unit; 1 for an unperturbed member 0.
        """


PerturbationClass = TypeVar("PerturbationClass", bound=type)


def register_perturbation(
    name: str, section: type[InitialPerturbationSection] | type[TendencyPerturbationSection]
) -> Callable[[PerturbationClass], PerturbationClass]:
    """Class decorator that makes a perturbation available as a ``kind`` of ``inference.ensemble``.

    Args:
        name: value of ``kind`` in the config.
        section: an `InitialPerturbationSection` for ``inference.ensemble.perturbation``, a
            `TendencyPerturbationSection` for ``inference.ensemble.stochastic``.

    Raises:
        ConfigError: if another class has the name, or the class or its section does not derive from its base.
    """

    if issubclass(section, InitialPerturbationSection):
        return PERTURBATIONS.register(name, section, InitialPerturbation)
    return PERTURBATIONS.register(name, section, TendencyPerturbation, TendencyPerturbationSection)
