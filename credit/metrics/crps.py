"""Fair CRPS of an ensemble in validation, and the ratio of its spread to the error of its mean.

Shape suffixes: L lead times, B batch, M ensemble members, C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from credit.channels import ChannelMap
from credit.metrics.base import Metric, MetricContext, register_metric


@register_metric("crps")
class EnsembleScores(Metric):
    """Area-weighted scores of an ensemble by lead time and channel.

    - ``crps/z500/24h``: fair CRPS, in the units of the channel. With a single member, it is the mean absolute error.
    - ``spread_skill/z500/24h``: ratio of spread to error; 1 for a calibrated ensemble. The spread is the square root of
      (M + 1) / M times the mean variance of the M members. The error is the RMSE of the ensemble mean (Fortin et al.
      2014, doi:10.1175/JHM-D-14-0008.1).
    - ``fair_crps``: the ratio of the fair CRPS to the mean absolute error of persistence, averaged over prognostic
      channels and lead times; lower is better.
    - ``calibration``: |ln(spread / error)|, averaged over prognostic channels and lead times; 0 is perfect.

    Args:
        context: channels, weights and lead times of the validation.
    """

    supports_domain = True

    def __init__(self, context: MetricContext) -> None:
        super().__init__(context)
        self._weight_CHW = context.weight_CHW.double()
        shape = (len(context.lead_hours), self._weight_CHW.shape[0])
        zeros_LC = torch.zeros(shape, dtype=torch.float64, device=self._weight_CHW.device)
        self._sums = {
            "crps": zeros_LC,
            "persistence": zeros_LC.clone(),
            "variance": zeros_LC.clone(),
            "squared_error": zeros_LC.clone(),
        }

    @classmethod
    def names(cls, channels: ChannelMap, lead_hours: Sequence[float]) -> list[str]:
        """Return ``fair_crps``, ``calibration``, and a name per score, lead time and channel; see `Metric.names`."""
        names = ["fair_crps", "calibration"]
        for score in ("crps", "spread_skill"):
            for hours in lead_hours:
                for channel in channels.output:
                    names.append(f"{score}/{channel.name}/{hours:g}h")
        return names

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """Sums of CRPS, absolute error of persistence, variance and squared error, each (L, C); see `Metric.sums`."""
        return self._sums

    def add(self, lead: int, forecast_BMCHW: Tensor, persistence_BCHW: Tensor, truth_BCHW: Tensor) -> None:
        """Add CRPS, variance and errors of one lead time of a batch to the sums; see `Metric.add`."""
        truth_BCHW = truth_BCHW.double()
        error_BMCHW = forecast_BMCHW.double() - truth_BCHW[:, None]
        num_members = error_BMCHW.shape[1]
        self._sums["crps"][lead] += self._sum_area_means(_fair_crps(error_BMCHW))
        persistence_error_BCHW = persistence_BCHW.double() - truth_BCHW
        self._sums["persistence"][lead] += self._sum_area_means(persistence_error_BCHW.abs())
        # The error of the ensemble mean is the mean of the members' errors.
        self._sums["squared_error"][lead] += self._sum_area_means(error_BMCHW.mean(dim=1).square())
        if num_members > 1:
            # The factor makes the expected variance of a calibrated ensemble equal to the squared error of its mean.
            variance_BCHW = error_BMCHW.var(dim=1) * (num_members + 1) / num_members
            self._sums["variance"][lead] += self._sum_area_means(variance_BCHW)

    def summary(self, num_cases: float) -> dict[str, float]:
        """Return ``fair_crps``, ``calibration``, and each score by lead time and channel; see `Metric.summary`."""
        channels = self.context.channels
        means = {name: total_LC / num_cases for name, total_LC in self._sums.items()}
        # The errors of a constant field are 0; the lower limit avoids 0 / 0.
        smallest_number = torch.finfo(torch.float64).tiny
        prognostic = channels.output_slice("prognostic")
        relative_crps_LC = means["crps"] / means["persistence"].clamp(min=smallest_number)
        spread_skill_LC = (means["variance"] / means["squared_error"].clamp(min=smallest_number)).sqrt()
        # The lower limit keeps the logarithm finite for an ensemble without spread.
        calibration_LC = spread_skill_LC.clamp(min=math.sqrt(smallest_number)).log().abs()
        # A field that is forecast without error needs no spread.
        calibration_LC[means["squared_error"] == 0] = 0.0
        # In the order of `names`: by score, then by lead time, then by channel.
        values = [relative_crps_LC[:, prognostic].mean().item(), calibration_LC[:, prognostic].mean().item()]
        values += means["crps"].flatten().tolist()
        values += spread_skill_LC.flatten().tolist()
        return dict(zip(self.names(channels, self.context.lead_hours), values, strict=True))

    def _sum_area_means(self, score_BCHW: Tensor) -> Tensor:
        """Return the area mean of each channel of (B, C, H, W) scores, summed over the batch, (C,) float64."""
        return (score_BCHW * self._weight_CHW).sum(dim=(0, 2, 3))


def _fair_crps(error_BMCHW: Tensor) -> Tensor:
    """Return the fair CRPS of each cell, (B, C, H, W), in the units of the errors.

    fair CRPS = 1 / M sum_j |e_j| - 1 / (M (M - 1)) sum_{j<k} |e_j - e_k| (Ferro 2014, doi:10.1002/qj.2270). With a
    single member, it is the absolute error.

    Args:
        error_BMCHW: (B, M, C, H, W) errors e_j of the members, forecast minus truth.
    """
    num_members = error_BMCHW.shape[1]
    mean_error_BCHW = error_BMCHW.abs().mean(dim=1)
    if num_members == 1:
        return mean_error_BCHW
    # The sum of |e_j - e_k| over pairs equals the sum of (2 i - M - 1) e_(i) over sorted errors e_(1) <= ... <= e_(M),
    # which has M instead of M (M - 1) / 2 terms.
    ranks_M = torch.arange(1, num_members + 1, dtype=torch.float64, device=error_BMCHW.device)
    factors_M111 = (2 * ranks_M - num_members - 1)[:, None, None, None]
    pair_sum_BCHW = (error_BMCHW.sort(dim=1).values * factors_M111).sum(dim=1)
    return mean_error_BCHW - pair_sum_BCHW / (num_members * (num_members - 1))
