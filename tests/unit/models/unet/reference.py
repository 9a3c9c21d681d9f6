"""Second implementation of the U-Net, from latitudes, longitudes and elementary operations.

Neighbours of a cell are found by their coordinates on the sphere, convolutions are sums over the nine neighbours, and
attention is a softmax of products.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from credit.models.unet import UNet

State = dict[str, Tensor]


def find_neighbour(lat: np.ndarray, width: int, row: int, column: int) -> tuple[int, int, float]:
    """Return row, column and distance in latitude of the cell that replaces a row and column beyond the grid.

    Args:
        lat: latitude of the rows in degrees, equally spaced.
        width: number of columns.
        row: row, from -1 to the number of rows.
        column: column, any number.
    """
    if 0 <= row < len(lat):
        return row, column % width, 0.0
    # Beyond the pole, latitudes decrease again, and the longitude is half the globe away.
    step = (lat[0] - lat[-1]) / (len(lat) - 1)
    latitude = np.sign(lat[0] - row * step) * 180 - (lat[0] - row * step)
    distances = np.abs(lat - latitude)
    # If several rows are equally near, take the outermost.
    nearest = np.flatnonzero(distances < distances.min() + 1e-9)
    source_row = nearest[0] if row < 0 else nearest[-1]
    return int(source_row), (column - width // 2) % width, float(distances[source_row])


@functools.cache
def find_all_neighbours(latitudes: tuple[float, ...], width: int, stride: int) -> tuple[Tensor, Tensor]:
    """Return cell numbers of the nine neighbours of each output cell, (9, rows, columns), and a mask beyond poles."""
    lat = np.array(latitudes)
    rows = range(0, len(lat), stride)
    columns = range(0, width, stride)
    numbers = torch.empty(9, len(rows), len(columns), dtype=torch.long)
    for tap in range(9):
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                source_row, source_column, _ = find_neighbour(lat, width, row + tap // 3 - 1, column + tap % 3 - 1)
                numbers[tap, i, j] = source_row * width + source_column
    is_beyond_pole = torch.zeros(9, len(rows), len(columns), dtype=torch.bool)
    is_beyond_pole[:3, 0] = True
    if rows[-1] == len(lat) - 1:
        is_beyond_pole[6:, -1] = True
    return numbers, is_beyond_pole


def convolve(
    state: State, name: str, x: Tensor, lat: np.ndarray, stride: int = 1, vector_channels: tuple[int, ...] = ()
) -> Tensor:
    """Return a 3x3 convolution on the sphere."""
    numbers, is_beyond_pole = find_all_neighbours(tuple(lat), x.shape[-1], stride)
    neighbours = x.flatten(2)[..., numbers]
    for channel in vector_channels:
        neighbours[:, channel] = torch.where(is_beyond_pole, -neighbours[:, channel], neighbours[:, channel])
    weight = state[f"{name}.weight"].flatten(2)
    return torch.einsum("bcthw,oct->bohw", neighbours, weight) + state[f"{name}.bias"].view(1, -1, 1, 1)


def normalise(state: State, name: str, x: Tensor) -> Tensor:
    """Return a group norm with at least four channels for each group."""
    channels = x.shape[1]
    groups = max(number for number in range(1, channels // 4 + 1) if channels % number == 0)
    grouped = x.reshape(len(x), groups, -1)
    deviation = grouped - grouped.mean(-1, keepdim=True)
    normed = deviation / (deviation.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    scale, shift = (state[f"{name}.{key}"].view(1, -1, 1, 1) for key in ("weight", "bias"))
    return normed.view(x.shape) * scale + shift


def attend(state: State, name: str, x: Tensor, dim_head: int) -> Tensor:
    """Return the attention of each cell to all cells."""
    normed = normalise(state, f"{name}.norm", x).flatten(2).transpose(1, 2)
    qkv = normed @ state[f"{name}.to_qkv.weight"].T
    results = []
    for head in qkv.split(3 * dim_head, dim=-1):
        q, k, v = head.split(dim_head, dim=-1)
        weights = torch.softmax(q @ k.mT / dim_head**0.5, dim=-1)
        results.append(weights @ v)
    y = torch.cat(results, dim=-1) @ state[f"{name}.to_out.weight"].T + state[f"{name}.to_out.bias"]
    return y.transpose(1, 2).reshape(x.shape)


def silu(x: Tensor) -> Tensor:
    """Return x times its sigmoid."""
    return x / (1 + torch.exp(-x))


def compute_block(state: State, name: str, x: Tensor, lat: np.ndarray, dim_head: int) -> Tensor:
    """Return the output of a residual block, with attention if the state has weights of it."""
    hidden = convolve(state, f"{name}.conv1", silu(normalise(state, f"{name}.norm1", x)), lat)
    hidden = convolve(state, f"{name}.conv2", silu(normalise(state, f"{name}.norm2", hidden)), lat)
    if f"{name}.shortcut.weight" in state:
        weight = state[f"{name}.shortcut.weight"][:, :, 0, 0]
        x = torch.einsum("bchw,oc->bohw", x, weight) + state[f"{name}.shortcut.bias"].view(1, -1, 1, 1)
    x = x + hidden
    if f"{name}.attention.to_out.bias" in state:
        x = x + attend(state, f"{name}.attention", x, dim_head)
    return x


def compute(network: UNet, x_BCTHW: Tensor, depth: list[int], dim_head: int) -> Tensor:
    """Return the output of a network without noise, from its state dict and the latitudes of its grid."""
    state = network.state_dict()
    lat = network.spec.grid.lat
    num_levels = len(depth)
    angle = torch.from_numpy(np.deg2rad(lat))
    features = torch.stack([angle.sin(), angle.cos(), (2 * angle).sin(), (2 * angle).cos()])
    x = x_BCTHW.flatten(1, 2)
    frames = network.spec.input_frames
    vectors = tuple(channel * frames + frame for channel in network.spec.vector_channels for frame in range(frames))
    x = convolve(state, "stem", x, lat, vector_channels=vectors)
    x = x + (state["latitude.weight"] @ features)[:, :, None]
    skips = [x]
    for level in range(num_levels):
        if level:
            x = convolve(state, f"encoder.{level}.down.conv", x, lat[:: 2 ** (level - 1)], stride=2)
            skips.append(x)
        for block in range(depth[level]):
            x = compute_block(state, f"encoder.{level}.blocks.{block}", x, lat[:: 2**level], dim_head)
            skips.append(x)
    for block in range(2):
        x = compute_block(state, f"middle.{block}", x, lat[:: 2 ** (num_levels - 1)], dim_head)
    for number, level in enumerate(reversed(range(num_levels))):
        level_lat = lat[:: 2**level]
        if number:
            rows = torch.arange(len(level_lat)) // 2
            columns = torch.arange(skips[-1].shape[-1]) // 2
            x = convolve(state, f"decoder.{number}.up.conv", x[:, :, rows][..., columns], level_lat)
        for block in range(depth[level] + 1):
            x = torch.cat([x, skips.pop()], dim=1)
            x = compute_block(state, f"decoder.{number}.blocks.{block}", x, level_lat, dim_head)
    y = convolve(state, "head.conv", silu(normalise(state, "head.norm", x)), lat)
    return y.view(len(y), network.spec.out_channels, network.spec.output_frames, *y.shape[2:])
