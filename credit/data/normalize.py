"""Normalizer: between physical units and normalised space, on the device, per channel and level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from credit.channels import Channel, ChannelMap
from credit.config.schema_data import TransformConfig
from credit.data.store.statistics import Statistics
from credit.data.transforms import apply, invert


class Normalizer(nn.Module):
    """Scales channels to mean 0 and standard deviation 1 over the training period; float32 throughout.

    Variables with a transform are transformed first; their statistics are those of transformed values.

    Channels with declared missing values come as NaN there and are filled with the mean, that is 0.

    Args:
        channels: the channels.
        statistics: of every channel that is read from data.
        fixed: mean and standard deviation of channels that `statistics` does not have, by name.
        transforms: variable -> its transform, where it has one.

    Attributes:
        tendency_scale_C: (C_prognostic,) standard deviation of a step's change over that of the state.
    """

    def __init__(
        self,
        channels: ChannelMap,
        statistics: Statistics,
        fixed: Mapping[str, tuple[float, float]],
        transforms: Mapping[str, TransformConfig],
    ) -> None:
        super().__init__()
        self._transforms: dict[str, dict[int, TransformConfig]] = {}
        for group in ("prognostic", "diagnostic", "dynamic_forcing", "static", "output"):
            own = channels.output if group == "output" else channels.group(group)
            self._transforms[group] = {
                row: transforms[channel.variable]
                for row, channel in enumerate(own)
                if channel.variable in transforms and channel.source == "data"
            }
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
        apart = self._each(apply, x.float(), group) - mean
        return torch.nan_to_num(apart.div_(std), nan=0.0, posinf=torch.inf, neginf=-torch.inf)

    def decode(self, x: torch.Tensor, group: str) -> torch.Tensor:
        """Return physical values of normalised `x` (B, C, ...)."""
        mean, std = self._of(group, x.dim())
        # not as one fused operation: the normalised value of 0 shall give 0 again
        return self._each(invert, (x.float() * std).add_(mean), group)

    def decode_differences(self, x: torch.Tensor, group: str) -> torch.Tensor:
        """Return values whose differences are those of physical values: without the mean, which would cost digits."""
        mean, std = self._of(group, x.dim())
        scaled = x.float() * std
        for row in self._transforms[group]:
            scaled[:, row] += mean[:, row]
        return self._each(invert, scaled, group)

    def encode_rows(self, x: torch.Tensor, group: str, rows: Sequence[int]) -> torch.Tensor:
        """Return normalised values of some of a group's channels, computed in float64; `x` is (B, rows, H, W)."""
        mean, std, own = self._of_rows(group, rows)
        x = x.double()
        if own:
            x = torch.stack([apply(one, own[k]) if k in own else one for k, one in enumerate(x.unbind(1))], dim=1)
        return ((x - mean) / std).float()

    def decode_rows(self, x: torch.Tensor, group: str, rows: Sequence[int]) -> torch.Tensor:
        """Return physical values of some channels of normalised `x` (B, C, H, W), float64 (B, rows, H, W)."""
        mean, std, own = self._of_rows(group, rows)
        x = torch.addcmul(mean, _take(x, rows).double(), std)
        if own:
            x = torch.stack([invert(one, own[k]) if k in own else one for k, one in enumerate(x.unbind(1))], dim=1)
        return x

    def _of_rows(
        self, group: str, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, TransformConfig]]:
        mean, std = (_take(one, rows).double() for one in self._of(group, 4))
        own = self._transforms[group]
        return mean, std, {place: own[row] for place, row in enumerate(rows) if row in own}

    def _each(self, function: Callable, x: torch.Tensor, group: str) -> torch.Tensor:
        """Return `x` (B, C, ...) with `function` applied to the channels of the group that have a transform."""
        own = self._transforms[group]
        if not own:
            return x
        parts = [function(part, own[row]) if row in own else part for row, part in enumerate(x.unbind(1))]
        return torch.stack(parts, dim=1)

    def _of(self, group: str, dims: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (1, -1) + (1,) * (dims - 2)
        groups = ("prognostic", "diagnostic") if group == "output" else (group,)
        mean = torch.cat([getattr(self, f"{name}_mean") for name in groups])
        std = torch.cat([getattr(self, f"{name}_std") for name in groups])
        return mean.reshape(shape), std.reshape(shape)


def _take(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return channels of `x` (B, C, ...), without a copy where they lie side by side."""
    first, last = rows[0], rows[-1]
    return x[:, first : last + 1] if list(rows) == list(range(first, last + 1)) else x[:, list(rows)]


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
