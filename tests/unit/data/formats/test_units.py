"""Tests of unit conversion: known values, reading, packing, the training store, and refused units."""

from __future__ import annotations

import itertools
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from credit.data.formats.units import _COMMON_UNITS, Conversion, find_conversion, is_same_unit, normalise_units
from credit.data.reader import open_reader
from credit.data.sources.source_reader import open_sources
from credit.data.store.preprocess import write_training_store
from credit.errors import ConfigError, DataError
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

H, W = 8, 16
HOURS = np.arange(40) * 6
IN_KELVIN = {"t2m": {"units": "K"}}


@pytest.mark.parametrize(
    ("source_units", "target_units", "value", "expected"),
    [
        ("degC", "K", 20.0, 293.15),
        ("C", "K", -273.15, 0.0),
        ("degF", "degC", 212.0, 100.0),
        ("hPa", "Pa", 1013.25, 101325.0),
        ("mb", "hPa", 1000.0, 1000.0),
        ("Pa", "hPa", 50000.0, 500.0),
        ("m", "mm", 0.004, 4.0),
        ("m of water equivalent", "mm", 0.004, 4.0),
        ("gpm", "m", 5500.0, 5500.0),
        ("gpdm", "gpm", 550.0, 5500.0),
        ("kg kg**-1", "g/kg", 0.007, 7.0),
        ("kg m-2 s-1", "kg m-2 day-1", 1.0, 86400.0),
        ("knots", "m s-1", 3600.0, 1852.0),
        ("%", "(0 - 1)", 30.0, 0.3),
        ("m**2 s**-2", "J/kg", 54000.0, 54000.0),
    ],
)
def test_known_conversions(source_units: str, target_units: str, value: float, expected: float) -> None:
    conversion = find_conversion(source_units, target_units, "x", "a.nc") or Conversion(1.0, 0.0)
    converted = conversion.apply(np.array([value, np.nan], np.float32))
    assert converted.dtype == np.float32
    assert np.isnan(converted[1])
    assert converted[0] == pytest.approx(expected, rel=1e-6, abs=1e-4)


@pytest.mark.parametrize("units", ["K", "kelvin", "Kelvin"])
def test_another_spelling_needs_no_conversion(units: str) -> None:
    assert find_conversion(units, "K", "t", "a.nc") is None


@pytest.mark.parametrize(
    ("source_units", "target_units", "kind", "message"),
    [
        ("m2 s-2", "m", DataError, 'a.nc: z is in "m2 s-2".*"m".*data.variable_options.z.units.*different quantities'),
        ("kg m-2", "mm", DataError, "different quantities"),
        ("furlong K", "K", DataError, "different quantities"),
        ("bananas", "K", DataError, '"bananas" is not a unit'),
        ("(0 - 1", "1", DataError, "is not a unit"),
        ("m", "bananas", ConfigError, 'data.variable_options.z.units: "bananas" is not a unit'),
        ("", "K", DataError, 'a.nc: z has no units.*"K"'),
        (" ", "K", DataError, "z has no units"),
        ("lg(re 1 mW)", "W", DataError, "not proportional"),
    ],
)
def test_impossible_conversions_are_refused(
    source_units: str, target_units: str, kind: type, message: str, capfd
) -> None:
    with pytest.raises(kind, match=message):
        find_conversion(source_units, target_units, "z", "a.nc")
    assert capfd.readouterr().err == ""


def test_common_units_are_converted_like_cf_units() -> None:
    cf_units = pytest.importorskip("cf_units")
    num_conversions = 0
    for source, target in itertools.permutations(_COMMON_UNITS, 2):
        if _COMMON_UNITS[source][0] == _COMMON_UNITS[target][0]:
            at_0, at_1 = (cf_units.Unit(source).convert(value, cf_units.Unit(target)) for value in (0.0, 1.0))
            conversion = find_conversion(source, target, "t", "a.nc")
            assert (conversion.scale, conversion.offset) == (at_1 - at_0, at_0)
            num_conversions += 1
    assert num_conversions >= 10


def test_missing_cf_units_is_reported_only_for_uncommon_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cf_units", None)
    assert find_conversion("K", "K", "t", "a.nc") is None
    assert find_conversion("mb", "Pa", "msl", "a.nc").apply(np.array([1000.0])) == 100_000
    assert find_conversion("Celsius", "kelvin", "t", "a.nc").apply(np.array([0.0])) == np.float32(273.15)
    # docs/data.md describes which spellings need cf-units.
    assert is_same_unit("m2 s-2", "J kg-1")
    assert not is_same_unit("m2 s-2", "N m kg-1")
    with pytest.raises(
        ConfigError, match=r"a.nc: t is in .*data.variable_options.t.units.*cf-units.*pip install .*\[units\]"
    ):
        find_conversion("degF", "K", "t", "a.nc")


def test_files_in_different_units_are_converted(tmp_path: Path) -> None:
    t = random_fields(8, H, W)
    kelvin_file = write_file(tmp_path / "a.nc", {"t2m": t[:4]})
    celsius = {"t2m": {"units": "degC", "standard_name": "air_temperature"}}
    celsius_file = write_file(tmp_path / "b.nc", {"t2m": t[4:] - 273.15}, hours=[24, 30, 36, 42], attributes=celsius)
    with pytest.raises(DataError, match=r"b\.nc; set data\.variable_options\.t2m\.units"):
        open_sources(make_config([kelvin_file, celsius_file], p2=["t2m"]))
    reader = open_sources(make_config([kelvin_file, celsius_file], p2=["t2m"], variable_options=IN_KELVIN))
    np.testing.assert_array_equal(reader.read(1)[0], t[1])
    np.testing.assert_allclose(reader.read(6)[0], t[6], atol=5e-5)
    assert reader.attributes["t2m"]["units"] == "K"
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(reader)).read(6), reader.read(6))
    no_units = write_file(tmp_path / "c.nc", {"t2m": t[:4]}, attributes={"t2m": {"units": ""}})
    with pytest.raises(DataError, match=r"c\.nc: t2m has no units"):
        open_sources(make_config(no_units, p2=["t2m"], variable_options=IN_KELVIN))


@pytest.mark.parametrize(
    ("first_units", "second_units"),
    [
        ("m2 s-2", "m**2 s**-2"), ("m2 s-2", "m^2/s^2"), ("m2 s-2", "J kg**-1"), ("W m**-2", "W/m2"), ("s-1", "1/s"),
        ("kg m-2 s-1", "kg/m2/s"), ("m s-1", "m.s-1"), ("K", "kelvin"), ("(0 - 1)", "1"),
    ],
)  # fmt: skip
def test_two_spellings_of_a_unit_are_equal(tmp_path: Path, first_units: str, second_units: str) -> None:
    values = random_fields(8, H, W)
    paths = [
        write_file(tmp_path / f"{number}.nc", {"x": values[4 * number :][:4]}, 24 * number + np.arange(0, 24, 6),
                   attributes={"x": {"units": units}})
        for number, units in enumerate((first_units, second_units))
    ]  # fmt: skip
    reader = open_sources(make_config(paths, p2=["x"]))
    assert len(reader.times) == 8
    assert reader.attributes["x"]["units"] == first_units
    assert find_conversion(first_units, second_units, "x", "a.nc") is None


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ("1", "1"), ("1/s", "s-1"), ("1 hPa", "hPa"), ("m2 s-2", "m2 s-2"), ("m**2 s**-2", "m2 s-2"),
        ("m^2/s^2", "m2 s-2"), ("m2*s-2", "m2 s-2"), ("kg/m2/s", "kg m-2 s-1"), ("J kg**-1", "m2 s-2"),
        ("1e-3 kg", "1e-3 kg"), ("10 hPa", "10 hPa"), ("1000 hPa", "1000 hPa"), ("10**5 Pa", "10**5 Pa"),
        ("1.1 m", "1.1 m"), ("100 m", "100 m"), ("(0 - 1)", "1"), ("%", "%"),
    ],
)  # fmt: skip
def test_normalised_spelling_keeps_numbers(units: str, expected: str) -> None:
    assert normalise_units(units) == expected


def test_unusual_spellings_are_compared_by_udunits() -> None:
    assert is_same_unit("m2 s-2", "N m kg-1")


@pytest.mark.parametrize(
    ("first_units", "second_units", "scale"),
    [
        ("1000 hPa", "100 hPa", 10.0), ("100 m", "1000 m", 0.1), ("10^5 Pa", "105 Pa", 1e5 / 105),
        ("10 hPa", "hPa", 10.0), ("1.1 m", "m", 1.1), ("1e-3 kg", "kg", 1e-3), ("10**5 Pa", "hPa", 1e3),
    ],
)  # fmt: skip
def test_units_that_differ_by_a_number_are_converted(first_units: str, second_units: str, scale: float) -> None:
    assert not is_same_unit(first_units, second_units)
    assert find_conversion(first_units, second_units, "x", "a.nc").scale == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize(
    ("first_units", "second_units"), [("m2 s-2", "m2 s-1"), ("W/m2", "W m2"), ("K", "degC"), ("10-6", "1e-6")]
)
def test_different_units_have_different_spellings(first_units: str, second_units: str) -> None:
    assert normalise_units(first_units) != normalise_units(second_units)


def test_packing_steps_are_converted(tmp_path: Path) -> None:
    pressure = np.round(random_fields(4, H, W) * 2) / 2
    options = {"attributes": {"sp": {"units": "hPa"}}, "packed": {"sp": 0.5}}
    path = write_file(tmp_path / "a.nc", {"sp": pressure}, **options)
    reader = open_sources(make_config(path, p2=["sp"], variable_options={"sp": {"units": "Pa"}}))
    assert reader.packing_steps == {"sp": 50.0}
    np.testing.assert_array_equal(reader.read(2)[0], pressure[2] * 100)


def test_conversion_of_static_fields_masks_and_checked_values(tmp_path: Path) -> None:
    t = random_fields(4, H, W)
    height = random_fields(H, W)
    t[:, 2, 3] = np.nan
    units = {"t2m": {"units": "degC"}, "height": {"units": "km"}}
    path = write_file(tmp_path / "a.nc", {"t2m": t - 273.15, "height": height}, attributes=units)
    fields = {"t2m": {"units": "K", "missing": "fill_mean"}, "height": {"units": "m"}}
    reader = open_sources(make_config(path, p2=["t2m"], static=["height"], variable_options=fields))
    np.testing.assert_allclose(reader.static()[0], 1000 * height, rtol=1e-6)
    assert reader.masks["t2m"].sum() == 1
    np.testing.assert_allclose(reader.read(0)[0], t[0], atol=1e-3)
    # Values in Kelvin with the units degC are far too warm.
    file_in_kelvin = write_file(tmp_path / "b.nc", {"t2m": t, "height": height}, attributes=units)
    with pytest.raises(DataError, match="b.nc: t2m at .* 127 of 128 values are outside the limits of temperature"):
        open_sources(make_config(file_in_kelvin, p2=["t2m"], static=["height"], variable_options=fields))


def test_a_store_in_other_units_is_refused(tmp_path: Path) -> None:
    t = random_fields(40, H, W)
    path = write_file(tmp_path / "a.nc", {"t2m": t - 273.15}, HOURS, attributes={"t2m": {"units": "degC"}})
    options = {"p2": ["t2m"], "store": str(tmp_path / "store.zarr")}
    conf = make_config(path, variable_options=IN_KELVIN, **options)
    write_training_store(conf)
    store_reader = open_reader(conf)
    assert store_reader.attributes["t2m"]["units"] == "K"
    np.testing.assert_allclose(store_reader.read(3)[0], t[3], atol=5e-5)
    assert store_reader.statistics.mean[0] == pytest.approx(float(t[:16].mean()), abs=1e-3)
    with pytest.raises(DataError, match="data.variable_options.t2m.units: K in the store, None in the config"):
        open_reader(make_config(path, **options))


@pytest.mark.parametrize("fields", [{"sin_latitude": {"units": "1"}}, {"t2m": {"units": ""}}, {"t2m": {"units": 1}}])
def test_settings_without_meaning_are_refused(fields: dict) -> None:
    with pytest.raises(ValidationError, match="units"):
        make_config("a.nc", p2=["t2m"], static=["sin_latitude"], variable_options=fields)
