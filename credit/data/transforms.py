"""Pointwise transforms (logarithm and square root) that make a variable with a skewed distribution easier to learn.

They are inverted before values are written or scored. Both are odd functions, so that small negative values keep their
sign; packing leaves such values in precipitation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TypeVar

import numpy as np
import torch

from credit.channels import Channel
from credit.config.sections.data import TransformConfig

# An array or a tensor; a function returns the type that it gets.
Values = TypeVar("Values", np.ndarray, torch.Tensor)


def apply_transform(values: Values, transform: TransformConfig) -> Values:
    """Transform values; `log1p` is sign(x) ln(1 + |x| / unit), `sqrt` is sign(x) sqrt(|x| / unit).

    Args:
        values: array or tensor of any shape, in physical units.
        transform: kind and unit of the transform, from ``data.transforms.NAME``.

    Returns:
        Array or tensor of the same shape and type.
    """
    library = _select_library(values)
    magnitude = abs(values) / transform.unit
    if transform.kind == "log1p":
        transformed = library.log1p(magnitude)
    else:
        transformed = library.sqrt(magnitude)
    return library.sign(values) * transformed


def invert_transform(values: Values, transform: TransformConfig) -> Values:
    """Return the physical values for which `apply_transform` returns `values`, in the same shape."""
    library = _select_library(values)
    if transform.kind == "log1p":
        magnitude = library.expm1(abs(values))
    else:
        magnitude = values * values
    return library.sign(values) * magnitude * transform.unit


def transform_channels(
    fields_CHW: np.ndarray, channels: Sequence[Channel], transforms: Mapping[str, TransformConfig]
) -> np.ndarray:
    """Return fields (C, H, W) with the channels of the variables in `transforms` transformed.

    If there are no such channels, `fields_CHW` itself is returned.

    Args:
        fields_CHW: (C, H, W) fields in physical units; they are not changed.
        channels: (C,) the channel of each field.
        transforms: mapping from the name of a variable to its transform.
    """
    rows = [row for row, channel in enumerate(channels) if channel.variable in transforms]
    if not rows:
        return fields_CHW
    transformed = fields_CHW.copy()
    for row in rows:
        transformed[row] = apply_transform(fields_CHW[row], transforms[channels[row].variable])
    return transformed


def _select_library(values: np.ndarray | torch.Tensor) -> ModuleType:
    """Return the module torch for a tensor, numpy for an array; the functions used here have equal names in both."""
    return torch if isinstance(values, torch.Tensor) else np
