"""Base class of validation metrics, and the registry behind ``trainer.metrics``.

Shape suffixes: L lead times, B batch, M ensemble members, C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import Tensor

from credit.channels import ChannelMap
from credit.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class MetricContext:
    """Everything that a metric is built from.

    Attributes:
        channels: the channels of the run; ``channels.output`` gives the order of C.
        weight_CHW: (C, H, W) weights of the cells, float64. They sum to 1 in each channel over the whole grid and are 0
            where its variable has no values. On a part of the grid they are multiplied by the number of parts.
        lead_hours: (L,) lead times in hours.
    """

    channels: ChannelMap
    weight_CHW: Tensor
    lead_hours: Sequence[float]


class Metric(ABC):
    """Base class of metrics, which have sums over cases and compute their values from these sums.

    A case is the forecast from one initial time. Each rank sums over its own cases. `credit.train.validate.validate`
    then replaces each sum, in place, by its mean over the ranks, and calls `summary` with the mean number of cases of a
    rank.

    If ranks divide the fields among them (``trainer.parallelism.domain``), a rank has a part of each field. The weights
    are then those of its cells times the number of these ranks. So the means are right if the sums are sums over cells
    of a weight times a value of the cell.

    Args:
        context: channels, weights and lead times of the validation.

    Attributes:
        supports_domain: True if the sums of the class are such sums over cells. Otherwise domain parallelism refuses
            it, because for example the square root of a sum over one part of a field has no meaning.
    """

    supports_domain: ClassVar[bool] = False

    def __init__(self, context: MetricContext) -> None:
        self.context = context

    @classmethod
    @abstractmethod
    def names(cls, channels: ChannelMap, lead_hours: Sequence[float]) -> list[str]:
        """Return the names of the metric's values, the keys of `summary`; ``trainer.monitor`` may be one of them.

        Args:
            channels: the channels of the run.
            lead_hours: lead times in hours.
        """

    @property
    @abstractmethod
    def sums(self) -> Mapping[str, Tensor]:
        """Sums over the cases of this rank so far, by name; each is a float64 tensor of any shape.

        The tensors must be those that the metric itself uses, because their values are replaced in place by the means
        over the ranks.
        """

    @abstractmethod
    def add(self, lead: int, forecast_BMCHW: Tensor, persistence_BCHW: Tensor, truth_BCHW: Tensor) -> None:
        """Add one lead time of a batch to the sums.

        The fields are in physical units, but the mean of each channel in the training statistics is subtracted. Masked
        cells may have any finite value, because their weight is 0.

        Args:
            lead: index of the lead time, from 0.
            forecast_BMCHW: (B, M, C, H, W) forecast of each member.
            persistence_BCHW: (B, C, H, W) persistence forecast: the state at the initial time, and 0 (the mean) for
                diagnostic channels.
            truth_BCHW: (B, C, H, W) truth.
        """

    @abstractmethod
    def summary(self, num_cases: float) -> dict[str, float]:
        """Return the values of the metric by name, for each of `names` and in their order.

        Args:
            num_cases: number of cases by which the sums are divided. It need not be an integer, because it is an
                average over the ranks.
        """


MetricClass = TypeVar("MetricClass", bound=type[Metric])
_METRICS: dict[str, type[Metric]] = {}


def register_metric(name: str) -> Callable[[MetricClass], MetricClass]:
    """Class decorator that makes a metric available in ``trainer.metrics``.

    Args:
        name: entry of ``trainer.metrics`` in a config.

    Raises:
        ConfigError: if another class has the name, or if the decorated class does not derive from `Metric`.
    """

    def register(cls: MetricClass) -> MetricClass:
        if not issubclass(cls, Metric):
            raise ConfigError(f'metric "{name}": {cls.__qualname__} must derive from credit.metrics.base.Metric')
        registered = _METRICS.setdefault(name, cls)
        # A module that is imported again registers its class again, which is allowed.
        if (registered.__module__, registered.__qualname__) != (cls.__module__, cls.__qualname__):
            # `setdefault` has kept the class that was registered first.
            raise ConfigError(
                f'metric name "{name}" of {cls.__module__} is taken by {registered.__module__}; choose another'
            )
        _METRICS[name] = cls
        return cls

    return register


def metric_class(name: str) -> type[Metric]:
    """Return the class of the metric with a name, an entry of ``trainer.metrics``.

    Raises:
        ConfigError: if no metric has the name; the message gives the most similar one.
    """
    # The built-in metrics register themselves when they are imported.
    import credit.metrics.crps
    import credit.metrics.rmse  # noqa: F401

    if name not in _METRICS:
        raise ConfigError(f'trainer.metrics: "{name}" is not a metric{did_you_mean(name, _METRICS)}')
    return _METRICS[name]
