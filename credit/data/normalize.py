"""Conversion between physical units and normalised values of each channel, on the device."""

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

    Variables with a transform are transformed first; their mean and standard deviation are computed from the
    transformed values. Missing values, which are NaN in physical units, become 0, the normalised mean.

    Letters of shapes: B samples of the batch, C channels of a group, R selected channels, H latitude rows, W longitude
    columns; ``...`` are any further dimensions, such as time, latitude and longitude.

    Args:
        channels: the channels of the model. The groups of channels are ``prognostic``, ``diagnostic``,
            ``dynamic_forcing``, ``static``, and ``output`` (prognostic and diagnostic channels together).
        statistics: statistics of every channel that is read from data.
        fixed_statistics: mapping from the name of each channel that is not read from data to its mean and standard
            deviation.
        transforms: mapping from the name of a variable to its transform, for the variables that have one.

    Attributes:
        tendency_scale_C: (C,) float32 for the prognostic channels: standard deviation of the change over a time step,
            divided by the standard deviation of the state.

    Raises:
        KeyError: for a channel that is neither in `statistics` nor in `fixed_statistics`.
    """

    def __init__(
        self,
        channels: ChannelMap,
        statistics: Statistics,
        fixed_statistics: Mapping[str, tuple[float, float]],
        transforms: Mapping[str, TransformConfig],
    ) -> None:
        super().__init__()
        # For each group, a mapping from the index of a channel in the group to the channel's transform. The group
        # `output` has no buffers, because its statistics are concatenated from the prognostic and diagnostic groups.
        self._transforms: dict[str, dict[int, TransformConfig]] = {
            "output": _index_transforms(channels.output, transforms)
        }
        for group in ("prognostic", "diagnostic", "dynamic_forcing", "static"):
            group_channels = channels.group(group)
            self._transforms[group] = _index_transforms(group_channels, transforms)
            mean_C, std_C = _mean_and_std(group_channels, statistics, fixed_statistics)
            self.register_buffer(f"{group}_mean", mean_C, persistent=False)
            self.register_buffer(f"{group}_std", std_C, persistent=False)
        prognostic = statistics.select([channel.name for channel in channels.group("prognostic")])
        # The quotient is computed in float64 and rounded once.
        scale_C = np.asarray(prognostic.tendency_std, np.float64) / np.asarray(prognostic.std, np.float64)
        self.register_buffer("tendency_scale_C", torch.from_numpy(scale_C.astype(np.float32)), persistent=False)

    def encode(self, x: torch.Tensor, group: str) -> torch.Tensor:
        """Return normalised values (B, C, ...) float32 of the channels of a group; missing values become 0.

        Args:
            x: (B, C, ...) values in physical units, with missing values as NaN.
            group: name of the group of channels.
        """
        mean, std = self._get_mean_and_std(group, x.dim())
        deviation = self._transform(apply_transform, x.float(), group) - mean
        # Only missing values are replaced; infinite values remain, so that an error in the data is noticed.
        return torch.nan_to_num(deviation.div_(std), nan=0.0, posinf=torch.inf, neginf=-torch.inf)

    def decode(self, x: torch.Tensor, group: str) -> torch.Tensor:
        """Return the values of the channels of a group in physical units, (B, C, ...) float32.

        Args:
            x: (B, C, ...) normalised values.
            group: name of the group of channels.
        """
        mean, std = self._get_mean_and_std(group, x.dim())
        # The product is rounded before the sum. With a fused multiply-add, a physical value of 0 would almost never be
        # exactly 0 after `encode` and `decode`.
        return self._transform(invert_transform, (x.float() * std).add_(mean), group)

    def decode_differences(self, x: torch.Tensor, group: str) -> torch.Tensor:
        """Return values (B, C, ...) float32 for computing differences in physical units, such as truth minus forecast.

        The difference of two results is a difference in physical units. The mean of each channel is not added, because
        adding the mean in float32 would make the differences less precise. For variables with a transform the mean is
        added, because the transform is not linear.

        Args:
            x: (B, C, ...) normalised values.
            group: name of the group of channels.
        """
        mean, std = self._get_mean_and_std(group, x.dim())
        scaled = x.float() * std
        for index in self._transforms[group]:
            scaled[:, index] += mean[:, index]
        return self._transform(invert_transform, scaled, group)

    def encode_channels(self, x: torch.Tensor, group: str, channel_indices: Sequence[int]) -> torch.Tensor:
        """Return normalised values of R channels of a group, (B, R, H, W) float32, computed in float64.

        Unlike in `encode`, missing values remain NaN.

        Args:
            x: (B, R, H, W) values in physical units of the channels at `channel_indices`.
            group: name of the group of channels.
            channel_indices: (R,) indices of the channels in the group.
        """
        mean, std = self._get_mean_and_std_of_channels(group, channel_indices)
        return ((self._transform_channels(apply_transform, x.double(), group, channel_indices) - mean) / std).float()

    def decode_channels(self, x: torch.Tensor, group: str, channel_indices: Sequence[int]) -> torch.Tensor:
        """Return the values of R channels of a group in physical units, (B, R, H, W) float64.

        Args:
            x: (B, C, H, W) normalised values of all channels of the group.
            group: name of the group of channels.
            channel_indices: (R,) indices of the channels in the group.
        """
        mean, std = self._get_mean_and_std_of_channels(group, channel_indices)
        physical = torch.addcmul(mean, _take_channels(x, channel_indices).double(), std)
        return self._transform_channels(invert_transform, physical, group, channel_indices)

    def _transform(self, function: Callable, x: torch.Tensor, group: str) -> torch.Tensor:
        """Return `x` (B, C, ...) with `function` applied to the channels of the group that have a transform."""
        transforms = self._transforms[group]
        if not transforms:
            return x
        # A new tensor is stacked, because `x` belongs to the caller and must not be changed.
        channels = list(x.unbind(1))
        for index, transform in transforms.items():
            channels[index] = function(channels[index], transform)
        return torch.stack(channels, dim=1)

    def _transform_channels(
        self, function: Callable, x: torch.Tensor, group: str, channel_indices: Sequence[int]
    ) -> torch.Tensor:
        """Return `x` (B, R, ...) with `function` applied to the channels that have a transform.

        Args:
            function: `apply_transform` or `invert_transform`.
            x: (B, R, ...) values of the channels at `channel_indices`.
            group: name of the group of channels.
            channel_indices: (R,) indices of the channels in the group.
        """
        transforms = self._transforms[group]
        if not any(row in transforms for row in channel_indices):
            return x
        channels = list(x.unbind(1))
        for index, row in enumerate(channel_indices):
            if row in transforms:
                channels[index] = function(channels[index], transforms[row])
        return torch.stack(channels, dim=1)

    def _get_mean_and_std(self, group: str, num_dims: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of a group's channels, each (1, C, 1, ...) with `num_dims` dimensions."""
        # The channels are dimension 1; all other dimensions are broadcast.
        shape = (1, -1) + (1,) * (num_dims - 2)
        groups = ("prognostic", "diagnostic") if group == "output" else (group,)
        mean = torch.cat([getattr(self, f"{name}_mean") for name in groups])
        std = torch.cat([getattr(self, f"{name}_std") for name in groups])
        return mean.reshape(shape), std.reshape(shape)

    def _get_mean_and_std_of_channels(
        self, group: str, channel_indices: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of selected channels of a group, (1, R, 1, 1) float64 each."""
        mean, std = self._get_mean_and_std(group, 4)
        return _take_channels(mean, channel_indices).double(), _take_channels(std, channel_indices).double()


def _take_channels(x: torch.Tensor, channel_indices: Sequence[int]) -> torch.Tensor:
    """Return the channels `channel_indices` of `x` (B, C, ...); the result is a view if the channels are adjacent."""
    adjacent_indices = list(range(channel_indices[0], channel_indices[-1] + 1))
    if list(channel_indices) == adjacent_indices:
        return x[:, channel_indices[0] : channel_indices[-1] + 1]
    return x[:, list(channel_indices)]


def _index_transforms(
    channels: Sequence[Channel], transforms: Mapping[str, TransformConfig]
) -> dict[int, TransformConfig]:
    """Return a mapping from index in `channels` to transform, for channels read from data that have a transform."""
    by_index = {}
    for index, channel in enumerate(channels):
        if channel.source == "data" and channel.variable in transforms:
            by_index[index] = transforms[channel.variable]
    return by_index


def _mean_and_std(
    channels: Sequence[Channel], statistics: Statistics, fixed_statistics: Mapping[str, tuple[float, float]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of the channels, (C,) float32 each.

    Args:
        channels: (C,) the channels.
        statistics: statistics of the channels that are read from data.
        fixed_statistics: mapping from the name of each channel that is not read from data to its mean and standard
            deviation.

    Raises:
        KeyError: for a channel that is neither in `statistics` nor in `fixed_statistics`.
    """
    pairs = []
    for channel in channels:
        if channel.name in statistics.names:
            row = statistics.names.index(channel.name)
            # A static field may be constant; then the mean is subtracted, but the field is not scaled.
            std = float(statistics.std[row]) or 1.0
            pairs.append((float(statistics.mean[row]), std))
        else:
            pairs.append(fixed_statistics[channel.name])
    # A group without channels has the shape (0, 2). The columns are copied, because they are not contiguous.
    table_C2 = np.asarray(pairs, dtype=np.float64).reshape(-1, 2).astype(np.float32)
    return torch.from_numpy(table_C2[:, 0].copy()), torch.from_numpy(table_C2[:, 1].copy())
