"""Layers that the networks share; your network can also import them.

- `SpherePadding` pads fields across the poles and around the globe, and removes the padding again.
- `SphereConv2d` is a convolution of (B, C, H, W) fields that uses `SpherePadding`.
- `CrossScaleEmbedding` reduces the resolution and turns (B, C, H, W) fields into (B, H, W, C) tokens.
- `WindowAttention`, `FeedForward` and `TransformerLayer` map (B, H, W, C) tokens to (B, H, W, C) tokens.
- `UpBlock`, `UpBlockPS`, `SubpixelConv`, `SubpixelHead` and `TransposedHead` double the resolution of (B, C, H, W)
  fields.
- `LayerNorm` and `GroupNorm` may depend on `Conditions`: vectors, such as noise, with the lengths in `ConditionDims`.
  `ConditionalScaleShift` scales and shifts the result of a norm by such a vector.
- `apply_spectral_norm` normalises the weights of a complete network. `advance_power_iterations` must then be called
  once per optimizer step; the trainer of this package calls it.

Layers do not depend on ranks, configs or a particular network. Layers that can be sharded or split over
tensor-parallel ranks declare this in the class attributes `_fsdp2_shard` and `_tp_plan`.
"""

from credit.models.layers.cross_scale_embedding import CrossScaleEmbedding
from credit.models.layers.norm import ConditionalScaleShift, ConditionDims, Conditions, GroupNorm, LayerNorm
from credit.models.layers.padding import NO_PADDING, SpherePadding, auto_padding, window_multiple
from credit.models.layers.spectral_norm import advance_power_iterations, apply_spectral_norm
from credit.models.layers.sphere_conv import SphereConv2d
from credit.models.layers.transformer_layer import FeedForward, TransformerLayer
from credit.models.layers.up_sampling import (
    Refinement,
    SubpixelConv,
    SubpixelHead,
    TransposedHead,
    UpBlock,
    UpBlockPS,
)
from credit.models.layers.window_attention import WindowAttention

__all__ = [
    "NO_PADDING",
    "ConditionDims",
    "ConditionalScaleShift",
    "Conditions",
    "CrossScaleEmbedding",
    "FeedForward",
    "GroupNorm",
    "LayerNorm",
    "Refinement",
    "SphereConv2d",
    "SpherePadding",
    "SubpixelConv",
    "SubpixelHead",
    "TransformerLayer",
    "TransposedHead",
    "UpBlock",
    "UpBlockPS",
    "WindowAttention",
    "advance_power_iterations",
    "apply_spectral_norm",
    "auto_padding",
    "window_multiple",
]
