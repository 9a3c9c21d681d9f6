"""Weights whose size depends on the channels or rows of the data, and their conversion to other channels or rows.

A network declares these weights where it builds the layers (`mark_input_layer`, `mark_output_layer`, and the attribute
`row_dims`). A run may then start from the weights of a run that had fewer channels or a different grid
(``trainer.resume_changes``). The weights of new channels are zero, so the outputs of the old channels do not change.
Weights that belong to rows of the grid are interpolated in latitude.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from credit.channels import ChannelMap
from credit.grid import LatLonGrid
from credit.parallel.blocks.marks import strip_wrapper_prefixes

# In a layer that maps output channels to output channels, the weight from a new channel to itself, as a fraction of the
# largest singular value of the weight matrix. A fraction below 1 leaves this singular value, and so spectral
# normalisation, unchanged.
NEW_CHANNEL_GAIN = 0.5


@dataclass(frozen=True)
class ChannelAxis:
    """Dimension of a tensor that has entries for each channel.

    From index `start` on, the entries along the dimension are a flattened array of shape (outer, channels, inner).

    Attributes:
        group: ``input`` or ``output``: the entries belong to the input or to the output channels of the network.
        dim: index of the dimension in the tensor.
        start: number of entries before the entries of the channels.
        outer: number of times that the whole list of channels is repeated.
        inner: number of neighbouring entries of each channel, such as one for each time frame.
    """

    group: Literal["input", "output"]
    dim: int
    start: int = 0
    outer: int = 1
    inner: int = 1

    def fits(self, stored: Tensor, trained: ChannelMap) -> bool:
        """Return True if `stored` has enough entries along this dimension for all channels in `trained`.

        The tensor may be longer, because other entries, such as the channels of tokens, may follow.
        """
        channels = trained.input if self.group == "input" else trained.output
        return (
            stored.dim() > self.dim and stored.shape[self.dim] >= self.start + self.outer * len(channels) * self.inner
        )

    def extend(self, stored: Tensor, stored_names: Sequence[str], names: Sequence[str]) -> Tensor:
        """Return `stored` extended to the channels `names`, with zeros for the new channels.

        Args:
            stored: whole (unsharded) tensor for the stored channels.
            stored_names: names of the channels of `stored`, in order; all of them must be in `names`.
            names: names of the channels of the result, in order.
        """
        channel_entries = self.outer * len(stored_names) * self.inner
        after = stored.shape[self.dim] - self.start - channel_entries
        entries_before, entries, entries_after = stored.split([self.start, channel_entries, after], self.dim)
        # The dimension becomes three: outer, channel, inner.
        entries = entries.unflatten(self.dim, (self.outer, len(stored_names), self.inner))
        shape = list(entries.shape)
        shape[self.dim + 1] = len(names)
        positions = torch.tensor([names.index(name) for name in stored_names])
        extended = entries.new_zeros(shape).index_copy(self.dim + 1, positions, entries)
        extended = extended.flatten(self.dim, self.dim + 2)
        return torch.cat([entries_before, extended, entries_after], self.dim)


def mark_input_layer(layer: nn.Module, frames: int, start: int = 0, inner: int = 1) -> None:
    """Declare that a linear layer or convolution reads the input channels.

    Args:
        layer: the layer; dimension 1 of its weight corresponds to its inputs.
        frames: number of input frames; the frames of a channel must be neighbouring inputs.
        start: number of other inputs that precede the input channels.
        inner: number of neighbouring inputs for each frame of a channel, such as the cells of a patch.
    """
    layer.channel_axes = {"weight": (ChannelAxis("input", 1, start, inner=frames * inner),)}


def mark_output_layer(layer: nn.Module, frames: int, outer: int = 1, inner: int = 1) -> None:
    """Declare that a linear layer or convolution writes the output channels.

    Args:
        layer: the layer; dimension 0 of its weight (1 for a transposed convolution) corresponds to its outputs.
        frames: number of output frames; the frames of a channel must be neighbouring outputs.
        outer: number of times that the list of channels is repeated, such as once for each cell of a patch.
        inner: number of neighbouring outputs for each frame of a channel.
    """
    out_dim = 1 if isinstance(layer, nn.ConvTranspose2d) else 0
    weight_axis = ChannelAxis("output", out_dim, outer=outer, inner=frames * inner)
    layer.channel_axes = {"weight": (weight_axis,), "bias": (replace(weight_axis, dim=0),)}


def mark_output_to_output_layer(layer: nn.Module, frames: int) -> None:
    """Declare that a linear layer or convolution both reads and writes the output channels.

    Args:
        layer: the layer; it must not be a transposed convolution.
        frames: number of output frames; the frames of a channel must be neighbours.
    """
    row_axis = ChannelAxis("output", 0, inner=frames)
    layer.channel_axes = {"weight": (row_axis, replace(row_axis, dim=1)), "bias": (row_axis,)}


def find_channel_axes(model: nn.Module) -> dict[str, tuple[ChannelAxis, ...]]:
    """Find all tensors of a model that have entries for each channel, and return their channel axes.

    Args:
        model: the model; it may be sharded and wrapped. Its layers may have spectral norm.

    Returns:
        Name of the tensor in the state dict -> its channel axes.
    """
    axes: dict[str, tuple[ChannelAxis, ...]] = {}
    for path, module in model.named_modules():
        plain_path = strip_wrapper_prefixes(path)
        for key, tensor_axes in getattr(module, "channel_axes", {}).items():
            # A wrapper forwards attributes to the layer inside it, and both have the same path without prefixes.
            # So a layer may be visited twice; the second visit writes the same entry.
            is_parametrized = parametrize.is_parametrized(module, key)
            name = f"{plain_path}.parametrizations.{key}.original" if is_parametrized else f"{plain_path}.{key}"
            axes[name] = tensor_axes
            if not is_parametrized:
                continue
            chain = module.parametrizations[key]
            for number, parametrization in enumerate(chain):
                for buffer_name, buffer_axes in _find_singular_vector_axes(
                    chain.original.shape, parametrization, tensor_axes
                ):
                    axes[f"{plain_path}.parametrizations.{key}.{number}.{buffer_name}"] = buffer_axes
    return axes


def _find_singular_vector_axes(
    shape: Sequence[int], parametrization: nn.Module, axes: Sequence[ChannelAxis]
) -> list[tuple[str, tuple[ChannelAxis, ...]]]:
    """Return (buffer name, channel axes) pairs for u and v of spectral norm; an empty list for other parametrizations.

    A weight matrix that is extended by rows and columns of zeros has the same singular vectors, extended by zeros. So u
    and v are extended like the weight.

    Args:
        shape: shape of the weight.
        parametrization: parametrization of the weight.
        axes: channel axes of the weight.
    """
    out_dim = getattr(parametrization, "out_dim", None)
    if out_dim is None:
        return []
    vectors = []
    for axis in axes:
        if axis.dim == out_dim:
            vectors.append(("u", (replace(axis, dim=0),)))
        else:
            # v has an entry for each pair of an input and a cell of the kernel.
            cells = math.prod(shape[2:])
            vectors.append(("v", (replace(axis, dim=0, start=axis.start * cells, inner=axis.inner * cells),)))
    return vectors


def find_row_dims(model: nn.Module) -> dict[str, int]:
    """Find the tensors of a model that have entries for each row of the grid.

    A layer declares its tensors of this kind in the attribute `row_dims`: name of the tensor in the layer -> index of
    the dimension that corresponds to the rows.

    Args:
        model: the model; it may be sharded and wrapped.

    Returns:
        Name of the tensor in the state dict -> index of the dimension that corresponds to the rows.
    """
    dims = {}
    for path, module in model.named_modules():
        for key, dim in getattr(module, "row_dims", {}).items():
            dims[f"{strip_wrapper_prefixes(path)}.{key}"] = dim
    return dims


def interpolate_rows(
    dims: Mapping[str, int], stored: Mapping[str, Tensor], trained: LatLonGrid, new: LatLonGrid
) -> dict[str, Tensor]:
    """Interpolate tensors linearly in latitude from the rows of a trained grid to the rows of a new grid.

    New rows beyond the outermost rows of the trained grid get the values of the outermost rows.

    Args:
        dims: name of a tensor -> its dimension that corresponds to the rows, from `find_row_dims`.
        stored: name -> whole (unsharded) tensor on the CPU, for all names in `dims`.
        trained: grid on which the stored tensors were trained.
        new: grid of the new run.

    Returns:
        Name -> tensor for the rows of the new grid.
    """
    # Latitudes decrease from north to south, but `np.interp` needs increasing numbers.
    negated_trained_lat_H, negated_lat_H = -np.asarray(trained.lat), -np.asarray(new.lat)
    position_H = np.interp(negated_lat_H, negated_trained_lat_H, np.arange(len(negated_trained_lat_H)))
    last_interval = len(negated_trained_lat_H) - 2
    north_row_index_H = torch.from_numpy(np.minimum(np.floor(position_H), last_interval).astype(np.int64))
    fraction_H = torch.from_numpy(position_H) - north_row_index_H
    interpolated = {}
    for name, dim in dims.items():
        rows_first = stored[name].movedim(dim, 0)
        fraction = fraction_H.to(rows_first.dtype).view(-1, *[1] * (rows_first.dim() - 1))
        rows = torch.lerp(rows_first[north_row_index_H], rows_first[north_row_index_H + 1], fraction)
        interpolated[name] = rows.movedim(0, dim)
    return interpolated


def extend_channels(
    axes: Mapping[str, tuple[ChannelAxis, ...]], stored: Mapping[str, Tensor], trained: ChannelMap, new: ChannelMap
) -> dict[str, Tensor]:
    """Extend tensors from the channels of a trained run to the channels of a new run.

    New entries are zero, with one exception: a layer that maps output channels to output channels maps each new channel
    to itself. This layer follows another output layer, and two consecutive layers of zeros would have no gradient.

    Args:
        axes: name of a tensor -> its channel axes, from `find_channel_axes`.
        stored: name -> whole (unsharded) tensor on the CPU, for all names in `axes`.
        trained: channels of the trained run; all of them must be in `new`.
        new: channels of the new run.

    Returns:
        Name -> tensor for the new channels.
    """
    names = {
        "input": ([channel.name for channel in trained.input], [channel.name for channel in new.input]),
        "output": ([channel.name for channel in trained.output], [channel.name for channel in new.output]),
    }
    extended = {}
    for name, tensor_axes in axes.items():
        value = stored[name]
        for axis in tensor_axes:
            value = axis.extend(value, *names[axis.group])
        if len(tensor_axes) == 2:
            _map_new_channels_to_themselves(value, stored[name], tensor_axes[0].inner, *names["output"])
        extended[name] = value
    return extended


def _map_new_channels_to_themselves(
    weight: Tensor, stored: Tensor, frames: int, stored_names: Sequence[str], names: Sequence[str]
) -> None:
    """Set the weight from each new channel to itself, in place. The layer maps output channels to output channels.

    Args:
        weight: extended weight of a linear layer or convolution.
        stored: weight before the extension.
        frames: number of frames of a channel.
        stored_names: names of the stored output channels.
        names: names of all output channels of the new run, in order.
    """
    factor = NEW_CHANNEL_GAIN * torch.linalg.matrix_norm(stored.flatten(1).double(), ord=2).item()
    # Index of the middle cell of the kernel; empty for a linear layer.
    middle = tuple(size // 2 for size in weight.shape[2:])
    for index, name in enumerate(names):
        if name not in stored_names:
            for entry in range(index * frames, (index + 1) * frames):
                weight[(entry, entry, *middle)] = factor
