"""A small U-Net for tests: 27 rows with rows on the poles, so that the levels have 27, 14 and 7 rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from credit.config.registry import MODELS
from credit.models.base import ModelSpec
from credit.models.initialise import find_addable_parameters, initialise_
from credit.models.registry import build_model
from credit.models.unet import UNet

SETTINGS: dict[str, Any] = {"dim": [8, 12, 16], "depth": [1, 2, 1], "dim_head": 4}
SIZES: dict[str, Any] = {
    "image_height": 27,
    "image_width": 20,
    "in_channels": 4,
    "out_channels": 3,
    "vector_channels": (1, 2),
    "pole_points": True,
}


def build(sizes: dict[str, Any] | None = None, **settings: Any) -> UNet:
    """Return a small network with weights of seed 0.

    Args:
        sizes: arguments of `ModelSpec.from_sizes`, where they differ from `SIZES`.
        **settings: keys of the section, where they differ from `SETTINGS`.
    """
    section = MODELS.find_section("unet").model_validate({"type": "unet", **SETTINGS, **settings})
    network = build_model(ModelSpec.from_sizes(**{**SIZES, **(sizes or {})}), section)
    initialise_(network, 0)
    return network


def draw_fields(network: UNet, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random input for a network."""
    shape = (batch, *network.spec.in_shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def draw_condition(network: UNet, kinds: list[dict[str, Any]], batch: int = 2) -> dict[str, Tensor]:
    """Return random noise of some kinds, given as entries of ``model.noise`` with their channels."""
    generator = torch.Generator().manual_seed(2)
    condition = {}
    for entry in kinds:
        if entry["kind"] == "dropout":
            condition["dropout"] = torch.arange(11, 11 + batch)[:, None]
        elif entry["kind"] == "global":
            condition["global"] = torch.randn(batch, entry["channels"], generator=generator)
        else:
            shape = (batch, entry["channels"], *network.spec.grid.shape)
            condition[entry["kind"]] = torch.randn(shape, generator=generator)
    return condition


def randomize_noise_weights(network: nn.Module) -> None:
    """Set the weights through which noise enters to random values, as after training."""
    generator = torch.Generator().manual_seed(3)
    for parameter in find_addable_parameters(network).values():
        nn.init.normal_(parameter, std=0.3, generator=generator)
