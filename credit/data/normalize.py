"""Normalizer: between physical units and normalised space, on the device, per channel and level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from credit.channels import Channel, ChannelMap
from credit.data.statistics import Statistics


class Normalizer(nn.Module):
    """Scales channels to mean 0 and standard deviation 1 over the training period; float32 throughout.

    Channels with declared missing values come as NaN there and are filled with the mean, that is 0.

    Args:
        channels: the channels.
        statistics: of every channel that is read from data.
        fixed: mean and standard deviation of channels that `statistics` does not have, by name.

    Attributes:
        tendency_scale_C: (C_prognostic,) standard deviation of a step's change over that of the state.
    """

    def __init__(self, channels: ChannelMap, statistics: Statistics, fixed: Mapping[str, tuple[float, float]]) -> None:
        super().__init__()
        for group in ("prognostic", "diagnostic", "dynamic_forcing", "static"):
            mean, std = _mean_and_std(channels.group(group), statistics, fixed)
            self.register_buffer(f"{group}_mean", mean, persistent=False)
            self.register_buffer(f"{group}_std", std, persistent=False)
        own = statistics.select([channel.name for channel in channels.group("prognostic")])
        scale = np.asarray(own.tendency_std, dtype=np.float64) / np.asarray(own.std, dtype=np.float64)
        self.register_buffer("tendency_scale_C", torch.from_numpy(scale.astype(np.float32)), persistent=False)

    def encode(self, x: torch.Tensor, group: str) -> torch.Tensor:
        """Return normalised values of one group's channels; `x` is (B, C, ...) in physical units.

        `group` may be ``output`` for prognostic and diagnostic channels together.
        """
        mean, std = self._of(group, x.dim())
        return torch.nan_to_num((x.float() - mean) / std, nan=0.0, posinf=torch.inf, neginf=-torch.inf)

    def decode(self, x: torch.Tensor, group: str) -> torch.Tensor:
        """Return physical values of normalised `x` (B, C, ...)."""
        mean, std = self._of(group, x.dim())
        return x.float() * std + mean

    def std(self, group: str) -> torch.Tensor:
        """Return the (C,) standard deviations of a group, physical units."""
        return self._of(group, 2)[1].reshape(-1)

    def _of(self, group: str, dims: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (1, -1) + (1,) * (dims - 2)
        groups = ("prognostic", "diagnostic") if group == "output" else (group,)
        mean = torch.cat([getattr(self, f"{name}_mean") for name in groups])
        std = torch.cat([getattr(self, f"{name}_std") for name in groups])
        return mean.reshape(shape), std.reshape(shape)


def _mean_and_std(
    channels: Sequence[Channel], statistics: Statistics, fixed: Mapping[str, tuple[float, float]]
) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = []
    for channel in channels:
        if channel.name in statistics.names:
            own = statistics.select([channel.name])
            pairs.append((float(own.mean[0]), float(own.std[0]) or 1.0))
        else:
            pairs.append(fixed[channel.name])
    table = np.asarray(pairs, dtype=np.float64).reshape(-1, 2).astype(np.float32)
    return torch.from_numpy(table[:, 0].copy()), torch.from_numpy(table[:, 1].copy())
