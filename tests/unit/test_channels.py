"""ChannelMap: the one place that counts."""

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


def _map(**changes: object) -> ChannelMap:
    arguments = {
        "variables": VARIABLES,
        "levels": [850.0, 500.0],
        "levels_by_variable": {"w": [500.0]},
        "masked_variables": ["sst"],
        **changes,
    }
    return ChannelMap.build(**arguments)


def _names(channels) -> list[str]:
    return [channel.name for channel in channels]


def test_order_is_variable_then_level_then_2d() -> None:
    channels = _map()
    assert _names(channels.group("prognostic")) == ["t850", "t500", "u850", "u500", "t2m", "sst"]
    assert _names(channels.output) == [*_names(channels.group("prognostic")), "w500", "tp"]
    assert _names(channels.group("static")) == ["lsm", "sin_latitude", "sst_mask"]
    assert (channels.output[1].variable, channels.output[1].level, channels.output[4].level) == ("t", 500.0, None)


def test_the_input_follows_input_order() -> None:
    published = _map(input_order=["prognostic", "static", "dynamic_forcing"])
    for channels in (_map(), published):
        names = _names(channels.input)
        for group in ("prognostic", "dynamic_forcing", "static"):
            assert names[channels.input_slice(group)] == _names(channels.group(group))
        assert len(names) == 6 + 3 + 3 and "tp" not in names
    assert _names(published.input)[6] == "lsm" and _names(_map().input)[6] == "sic"
    with pytest.raises(KeyError):
        _map().input_slice("diagnostic")


def test_the_outputs_slices_lie_end_to_end() -> None:
    channels = _map()
    assert channels.output_slice("prognostic") == slice(0, 6)
    assert channels.output_slice("diagnostic") == slice(6, 8)


def test_what_is_read_and_what_is_computed() -> None:
    channels = _map()
    assert _names(channels.time_varying_stored) == [*_names(channels.output), "sic"]
    assert _names(channels.static_stored) == ["lsm"]
    sources = {channel.name: channel.source for channel in channels.input}
    assert sources["sin_year"] == sources["sin_latitude"] == "computed"
    assert sources["sst_mask"] == "mask" and sources["sic"] == "data"


def test_a_computed_name_is_computed_only_in_its_own_kind_of_group() -> None:
    variables = {"prognostic": {"vars_3D": [], "vars_2D": ["t2m"]}, "static": {"vars_3D": [], "vars_2D": ["sin_year"]}}
    channels = ChannelMap.build(variables, [])
    assert channels.group("static")[0].source == "data"


def test_a_level_that_looks_like_a_2d_variable() -> None:
    variables = {"prognostic": {"vars_3D": ["u"], "vars_2D": ["u10"]}}
    assert _names(ChannelMap.build(variables, [500.0, 10.0]).output) == ["u500", "u10hPa", "u10"]
    assert _names(ChannelMap.build(variables, [0.5, 10.0], level_units="Pa").output) == ["u0.5", "u10Pa", "u10"]


def test_a_variable_has_one_part() -> None:
    twice = {"prognostic": {"vars_3D": [], "vars_2D": ["tp"]}, "diagnostic": {"vars_3D": [], "vars_2D": ["tp"]}}
    with pytest.raises(ConfigError, match="tp listed twice"):
        ChannelMap.build(twice, [])


def test_round_trip_through_json() -> None:
    channels = _map(input_order=["static", "prognostic", "dynamic_forcing"])
    again = ChannelMap.from_dict(json.loads(json.dumps(channels.to_dict())))
    assert again == channels and again.input == channels.input


def test_differences_are_named() -> None:
    channels = _map()
    assert channels.describe_mismatch(_map()) is None
    assert "prognostic: without none, with t250, u250" in channels.describe_mismatch(_map(levels=[850.0, 500.0, 250.0]))
    assert "in a different order" in channels.describe_mismatch(_map(levels=[500.0, 850.0]))
    other = _map(input_order=["static", "prognostic", "dynamic_forcing"])
    assert channels.describe_mismatch(other).startswith("input order")
    unmasked = _map(masked_variables=[])
    assert channels.describe_mismatch(unmasked) == "static: without sst_mask, with none"
