"""Parts of the ``model`` section that the networks of miles-credit share: padding, frames and numbers of channels."""

from __future__ import annotations

from collections.abc import Sequence

from credit.interop.miles_credit.draft import ConfigDraft
from credit.interop.miles_credit.reading import MilesConfig, to_number
from credit.interop.miles_credit.report import ConversionReport


def compare_input_frames(config: MilesConfig, default: int) -> None:
    """Compare the numbers of input frames of the network and the data; record a difference as refused.

    Args:
        config: config to convert.
        default: default of miles-credit for `model.frames`.
    """
    frames = config.get_integer("model.frames", default)
    history_len = config.get_integer("data.history_len", 1)
    if frames != history_len:
        config.report.record_refused("model.frames", f"`{frames}` differs from `data.history_len` ({history_len})")


def convert_padding(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write `model.padding`: the numbers of cells of the input grid that are added around the grid."""
    report = config.report
    if config.peek_section("model.padding_conf"):
        if not config.get_flag("model.padding_conf.activate", False):
            draft.set("model.padding", None)
            return
        mode = config.get("model.padding_conf.mode", "earth")
        lat = _read_pair(config, "model.padding_conf.pad_lat", report)
        lon = _read_pair(config, "model.padding_conf.pad_lon", report)
    elif config.generation == 1 and config.has("model.pad_lat") and config.has("model.pad_lon"):
        # The parser of generation 1 converts the two older keys to mirror padding.
        mode = "mirror"
        lat = _read_pair(config, "model.pad_lat", report)
        lon = _read_pair(config, "model.pad_lon", report)
        report.record_derived("model.padding_conf.mode", "hidden default `mirror` of `pad_lat` and `pad_lon`")
    else:
        report.record_derived("model.padding_conf", "hidden default: no padding, `model.padding: null`")
        draft.set("model.padding", None)
        return
    if mode not in ("earth", "mirror"):
        report.record_refused("model.padding_conf.mode", f"`{mode}` is not one of earth, mirror")
        return
    height = config.get_integer("model.image_height", 1)
    width = config.get_integer("model.image_width", 1)
    if height > width:
        # In stores with fields (longitude, latitude), miles-credit pads longitudes as if they were latitudes.
        lat, lon = lon, lat
        report.record_derived(
            "model.image_height",
            f"approximate: rows of the file are longitudes; here, fields are (latitude, longitude), with padding {lat} "
            f"and {lon}",
        )
        report.import_obstacles.append("`model.image_height`: the network was trained with transposed fields")
    if max(*lat, *lon) == 0:
        draft.set("model.padding", None)
        return
    draft.set("model.padding", {"mode": mode, "lat": lat, "lon": lon, "pole": "published"})
    draft.comments["model.padding.pole"] = "as in miles-credit; `exact` is for new models"


def _read_pair(config: MilesConfig, key: str, report: ConversionReport) -> list[int]:
    """Return the numbers of cells that are added on the two sides of the grid; a single number applies to both sides.

    If the key is missing, the number is 40, the default of miles-credit.
    """
    value = config.get(key, 40)
    if not isinstance(value, Sequence) or isinstance(value, str):
        value = [value, value]
    cells = []
    for item in value:
        number = to_number(item)
        if number is None or number < 0 or number != int(number):
            report.record_refused(key, f"`{value}`: numbers of cells must be whole numbers of at least 0")
            return [0, 0]
        cells.append(int(number))
    if len(cells) != 2:
        report.record_refused(key, f"`{value}`: write two numbers")
        return [0, 0]
    return cells


def compare_channel_counts(config: MilesConfig, draft: ConfigDraft) -> None:
    """Compare the numbers of channels in the original config with those of the variables in the draft.

    A difference is recorded in the report, because published weights can then not be imported.
    """
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
            config.report.record_derived(
                key, f"differs from the data: the network gets {expected}, but the file has {stated}"
            )
            config.report.import_obstacles.append(f"`{key}` is {stated}, but the data have {expected}")
