"""Conversion between physical units and normalised values, on the device, for each channel and level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from credit.channels import Channel, ChannelMap
from credit.config.sections.data import TransformConfig
from credit.data.store.statistics import Statistics
from credit.data.transforms import apply_transform, invert_transform


class Normalizer(nn.Module):
    """Scaling of channels to mean 0 and standard deviation 1 over the training period, in float32.

    Variables with a transform are transformed first; their statistics are those of transformed values. Channels with
    declared missing values have NaN there, which is filled with the mean, that is 0.

    Args:
        channels: the channels of the model.
        statistics: statistics of every channel that is read from data.
        fixed: name -> (mean, standard deviation) of the channels that `statistics` does not have.
        transforms: variable -> its transform, for the variables that have one.

    Attributes:
        tendency_scale_C: (C,) float32, for the C prognostic channels: the standard deviation of the change in a step
            divided by the standard deviation of the state.

    Raises:
        KeyError: for a channel that is neither in `statistics` nor in `fixed`.
    """

    def __init__(
        self,
        channels: ChannelMap,
        statistics: Statistics,
        fixed: Mapping[str, tuple[float, float]],
        transforms: Mapping[str, TransformConfig],
    ) -> None:
        super().__init__()
        # Group -> index of a channel in it -> the channel's transform.
        self._transforms: dict[str, dict[int, TransformConfig]] = {
            "output": _transforms_by_index(channels.output, transforms)
        }
        for group in ("prognostic", "diagnostic", "dynamic_forcing", "static"):
            group_channels = channels.group(group)
            self._transforms[group] = _transforms_by_index(group_channels, transforms)
            mean_C, std_C = _mean_and_std(group_channels, statistics, fixed)
            self.register_buffer(f"{group}_mean", mean_C, persistent=False)
            self.register_buffer(f"{group}_std", std_C, persistent=False)
        prognostic = statistics.select([channel.name for channel in channels.group("prognostic")])
        # The quotient is taken in float64 and rounded once.
        scale_C = np.asarray(prognostic.tendency_std, np.float64) / np.asarray(prognostic.std, np.float64)
        self.register_buffer("tendency_scale_C", torch.from_numpy(scale_C.astype(np.float32)), persistent=False)

    def encode(self, x: torch.Tensor, group: str) -> torch.Tensor:
        """Return normalised values (B, C, ...) float32 of the channels of a group; missing values become 0.

        Args:
            x: (B, C, ...) in physical units, missing values as NaN.
            group: a group of channels, or ``output`` for prognostic and diagnostic channels together.
        """
        mean, std = self._mean_and_std(group, x.dim())
        deviation = self._transform(apply_transform, x.float(), group) - mean
        # Only missing values are replaced; infinite ones stay, so that an error of the data is noticed.
        return torch.nan_to_num(deviation.div_(std), nan=0.0, posinf=torch.inf, neginf=-torch.inf)

    def decode(self, x: torch.Tensor, group: str) -> torch.Tensor:
        """Return physical values (B, C, ...) float32 of the channels of a group.

        Args:
            x: (B, C, ...) normalised values.
            group: as in `encode`.
        """
        mean, std = self._mean_and_std(group, x.dim())
        # A fused multiply-add rounds differently, and the normalised value of 0 must give exactly 0 again.
        return self._transform(invert_transform, (x.float() * std).add_(mean), group)

    def decode_differences(self, x: torch.Tensor, group: str) -> torch.Tensor:
        """Return values (B, C, ...) float32 whose differences are those of physical values.

        They are physical values without the mean, because adding it would cost digits of the differences. Variables
        with a transform include the mean, because the transform is not linear.

        Args:
            x: (B, C, ...) normalised values.
            group: as in `encode`.
        """
        mean, std = self._mean_and_std(group, x.dim())
        scaled = x.float() * std
        for index in self._transforms[group]:
            scaled[:, index] += mean[:, index]
        return self._transform(invert_transform, scaled, group)

    def encode_rows(self, x: torch.Tensor, group: str, rows: Sequence[int]) -> torch.Tensor:
        """Return normalised values (B, R, H, W) of some channels of a group, computed in float64, as float32.

        Unlike in `encode`, missing values stay missing.

        Args:
            x: (B, R, H, W) in physical units, the R channels at `rows`.
            group: as in `encode`.
            rows: (R,) indices of the channels in the group.
        """
        mean, std = self._mean_and_std_of_rows(group, rows)
        return ((self._transform_rows(apply_transform, x.double(), group, rows) - mean) / std).float()

    def decode_rows(self, x: torch.Tensor, group: str, rows: Sequence[int]) -> torch.Tensor:
        """Return physical values of some channels of a group, (B, R, H, W) float64.

        Args:
            x: (B, C, H, W) normalised values of all channels of the group.
            group: as in `encode`.
            rows: (R,) indices of the channels in the group.
        """
        mean, std = self._mean_and_std_of_rows(group, rows)
        physical = torch.addcmul(mean, _take_channels(x, rows).double(), std)
        return self._transform_rows(invert_transform, physical, group, rows)

    def _transform(self, function: Callable, x: torch.Tensor, group: str) -> torch.Tensor:
        """Return `x` (B, C, ...) with `function` applied to the channels of the group that have a transform."""
        transforms = self._transforms[group]
        if not transforms:
            return x
        channels = list(x.unbind(1))
        for index, transform in transforms.items():
            channels[index] = function(channels[index], transform)
        return torch.stack(channels, dim=1)

    def _transform_rows(self, function: Callable, x: torch.Tensor, group: str, rows: Sequence[int]) -> torch.Tensor:
        """Return `x` (B, R, ...), the channels of the group at `rows`, with `function` applied as in `_transform`."""
        transforms = self._transforms[group]
        if not any(row in transforms for row in rows):
            return x
        channels = list(x.unbind(1))
        for index, row in enumerate(rows):
            if row in transforms:
                channels[index] = function(channels[index], transforms[row])
        return torch.stack(channels, dim=1)

    def _mean_and_std(self, group: str, num_dims: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of a group's channels, (1, C, 1, ...) with `num_dims` dimensions."""
        shape = (1, -1) + (1,) * (num_dims - 2)
        groups = ("prognostic", "diagnostic") if group == "output" else (group,)
        mean = torch.cat([getattr(self, f"{name}_mean") for name in groups])
        std = torch.cat([getattr(self, f"{name}_std") for name in groups])
        return mean.reshape(shape), std.reshape(shape)

    def _mean_and_std_of_rows(self, group: str, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of some channels of a group, (1, R, 1, 1) float64 each."""
        mean, std = self._mean_and_std(group, 4)
        return _take_channels(mean, rows).double(), _take_channels(std, rows).double()


def _take_channels(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return the channels of `x` (B, C, ...) at the given indices, a view where they are adjacent."""
    adjacent_rows = list(range(rows[0], rows[-1] + 1))
    if list(rows) == adjacent_rows:
        return x[:, rows[0] : rows[-1] + 1]
    return x[:, list(rows)]


def _transforms_by_index(
    channels: Sequence[Channel], transforms: Mapping[str, TransformConfig]
) -> dict[int, TransformConfig]:
    """Return index of a channel -> its transform, for the channels read from data that have one."""
    by_index = {}
    for index, channel in enumerate(channels):
        if channel.source == "data" and channel.variable in transforms:
            by_index[index] = transforms[channel.variable]
    return by_index


def _mean_and_std(
    channels: Sequence[Channel], statistics: Statistics, fixed: Mapping[str, tuple[float, float]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of the channels, (C,) float32 each.

    Args:
        channels: (C,) the channels.
        statistics: statistics of the channels that are read from data.
        fixed: name of any other channel -> its mean and standard deviation.

    Raises:
        KeyError: for a channel that is in neither of them.
    """
    pairs = []
    for channel in channels:
        if channel.name in statistics.names:
            row = statistics.names.index(channel.name)
            # A static field may be the same everywhere; it is then only shifted.
            std = float(statistics.std[row]) or 1.0
            pairs.append((float(statistics.mean[row]), std))
        else:
            pairs.append(fixed[channel.name])
    table_C2 = np.asarray(pairs, dtype=np.float64).reshape(-1, 2).astype(np.float32)
    return torch.from_numpy(table_C2[:, 0].copy()), torch.from_numpy(table_C2[:, 1].copy())
