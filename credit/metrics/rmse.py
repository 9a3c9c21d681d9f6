"""Root mean square error (RMSE) in validation, and its ratio to the RMSE of persistence.

Shape suffixes: L lead times, B batch, M ensemble members, C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from credit.channels import ChannelMap
from credit.metrics.base import Metric, MetricContext, register_metric


@register_metric("rmse")
class RootMeanSquareError(Metric):
    """RMSE of the ensemble mean, and its ratio to the RMSE of persistence.

    - ``rmse/z500/24h``: square root of the squared error averaged over cells (by area) and cases, for each channel and
      lead time, in the units of the channel.
    - ``skill``: ratio of the forecast's RMSE to the RMSE of persistence, averaged over prognostic channels and lead
      times; lower is better.

    Args:
        context: channels, weights and lead times of the validation.
    """

    supports_domain = True

    def __init__(self, context: MetricContext) -> None:
        super().__init__(context)
        self._weight_CHW = context.weight_CHW.double()
        # Sums of squared errors over the cases, in the square of each channel's units.
        shape = (len(context.lead_hours), self._weight_CHW.shape[0])
        self.forecast_LC = torch.zeros(shape, dtype=torch.float64, device=self._weight_CHW.device)
        self.persistence_LC = torch.zeros_like(self.forecast_LC)

    @classmethod
    def names(cls, channels: ChannelMap, lead_hours: Sequence[float]) -> list[str]:
        """Return ``skill``, and the name of the RMSE of each lead time and channel; see `Metric.names`."""
        names = ["skill"]
        for hours in lead_hours:
            for channel in channels.output:
                names.append(f"rmse/{channel.name}/{hours:g}h")
        return names

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """Sums of squared errors of the forecast and of persistence, each (L, C); see `Metric.sums`."""
        return {"forecast": self.forecast_LC, "persistence": self.persistence_LC}

    def add(self, lead: int, forecast_BMCHW: Tensor, persistence_BCHW: Tensor, truth_BCHW: Tensor) -> None:
        """Add the squared errors of one lead time of a batch to the sums; see `Metric.add`."""
        # A single member needs no mean, which would copy the field.
        if forecast_BMCHW.shape[1] == 1:
            ensemble_mean_BCHW = forecast_BMCHW[:, 0]
        else:
            ensemble_mean_BCHW = forecast_BMCHW.mean(dim=1)
        self.forecast_LC[lead] += self._sum_squared_errors(ensemble_mean_BCHW, truth_BCHW)
        self.persistence_LC[lead] += self._sum_squared_errors(persistence_BCHW, truth_BCHW)

    def summary(self, num_cases: float) -> dict[str, float]:
        """Return ``skill`` (dimensionless), and the RMSE of each lead time and channel (in the channel's units)."""
        channels = self.context.channels
        rmse_LC = (self.forecast_LC / num_cases).sqrt()
        persistence_LC = (self.persistence_LC / num_cases).sqrt()
        prognostic = channels.output_slice("prognostic")
        # Persistence has no error for a constant field; the lower limit avoids 0 / 0.
        smallest_number = torch.finfo(torch.float64).tiny
        ratio = rmse_LC[:, prognostic] / persistence_LC[:, prognostic].clamp(min=smallest_number)
        # In the order of `names`: by lead time, then by channel.
        values = [ratio.mean().item(), *rmse_LC.flatten().tolist()]
        return dict(zip(self.names(channels, self.context.lead_hours), values, strict=True))

    def _sum_squared_errors(self, forecast_BCHW: Tensor, truth_BCHW: Tensor) -> Tensor:
        """Return the squared error of each channel, averaged over cells (by area) and summed over the batch, (C,)."""
        weighted_BCHW = (forecast_BCHW - truth_BCHW).double().square() * self._weight_CHW
        return weighted_BCHW.sum(dim=(0, 2, 3))
