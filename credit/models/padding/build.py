"""Construction of the padding from the config section ``model.padding``, with checks that it fits the grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from credit.errors import ConfigError, did_you_mean
from credit.models.layers.padding import NO_PADDING, SpherePadding, auto_padding

# Choices of the keys `mode` and `pole`, and all keys.
MODES = ("earth", "mirror")
POLES = ("published", "exact")
KEYS = ("mode", "lat", "lon", "pole")


def build_padding(
    padding: Mapping[str, Any] | None,
    *,
    grid: tuple[int, int],
    strides: Sequence[int],
    multiple: int,
    vector_channels: Sequence[int],
    pole_points: bool,
) -> SpherePadding:
    """Check the section ``model.padding`` and build the padding that it describes.

    Args:
        padding: keys `mode`, `lat`, `lon` and `pole` with the defaults earth, auto, auto, published; None for no
            padding. `pole: published` also copies a row that lies on the pole, and keeps the sign of vector components
            beyond the pole, as when the published weights were trained. `pole: exact` does neither. A change of sign is
            correct only if the normalised value 0 means no wind, so `exact` needs vector channels that are normalised
            by a scale without an offset.
        grid: number of rows and columns.
        strides: stride of each stage; used where `lat` or `lon` is `auto`.
        multiple: `auto` makes the padded size a multiple of this number of cells, so that every window fits.
        vector_channels: indices of the input channels that hold vector components; used by `pole: exact`.
        pole_points: True if the grid has rows at the poles; used by `pole: exact`.

    Raises:
        ConfigError: if a key or value is unknown, values do not fit together, or the grid is smaller than the pads.
    """
    if padding is None:
        return NO_PADDING
    if not isinstance(padding, Mapping):
        raise ConfigError(f"model.padding: {padding!r} is not a mapping with the keys {', '.join(KEYS)}")
    for key in padding:
        if key not in KEYS:
            raise ConfigError(f"model.padding.{key}: unknown key{did_you_mean(key, KEYS)}")
    mode = _read_choice("mode", padding.get("mode", "earth"), MODES)
    pole = _read_choice("pole", padding.get("pole", "published"), POLES)
    height, width = grid
    lat = _read_pads("lat", padding.get("lat", "auto"), height, multiple, strides)
    lon = _read_pads("lon", padding.get("lon", "auto"), width, multiple, strides)
    is_exact = pole == "exact"
    if is_exact and mode != "earth":
        raise ConfigError(
            f"model.padding.pole: exact needs model.padding.mode: earth, which crosses the pole; mode is {mode}"
        )
    if mode == "earth" and any(lat) and width % 2:
        raise ConfigError(
            f"model.padding.mode: earth needs an even number of longitudes, the grid has {width}: "
            "the opposite meridian is at a distance of half the columns; choose mode: mirror"
        )
    # The outermost row is not repeated beyond the pole if `mirror` reflects at it, or if it lies on the pole.
    skips_row_on_pole = is_exact and pole_points
    skip = 1 if mode == "mirror" or skips_row_on_pole else 0
    for axis, pads, limit in (("lat", lat, height - skip), ("lon", lon, width)):
        if max(pads) > limit:
            raise ConfigError(
                f"model.padding.{axis}: {list(pads)} exceeds the {limit} cells that the grid can provide on each side; "
                "choose smaller pads"
            )
    sign_channels = tuple(vector_channels) if is_exact else ()
    return SpherePadding(mode, lat, lon, skip, sign_channels)


def _read_choice(key: str, value: Any, choices: Sequence[str]) -> str:
    """Return the value of a key of ``model.padding`` if it is a valid choice.

    Args:
        key: name of the key, for the message.
        value: value of the key in the config.
        choices: valid values.

    Raises:
        ConfigError: if the value is not one of the choices; the message suggests the most similar choice.
    """
    if value not in choices:
        raise ConfigError(f"model.padding.{key}: {value!r} is not a valid choice{did_you_mean(str(value), choices)}")
    return value


def _read_pads(key: str, value: Any, size: int, multiple: int, strides: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of cells to add on the two sides of an axis, from the value of a key of ``model.padding``.

    Args:
        key: `lat` or `lon`.
        value: value of the key: `auto` or two whole numbers.
        size: number of rows or columns of the grid.
        multiple: `auto` makes the padded size a multiple of this number of cells.
        strides: stride of each stage; used for `auto`.

    Raises:
        ConfigError: if the value is neither `auto` nor two whole numbers of at least 0.
    """
    if value == "auto":
        return auto_padding(size, multiple, strides)
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ConfigError(f"model.padding.{key}: {value!r} must be `auto` or two numbers of cells")
    for pad in value:
        # `bool` is a subclass of `int`, but true and false are not numbers of cells.
        if not isinstance(pad, int) or isinstance(pad, bool) or pad < 0:
            raise ConfigError(f"model.padding.{key}: {value!r} must be whole numbers of cells, 0 or more")
    return value[0], value[1]
