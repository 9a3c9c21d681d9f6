"""Base classes and registry of perturbations of ensemble members.

The random numbers of a perturbation depend only on the seed, the initial time and the number of the member
(`build_member_rng`), not on batches, ranks or devices.
Shape suffixes: B batch, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from credit.config.registry import PERTURBATIONS
from credit.config.sections.inference import InitialPerturbationSection, TendencyPerturbationSection
from credit.forecast.rollout import ForecastInputs, ForecastStart
from credit.forecast.stepper import Stepper
from credit.grid import LatLonGrid


@dataclass(frozen=True)
class PerturbationContext:
    """Grid, seed, model and data of a run, from which a perturbation is built.

    Attributes:
        grid: grid of the fields.
        step_minutes: time step of the model in minutes.
        seed: seed of all random numbers (``inference.ensemble.seed``).
        has_control: True if member 0 is the unperturbed control.
        stepper: stepper that runs the network; None for a `TendencyPerturbation`.
        inputs: source of analyses and forcing; None for a `TendencyPerturbation`.
    """

    grid: LatLonGrid
    step_minutes: int
    seed: int
    has_control: bool
    stepper: Stepper | None = None
    inputs: ForecastInputs | None = None


class InitialPerturbation(ABC):
    """Base class of perturbations of the initial states.

    Two members form a pair: their perturbations are the same except for the sign, so the mean of the two initial states
    is the analysis. With a control, the pairs are the members 1 and 2, 3 and 4, and so on. A subclass only generates
    perturbations of unit size. `credit.forecast.ensemble.perturbations.build_perturbation` multiplies them by amplitude
    and sign, and does not perturb the control.

    Args:
        context: grid, seed, model and data of the run.
        section: ``inference.ensemble.perturbation`` of the config.

    Attributes:
        supports_domain: True if `draw` supports domain parallelism (`Stepper.domain`): its argument and its result are
            this rank's part of the fields. With domain parallelism, a perturbation without this support is an error.
    """

    supports_domain: ClassVar[bool] = False

    def __init__(self, context: PerturbationContext, section: InitialPerturbationSection) -> None:
        self.context = context

    @abstractmethod
    def draw(self, starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
        """Return a perturbation of about unit size for each start.

        Args:
            starts: starts of the forecasts of the batch. Both members of a pair have the same start, and its attribute
                `member` is the number of the pair, from 0.
            state_BCTHW: normalised prognostic channels of the unperturbed input frames.

        Returns:
            (B, C, H, W) float32 on the device of the state. The unit is the standard deviation of each channel's change
            over a step.
        """


class TendencyPerturbation(ABC):
    """Base class of perturbations of tendencies: factors that multiply the change that the network predicts for a step.

    The factors are generated for the whole grid. With domain parallelism, each rank uses its part of the factors.

    Args:
        context: grid, time step and seed of the run.
        section: ``inference.ensemble.stochastic`` of the config.
    """

    def __init__(self, context: PerturbationContext, section: TendencyPerturbationSection) -> None:
        self.context = context

    @abstractmethod
    def factors(self, starts: Sequence[ForecastStart], device: torch.device) -> Iterator[Tensor]:
        """Yield, for each successive step, the factors that multiply the predicted change; the sequence never ends.

        Args:
            starts: starts of the forecasts of the batch.
            device: device of the result.

        Yields:
            (B, 1, H, W) float32, dimensionless and the same for all channels; 1 for an unperturbed control.
        """


PerturbationClass = TypeVar("PerturbationClass", bound=type)


def register_perturbation(
    name: str, section: type[InitialPerturbationSection] | type[TendencyPerturbationSection]
) -> Callable[[PerturbationClass], PerturbationClass]:
    """Class decorator that makes a perturbation available as a ``kind`` of ``inference.ensemble``.

    Args:
        name: value of ``kind`` in the config.
        section: class of the config section. It derives from `InitialPerturbationSection` for
            ``inference.ensemble.perturbation``, or `TendencyPerturbationSection` for ``inference.ensemble.stochastic``.

    Raises:
        ConfigError: if another class is registered under `name`, if `section` derives from neither of these two
            classes, or if the decorated class does not derive from the base class for its section
            (`InitialPerturbation` or `TendencyPerturbation`).
    """
    # Both kinds of perturbations share one registry; the class of the section distinguishes them.
    if issubclass(section, InitialPerturbationSection):
        return PERTURBATIONS.register(name, section, InitialPerturbation)
    return PERTURBATIONS.register(name, section, TendencyPerturbation, TendencyPerturbationSection)
