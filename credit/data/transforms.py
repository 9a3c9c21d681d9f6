"""Pointwise transforms that make a skewed variable easier to learn; inverted before a value is shown or compared.

Both are odd functions, so small negative values, which packing leaves in precipitation, keep their sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TypeVar

import numpy as np
import torch

from credit.channels import Channel
from credit.config.sections.data import TransformConfig

# An array or a tensor; a function returns what it gets.
Values = TypeVar("Values", np.ndarray, torch.Tensor)


def apply_transform(values: Values, transform: TransformConfig) -> Values:
    """Return the transformed values; `log1p` is sign(x) ln(1 + |x| / unit), `sqrt` is sign(x) sqrt(|x| / unit).

    Args:
        values: array or tensor of any shape, in physical units.
        transform: kind and unit, ``data.transforms.NAME``.

    Returns:
        Array or tensor of the same shape and type.
    """
    library = _library_of(values)
    magnitude = abs(values) / transform.unit
    if transform.kind == "log1p":
        transformed = library.log1p(magnitude)
    else:
        transformed = library.sqrt(magnitude)
    return library.sign(values) * transformed


def invert_transform(values: Values, transform: TransformConfig) -> Values:
    """Return the physical values that `apply_transform` transforms to `values`, of any shape."""
    library = _library_of(values)
    if transform.kind == "log1p":
        magnitude = library.expm1(abs(values))
    else:
        magnitude = values * values
    return library.sign(values) * magnitude * transform.unit


def transform_channels(
    fields_CHW: np.ndarray, channels: Sequence[Channel], transforms: Mapping[str, TransformConfig]
) -> np.ndarray:
    """Return fields (C, H, W) with the variables in `transforms` transformed; the same array if there are none.

    Args:
        fields_CHW: fields in physical units; they are not changed.
        channels: (C,) the channel of each field.
        transforms: variable -> its transform.
    """
    rows = [row for row, channel in enumerate(channels) if channel.variable in transforms]
    if not rows:
        return fields_CHW
    transformed = fields_CHW.copy()
    for row in rows:
        transformed[row] = apply_transform(fields_CHW[row], transforms[channels[row].variable])
    return transformed


def _library_of(values: np.ndarray | torch.Tensor) -> ModuleType:
    """Return torch for a tensor and numpy for an array; the functions that are used have the same names in both."""
    return torch if isinstance(values, torch.Tensor) else np
