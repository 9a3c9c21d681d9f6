"""Parameters, levels and grids of GRIB2 messages, compared with the tables and the coordinates of ecCodes."""

from __future__ import annotations

from pathlib import Path

import eccodes
import numpy as np
import pytest

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.sections.inference import InferenceConfig
from credit.config.sections.output import GribConfig, GribParameterConfig
from credit.data.formats.grib.dataset import open_grib
from credit.data.formats.units import normalise_units
from credit.errors import ConfigError
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.io.grib.options import GribOptions
from credit.forecast.io.grib.parameters import PARAMETERS, GribParameter, find_grib_conversion, find_parameter
from credit.forecast.io.schema import OutputFields, OutputOptions
from credit.grid import LatLonGrid
from credit.physics.vertical import HybridLevels
from tests.unit.analytic_reader import make_grid

INITIAL = Calendar().parse("2001-04-01T00:00")
# Only for the centre ECMWF, ecCodes has separate short names for winds at 100 m.
SHORT_NAMES = {"100u": "u", "100v": "v"}


def write_forecast(
    folder: Path,
    variables: dict[str, dict[str, str]],
    levels: list[float] | None = None,
    grid: LatLonGrid | None = None,
    conf: dict | None = None,
    calendar: str = "standard",
    **options: object,
) -> Path:
    """Write a forecast of one lead time of variables with the given attributes, on `levels` or without levels."""
    names = list(variables)
    kinds = {"vars_3D": names, "vars_2D": []} if levels else {"vars_3D": [], "vars_2D": names}
    channels = ChannelMap.build({"prognostic": kinds}, levels or [])
    level_units = options.pop("level_units", "hPa")
    members = options.pop("members", None)
    grid = grid or make_grid(6, 12)
    fields = OutputFields(channels, grid, Calendar(calendar), variables, 360, level_units)
    grib = GribOptions(GribConfig(**(conf or {})), **options)
    initial = Calendar(calendar).parse("2001-04-01T00:00")
    writer = ForecastWriter(folder, fields, [360], [initial], OutputOptions("grib2", grib=grib), members=members)
    values = np.random.default_rng(0).random((1, len(channels.output), *grid.shape)).astype(np.float32)
    return writer.write(initial, values)


def read_keys(path: Path, *keys: str) -> list[tuple]:
    """Return the values of some keys of each message."""
    messages = []
    with open(path, "rb") as file:
        while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
            messages.append(tuple(eccodes.codes_get(handle, key) for key in keys))
            eccodes.codes_release(handle)
    return messages


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.short_name)
def test_eccodes_knows_each_parameter_with_its_units(tmp_path: Path, parameter: GribParameter) -> None:
    """The short names and units of ecCodes are the reference for the table of parameters."""
    attributes = {"units": parameter.sum_units or parameter.units}
    if parameter.sum_units is not None:
        attributes["temporal"] = "accumulate"
    levels = [500.0] if parameter.level_type is None else None
    path = write_forecast(tmp_path, {parameter.short_name: attributes}, levels)
    ((short_name, units, level_type, level),) = read_keys(path, "shortName", "units", "typeOfLevel", "level")
    assert short_name == SHORT_NAMES.get(parameter.short_name, parameter.short_name)
    assert normalise_units(units) == normalise_units(attributes["units"])
    assert level_type == (parameter.level_type or "isobaricInhPa")
    assert level == (500 if levels else parameter.level or 0)


def test_standard_name_and_name_give_the_parameter() -> None:
    def short_name(name: str, standard_name: str = "", has_levels: bool = False) -> str:
        return find_parameter(name, standard_name, has_levels, {}).short_name

    assert short_name("temp", "air_temperature", True) == short_name("T", "", True) == "t"
    assert short_name("2m_temperature", "air_temperature") == short_name("t2m") == "2t"
    assert short_name("anything", "air_pressure_at_mean_sea_level") == "msl"
    assert short_name("10m_u_component_of_wind") == short_name("U10") == "10u"
    assert short_name("geopotential_height", "geopotential_height", True) == "gh"
    with pytest.raises(
        ConfigError, match=r'known for t \(standard_name "air_temperature"\), a variable without levels'
    ):
        short_name("t", "air_temperature")
    configured = {"Z500": GribParameterConfig(parameter="z", level_type="isobaricInhPa", level=500)}
    parameter = find_parameter("Z500", "geopotential", False, configured)
    assert (parameter.numbers, parameter.level_type, parameter.level) == ((0, 3, 4), "isobaricInhPa", 500)


def test_configured_numbers_are_written(tmp_path: Path) -> None:
    conf = {"parameters": {"Z500": {"parameter": "z", "level_type": "isobaricInhPa", "level": 500},
                           "cape": {"discipline": 0, "category": 7, "number": 6, "units": "J kg-1",
                                    "level_type": "entireAtmosphere"}}}  # fmt: skip
    path = write_forecast(tmp_path, {"Z500": {"units": "m2 s-2"}, "cape": {"units": "m2 s-2"}}, conf=conf)
    assert read_keys(path, "shortName", "typeOfLevel", "level") == [
        ("z", "isobaricInhPa", 500),
        ("cape", "entireAtmosphere", 0),
    ]


@pytest.mark.parametrize(
    ("units", "target", "expected"),
    [
        ("m2 s-2", "m", 100.0 / 9.80665),
        ("gpm", "m2 s-2", 980.665),
        ("m", "kg m-2", 1e5),
        ("mm", "kg m-2", 100.0),
        ("m s-1", "kg m-2 s-1", 1e5),
        ("hPa", "Pa", 1e4),
        ("degC", "K", 373.15),
        ("1", "%", 1e4),
    ],
)
def test_units_are_converted(units: str, target: str, expected: float) -> None:
    conversion = find_grib_conversion("x", units, target, GribParameter("x", (0, 0, 0), target))
    assert 100.0 * conversion.scale + conversion.offset == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        ({"foo": {"units": "K"}, "bar": {"units": "K"}}, {}, r"known for foo (.|\n)*known for bar .*; set infer"),
        ({"t2m": {"units": "m"}}, {}, "t2m is in m, but the GRIB2 parameter 2t is in K; correct the units"),
        ({"t2m": {}}, {}, "t2m has no units, but 2t is in K; set data.variable_options.t2m.units"),
        ({"t2m": {"units": "K", "temporal": "accumulate"}}, {}, "t2m is a sum over time, but the GRIB2 parameter 2t"),
        ({"tp": {"units": "mm"}}, {}, "tp is in mm, but the GRIB2 parameter tp is in kg m-2 s-1; .*temporal"),
        ({"t2m": {"units": "K"}}, {"calendar": "noleap"}, "the calendar noleap, but GRIB2 supports only real"),
        ({"t2m": {"units": "K"}}, {"calendar": "360_day"}, "the data have the calendar 360_day"),
        ({"t2m": {"units": "K"}}, {"members": 300}, "inference.ensemble.members: 300: GRIB2 supports at most 254"),
        ({"t2m": {"units": "K"}}, {"conf": {"centre": "xyz"}}, 'inference.grib.centre: "xyz" is not a centre'),
        ({"t2m": {"units": "K"}}, {"conf": {"precision": {"tm2": 1}}}, 'precision: "tm2" is not written; did you'),
        ({"t2m": {"units": "K"}}, {"conf": {"parameters": {"t2m": {"parameter": "t"}}}}, "t2m has no levels; add"),
        ({"t2m": {"units": "K"}}, {"conf": {"parameters": {"t2m": {"parameter": "22t"}}}}, '"22t" is not among'),
        ({"t": {"units": "K"}}, {"levels": [500.0], "conf": {"parameters": {"t": {"parameter": "2t"}}}}, "2t is on"),
        ({"t": {"units": "K"}}, {"levels": [2.5], "level_units": "model_level"}, "level 2.5, .* data.coeff"),
    ],
)  # fmt: skip
def test_impossible_forecasts_are_refused(tmp_path: Path, variables: dict, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_forecast(tmp_path / "forecasts", variables, **options)
    assert not list(tmp_path.rglob("*.grib2*"))


@pytest.mark.parametrize(
    ("grid", "grid_type", "increment"),
    [
        (make_grid(19, 36, poles=True), "regular_ll", 10.0),
        (make_grid(18, 36), "regular_ll", 10.0),
        (make_grid(10, 1024), "regular_ll", None),
        (make_grid(7, 14), "regular_ll", None),
        (LatLonGrid.from_coords(np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(48)[0])), np.arange(96) * 3.75)[0],
         "regular_gg", 3.75),
        (LatLonGrid.from_coords(np.linspace(-80.0, 80.0, 9), np.arange(12) * 30.0 + 15.0)[0], "regular_ll", 30.0),
    ],
)  # fmt: skip
def test_eccodes_computes_the_coordinates_of_the_grid(
    tmp_path: Path, grid: LatLonGrid, grid_type: str, increment: float | None
) -> None:
    path = write_forecast(tmp_path, {"t2m": {"units": "K"}}, grid=grid)
    keys = ("gridType", "iDirectionIncrementGiven", "iScansNegatively", "jScansPositively", "shapeOfTheEarth")
    assert read_keys(path, *keys) == [(grid_type, int(increment is not None), 0, 0, 6)]
    with open(path, "rb") as file:
        handle = eccodes.codes_grib_new_from_file(file)
        lat = eccodes.codes_get_array(handle, "latitudes").reshape(grid.shape)
        lon = eccodes.codes_get_array(handle, "longitudes").reshape(grid.shape)
        if increment is not None:
            assert eccodes.codes_get(handle, "iDirectionIncrementInDegrees") == increment
        eccodes.codes_release(handle)
    np.testing.assert_allclose(lat, np.broadcast_to(grid.lat[:, None], grid.shape), rtol=0, atol=2e-6)
    np.testing.assert_allclose(lon, np.broadcast_to(grid.lon, grid.shape), rtol=0, atol=2e-6)
    # The reader of source files computes the coordinates independently.
    dataset = open_grib(path, {})
    np.testing.assert_allclose(dataset["2t"]["latitude"], grid.lat, atol=2e-6)
    archive = open_forecasts(tmp_path)
    np.testing.assert_allclose(dataset["2t"].values[0], archive.read(INITIAL)[0, 0], rtol=1e-6)


def test_rows_of_other_grids_are_refused(tmp_path: Path) -> None:
    grid = LatLonGrid.from_coords(np.array([80.0, 30.0, 0.0, -30.0, -80.0]), np.arange(12) * 30.0)[0]
    with pytest.raises(
        ConfigError, match="the 5 latitudes of the grid are neither equally spaced nor the latitudes of"
    ):
        write_forecast(tmp_path, {"t2m": {"units": "K"}}, grid=grid)


def test_model_levels_have_numbers_and_coefficients(tmp_path: Path) -> None:
    a = np.array([0.0, 5000.0, 10000.0, 8000.0, 0.0])
    b = np.array([0.0, 0.0, 0.2, 0.6, 1.0])
    edges = [np.stack([half[:-1], half[1:]], axis=1) for half in (a, b)]
    model_levels = HybridLevels(np.arange(1.0, 5.0), edges[0].mean(axis=1), edges[1].mean(axis=1), *edges)
    options = {"levels": [2.0, 4.0], "level_units": "model_level", "model_levels": model_levels}
    path = write_forecast(tmp_path / "coefficients", {"t": {"units": "K"}}, **options)
    assert read_keys(path, "typeOfLevel", "level", "NV") == [("hybrid", 2, 10), ("hybrid", 4, 10)]
    dataset = open_grib(path, {})
    np.testing.assert_allclose(dataset["hyai"], a, rtol=1e-6)
    np.testing.assert_allclose(dataset["hybi"], b, rtol=1e-6)
    assert open_forecasts(tmp_path / "coefficients").channel_names == ["t2", "t4"]
    path = write_forecast(tmp_path / "numbers", {"t": {"units": "K"}}, levels=[2.0, 4.0], level_units="model_level")
    assert read_keys(path, "typeOfLevel", "level", "PVPresent") == [("hybrid", 2, 0), ("hybrid", 4, 0)]


def test_levels_in_pascal_and_above_1_hpa(tmp_path: Path) -> None:
    path = write_forecast(tmp_path / "hPa", {"t": {"units": "K"}}, levels=[0.5, 850.0])
    keys = ("typeOfFirstFixedSurface", "scaledValueOfFirstFixedSurface", "scaleFactorOfFirstFixedSurface")
    assert read_keys(path, *keys) == [("pl", 50, 0), ("pl", 85000, 0)]
    path = write_forecast(tmp_path / "Pa", {"t": {"units": "K"}}, levels=[0.5, 85000.0], level_units="Pa")
    assert read_keys(path, *keys) == [("pl", 5, 1), ("pl", 85000, 0)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "grib2", "keep_bits": 12}, "compression, keep_bits: only for netCDF and zarr"),
        ({"format": "grib2", "compression": 1}, "compression, keep_bits: only for netCDF and zarr"),
        ({"grib": {"bits": 12}}, "grib: only for GRIB2, but format is netcdf"),
        ({"format": "grib2", "layout": "weatherbench2"}, "set format: zarr"),
        ({"format": "grib2", "grib": {"precision": {"z": 0}}}, "z: 0.0 must be above 0"),
        ({"format": "grib2", "grib": {"parameters": {"z": {"category": 3}}}}, "give either parameter, or all of"),
        ({"format": "grib2", "grib": {"parameters": {"z": {"parameter": "z", "level": 5}}}}, "level: needs level_type"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InferenceConfig(**settings)
