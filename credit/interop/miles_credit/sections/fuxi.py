"""Conversion of the ``model`` section of a FuXi to the network `swin`, which computes the same function."""

from __future__ import annotations

from typing import Any

from credit.interop.miles_credit.draft import ConfigDraft
from credit.interop.miles_credit.keys.row import Disposition
from credit.interop.miles_credit.reading import MilesConfig
from credit.interop.miles_credit.sections.network_parts import (
    compare_channel_counts,
    compare_input_frames,
    convert_padding,
)

# Key -> (key of this package, default of the class of miles-credit if the file does not have the key).
KEYS: dict[str, tuple[str, Any]] = {
    "dim": ("dim", 1536),
    "depth": ("depth", 48),
    "num_heads": ("heads", 8),
    "num_groups": ("num_groups", 32),
    "window_size": ("window_size", 7),
    "proj_drop": ("ff_dropout", 0.0),
    "attn_drop": ("attn_dropout", 0.0),
    "use_spectral_norm": ("use_spectral_norm", True),
    "interp": ("interp", True),
}
# Defaults of the class for the edges of a patch and for the number of frames.
_HIDDEN_PATCH = 16
_HIDDEN_FRAMES = 2


def convert_fuxi(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write the ``model`` section of a network of the class `fuxi`."""
    draft.set("model.type", "swin", "FuXi")
    config.report.add(Disposition.MAPPED, "model.type", "`model.type: swin`")
    draft.set("model.residual", False, "the network of miles-credit predicts the state, not its change")
    draft.set("model.edges", "published", "as in miles-credit; `sphere` is for new models")
    for name, (our_name, default) in KEYS.items():
        _convert_value(config, draft, name, our_name, default)
    _convert_patches(config, draft)
    convert_padding(config, draft)
    if config.get_number("model.proj_drop", 0.0):
        config.report.record_derived(
            "model.proj_drop",
            "approximate: in miles-credit, it also drops the outputs of attention and of the MLP; here, "
            "`model.ff_dropout` drops only hidden channels",
        )
    drop_path = config.get_number("model.drop_path", 0.0)
    if drop_path:
        config.report.record_derived(
            "model.drop_path", f"approximate: stochastic depth ({drop_path}) has no counterpart"
        )
    if config.get_flag("model.use_noise", False):
        config.report.record_refused("model.use_noise", "`true`: this noise has no counterpart; use `model.noise`")
    compare_input_frames(config, _HIDDEN_FRAMES)
    compare_channel_counts(config, draft)


def _convert_value(config: MilesConfig, draft: ConfigDraft, name: str, our_name: str, default: Any) -> None:
    """Convert a key of the ``model`` section; if the key is missing, write miles-credit's default.

    Args:
        config: config to convert.
        draft: draft to which the value is added.
        name: name of the key in the section.
        our_name: name of the key of this package.
        default: default of miles-credit, which also determines the type of the value.
    """
    key = f"model.{name}"
    if config.get(key) is None:
        draft.set(f"model.{our_name}", default)
        config.report.record_derived(key, f"hidden default `{default}`: `model.{our_name}`")
        return
    if isinstance(default, bool):
        value: Any = config.get_flag(key, default)
    elif isinstance(default, int):
        value = config.get_integer(key, default)
    else:
        value = config.get_number(key, default)
    draft.set(f"model.{our_name}", value)
    config.report.add(Disposition.MAPPED, key, f"`model.{our_name}`")


def _convert_patches(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write `model.patch_size`; record patches as refused if they are not square or do not contain all frames."""
    height = config.get_integer("model.patch_height", _HIDDEN_PATCH)
    width = config.get_integer("model.patch_width", _HIDDEN_PATCH)
    if height != width:
        config.report.record_refused("model.patch_width", f"`{width}` differs from `model.patch_height` ({height})")
    for name in ("patch_height", "patch_width"):
        key = f"model.{name}"
        if config.has(key):
            config.report.add(Disposition.MAPPED, key, "`model.patch_size`")
        else:
            config.report.record_derived(key, f"hidden default `{_HIDDEN_PATCH}`: `model.patch_size`")
    draft.set("model.patch_size", height)
    frames = config.get_integer("model.frames", _HIDDEN_FRAMES)
    frame_patch = config.get_integer("model.frame_patch_size", _HIDDEN_FRAMES)
    if frame_patch != frames:
        config.report.record_refused(
            "model.frame_patch_size", f"`{frame_patch}` differs from `model.frames` ({frames})"
        )
    else:
        config.report.record_derived("model.frame_patch_size", "a patch contains all frames")
