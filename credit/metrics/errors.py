"""Validation errors as sums that can be added over batches and ranks; a metric is a function of the sums."""

from __future__ import annotations

import torch

from credit.channels import ChannelMap


class ErrorSums:
    """Area-weighted squared errors of a forecast and of persistence, by lead and channel.

    Args:
        weight_CHW: weights of the cells that count, summing to 1 over each channel.
        steps: forecast steps.
    """

    def __init__(self, weight_CHW: torch.Tensor, steps: int) -> None:
        self._weight_CHW = weight_CHW.double()
        zeros = torch.zeros(steps, weight_CHW.shape[0], dtype=torch.float64, device=weight_CHW.device)
        self.model_LC = zeros.clone()
        self.persistence_LC = zeros.clone()
        self.cases = 0

    def add(
        self, lead: int, model_BCHW: torch.Tensor, persistence_BCHW: torch.Tensor, truth_BCHW: torch.Tensor
    ) -> None:
        """Add one lead (from 0) of a batch; masked cells may hold anything finite."""
        for total, forecast in ((self.model_LC, model_BCHW), (self.persistence_LC, persistence_BCHW)):
            error = (forecast - truth_BCHW).double().square() * self._weight_CHW
            total[lead] += error.sum(dim=(0, 2, 3))
        if lead == 0:
            self.cases += model_BCHW.shape[0]

    @staticmethod
    def names(channels: ChannelMap, hours: list[float]) -> list[str]:
        """Return the keys of `summary`."""
        return ["skill"] + [f"rmse/{channel.name}/{hour:g}h" for hour in hours for channel in channels.output]

    def summary(self, channels: ChannelMap, hours: list[float]) -> dict[str, float]:
        """Return ``rmse/z500/24h`` in the units of the fields that were added, and ``skill``.

        ``skill`` is the mean over prognostic channels and leads of RMSE over persistence's RMSE; lower is better.
        """
        rmse = (self.model_LC / self.cases).sqrt()
        persistence = (self.persistence_LC / self.cases).sqrt()
        part = channels.output_slice("prognostic")
        ratio = rmse[:, part] / persistence[:, part].clamp(min=torch.finfo(torch.float64).tiny)
        values = [ratio.mean().item(), *rmse.flatten().tolist()]
        return dict(zip(self.names(channels, hours), values, strict=True))
