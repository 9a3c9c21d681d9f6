"""Order, slices and sources of channels in a ChannelMap."""

from __future__ import annotations

import json

import pytest

from credit.channels import ChannelMap
from credit.errors import ConfigError

VARIABLES = {
    "prognostic": {"vars_3D": ["t", "u"], "vars_2D": ["t2m", "sst"]},
    "diagnostic": {"vars_3D": ["w"], "vars_2D": ["tp"]},
    "dynamic_forcing": {"vars_3D": [], "vars_2D": ["sic", "toa_incident_solar_radiation", "sin_year"]},
    "static": {"vars_3D": [], "vars_2D": ["lsm", "sin_latitude"]},
}


def build_channel_map(**changes: object) -> ChannelMap:
    arguments = {
        "variables": VARIABLES,
        "levels": [850.0, 500.0],
        "levels_by_variable": {"w": [500.0]},
        "masked_variables": ["sst"],
        **changes,
    }
    return ChannelMap.build(**arguments)


def channel_names(channels) -> list[str]:
    return [channel.name for channel in channels]


def test_order_is_variable_then_level_then_2d() -> None:
    channels = build_channel_map()
    assert channel_names(channels.group("prognostic")) == ["t850", "t500", "u850", "u500", "t2m", "sst"]
    assert channel_names(channels.output) == [*channel_names(channels.group("prognostic")), "w500", "tp"]
    assert channel_names(channels.group("static")) == ["lsm", "sin_latitude", "sst_mask"]
    assert (channels.output[1].variable, channels.output[1].level, channels.output[4].level) == ("t", 500.0, None)


def test_the_input_follows_input_order() -> None:
    static_before_forcing = build_channel_map(input_order=["prognostic", "static", "dynamic_forcing"])
    for channels in (build_channel_map(), static_before_forcing):
        names = channel_names(channels.input)
        for group in ("prognostic", "dynamic_forcing", "static"):
            assert names[channels.input_slice(group)] == channel_names(channels.group(group))
        assert len(names) == 6 + 3 + 3 and "tp" not in names
    assert (
        channel_names(static_before_forcing.input)[6] == "lsm" and channel_names(build_channel_map().input)[6] == "sic"
    )
    with pytest.raises(KeyError):
        build_channel_map().input_slice("diagnostic")


def test_output_slices_are_adjacent() -> None:
    channels = build_channel_map()
    assert channels.output_slice("prognostic") == slice(0, 6)
    assert channels.output_slice("diagnostic") == slice(6, 8)


def test_stored_and_computed_channels() -> None:
    channels = build_channel_map()
    assert channel_names(channels.time_varying_stored) == [*channel_names(channels.output), "sic"]
    assert channel_names(channels.static_stored) == ["lsm"]
    sources = {channel.name: channel.source for channel in channels.input}
    assert sources["sin_year"] == sources["sin_latitude"] == "computed"
    assert sources["sst_mask"] == "mask" and sources["sic"] == "data"


def test_a_computed_name_is_computed_only_in_its_own_kind_of_group() -> None:
    variables = {"prognostic": {"vars_3D": [], "vars_2D": ["t2m"]}, "static": {"vars_3D": [], "vars_2D": ["sin_year"]}}
    channels = ChannelMap.build(variables, [])
    assert channels.group("static")[0].source == "data"


def test_ambiguous_level_name_gets_units() -> None:
    variables = {"prognostic": {"vars_3D": ["u"], "vars_2D": ["u10"]}}
    assert channel_names(ChannelMap.build(variables, [500.0, 10.0]).output) == ["u500", "u10hPa", "u10"]
    assert channel_names(ChannelMap.build(variables, [0.5, 10.0], level_units="Pa").output) == ["u0.5", "u10Pa", "u10"]


def test_variable_in_two_groups_is_refused() -> None:
    variables = {"prognostic": {"vars_3D": [], "vars_2D": ["tp"]}, "diagnostic": {"vars_3D": [], "vars_2D": ["tp"]}}
    with pytest.raises(ConfigError, match="tp listed twice"):
        ChannelMap.build(variables, [])


def test_round_trip_through_json() -> None:
    channels = build_channel_map(input_order=["static", "prognostic", "dynamic_forcing"])
    restored = ChannelMap.from_dict(json.loads(json.dumps(channels.to_dict())))
    assert restored == channels and restored.input == channels.input


def test_differences_are_named() -> None:
    channels = build_channel_map()
    assert channels.describe_mismatch(build_channel_map()) is None
    assert "prognostic: without none, with t250, u250" in channels.describe_mismatch(
        build_channel_map(levels=[850.0, 500.0, 250.0])
    )
    assert "in a different order" in channels.describe_mismatch(build_channel_map(levels=[500.0, 850.0]))
    reordered = build_channel_map(input_order=["static", "prognostic", "dynamic_forcing"])
    assert channels.describe_mismatch(reordered).startswith("input order")
    unmasked = build_channel_map(masked_variables=[])
    assert channels.describe_mismatch(unmasked) == "static: without sst_mask, with none"
