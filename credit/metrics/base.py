"""Base class and registry of the validation metrics in ``trainer.metrics``.

Shape suffixes: L lead times, B batch, M ensemble members, C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import Tensor

from credit.channels import ChannelMap
from credit.config.registry import register_class
from credit.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class MetricContext:
    """Channels, cell weights and lead times of a validation, from which a metric is built.

    Attributes:
        channels: the channels of the run; dimension C has the order of ``channels.output``.
        weight_CHW: (C, H, W) weights of the cells, float64. The weights of each channel sum to 1 over the whole grid.
            They are 0 in cells in which the variable is missing. On a part of the grid (domain parallelism), all
            weights are multiplied by the number of parts.
        lead_hours: (L,) lead times in hours.
    """

    channels: ChannelMap
    weight_CHW: Tensor
    lead_hours: Sequence[float]


class Metric(ABC):
    """Base class of validation metrics: a metric computes its values from sums over cases.

    A case is the forecast from one initial time. Each rank sums over the cases of this rank.
    `credit.train.validate.validate` then replaces each sum, in place, with its mean over the ranks, and calls `summary`
    with the mean number of cases per rank.

    With domain parallelism (``trainer.parallelism.domain``), each rank has a part of every field, and the weights of
    its cells are multiplied by the number of these ranks. The means are then correct for metrics whose sums are
    weighted sums over cells.

    Args:
        context: channels, weights and lead times of the validation.

    Attributes:
        supports_domain: True if all sums of the class are weighted sums over cells. A config with domain parallelism
            and any other metric is an error. For example, a sum of square roots is not a weighted sum over cells: the
            square root for a part of a field has no meaning.
    """

    supports_domain: ClassVar[bool] = False

    def __init__(self, context: MetricContext) -> None:
        self.context = context

    @classmethod
    @abstractmethod
    def names(cls, channels: ChannelMap, lead_hours: Sequence[float]) -> list[str]:
        """Return the names of the metric's values: the keys of `summary`, which ``trainer.monitor`` may name.

        Args:
            channels: the channels of the run.
            lead_hours: lead times in hours.
        """

    @property
    @abstractmethod
    def sums(self) -> Mapping[str, Tensor]:
        """Sums over the cases that were added on this rank: name -> float64 tensor of any shape.

        Return the tensors that `summary` uses, not copies: the caller replaces their values, in place, with the means
        over the ranks.
        """

    @abstractmethod
    def add(self, lead: int, forecast_BMCHW: Tensor, persistence_BCHW: Tensor, truth_BCHW: Tensor) -> None:
        """Add one lead time of a batch to the sums.

        The fields are in physical units, minus the mean of each channel in the training statistics. Masked cells may
        contain any finite value, because their weight is 0.

        Args:
            lead: index of the lead time, from 0.
            forecast_BMCHW: (B, M, C, H, W) forecast of each member.
            persistence_BCHW: (B, C, H, W) persistence forecast: the state at the initial time, or 0 (the mean) for
                diagnostic channels.
            truth_BCHW: (B, C, H, W) truth.
        """

    @abstractmethod
    def summary(self, num_cases: float) -> dict[str, float]:
        """Return the values of the metric by name, with the keys and the order of `names`.

        Args:
            num_cases: number of cases by which the sums are divided. The number may be a fraction, because it is an
                average over the ranks.
        """


MetricClass = TypeVar("MetricClass", bound=type[Metric])
_METRICS: dict[str, type[Metric]] = {}


def register_metric(name: str) -> Callable[[MetricClass], MetricClass]:
    """Class decorator that makes a metric available in ``trainer.metrics``.

    Args:
        name: entry of ``trainer.metrics`` in a config.

    Raises:
        ConfigError: if a different class has this name, or if the decorated class does not derive from `Metric`.
    """

    def register(cls: MetricClass) -> MetricClass:
        return register_class(_METRICS, "metric", name, cls, Metric)

    return register


def find_metric_class(name: str) -> type[Metric]:
    """Return the class of the metric that is registered as `name`, an entry of ``trainer.metrics``.

    Raises:
        ConfigError: if no metric has the name; the message suggests the most similar name.
    """
    # The built-in metrics register themselves when they are imported.
    import credit.metrics.crps
    import credit.metrics.rmse  # noqa: F401

    if name not in _METRICS:
        raise ConfigError(f'trainer.metrics: "{name}" is not a metric{did_you_mean(name, _METRICS)}')
    return _METRICS[name]
