"""Tests of the unit checks: implausible units and values are reported, plausible ones are accepted."""

from __future__ import annotations

from pathlib import Path

import netCDF4
import numpy as np
import pytest

from credit.data.formats.unit_checks import (
    build_value_rules,
    convert_range_to_file_units,
    describe_implausible_variables,
    read_file_range,
    require_plausible_units,
)
from credit.data.formats.units import Conversion
from credit.data.sources.source_reader import open_sources
from credit.errors import DataError
from tests.unit.data.files_on_the_fly import make_config, write_file


def describe_problem(name: str, units: str, values: object, level: float | None = None, standard_name: str = "") -> str:
    """Return the message about the units and values of a field, empty if they are plausible."""
    attributes = {"units": units, "standard_name": standard_name}
    try:
        require_plausible_units(name, attributes, "a.nc")
    except DataError as error:
        return str(error)
    rules = build_value_rules(name, attributes, levels=[level])
    implausible = rules.apply(np.asarray(values, dtype=np.float32).reshape(1, 2, -1))[1]
    return "" if implausible is None else rules.describe(implausible)


def values_around(mean: float) -> list[float]:
    """Return four values of this mean, one of them missing."""
    return [mean * 0.99, mean * 1.01, mean, np.nan]


@pytest.mark.parametrize(
    ("name", "units", "mean", "level", "standard_name"),
    [
        ("t", "K", 255.0, 500, ""),
        ("t", "kelvin", 200.0, 50, ""),
        ("t", "K", 1100.0, 1e-5, ""),
        ("t2m", "degC", 14.0, None, ""),
        ("tas", "degrees_Celsius", -40.0, None, "air_temperature"),
        ("msl", "hPa", 1013.0, None, ""),
        ("sp", "Pa", 98000.0, None, ""),
        ("q", "kg/kg", 1e-6, 10, ""),
        ("q", "g kg**-1", 8.0, 1000, ""),
        ("z", "m**2 s**-2", 54000.0, 500, ""),
        ("z", "m2 s-2", 300000.0, 10, ""),
        ("z", "m2 s-2", 900.0, 1000, ""),
        ("z", "m2 s-2", -999.0, 1000, ""),
        ("hgt", "gpm", 5500.0, 500, "geopotential_height"),
        ("u10", "m s-1", -0.3, None, ""),
        ("theta", "K", 1.8e5, None, "air_potential_temperature"),
        ("cape", "J kg-1", 6000.0, None, ""),
        # Fractions, slightly out of range after packing; in other units, without a standard_name.
        ("lsm", "1", 1.0, None, "land_binary_mask"),
        ("lsm", "(0 - 1)", 0.5, None, "land_area_fraction"),
        ("ci", "%", 99.0, None, "sea_ice_area_fraction"),
        ("ci", "K", 50.0, None, "sea_ice_area_fraction"),
        ("ci", "", 50.0, None, "sea_ice_area_fraction"),
        ("lsm", "1", 50.0, None, ""),
        # Unknown units or unknown quantities.
        ("t2m", "furlong", 3.0, None, ""),
        ("tp", "K", 3.0, None, ""),
        ("z", "", 3.0, 500, ""),
        ("n", "m-3", 1e12, None, ""),
    ],
)
def test_plausible_values_are_accepted(
    name: str, units: str, mean: float, level: float | None, standard_name: str
) -> None:
    assert describe_problem(name, units, values_around(mean), level, standard_name) == ""


@pytest.mark.parametrize(
    ("name", "units", "mean", "level", "standard_name"),
    [
        ("t", "K", -20.0, 500, ""),
        ("t2m", "K", 15.0, None, ""),
        ("t", "K", 1100.0, 500, ""),
        ("t2m", "degC", 287.0, None, ""),
        ("msl", "Pa", 1013.0, None, ""),
        ("msl", "hPa", 101300.0, None, ""),
        ("sp", "K", 98000.0, None, ""),
        ("q", "kg kg-1", 5.0, 1000, ""),
        ("clwc", "kg kg-1", -2.0, 1000, ""),
        ("z", "m2 s-2", 5500.0, 500, ""),
        ("hgt", "m", 54000.0, 500, "geopotential_height"),
        ("z", "m2 s-2", -32000.0, 850, ""),
        ("z", "m", 5500.0, 500, ""),
        ("temperature", "Pa", 250.0, 500, "air_temperature"),
        ("n", "m-3", 9.96921e36, None, ""),
        ("lsm", "1", 100.0, None, "land_area_fraction"),
        ("lsm", "(0 - 1)", 100.0, None, "land_binary_mask"),
        ("ci", "1", 1.1, None, "sea_ice_area_fraction"),
        ("ci", "%", -30.0, None, "sea_area_fraction"),
    ],
)
def test_implausible_values_are_reported(
    name: str, units: str, mean: float, level: float | None, standard_name: str
) -> None:
    assert describe_problem(name, units, values_around(mean), level, standard_name) != ""


@pytest.mark.parametrize("fill", [9.96921e36, 1e20, -1e20, 1e15, -999.0, -9999.0, -99.99, -32767.0, 3.4e38])
@pytest.mark.parametrize("others", [[-20.0, 30.0, 12.0], [0.0, 0.0, 0.0], [0.2, 0.4, np.nan], [1e-9, 0.0, 0.0]])
def test_fill_values_are_recognised(fill: float, others: list[float]) -> None:
    message = describe_problem("x", "", [*others, fill])
    assert message.startswith(f"1 of 4 values are {np.float32(fill):.6g}, the first: a fill value")
    assert "data.variable_options.x.valid_range" in message
    assert describe_problem("x", "", [fill] * 4).startswith("4 of 4 values are")


@pytest.mark.parametrize(
    "values",
    [
        # Heights near the ground, rates with heavy tails, values that are mostly zero, counts, packed integers.
        [-1500.0, -999.0, 2400.0, 30.0],
        [-99.0, 60.0, -20.0, 5.0],
        [0.0, 0.0, 0.0, 0.4],
        [0.0, 1e-14, 0.0, 3e-3],
        [1e12, 3e9, 0.0, 1e15 * 1.01],
        [-32767.0, -32766.0, 0.0, 32766.0],
        [0.0, 9999.0, 20000.0, 300.0],
    ],
)
def test_data_that_look_like_fill_values_are_accepted(values: list[float]) -> None:
    assert describe_problem("x", "", values) == ""


def test_fill_value_of_packed_integers_is_recognised() -> None:
    rules = build_value_rules("x", {}, packing=(0.01, 250.0))
    field = np.array([[[280.0, 281.0], [279.0, -32767 * 0.01 + 250.0]]])
    assert rules.apply(field)[1].value == pytest.approx(-77.67)
    assert rules.apply(field[..., :1])[1] is None


@pytest.mark.parametrize("lowest", [-32767, -32768])
@pytest.mark.parametrize(
    "packed",
    [
        # No rain, rain in one cell, the maximum of the file in one cell, rain in two cells.
        [0, 0, 0, 0], [0, 0, 0, 900], [0, 0, 0, 65534], [0, 0, 900, 910],
    ],
)  # fmt: skip
def test_minimum_of_packed_rain_is_data(lowest: int, packed: list[int]) -> None:
    """NCO packs the minimum of a file as -32767. Common Python code packs it as -32768."""
    scale = 0.001
    rules = build_value_rules("tp", {"units": "m"}, packing=(scale, -lowest * scale))
    field = np.array(packed, dtype=np.float32).reshape(1, 2, 2) * scale
    assert rules.apply(field)[1] is None


def test_the_ends_of_a_packed_range_are_data() -> None:
    rules = build_value_rules("x", {}, packing=(0.01, 250.0))
    for values in ([280.0, 280.5, 281.0, 32767 * 0.01 + 250.0], [-32767 * 0.01 + 250.0] * 4):
        assert rules.apply(np.array(values).reshape(1, 2, 2))[1] is None


def test_packed_file_has_only_its_declared_fill_value(tmp_path: Path) -> None:
    """Only the declared fill value is missing. No other integer is treated as a fill value."""
    values = np.full((4, 8, 16), 280.0)
    values[:, 0, :8] = 281.0
    values[1, 2, 3] = -999 * 0.01 + 280.0
    path = write_file(tmp_path / "a.nc", {"x": values}, packed={"x": 0.01})
    fields = open_sources(make_config(path, p2=["x"])).read(1)
    assert fields[0, 2, 3] == pytest.approx(270.01, abs=1e-3)
    with netCDF4.Dataset(path, "a") as file:
        file["x"].set_auto_maskandscale(False)
        file["x"][0, 5, 5] = -32767
    with pytest.raises(DataError, match="missing"):
        open_sources(make_config(path, p2=["x"])).read(0)


def test_each_level_has_its_limits() -> None:
    rules = build_value_rules("z", {"units": "m2 s-2"}, levels=[850, 500, 10])
    fields = np.stack([np.full((2, 2), value, np.float32) for value in (14000, 54000, 300000)])
    assert rules.apply(fields)[1] is None
    implausible = rules.apply(np.stack([fields, fields[[0, 0, 2]]]))[1]
    assert (implausible.index, implausible.level_index) == ((1,), 1)
    assert rules.apply(fields[[0]], slice(1, 2))[1].level_index == 1


@pytest.mark.parametrize(
    ("attributes", "packing", "expected"),
    [
        ({}, None, None),
        ({"valid_range": np.array([0.0, 50.0], np.float32)}, None, (0.0, 50.0)),
        ({"valid_min": 0.0}, None, (0.0, np.inf)),
        ({"valid_max": np.float32(7)}, None, (-np.inf, 7.0)),
        ({"valid_range": np.array([-100, 100], np.int16)}, (0.5, 10.0), (-40.0, 60.0)),
        ({"valid_range": np.array([-100.0, 100.0], np.float32)}, (0.5, 10.0), (-100.0, 100.0)),
        ({"valid_range": np.array([0, -2], np.int16), "_Unsigned": "true"}, (0.5, 10.0), None),
        ({"valid_range": "0, 50"}, None, None),
        ({"valid_range": [1.0, 2.0, 3.0]}, None, None),
    ],
)
def test_range_that_a_file_declares_is_used(attributes: dict, packing: tuple | None, expected: tuple | None) -> None:
    file_range = read_file_range(attributes, packing)
    assert file_range == (expected and pytest.approx(expected, rel=1e-5, abs=1e-3))
    if file_range is not None:
        rules = build_value_rules("x", {"units": "1"}, file_range=file_range)
        assert rules.apply(np.full((1, 2, 2), 2.0))[1] is None
        assert rules.describe(rules.apply(np.full((1, 2, 2), 1e3 if file_range[1] < 1e3 else -1e3))[1]).startswith(
            "4 of 4 values are outside the limits of values in 1 and of the valid range that the file declares"
        )


def test_wide_range_of_the_file_does_not_disable_unit_checks() -> None:
    rules = build_value_rules("t2m", {"units": "K"}, file_range=(-1e30, 1e30))
    assert rules.apply(np.full((1, 2, 2), 15.0))[1] is not None


def test_configured_valid_range_replaces_other_checks() -> None:
    """The range is in units of the run. Values inside are accepted, even fill values. Values outside are missing."""
    valid_range = convert_range_to_file_units([-1000.0, 20.0], Conversion(1.0, -273.15))
    rules = build_value_rules("t", {"units": "K"}, valid_range=valid_range)
    field = np.array([[[280.0, 9e36], [-500.0, np.nan]]], dtype=np.float32)
    values, implausible = rules.apply(field)
    assert implausible is None
    np.testing.assert_array_equal(values, [[[280.0, np.nan], [-500.0, np.nan]]])
    assert field[0, 0, 1] > 1e36, "what is given is not written to"


def test_a_range_of_unsigned_integers_is_not_used(tmp_path: Path) -> None:
    values = np.linspace(200.0, 330.0, 4 * 8 * 16).reshape(4, 8, 16)
    path = write_file(tmp_path / "a.nc", {"x": values}, packed={"x": 0.01})
    with netCDF4.Dataset(path, "a") as file:
        file["x"].setncatts({"_Unsigned": "true", "add_offset": 0.0, "valid_range": np.array([0, -2], np.int16)})
        file["x"].set_auto_maskandscale(False)
        file["x"][:] = np.round(values / 0.01).astype(np.uint16).view(np.int16)
    fields = open_sources(make_config(path, p2=["x"])).read(3)[0]
    np.testing.assert_allclose(fields, values[3], atol=0.006)


def test_configured_valid_range_accepts_units_of_another_quantity(tmp_path: Path) -> None:
    """The file has heights with the name z and no standard_name. The error message recommends a valid_range."""
    heights = np.random.default_rng(0).normal(5500.0, 100.0, (4, 1, 8, 16))
    path = write_file(tmp_path / "a.nc", {"z": heights}, levels=[500.0], attributes={"z": {"units": "gpm"}})
    options = {"p3": ["z"], "levels": [500.0]}
    with pytest.raises(
        DataError, match=r'units are "gpm", but z is a geopotential.*data\.variable_options\.z\.valid_range'
    ):
        open_sources(make_config(path, **options))
    conf = make_config(path, **options, variable_options={"z": {"valid_range": [4000.0, 7000.0]}})
    reader = open_sources(conf)
    np.testing.assert_allclose(reader.read(2)[0], heights[2, 0], rtol=1e-6)
    assert describe_implausible_variables(reader.read(2), reader, conf, "then") == []
