"""Base classes of the kinds of noise, and the sequences of draws that forecasts are made with.

A draw depends on the seed of the run, the sample, the member, the step of the forecast and the kind, and in training on
the optimizer step. It does not depend on the batch or the rank that a sample is computed in, so an ensemble is the same
on any number of ranks, and can be computed again without saving a random state.

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
    """Identity of one member of the forecast of one sample; its noise depends on nothing else.

    Attributes:
        seed: seed of the run, or of the ensemble of a forecast.
        initial_minutes: initial time of the sample, in minutes of the run's calendar.
        member: number of the member, from 0.
        optimizer_step: in training the optimizer step, from 0; None in validation and in forecasts.
    """

    seed: int
    initial_minutes: int
    member: int
    optimizer_step: int | None = None


class Noise(ABC):
    """Base class of the kinds of noise.

    Args:
        spec: what the model is built from: grid, time step, channels.
        section: the entry of ``model.noise``.
    """

    def __init__(self, spec: ModelSpec, section: ModelNoiseSection) -> None:
        self.kind = section.kind
        self.memory_minutes = section.memory_minutes()
        self.step_minutes = spec.timestep_minutes

    @abstractmethod
    def sequence(self, keys: Sequence[MemberKey], device: torch.device) -> Iterator[Tensor]:
        """Yield the noise (B, ...) of each step of a forecast, one row for each key; a row of zeros is no noise."""

    def seed_at(self, key: MemberKey, step: int) -> int:
        """Return the seed of the independent noise of a member at a step of its forecast (from 0)."""
        return derive_seed(key.seed, key.optimizer_step, key.initial_minutes, key.member, step, self.kind)


class GaussianNoise(Noise):
    """Base class of noise that consists of channels of Gaussian numbers.

    Args:
        spec: what the model is built from: grid, time step, channels.
        section: the entry of ``model.noise``.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape (K, ...) of the noise of one member."""

    @abstractmethod
    def draw(self, generator: torch.Generator) -> Tensor:
        """Return independent noise of one member, of `shape`, float32 on the CPU, with mean 0 and variance 1."""

    def draw_at(self, key: MemberKey, step: int) -> Tensor:
        """Return the independent noise of a member at a step of its forecast (from 0)."""
        return self.draw(torch.Generator().manual_seed(self.seed_at(key, step)))

    def sequence(self, keys: Sequence[MemberKey], device: torch.device) -> Iterator[Tensor]:
        """Yield the noise (B, K, ...) of each step of a forecast, one row for each key.

        A channel with memory is a first-order autoregression, z' = phi z + sqrt(1 - phi^2) n with
        phi = exp(-time step / memory), whose variance is 1 at every step.
        """
        other_dims = [1] * (len(self.shape) - 1)
        correlation = self._correlation_K().view(-1, *other_dims)
        innovation_weight = (1.0 - correlation.square()).sqrt()
        noise = torch.stack([self.draw_at(key, 0) for key in keys])
        for step in itertools.count(1):
            yield to_device(noise, device)
            innovation = torch.stack([self.draw_at(key, step) for key in keys])
            noise = correlation * noise + innovation_weight * innovation

    def _correlation_K(self) -> Tensor:
        """Return the correlation of each channel with itself one step later, float32 (K,)."""
        correlations = []
        for memory in split_evenly(self.memory_minutes, self.shape[0]):
            correlations.append(math.exp(-self.step_minutes / memory) if memory else 0.0)
        return torch.tensor(correlations)


def split_evenly(values: Sequence[float], count: int) -> list[float]:
    """Return the value of each of `count` items that are divided into equal parts, one for each value."""
    return [values[item * len(values) // count] for item in range(count)]


NoiseClass = TypeVar("NoiseClass", bound=type[Noise])


def register_noise(name: str, section: type[ModelNoiseSection]) -> Callable[[NoiseClass], NoiseClass]:
    """Class decorator that makes a kind of noise available in ``model.noise``.

    A model takes the noise in the `condition` argument of its forward under the same name, and declares the name in
    `conditions`.

    Raises:
        ConfigError: if another class has the name, or the class or its section does not derive from its base.
    """
    return NOISES.register(name, section, Noise, ModelNoiseSection)


class NoiseGenerator:
    """All kinds of noise of a model.

    Args:
        spec: what the model is built from.
        section: the model section of the config.
    """

    def __init__(self, spec: ModelSpec, section: ModelSection) -> None:
        self.kinds: dict[str, Noise] = {}
        for entry in section.noise:
            self.kinds[entry.kind] = NOISES.find_class(entry.kind)(spec, entry)

    def sequence(self, keys: Sequence[MemberKey], device: torch.device) -> Iterator[Mapping[str, Tensor] | None]:
        """Yield the condition of each step of a forecast: kind -> noise (B, K, ...); None for a model without noise."""
        if not self.kinds:
            # This never ends, as a forecast may have any number of steps.
            yield from itertools.repeat(None)
        sequences = {kind: noise.sequence(keys, device) for kind, noise in self.kinds.items()}
        while True:
            yield {kind: next(sequence) for kind, sequence in sequences.items()}
