"""Padding of a global field across the poles and around the globe, and the padded sizes that windows ask for.

Rows run from north to south: pads are `(north, south)` rows and `(west, east)` columns. A caller whose rows run the
other way swaps the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credit.errors import ConfigError, did_you_mean

MODES = ("earth", "mirror")
POLES = ("published", "exact")
KEYS = ("mode", "lat", "lon", "pole")


@dataclass(frozen=True)
class SpherePadding:
    """Pads (B, C, ..., H, W) fields on the sphere.

    Attributes:
        mode: `earth` continues a meridian across the pole at the opposite longitude; `mirror` reflects latitude in
            place.
        lat: rows added in the north and in the south.
        lon: columns added in the west and in the east, periodic.
        skip: rows at a pole that are not repeated beyond it, 0 or 1.
        vector_runs: slices of channels whose sign flips across a pole.
    """

    mode: str
    lat: tuple[int, int]
    lon: tuple[int, int]
    skip: int
    vector_runs: tuple[slice, ...]

    def padded(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return rows and columns of a field of `grid`, padded."""
        return grid[0] + sum(self.lat), grid[1] + sum(self.lon)

    def beyond_poles(self, height: int) -> tuple[range, ...]:
        """Return the rows of a padded field of `height` rows in which vectors point the other way."""
        if not self.vector_runs:
            return ()
        return range(self.lat[0]), range(self.lat[0] + height, sum(self.lat) + height)

    def pad(self, x: Tensor) -> Tensor:
        """Return the padded field (B, C, ..., H + sum(lat), W + sum(lon))."""
        if not any(self.lat):
            return self._pad_lon(x)
        return self._pad_lon(self._pad_lat_earth(x)) if self.mode == "earth" else self._pad_lat_mirror(self._pad_lon(x))

    def _pad_lon(self, x: Tensor) -> Tensor:
        west, east = self.lon
        return torch.cat((x[..., x.shape[-1] - west :], x, x[..., :east]), dim=-1) if west or east else x

    def _pad_lat_earth(self, x: Tensor) -> Tensor:
        height = x.shape[-2]
        north = self._across_pole(x[..., self.skip : self.skip + self.lat[0], :])
        south = self._across_pole(x[..., height - self.skip - self.lat[1] : height - self.skip, :])
        return torch.cat((north, x, south), dim=-2)

    def _across_pole(self, rows: Tensor) -> Tensor:
        beyond = rows.flip(-2).roll(rows.shape[-1] // 2, -1)
        for run in self.vector_runs:
            beyond[:, run].neg_()  # `roll` made a new tensor, so the field itself stays as it is
        return beyond

    def _pad_lat_mirror(self, x: Tensor) -> Tensor:
        height = x.shape[-2]
        north = x[..., 1 : 1 + self.lat[0], :].flip(-2)
        south = x[..., height - 1 - self.lat[1] : height - 1, :].flip(-2)
        return torch.cat((north, x, south), dim=-2)


NO_PADDING = SpherePadding("mirror", (0, 0), (0, 0), 0, ())


def stage_sizes(padded: int, strides: Sequence[int]) -> list[int]:
    """Return the rows (or columns) of each encoder stage; a convolution drops what its stride does not cover."""
    return [padded // math.prod(strides[: i + 1]) for i in range(len(strides))]


def window_multiple(strides: Sequence[int], windows: Sequence[Sequence[int]]) -> int:
    """Return the number whose multiples, as padded size, let every window of every stage fit.

    Args:
        strides: stride of each stage's embedding.
        windows: for each stage the windows that must divide its size.
    """
    return math.lcm(*(math.prod(strides[: i + 1]) * math.lcm(*windows[i]) for i in range(len(strides))))


def auto_padding(size: int, multiple: int, strides: Sequence[int]) -> tuple[int, int]:
    """Return the least pads that make `size` a multiple of `multiple`, at least half a coarsest cell on each side.

    Half a cell of the coarsest stage keeps the seam out of the field; the rule gives the padding of the published 6
    h model and of the 1 degree starter. An odd row goes to the second side (south or east).
    """
    least = math.prod(strides) // 2
    total = math.ceil((size + 2 * least) / multiple) * multiple - size
    return total // 2, total - total // 2


def check_windows(
    axis: str, size: int, pads: tuple[int, int], strides: Sequence[int], windows: Sequence[Sequence[int]]
) -> None:
    """Raise a ConfigError naming the first stage whose size a window does not divide, and the nearest pads that fit.

    Args:
        axis: `lat` or `lon`, for the message.
        size: grid rows or columns.
        pads: rows or columns added on the two sides.
        strides: stride of each stage.
        windows: (global, local) window of each stage.
    """
    sizes = stage_sizes(size + sum(pads), strides)
    padded = f"{size} + {pads[0]} + {pads[1]} = {size + sum(pads)} cells along {axis}"
    for i, cells in enumerate(sizes):
        for key, window in zip(("global_window_size", "local_window_size"), windows[i], strict=True):
            if cells == 0 or cells % window:
                raise ConfigError(
                    f"model.{key}: window {window} does not divide the {cells} cells of stage {i}, "
                    f"from {padded} padded; " + _nearest_fit(axis, size, pads, window_multiple(strides, windows))
                )
        if i and sizes[i - 1] != 2 * cells:
            raise ConfigError(
                f"model.padding.{axis}: {list(pads)} makes {padded} padded, of which stage {i - 1} has {sizes[i - 1]} "
                f"and stage {i} has {cells}, but the decoder needs exactly half; "
                + _nearest_fit(axis, size, pads, window_multiple(strides, windows))
            )


def _nearest_fit(axis: str, size: int, pads: tuple[int, int], multiple: int) -> str:
    padded = size + sum(pads)
    above = math.ceil(padded / multiple) * multiple
    below = above - multiple
    nearest = below if below >= size and padded - below < above - padded else above
    first = (nearest - size) // 2
    return (
        f"every window fits a padded size that is a multiple of {multiple}; "
        f"the nearest is model.padding.{axis}: [{first}, {nearest - size - first}]"
    )


def build_padding(
    padding: Mapping[str, Any] | None,
    *,
    grid: tuple[int, int],
    strides: Sequence[int],
    windows: Sequence[Sequence[int]],
    vector_channels: Sequence[int],
    pole_points: bool,
) -> SpherePadding:
    """Check the `padding` section of a model and return the padding it asks for.

    Args:
        padding: keys `mode`, `lat`, `lon` and `pole`, all with defaults (earth, auto, auto, published); None means
            no padding. `pole: published` is what published weights were trained with: it repeats a row at the pole
            and keeps the sign of vector components; `exact` does neither. A sign flip supposes that 0 means no wind,
            so `exact` wants vector channels normalised by a scale alone.
        grid: rows and columns.
        strides: stride of each stage, for `auto`.
        windows: (global, local) window of each stage, for `auto`.
        vector_channels: input channels that hold vector components, for `pole: exact`.
        pole_points: whether the grid has rows at the poles, for `pole: exact`.

    Raises:
        ConfigError: for an unknown key or choice, or pads that the grid cannot give.
    """
    if padding is None:
        return NO_PADDING
    if not isinstance(padding, Mapping):
        raise ConfigError(f"model.padding: {padding!r} is not a mapping with the keys {', '.join(KEYS)}")
    for key in padding:
        if key not in KEYS:
            raise ConfigError(f"model.padding.{key}: unknown key{did_you_mean(key, KEYS)}")
    mode = _choice("mode", padding.get("mode", "earth"), MODES)
    pole = _choice("pole", padding.get("pole", "published"), POLES)
    height, width = grid
    multiple = window_multiple(strides, windows)
    lat = _pads("lat", padding.get("lat", "auto"), height, multiple, strides)
    lon = _pads("lon", padding.get("lon", "auto"), width, multiple, strides)
    exact = pole == "exact"
    if exact and mode != "earth":
        raise ConfigError(
            f"model.padding.pole: exact needs model.padding.mode: earth, which crosses the pole; mode is {mode}"
        )
    if mode == "earth" and any(lat) and width % 2:
        raise ConfigError(
            f"model.padding.mode: earth needs an even number of longitudes, the grid has {width}: "
            "the opposite meridian is half the columns away; choose mode: mirror"
        )
    skip = 1 if mode == "mirror" or (exact and pole_points) else 0
    for axis, pads, limit in (("lat", lat, height - skip), ("lon", lon, width)):
        if max(pads) > limit:
            raise ConfigError(
                f"model.padding.{axis}: {list(pads)} is more than the {limit} cells that the grid can give on a side"
            )
    return SpherePadding(mode, lat, lon, skip, _runs(vector_channels) if exact else ())


def _choice(key: str, value: Any, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ConfigError(f"model.padding.{key}: {value!r} is not a choice{did_you_mean(str(value), choices)}")
    return value


def _pads(key: str, value: Any, size: int, multiple: int, strides: Sequence[int]) -> tuple[int, int]:
    if value == "auto":
        return auto_padding(size, multiple, strides)
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ConfigError(f"model.padding.{key}: {value!r} is neither `auto` nor two numbers of cells")
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value):
        raise ConfigError(f"model.padding.{key}: {value!r} must be whole numbers of cells, 0 or more")
    return value[0], value[1]


def _runs(channels: Sequence[int]) -> tuple[slice, ...]:
    """Return the channels as slices of consecutive ones, so that no index tensor has to live on a device."""
    runs: list[slice] = []
    for channel in sorted(set(channels)):
        if runs and runs[-1].stop == channel:
            runs[-1] = slice(runs[-1].start, channel + 1)
        else:
            runs.append(slice(channel, channel + 1))
    return tuple(runs)
