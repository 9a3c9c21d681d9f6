"""Pointwise functions that make a skewed variable easier to learn; undone before a value is shown or compared.

Both are odd, so that small negative values, as packing leaves them in precipitation, stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TypeVar

import numpy as np
import torch

from credit.channels import Channel
from credit.config.schema_data import TransformConfig

Values = TypeVar("Values", np.ndarray, torch.Tensor)


def apply(values: Values, transform: TransformConfig) -> Values:
    """Return the transformed values; `log1p` is sign(x) ln(1 + |x| / unit), `sqrt` sign(x) sqrt(|x| / unit)."""
    of = _library(values)
    size = abs(values) / transform.unit
    return of.sign(values) * (of.log1p(size) if transform.kind == "log1p" else of.sqrt(size))


def invert(values: Values, transform: TransformConfig) -> Values:
    """Return the values of which `apply` makes `values`."""
    of = _library(values)
    size = of.expm1(abs(values)) if transform.kind == "log1p" else values * values
    return of.sign(values) * size * transform.unit


def transform_channels(
    fields_CHW: np.ndarray, channels: Sequence[Channel], transforms: Mapping[str, TransformConfig]
) -> np.ndarray:
    """Return fields (C, H, W) with the named variables transformed; the same array where there is none."""
    rows = [row for row, channel in enumerate(channels) if channel.variable in transforms]
    if not rows:
        return fields_CHW
    transformed = fields_CHW.copy()
    for row in rows:
        transformed[row] = apply(fields_CHW[row], transforms[channels[row].variable])
    return transformed


def _library(values: np.ndarray | torch.Tensor) -> ModuleType:
    return torch if isinstance(values, torch.Tensor) else np
