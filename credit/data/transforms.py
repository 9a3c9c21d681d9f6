"""Pointwise transforms (logarithm and square root) that make a variable with a skewed distribution easier to learn.

The transforms are inverted before values are written or scored. Both transforms are odd functions, so they preserve the
sign of negative values. Packing can cause small negative values of precipitation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TypeVar

import numpy as np
import torch

from credit.channels import Channel
from credit.config.sections.data import TransformConfig

# An array or a tensor; each function returns the type of its argument.
Values = TypeVar("Values", np.ndarray, torch.Tensor)


def apply_transform(values: Values, transform: TransformConfig) -> Values:
    """Transform values with sign(x) ln(1 + |x| / unit) for `log1p`, or sign(x) sqrt(|x| / unit) for `sqrt`.

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
    """Return physical values in the shape of `values`; this function is the inverse of `apply_transform`."""
    library = _select_library(values)
    if transform.kind == "log1p":
        magnitude = library.expm1(abs(values))
    else:
        magnitude = values * values
    return library.sign(values) * magnitude * transform.unit


def transform_channels(
    fields_CHW: np.ndarray, channels: Sequence[Channel], transforms: Mapping[str, TransformConfig]
) -> np.ndarray:
    """Return fields (C, H, W) in which the channels of the variables in `transforms` are transformed.

    If no channel has a transform, `fields_CHW` itself is returned.

    Args:
        fields_CHW: (C, H, W) fields in physical units; the array is not changed.
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
    """Return the module torch for a tensor, or numpy for an array; both have functions of the same names."""
    return torch if isinstance(values, torch.Tensor) else np
