"""Base classes of the kinds of noise, and the sequence of random numbers for the steps of a forecast.

The random numbers depend on the seed of the run, the sample, the ensemble member, the forecast step and the kind of
noise; in training also on the optimizer step. They do not depend on the batch or on the rank. So an ensemble is the
same on any number of ranks, and can be recomputed without a saved random state.

Shape suffixes: B batch, K channels of the noise.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from credit.config.registry import NOISES
from credit.config.sections.model import ModelNoiseSection, ModelSection
from credit.models.base import ModelSpec
from credit.parallel.host_copy import to_device
from credit.utils.seeds import derive_seed


@dataclass(frozen=True)
class MemberKey:
    """Identity of one ensemble member of one sample: all values from which the noise of the member is derived.

    Attributes:
        seed: seed of the training run, or of the ensemble of a forecast.
        initial_minutes: initial time of the sample, in minutes of the run's calendar.
        member: index of the member, from 0.
        optimizer_step: index of the optimizer step, from 0, in training; None in validation and in forecasts.
    """

    seed: int
    initial_minutes: int
    member: int
    optimizer_step: int | None = None


class Noise(ABC):
    """Base class of the kinds of noise.

    Args:
        spec: grid, time step and channels of the data.
        section: entry of ``model.noise`` in the config that describes this noise.

    Attributes:
        can_be_scaled: True if forecasts may multiply the noise by a positive or negative number.
    """

    can_be_scaled = False

    def __init__(self, spec: ModelSpec, section: ModelNoiseSection) -> None:
        self.kind = section.kind
        self.memory_minutes = section.memory_minutes()
        self.step_minutes = spec.timestep_minutes

    @abstractmethod
    def sequence(self, keys: Sequence[MemberKey], device: torch.device) -> Iterator[Tensor]:
        """Yield the noise of successive forecast steps; the sequence never ends.

        Args:
            keys: the members that need noise.
            device: device of the noise.

        Yields:
            (B, ...) noise, with one row for each of the B keys. Callers may replace rows with zeros, which mean no
            noise.
        """

    def derive_seed_at(self, key: MemberKey, step: int) -> int:
        """Return the seed of the random numbers of a member at a forecast step, counted from 0."""
        return derive_seed(key.seed, key.optimizer_step, key.initial_minutes, key.member, step, self.kind)


class GaussianNoise(Noise):
    """Base class of noise that consists of channels of Gaussian numbers.

    Args:
        spec: grid, time step and channels of the data.
        section: entry of ``model.noise`` in the config that describes this noise.
    """

    can_be_scaled = True

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape (K channels, ...) of the noise of one member at one step."""

    @abstractmethod
    def draw(self, generator: torch.Generator) -> Tensor:
        """Return Gaussian noise of one member with mean 0 and variance 1, of shape `shape`, float32 on the CPU."""

    def draw_at(self, key: MemberKey, step: int) -> Tensor:
        """Return the new noise of a member at a forecast step, from 0, without the memory of earlier steps."""
        return self.draw(torch.Generator().manual_seed(self.derive_seed_at(key, step)))

    def sequence(self, keys: Sequence[MemberKey], device: torch.device) -> Iterator[Tensor]:
        """Yield the noise (B keys, K channels, ...) of successive forecast steps; the sequence never ends.

        A channel with memory is a first-order autoregression z' = phi z + sqrt(1 - phi^2) n. Here z and z' are the
        noise at two successive steps, n is new noise and phi = exp(-time step / memory). The variance of z is 1 at
        every step. With a memory of 0, the noise of each step is new.
        """
        # Give the correlations the shape (K, 1, ...), which broadcasts against the noise (B, K, ...).
        other_dims = [1] * (len(self.shape) - 1)
        correlation = self._compute_correlation_K().view(-1, *other_dims)
        innovation_weight = (1.0 - correlation.square()).sqrt()
        # The first step has no earlier noise to depend on.
        noise = torch.stack([self.draw_at(key, 0) for key in keys])
        for step in itertools.count(1):
            yield to_device(noise, device)
            innovation = torch.stack([self.draw_at(key, step) for key in keys])
            noise = correlation * noise + innovation_weight * innovation

    def _compute_correlation_K(self) -> Tensor:
        """Return the correlation phi of each channel between two successive steps, float32 (K,)."""
        correlations = []
        for memory in repeat_evenly(self.memory_minutes, self.shape[0]):
            if memory:
                correlations.append(math.exp(-self.step_minutes / memory))
            else:
                correlations.append(0.0)
        return torch.tensor(correlations)


def repeat_evenly(values: Sequence[float], count: int) -> list[float]:
    """Return a list of `count` items in which each value is repeated about equally often, in order.

    For example, ``repeat_evenly([a, b], 4)`` returns ``[a, a, b, b]``.
    """
    return [values[item * len(values) // count] for item in range(count)]


NoiseClass = TypeVar("NoiseClass", bound=type[Noise])


def register_noise(name: str, section: type[ModelNoiseSection]) -> Callable[[NoiseClass], NoiseClass]:
    """Class decorator that makes a kind of noise available in ``model.noise``.

    A model that supports the noise lists `name` in its attribute `conditions`. The `forward` method of the model
    receives the noise in the dict `condition`, with the key `name`.

    Args:
        name: ``kind`` of the noise in a config.
        section: config section of the kind of noise; it derives from `ModelNoiseSection`.

    Raises:
        ConfigError: if the name is already registered, the class does not derive from `Noise`, or the section does not
            derive from `ModelNoiseSection`.
    """
    return NOISES.register(name, section, Noise, ModelNoiseSection)


class NoiseGenerator:
    """Generator of all kinds of noise that ``model.noise`` lists.

    Args:
        spec: grid, time step and channels of the data.
        section: the config section of the model, which lists the kinds in ``noise``.

    Attributes:
        kinds: kind of noise -> object that generates this noise.
    """

    def __init__(self, spec: ModelSpec, section: ModelSection) -> None:
        self.kinds: dict[str, Noise] = {}
        for entry in section.noise:
            self.kinds[entry.kind] = NOISES.find_class(entry.kind)(spec, entry)

    def sequence(self, keys: Sequence[MemberKey], device: torch.device) -> Iterator[Mapping[str, Tensor] | None]:
        """Yield the noise of successive forecast steps; the sequence never ends.

        Args:
            keys: the members that need noise.
            device: device of the noise.

        Yields:
            The argument `condition` of `ForecastModel.forward`: a dict from each kind of noise to its tensor (B, ...),
            with one row for each of the B keys; None for a model without noise.
        """
        if not self.kinds:
            # This statement never ends, because a forecast may have any number of steps.
            yield from itertools.repeat(None)
        sequences = {kind: noise.sequence(keys, device) for kind, noise in self.kinds.items()}
        # The sequences of all kinds advance together by one forecast step.
        while True:
            yield {kind: next(sequence) for kind, sequence in sequences.items()}
