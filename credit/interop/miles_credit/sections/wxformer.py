"""Conversion of the ``model`` section of a WXFormer.

Two classes of miles-credit have this architecture. The decoder of `crossformer` uses transposed convolutions, and the
decoder of `wxformer` uses pixel shuffling. Both classes ignore unknown keys.
"""

from __future__ import annotations

from typing import Any

from credit.interop.miles_credit.draft import ConfigDraft
from credit.interop.miles_credit.reading import MilesConfig, to_number
from credit.interop.miles_credit.sections.network_parts import (
    compare_channel_counts,
    compare_input_frames,
    convert_padding,
)

# Key -> default of both classes if the file does not have the key. Some of them differ from the defaults here.
_HIDDEN_DEFAULTS: dict[str, Any] = {
    "dim": [64, 128, 256, 512],
    "depth": [2, 2, 8, 2],
    "dim_head": 32,
    "global_window_size": [5, 5, 2, 1],
    "local_window_size": 10,
    "cross_embed_kernel_sizes": [[4, 8, 16, 32], [2, 4], [2, 4], [2, 4]],
    "cross_embed_strides": [4, 2, 2, 2],
    "attn_dropout": 0.0,
    "ff_dropout": 0.0,
    "use_spectral_norm": True,
    "interp": True,
}
# Keys that may have a single value for all four stages; in this package, they have a list.
_PER_STAGE_KEYS = ("dim", "depth", "global_window_size", "cross_embed_strides")
# Default of `frames` in both classes.
_HIDDEN_FRAMES = 2


def convert_crossformer(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write the ``model`` section of a network of the class `crossformer`."""
    if config.get_flag("model.upsample_v_conv", False):
        config.report.record_refused(
            "model.upsample_v_conv",
            "`true`: bilinear up-sampling with a convolution has no counterpart; the decoders of this package are "
            "`pixel_shuffle` and `transposed`",
        )
    if config.get_flag("model.upsample_with_ps", False):
        config.report.record_derived(
            "model.upsample_with_ps", "`crossformer` does not read this key: `model.decoder: transposed`"
        )
    _convert(config, draft, "transposed")


def convert_wxformer(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write the ``model`` section of a network of the class `wxformer`."""
    if not config.get_flag("model.upsample_with_ps", True):
        config.report.record_derived(
            "model.upsample_with_ps",
            "`false` has no effect in miles-credit 2026.2: `model.decoder: pixel_shuffle`. Weights of earlier versions "
            "need `transposed`",
        )
    if config.get_flag("model.upsample_v_conv", False):
        config.report.record_derived(
            "model.upsample_v_conv", "`wxformer` does not read this key: `model.decoder: pixel_shuffle`"
        )
    _convert(config, draft, "pixel_shuffle")


def _convert(config: MilesConfig, draft: ConfigDraft, decoder: str) -> None:
    """Write the ``model`` section of a WXFormer.

    Args:
        config: config to convert.
        draft: draft to which the section is added.
        decoder: value of `model.decoder`.
    """
    draft.set("model.type", "wxformer")
    draft.set("model.residual", False, "the network of miles-credit predicts the state, not its change")
    for name, default in _HIDDEN_DEFAULTS.items():
        _convert_value(config, draft, name, default)
    draft.set("model.decoder", decoder, f"the decoder of `{config.get('model.type')}`")
    convert_padding(config, draft)
    draft.set("model.position_bias_index", "published", "as in miles-credit")

    # In this package, the grid and the channels of the network are derived from the data.
    compare_input_frames(config, _HIDDEN_FRAMES)
    compare_channel_counts(config, draft)


def _convert_value(config: MilesConfig, draft: ConfigDraft, name: str, default: Any) -> None:
    """Convert a key with the same name in both packages; if the key is missing, write miles-credit's default."""
    key = f"model.{name}"
    value = config.get(key)
    if value is None:
        draft.set(key, default)
        config.report.record_derived(key, f"hidden default `{default}`")
        return
    number = to_number(value)
    if name in _PER_STAGE_KEYS and number is not None:
        value = [int(number)] * 4
        config.report.record_derived(key, f"the same value in all stages: `{value}`")
    elif isinstance(default, float):
        value = config.get_number(key, default)
    elif isinstance(default, bool):
        value = bool(value)
    draft.set(key, value)
