"""Layers that networks share.

A network can import from here all that it needs to run on the sphere:

- `SpherePadding` pads fields across the poles and around the globe, and crops the padding away again.
- `SphereConv2d` is a convolution of (B, C, H, W) fields with this padding.
- `CrossScaleEmbedding` reduces the resolution and turns (B, C, H, W) fields into (B, H, W, C) tokens.
- `WindowAttention`, `FeedForward` and `TransformerLayer` take and return (B, H, W, C) tokens.
- `UpBlock`, `UpBlockPS`, `SubpixelConv`, `SubpixelHead` and `TransposedHead` double the resolution of (B, C, H, W)
  fields.
- `LayerNorm` and `GroupNorm` may depend on `Conditions`: vectors, such as noise, with the lengths in `ConditionDims`.
  `ConditionalScaleShift` computes this dependence.
- `apply_spectral_norm` normalises the weights of a finished network. `advance_power_iterations` must then be called
  once per optimizer step, as the package's trainer does.

Layers do not depend on ranks, configs or a particular network. Layers that are worth sharding declare it in the class
attributes `_fsdp2_shard` and `_tp_plan`.
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
