"""Builder of a small WXFormer for tests. The sizes are those of the golden files."""

from __future__ import annotations

from typing import Any

import torch

from credit.models.wxformer import WXFormer

SETTINGS: dict[str, Any] = {
    "image_height": 16,
    "image_width": 24,
    "in_channels": 3,
    "out_channels": 3,
    "dim": [8, 16, 32, 64],
    "depth": [1, 1, 1, 1],
    "dim_head": 8,
    "global_window_size": [2, 2, 1, 1],
    "local_window_size": [4, 2, 1, 1],
    "cross_embed_kernel_sizes": [[4, 8, 16], [2, 4], [2, 4], [2, 4]],
    "decoder": "pixel_shuffle",
    "padding": {"mode": "earth", "lat": [8, 8], "lon": [4, 4]},
}


def build(seed: int = 0, **changes: Any) -> WXFormer:
    """Return a small model whose initial weights are drawn from `seed`."""
    model = WXFormer.from_kwargs(**{**SETTINGS, **changes})
    model.initialise(seed)
    return model


def fields(batch: int = 1, seed: int = 1) -> torch.Tensor:
    """Return random input for `build()`."""
    shape = (batch, SETTINGS["in_channels"], 1, SETTINGS["image_height"], SETTINGS["image_width"])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
