"""The networks of the package, small enough to train in seconds, and which features each supports."""

from __future__ import annotations

from typing import Any

from tests.smoke.conftest import CONFIG

# Sections `model` for a grid of 16 x 32 cells.
SECTIONS: dict[str, dict[str, Any]] = {
    "graph": {"type": "graph", "dim": 16, "depth": 2},
    "sfno": {"type": "sfno", "dim": 16, "depth": 2},
    "swin": {"type": "swin", "dim": 16, "depth": 2, "heads": 2, "window_size": 2, "num_groups": 4},
    "unet": {"type": "unet", "dim": [8, 16, 16], "depth": [1, 1, 1], "dim_head": 8},
    "wxformer": {**CONFIG["model"], "attn_dropout": 0.0},
}
# Sections for the plan on 48 x 96 cells, with few weights, so that activations are most of the memory.
PLANNED_SECTIONS: dict[str, dict[str, Any]] = {
    "graph": {"type": "graph", "dim": 32, "depth": 2},
    "sfno": {"type": "sfno", "dim": 32, "depth": 2},
    "swin": {"type": "swin", "dim": 32, "depth": 2, "heads": 2, "window_size": 4},
    "unet": {"type": "unet", "dim": [16, 16, 32], "depth": [1, 1, 1], "dim_head": 8},
    "wxformer": {
        "type": "wxformer",
        "dim": [16, 32, 64, 128],
        "depth": [1, 1, 1, 1],
        "dim_head": 8,
        "decoder": "pixel_shuffle",
        "global_window_size": [4, 4, 2, 1],
        "local_window_size": [4, 4, 2, 1],
        "padding": {"mode": "earth", "lat": "auto", "lon": "auto"},
    },
}
NOISE: dict[str, dict[str, Any]] = {
    "global": {"kind": "global", "channels": 4, "memory": ["0h", "24h"]},
    "cell": {"kind": "cell", "channels": 2},
    "spherical": {"kind": "spherical", "channels": 2, "lengths": [2000, 5000]},
    "dropout": {"kind": "dropout", "rate": 0.1},
}
# Layers that get low-rank adapters.
LORA_TARGETS = {
    "graph": ["layers.*.contract"],
    "sfno": ["*.expand"],
    "swin": ["*.to_qkv"],
    "unet": ["*.to_qkv"],
    "wxformer": ["*.to_qkv"],
}
# The layers that read the input, which a test freezes.
FIRST_LAYERS = {
    "graph": "encoder",
    "sfno": "encoder",
    "swin": "embedding",
    "unet": "stem",
    "wxformer": "stages.0",
}
# Networks that support divided fields, and a part of the error message of the others.
DIVIDED = ("swin", "unet", "wxformer")
REFUSAL = "does not declare how its fields are divided"
