"""A small SFNO for tests."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from credit.models.base import ModelSpec
from credit.models.sfno.model import SFNO
from credit.models.sfno.section import SFNOSection

Module = TypeVar("Module", bound=nn.Module)
SIZES: dict[str, Any] = {"image_height": 9, "image_width": 16, "in_channels": 3, "out_channels": 2, "pole_points": True}
NOISES = [
    {"kind": "global", "channels": 3},
    {"kind": "cell", "channels": 2},
    {"kind": "spherical", "channels": 2, "lengths": [2000.0]},
    {"kind": "dropout", "rate": 0.3},
]


def build_section(**keys: Any) -> SFNOSection:
    """Return the section of a small model, in which `keys` replace or add keys."""
    # None stands for the default of a key.
    settings = {"type": "sfno", "dim": 8, "depth": 2, **keys}
    return SFNOSection.model_validate({key: value for key, value in settings.items() if value is not None})


def build(sizes: dict[str, Any] | None = None, seed: int = 0, **keys: Any) -> SFNO:
    """Return a small model with weights of `seed`.

    Args:
        sizes: arguments of `ModelSpec.from_sizes` that differ from `SIZES`.
        seed: seed of the weights.
        **keys: keys of the section.
    """
    spec = ModelSpec.from_sizes(**{**SIZES, **(sizes or {})})
    model = SFNO(spec, build_section(**keys))
    model.initialise(seed)
    return model


def draw_fields(model: SFNO, batch: int = 2, seed: int = 1) -> Tensor:
    """Return random input for a model."""
    return torch.randn((batch, *model.spec.in_shape), generator=torch.Generator().manual_seed(seed))


def draw_noise(model: SFNO, batch: int = 2, seed: int = 2) -> dict[str, Tensor]:
    """Return noise of all kinds in `NOISES`."""
    generator = torch.Generator().manual_seed(seed)
    grid_shape = model.spec.grid.shape
    return {
        "global": torch.randn((batch, 3), generator=generator),
        "cell": torch.randn((batch, 2, *grid_shape), generator=generator),
        "spherical": torch.randn((batch, 2, *grid_shape), generator=generator),
        "dropout": torch.randint(1, 2**62, (batch, 1), generator=generator),
    }


@torch.no_grad()
def perturb(model: Module, seed: int = 3) -> Module:
    """Add random numbers to all parameters of a network or block in place, so that none is zero, and return it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model
