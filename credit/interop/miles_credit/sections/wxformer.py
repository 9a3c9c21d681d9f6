"""Conversion of the ``model`` section of a WXFormer.

Two classes of miles-credit have this architecture: `crossformer` has the decoder with transposed convolutions,
`wxformer` the one with pixel shuffling. Both ignore keys that they do not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from credit.interop.miles_credit.draft import ConfigDraft
from credit.interop.miles_credit.reading import MilesConfig, to_number
from credit.interop.miles_credit.report import ConversionReport

# Key -> default of both classes, where the file does not have the key. Some differ from the defaults of this package.
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
# Keys that may have one value for all four stages where this package has a list.
_PER_STAGE_KEYS = ("dim", "depth", "global_window_size", "cross_embed_strides")
# Default of `frames` in both classes.
_HIDDEN_FRAMES = 2


def convert_crossformer(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write the ``model`` section of a network of the class `crossformer`."""
    if config.get_flag("model.upsample_v_conv", False):
        config.report.refuse(
            "model.upsample_v_conv",
            "`true`: bilinear up-sampling with a convolution has no counterpart; the decoders of this package are "
            "`pixel_shuffle` and `transposed`",
        )
    if config.get_flag("model.upsample_with_ps", False):
        config.report.derive("model.upsample_with_ps", "`crossformer` does not read it: `model.decoder: transposed`")
    _convert(config, draft, "transposed")


def convert_wxformer(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write the ``model`` section of a network of the class `wxformer`."""
    if not config.get_flag("model.upsample_with_ps", True):
        config.report.derive(
            "model.upsample_with_ps",
            "`false` has no effect in miles-credit 2026.2: `model.decoder: pixel_shuffle`. Weights of earlier versions "
            "need `transposed`",
        )
    if config.get_flag("model.upsample_v_conv", False):
        config.report.derive("model.upsample_v_conv", "`wxformer` does not read it: `model.decoder: pixel_shuffle`")
    _convert(config, draft, "pixel_shuffle")


def _convert(config: MilesConfig, draft: ConfigDraft, decoder: str) -> None:
    """Write the ``model`` section.

    Args:
        config: the config to convert.
        draft: receives the section.
        decoder: value of `model.decoder`.
    """
    draft.set("model.type", "wxformer")
    draft.set("model.residual", False, "the network of miles-credit predicts the state, not its change")
    for name, default in _HIDDEN_DEFAULTS.items():
        _convert_value(config, draft, name, default)
    draft.set("model.decoder", decoder, f"that of `{config.get('model.type')}`")
    _convert_padding(config, draft)
    draft.set("model.position_bias_index", "published", "the lookup of miles-credit")

    # The network of this package gets the grid and the channels from the data.
    frames = config.get_integer("model.frames", _HIDDEN_FRAMES)
    history_len = config.get_integer("data.history_len", 1)
    if frames != history_len:
        config.report.refuse("model.frames", f"`{frames}` differs from `data.history_len` ({history_len})")
    _compare_counts(config, draft)


def _convert_value(config: MilesConfig, draft: ConfigDraft, name: str, default: Any) -> None:
    """Convert one key of the same name in both packages; write the hidden default if it is missing."""
    key = f"model.{name}"
    value = config.get(key)
    if value is None:
        draft.set(key, default)
        config.report.derive(key, f"hidden default `{default}`")
        return
    number = to_number(value)
    if name in _PER_STAGE_KEYS and number is not None:
        value = [int(number)] * 4
        config.report.derive(key, f"the same value in all stages: `{value}`")
    elif isinstance(default, float):
        value = config.get_number(key, default)
    elif isinstance(default, bool):
        value = bool(value)
    draft.set(key, value)


def _convert_padding(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write `model.padding`: the cells that are added around the grid, in cells of the input."""
    report = config.report
    if config.section("model.padding_conf"):
        if not config.get_flag("model.padding_conf.activate", False):
            draft.set("model.padding", None)
            return
        mode = config.get("model.padding_conf.mode", "earth")
        lat = _read_pair(config, "model.padding_conf.pad_lat", report)
        lon = _read_pair(config, "model.padding_conf.pad_lon", report)
    elif config.generation == 1 and config.has("model.pad_lat") and config.has("model.pad_lon"):
        # The parser of generation 1 turns the two older keys into mirror padding.
        mode = "mirror"
        lat = _read_pair(config, "model.pad_lat", report)
        lon = _read_pair(config, "model.pad_lon", report)
        report.derive("model.padding_conf.mode", "hidden default `mirror` of `pad_lat` and `pad_lon`")
    else:
        report.derive("model.padding_conf", "hidden default: no padding, `model.padding: null`")
        draft.set("model.padding", None)
        return
    if mode not in ("earth", "mirror"):
        report.refuse("model.padding_conf.mode", f"`{mode}` is not one of earth, mirror")
        return
    height = config.get_integer("model.image_height", 1)
    width = config.get_integer("model.image_width", 1)
    if height > width:
        # In stores with fields (longitude, latitude), miles-credit pads longitudes as if they were latitudes.
        lat, lon = lon, lat
        report.derive(
            "model.image_height",
            f"approximate: rows of the file are longitudes; here fields are (latitude, longitude), with padding {lat} "
            f"and {lon}",
        )
        report.import_obstacles.append("`model.image_height`: the network was trained with transposed fields")
    if max(*lat, *lon) == 0:
        draft.set("model.padding", None)
        return
    draft.set("model.padding", {"mode": mode, "lat": lat, "lon": lon, "pole": "published"})
    draft.comments["model.padding.pole"] = "as in miles-credit; `exact` is for new models"


def _read_pair(config: MilesConfig, key: str, report: ConversionReport) -> list[int]:
    """Return the numbers of cells on both sides of the grid; a single number is that of both sides.

    The hidden default of the padding is 40 cells.
    """
    value = config.get(key, 40)
    if not isinstance(value, Sequence) or isinstance(value, str):
        value = [value, value]
    cells = []
    for item in value:
        number = to_number(item)
        if number is None or number < 0 or number != int(number):
            report.refuse(key, f"`{value}`: cells must be whole numbers from 0")
            return [0, 0]
        cells.append(int(number))
    if len(cells) != 2:
        report.refuse(key, f"`{value}`: two numbers are needed")
        return [0, 0]
    return cells


def _compare_counts(config: MilesConfig, draft: ConfigDraft) -> None:
    """Compare the numbers of channels that the file states with those of the variables of the draft."""
    variables = draft.values.get("data", {}).get("variables", {})

    num_levels = len(draft.values.get("data", {}).get("levels", []))

    def count(group: str) -> int:
        """Return the number of channels of a group."""
        members = variables.get(group, {})
        return len(members.get("vars_3D", [])) * num_levels + len(members.get("vars_2D", []))

    prognostic = variables.get("prognostic", {})
    expected_counts = {
        "model.channels": len(prognostic.get("vars_3D", [])),
        "model.surface_channels": len(prognostic.get("vars_2D", [])),
        "model.input_only_channels": count("dynamic_forcing") + count("static"),
        "model.output_only_channels": count("diagnostic"),
        "model.levels": num_levels,
    }
    for key, expected in expected_counts.items():
        stated = config.get_integer(key, expected)
        if stated != expected:
            config.report.derive(key, f"differs from the data: the network gets {expected}, the file says {stated}")
            config.report.import_obstacles.append(f"`{key}` is {stated}, but the data have {expected}")
