"""Base class of validation metrics, and their registry: ``trainer.metrics``.

Shape suffixes: L lead times, B batch, M ensemble members, C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from credit.channels import ChannelMap
from credit.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class MetricContext:
    """What a metric is built from.

    Attributes:
        channels: ``channels.output`` is the order of C.
        weight_CHW: weights of the cells that count, summing to 1 over each channel, float64.
        lead_hours: lead times.
    """

    channels: ChannelMap
    weight_CHW: Tensor
    lead_hours: Sequence[float]


class Metric(ABC):
    """A metric as sums that can be added over batches and ranks, and a function of their means.

    Args:
        context: of the validation.
    """

    def __init__(self, context: MetricContext) -> None:
        self.context = context

    @classmethod
    @abstractmethod
    def names(cls, channels: ChannelMap, lead_hours: Sequence[float]) -> list[str]:
        """Return the keys of `summary`; one of them may be ``trainer.monitor``."""

    @property
    @abstractmethod
    def sums(self) -> Mapping[str, Tensor]:
        """Sums over the cases so far, float64; they are averaged over the ranks in place."""

    @abstractmethod
    def add(self, lead: int, forecast_BMCHW: Tensor, persistence_BCHW: Tensor, truth_BCHW: Tensor) -> None:
        """Add one lead time (from 0) of a batch, in physical units less their mean.

        Masked cells may hold anything finite; their weight is 0.
        """

    @abstractmethod
    def summary(self, num_cases: float) -> dict[str, float]:
        """Return the metric's values by name from the sums over `num_cases` cases."""


MetricClass = TypeVar("MetricClass", bound=type[Metric])
_METRICS: dict[str, type[Metric]] = {}


def register_metric(name: str) -> Callable[[MetricClass], MetricClass]:
    """Class decorator that makes a metric available in ``trainer.metrics``.

    Raises:
        ConfigError: if another class has the name, or the class does not derive from `Metric`.
    """

    def register(cls: MetricClass) -> MetricClass:
        if not issubclass(cls, Metric):
            raise ConfigError(f'metric "{name}": {cls.__qualname__} must derive from credit.metrics.base.Metric')
        owner = _METRICS.setdefault(name, cls)
        # A module that is imported again brings the same class anew.
        if (owner.__module__, owner.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f'metric name "{name}" of {cls.__module__} is taken by {owner.__module__}; choose another'
            )
        _METRICS[name] = cls
        return cls

    return register


def metric_class(name: str) -> type[Metric]:
    """Return the class registered as `name`.

    Raises:
        ConfigError: for an unknown name, with the nearest one.
    """
    import credit.metrics.rmse  # noqa: F401  the built-in metric registers itself

    if name not in _METRICS:
        raise ConfigError(f'trainer.metrics: "{name}" is not a metric{did_you_mean(name, _METRICS)}')
    return _METRICS[name]
