"""Sizes of the networks that several benchmarks measure, as arguments of their constructors."""

from __future__ import annotations

# Arguments that have the same names here and in the reference implementation.
_STARTER_SIZES = {
    "image_height": 181, "image_width": 360, "dim": [32, 64, 128, 256], "depth": [2, 2, 8, 2], "dim_head": 32,
    "global_window_size": [8, 4, 2, 1], "local_window_size": 4,
}  # fmt: skip
# The network of the 1 degree starter config, here and in the reference implementation.
STARTER = {
    **_STARTER_SIZES, "in_channels": 80, "out_channels": 84, "decoder": "pixel_shuffle",
    "padding": {"mode": "mirror", "lat": [37, 38], "lon": [12, 12]},
}  # fmt: skip
REFERENCE_STARTER = {
    **_STARTER_SIZES, "frames": 1, "channels": 4, "levels": 18, "surface_channels": 4, "input_only_channels": 4,
    "output_only_channels": 8, "cross_embed_strides": (2, 2, 2, 2),
    "padding_conf": {"activate": True, "mode": "mirror", "pad_lat": [37, 38], "pad_lon": [12, 12]},
}  # fmt: skip
# A network of the size of NCAR's published 6 h weights.
PUBLISHED = {
    "image_height": 640, "image_width": 1280, "in_channels": 74, "out_channels": 71, "dim": [128, 256, 512, 1024],
    "depth": [2, 2, 8, 2], "dim_head": 32, "global_window_size": [10, 5, 2, 1], "local_window_size": 10,
    "decoder": "transposed", "padding": {"mode": "earth", "lat": [80, 80], "lon": [80, 80], "pole": "published"},
}  # fmt: skip
