"""Tests of sources on hybrid levels: conventions, derived fields, interpolation, the training store and errors."""

from __future__ import annotations

import re
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr
import yaml
from pydantic import ValidationError

from credit.cli.main import main
from credit.config.sections.data import DataConfig
from credit.data.formats.grib.dataset import open_grib
from credit.data.reader import open_reader
from credit.data.sources import derived_variables
from credit.data.sources.levels.hybrid_coefficients import read_levels
from credit.data.sources.source_reader import open_sources
from credit.data.store.preprocess import write_training_store
from credit.data.store.store_settings import config_identity
from credit.errors import DataError
from tests.unit.data import hybrid_on_the_fly as hybrid
from tests.unit.data.files_on_the_fly import make_config, write_file
from tests.unit.data.hybrid_on_the_fly import ATMOSPHERE, DERIVED, GROUND, LEVELS, config, fields_of


@pytest.fixture(scope="module")
def hybrid_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "ml.nc"
    return hybrid.write(path, "ecmwf", fields_of("t", "u", "v", "q", "sp", "zs"))


def interpolate_by_numpy(name: str, time: int, levels: list[float]) -> np.ndarray:
    """Return a variable (levels, H, W) at levels in hPa, with constant values beyond the ends of a column."""
    log_pressure = np.log(hybrid.levels().pressure(ATMOSPHERE["sp"][time].astype(np.float64)))
    interpolated = np.empty((len(levels), hybrid.H, hybrid.W))
    for i, j in np.ndindex(hybrid.H, hybrid.W):
        column = ATMOSPHERE[name][time, :, i, j]
        interpolated[:, i, j] = np.interp(np.log(np.array(levels) * 100.0), log_pressure[:, i, j], column)
    return interpolated


def test_winds_and_humidity_equal_numpy(hybrid_file: Path) -> None:
    reader = open_sources(config(hybrid_file, p3=["u", "q"]))
    for time in (0, 7):
        expected = np.concatenate([interpolate_by_numpy("u", time, LEVELS), interpolate_by_numpy("q", time, LEVELS)])
        np.testing.assert_allclose(reader.read(time), expected, rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal([*reader.read_each([6, 7])], [reader.read(6), reader.read(7)])


@pytest.mark.parametrize("kind", ["cam", "cf", "grib"])
def test_all_conventions_give_the_same_fields(tmp_path: Path, hybrid_file: Path, kind: str) -> None:
    names = {"cam": {"sp": "PS", "zs": "PHIS", "t": "T"}, "grib": {"zs": "z", "sp": "lnsp"}}.get(kind, {})
    pressure = "lnsp" if kind == "grib" else "sp"
    fields = fields_of("t", "q", pressure, "zs", times=3)
    renamed_fields = {names.get(name, name): values for name, values in fields.items()}
    path = hybrid.write(tmp_path / f"ml.{kind}", kind, renamed_fields, hybrid.HOURS[:3])
    if kind == "grib":
        source = {"rename": names | {"sp": "lnsp"}, "format": "grib"}
    else:
        source = {"rename": names, "format": "netcdf"}
    derived = {name: DERIVED[name] for name in ("z", "msl")}
    options = {"p3": ["t", "q", "z"], "p2": ["msl"], "variable_options": derived}
    fields_read = open_sources(config(path, source=source, **options)).read(2)
    expected = open_sources(config(hybrid_file, **options)).read(2)
    for values, expected_values, atol in zip(
        np.split(fields_read, [5, 10]), np.split(expected, [5, 10]), (1e-3, 1e-7, 0.1), strict=True
    ):
        np.testing.assert_allclose(values, expected_values, rtol=1e-6, atol=atol)  # GRIB has 24 bits per value


def test_coefficients_from_a_file(tmp_path: Path, hybrid_file: Path) -> None:
    """Coefficients are read from a table like ECMWF's (n, a [Pa], b of the half levels) or from a netCDF file."""
    bare_file = hybrid.write(tmp_path / "bare.nc", "no", fields_of("t", "u", "q", "sp", "zs"))
    with pytest.raises(DataError, match=r"bare\.nc: the coefficients of its hybrid levels .*vertical\.coefficients"):
        open_sources(config(bare_file))
    a, b = hybrid.half_levels()
    rows = [f"{n},{a_:.9f},{b_:.12f}" for n, (a_, b_) in enumerate(zip(a, b, strict=True))]
    (tmp_path / "L24.csv").write_text("\n".join(["n,a [Pa],b", *rows]))
    expected = open_sources(config(hybrid_file)).read(1)
    for table in (tmp_path / "L24.csv", hybrid_file):
        fields_read = open_sources(config(bare_file, GROUND | {"coefficients": str(table)})).read(1)
        np.testing.assert_allclose(fields_read, expected, rtol=1e-5)
    (tmp_path / "short.csv").write_text("\n".join(["n,a [Pa],b", *rows[4:]]))
    with pytest.raises(DataError, match=r"24 levels \(1 to 24\), but the coefficients are for 20"):
        open_sources(config(bare_file, GROUND | {"coefficients": str(tmp_path / "short.csv")}))
    (tmp_path / "full.csv").write_text("\n".join(["n,a [Pa],b", *rows[:-1]]))
    with pytest.raises(DataError, match="full.csv: coefficients of half levels must extend .* to the ground"):
        open_sources(config(bare_file, GROUND | {"coefficients": str(tmp_path / "full.csv")}))


def test_derived_fields_equal_direct_computation(hybrid_file: Path) -> None:
    reader = open_sources(config(hybrid_file, p3=["t", "z", "r", "ws"], p2=["msl"], variable_options=DERIVED))
    assert reader.attributes["z"]["units"] == "m2 s-2"
    assert reader.attributes["msl"]["units"] == "Pa"
    t, z, r, ws = np.split(reader.read(5)[:-1], 4)
    speed = np.hypot(ATMOSPHERE["u"][5], ATMOSPHERE["v"][5])
    surface = ATMOSPHERE["sp"][5].astype(np.float64)
    pressure = hybrid.levels().pressure(surface)
    column = (slice(None), 4, 3)
    expected = np.interp(np.log(np.array(LEVELS) * 100.0), np.log(pressure[column]), speed[column])
    np.testing.assert_allclose(ws[column], expected, rtol=1e-5)
    # The hydrostatic equation between two levels, accurate to some metres with 24 levels.
    p = np.linspace(2e4, 5e4, 20001)
    virtual = ATMOSPHERE["t"][5][column] * (1 + 0.60777 * ATMOSPHERE["q"][5][column])
    thickness = hybrid.R * np.trapezoid(np.interp(np.log(p), np.log(pressure[column]), virtual) / p, p)
    assert z[1, 4, 3] - z[2, 4, 3] == pytest.approx(thickness, abs=40.0)
    assert (np.diff(z, axis=0) < 0).all()
    assert t.shape == z.shape
    assert r.min() >= 0
    assert np.isfinite(r).all()


def test_store_has_the_same_values_and_records_their_derivation(tmp_path: Path, hybrid_file: Path) -> None:
    options = {"p3": ["t", "q", "z"], "p2": ["msl"], "variable_options": {n: DERIVED[n] for n in ("z", "msl")}}
    store = {"store": str(tmp_path / "store.zarr"), "grid": {"rows": 5, "columns": 8, "poles": True}}
    conf = config(hybrid_file, **options, **store)
    write_training_store(conf, progress=False)
    store_reader = open_reader(conf)
    source_reader = open_sources(conf)
    for index in (0, 11):
        np.testing.assert_array_equal(store_reader.read(index), source_reader.read(index))
    assert store_reader.attributes == source_reader.attributes
    with pytest.raises(DataError, match=r"data\.variable_options\.r\.derive|channels"):
        open_reader(
            config(
                hybrid_file,
                **options | {"p3": ["t", "q", "r"], "variable_options": {n: DERIVED[n] for n in ("r", "msl")}},
                **store,
            )
        )
    with pytest.raises(DataError, match=r"data\.sources: .*'vertical'"):
        open_reader(config(hybrid_file, GROUND | {"coefficients": str(hybrid_file)}, **options, **store))


def test_unused_options_are_not_in_the_identity_of_a_store(tmp_path: Path) -> None:
    identity = config_identity(make_config(tmp_path / "a.nc", p2=["t2m"]))
    assert not [key for key in identity if "derive" in key or "inputs" in key or "coefficients" in key]
    assert "vertical" not in identity["data.sources"][0]


def test_pressure_levels_are_interpolated_to_hybrid_levels(tmp_path: Path, hybrid_file: Path) -> None:
    """A profile on pressure levels that is linear in ln p is exact on hybrid levels."""
    pressure = np.array([20, 50, 100, 200, 300, 500, 700, 850, 925.0])
    profile = np.tile((100.0 + 15.0 * np.log(pressure * 100))[None, :, None, None], (40, 1, hybrid.H, hybrid.W))
    fields = {"u": profile, "t": profile, "sp": ATMOSPHERE["sp"]}
    attributes = {"u": {"units": "m s-1"}, "sp": {"units": "Pa"}}
    path = write_file(tmp_path / "pl.nc", fields, hybrid.HOURS, lat=hybrid.LAT, levels=pressure, attributes=attributes)
    options = {"levels": [8, 15, 24], "level_units": "model_level", "coefficients": str(hybrid_file)}
    fields_read = open_sources(config(path, {"surface_pressure": "sp"}, p3=["u", "t"], **options)).read(3)
    target = hybrid.levels().select([7, 14, 23]).pressure(ATMOSPHERE["sp"][3].astype(np.float64))
    inside = target < 92500
    for values in np.split(fields_read, 2):
        np.testing.assert_allclose(values[inside], (100.0 + 15.0 * np.log(target))[inside], rtol=1e-5)
    # Below the lowest pressure level, wind is constant and temperature has the standard lapse rate.
    u, t = (values[~inside] for values in np.split(fields_read, 2))
    assert len(u) > 3
    np.testing.assert_allclose(u, profile[0, -1, 0, 0], rtol=1e-6)
    standard = profile[0, -1, 0, 0] * (target[~inside] / 92500) ** (hybrid.R * 0.0065 / hybrid.G)
    np.testing.assert_allclose(t, standard, rtol=1e-6)
    with pytest.raises(DataError, match="level 1 .* is above the uppermost level of the source"):
        open_sources(config(path, {"surface_pressure": "sp"}, p3=["u"], **options | {"levels": [1, 24]}))


def test_run_on_the_levels_of_the_source_is_not_interpolated(hybrid_file: Path) -> None:
    """Without data.coefficients, fields are not interpolated, but derived fields are available."""
    options = {"level_units": "model_level", "levels": [10, 24]}
    reader = open_sources(config(hybrid_file, p3=["t", "z"], variable_options={"z": DERIVED["z"]}, **options))
    t, z = np.split(reader.read(4), 2)
    np.testing.assert_array_equal(t, ATMOSPHERE["t"][4][[9, 23]])
    bottom = hybrid.levels().select([23])
    surface = ATMOSPHERE["sp"][4].astype(np.float64)
    layer = hybrid.R * t[1] * (1 + 0.60777 * ATMOSPHERE["q"][4][23]) * np.log(surface / bottom.pressure(surface)[0])
    np.testing.assert_allclose(z[1] - ATMOSPHERE["zs"], layer, rtol=0.01)


def test_relative_humidity_on_pressure_levels_needs_only_t_and_q(tmp_path: Path) -> None:
    """At 1000 hPa and 20 degC, saturation is 23.39 hPa (steam tables). q of 7.3 g/kg is half of it."""
    shape = (4, 2, 6, 12)
    fields = {"t": np.full(shape, 293.15), "q": np.full(shape, 7.3)}
    attributes = {"q": {"units": "g kg-1"}}
    path = write_file(tmp_path / "pl.nc", fields, levels=[500, 1000], attributes=attributes)
    for kind in ("relative_humidity", "relative_humidity_water"):
        reader = open_sources(make_config(path, p3=["r"], levels=[1000], variable_options={"r": {"derive": kind}}))
        np.testing.assert_allclose(reader.read(0), 50.0, atol=0.4)


def test_wind_speed_without_levels(tmp_path: Path) -> None:
    fields = {"10u": np.full((4, 6, 12), -3.0), "v10": np.full((4, 6, 12), 4.0)}
    path = write_file(tmp_path / "sfc.nc", fields, attributes={name: {"units": "m s-1"} for name in fields})
    wind = {"derive": "wind_speed", "inputs": {"eastward_wind": "u10", "northward_wind": "v10"}}
    sources = [{"path": str(path), "rename": {"u10": "10u"}}]
    reader = open_sources(make_config("", sources=sources, p2=["si10"], variable_options={"si10": wind}))
    np.testing.assert_array_equal(reader.read(0), 5.0)
    assert reader.attributes["si10"]["standard_name"] == "wind_speed"


def test_fields_do_not_depend_on_the_size_of_row_blocks(hybrid_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = config(hybrid_file, p3=["t", "z"], p2=["msl"], variable_options={n: DERIVED[n] for n in ("z", "msl")})
    expected = open_sources(conf).read(0)
    monkeypatch.setattr(derived_variables, "_BLOCK_VALUES", 2 * hybrid.K * hybrid.W)
    np.testing.assert_array_equal(open_sources(conf).read(0), expected)


def test_inputs_on_different_grids_are_refused(tmp_path: Path) -> None:
    """Surface pressure must be on the grid of its source, whatever the grid of the run is."""
    column_file = hybrid.write(tmp_path / "ml.nc", "ecmwf", fields_of("t"))
    pressure = {"sp": np.full((40, 6, 12), 1e5)}
    pressure_file = write_file(tmp_path / "sp.nc", pressure, hybrid.HOURS, attributes={"sp": {"units": "Pa"}})
    sources = [{"path": str(column_file), "vertical": {"surface_pressure": "sp"}}, {"path": str(pressure_file)}]
    grid = {"rows": 5, "columns": 8, "poles": True}
    with pytest.raises(DataError, match=r"t: its inputs in .*ml\.nc and .*sp\.nc are on different grids"):
        open_sources(make_config("", sources=sources, p3=["t"], levels=[200], grid=grid))


def test_units_of_the_files_are_converted(tmp_path: Path, hybrid_file: Path) -> None:
    """Inputs in hPa, degC, g/kg and m give the same fields as SI units. The temperature itself stays in degC."""
    fields = fields_of("t", "q", "sp", "zs")
    converted_fields = {
        "t": fields["t"] - np.float32(273.15),
        "q": fields["q"] * 1e3,
        "sp": fields["sp"] / 100,
        "zs": fields["zs"] / 9.80665,
    }
    path = hybrid.write(tmp_path / "odd.nc", "ecmwf", converted_fields)
    with netCDF4.Dataset(path, "a") as file:
        for name, units in (("t", "degC"), ("q", "g kg-1"), ("sp", "hPa"), ("zs", "m")):
            file[name].units = units
    options = {"p3": ["t", "z"], "p2": ["msl"], "variable_options": {n: DERIVED[n] for n in ("z", "msl")}}
    fields_read = open_sources(config(path, **options)).read(0)
    expected = open_sources(config(hybrid_file, **options)).read(0)
    np.testing.assert_allclose(fields_read[:5] + 273.15, expected[:5], atol=1e-3)
    np.testing.assert_allclose(fields_read[5:], expected[5:], rtol=1e-5, atol=0.5)
    for name, units, message in (
        ("sp", "K", "the units of surface_pressure must be Pa or hPa"),
        ("sp", "Pa", r"odd.nc: sp at .* are outside the limits of pressure at the surface or at sea level in Pa"),
    ):
        with netCDF4.Dataset(path, "a") as file:
            file[name].units = units
        with pytest.raises(DataError, match=message):
            open_sources(config(path, **options)).read(0)


def test_surface_pressure_may_be_in_other_files(tmp_path: Path, hybrid_file: Path) -> None:
    column_file = hybrid.write(tmp_path / "ml.nc", "ecmwf", fields_of("t", "u", "q"))
    surface_file = hybrid.write(tmp_path / "sfc.nc", "no", fields_of("lnsp", "zs"))
    early_surface_file = hybrid.write(tmp_path / "early.nc", "no", fields_of("lnsp", "zs", times=30), hybrid.HOURS[:30])
    ground = {"surface_pressure": "lnsp", "surface_geopotential": "zs"}
    sources = [{"path": str(column_file), "vertical": ground}, {"path": str(surface_file)}]
    fields_read = open_sources(make_config("", sources=sources, p3=["t", "u", "q"], levels=LEVELS)).read(8)
    np.testing.assert_allclose(fields_read, open_sources(config(hybrid_file)).read(8), rtol=1e-5, atol=1e-7)
    sources[1]["path"] = str(early_surface_file)
    with pytest.raises(
        DataError,
        match=r"t needs lnsp at the same times, but lnsp is missing at 10 of 40 times, the first is 2000-01-08T12:00",
    ):
        open_sources(make_config("", sources=sources, p3=["t"], levels=LEVELS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vertical": {"surface_pressure": "ps"}}, r'data\.sources\.0\.vertical\.surface_pressure: "ps" is in no file'),
        ({"vertical": {"surface_pressure": "sp"}}, "level 850, 1000 is below the ground.*surface_geopotential"),
        ({"levels": [0.1, 500]}, r"t: level 0\.1 \(0\.1 hPa\) is above the uppermost level"),
        ({"variable_options": {"z": {"derive": "geopotential", "inputs": {"temperature": "ta"}}}, "p3": ["t", "z"]},
         r'data\.variable_options\.z\.inputs: "ta" is in no file'),
        ({"variable_options": {"z": DERIVED["z"]}, "p3": ["t", "z"], "vertical": {"surface_pressure": "sp"}},
         r"data\.variable_options\.z\.derive: geopotential is computed on hybrid levels.*"
         r"set both in data\.sources\.0\.vertical"),
    ],
)  # fmt: skip
def test_check_reports_problems(
    tmp_path: Path, hybrid_file: Path, capsys: pytest.CaptureFixture, change: dict, message: str
) -> None:
    conf = config(hybrid_file, **{"p3": ["t"]} | change)
    raw = {"save_loc": str(tmp_path / "run"), "data": conf.model_dump(mode="json", exclude_defaults=True)}
    raw |= {"model": {"type": "wxformer"}, "trainer": {"max_steps": 1}}
    (tmp_path / "config.yml").write_text(yaml.safe_dump(raw))
    assert main(["check", str(tmp_path / "config.yml")]) == 2
    output = capsys.readouterr()
    text = " ".join((output.out + output.err).split())

    assert re.search(message, text), text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variable_options": {"z": {"inputs": {"temperature": "t"}}}, "p3": ["t", "z"]}, "no effect without derive"),
        (
            {"variable_options": {"z": {"derive": "geopotential", "inputs": {"pressure": "t"}}}, "p3": ["t", "z"]},
            'no input "pressure"',
        ),
        ({"variable_options": {"z": DERIVED["z"]}, "p2": ["z"]}, "list z in vars_3D"),
        ({"variable_options": {"msl": DERIVED["msl"]}, "p3": ["msl"]}, "list msl in vars_2D"),
        (
            {"variable_options": {"z": DERIVED["ws"]}, "static": ["z"]},
            "applies only to prognostic, diagnostic and forcing",
        ),
        ({"coefficients": "a.nc"}, "coefficients has no effect"),
    ],
)
def test_invalid_configs_are_refused(hybrid_file: Path, options: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(hybrid_file, **options)


def test_static_fields_on_hybrid_levels_are_refused(tmp_path: Path) -> None:
    path = hybrid.write(tmp_path / "ml.nc", "ecmwf", fields_of("t", "sp", "zs") | {"lai": ATMOSPHERE["q"]})
    conf = config(path, p3=["t"])
    groups = conf.variables.model_dump() | {"static": {"vars_3D": ["lai"]}}
    with pytest.raises(DataError, match="lai is static and on levels, and its source has vertical"):
        open_sources(DataConfig(**conf.model_dump() | {"variables": groups}))


def test_inputs_must_be_on_the_same_levels(tmp_path: Path) -> None:
    """Humidity is missing on the uppermost 4 levels. Humidity of other levels must not replace it."""
    column_file = hybrid.write(tmp_path / "ml.nc", "ecmwf", fields_of("t", "sp", "zs"))
    with xr.open_dataset(hybrid.write(tmp_path / "q.nc", "ecmwf", fields_of("q")), decode_times=False) as file:
        file.isel(lev=slice(4, None)).to_netcdf(tmp_path / "low.nc")
    sources = [{"path": str(column_file), "vertical": GROUND}, {"path": str(tmp_path / "low.nc"), "vertical": GROUND}]
    different_levels = r"z: its inputs are on 24 levels in .*ml\.nc and on 20 different levels in .*low\.nc"
    with pytest.raises(DataError, match=different_levels):
        open_sources(make_config("", sources=sources, p3=["z"], levels=[500], variable_options={"z": DERIVED["z"]}))
    sources[0]["path"] = str(tmp_path / "gap.nc")
    with xr.open_dataset(column_file, decode_times=False) as file:
        file.isel(lev=slice(0, 20)).to_netcdf(tmp_path / "gap.nc")
    with pytest.raises(DataError, match=r"t has 20 levels \(1 to 20\) that do not extend to the ground"):
        open_sources(make_config("", sources=sources, p3=["z"], levels=[500], variable_options={"z": DERIVED["z"]}))


def test_levels_of_the_ifs_are_read_from_grib(shared_data: Path) -> None:
    """The file lists every fourth of ECMWF's 137 levels. The expected hPa are from ECMWF's table of the levels."""
    path = shared_data / "ingest" / "ml_data.grib"
    levels = read_levels(open_grib(path, {}), "hybrid_1", None, str(path))
    assert levels.values.tolist() == list(range(1, 138, 4))
    pressure = levels.pressure(np.array(101325.0)) / 100
    np.testing.assert_allclose(pressure[[0, -1]], [0.0100, 1012.0494], atol=1e-4)


def test_cam_fields_equal_numpy(shared_data: Path) -> None:
    """The file has CAM's names, level values based on P0, no variable P0, and the year 49. The reference is numpy."""
    path = shared_data / "ingest" / "vinth2p.nc"
    splits = {"train": ["0049-09-01", "0049-09-30"], "valid": ["0049-11-01"] * 2, "test": ["0049-12-01"] * 2}
    conf = config(path, {"surface_pressure": "PS"}, p3=["T"], levels=[10, 100, 300], splits=splits)
    fields_read = open_sources(conf).read(1)
    with xr.open_dataset(path, decode_times=False) as file:
        file = file.isel(time=1).sortby("lat", ascending=False).load()
    log_pressure = np.log(
        file.hyam.values[:, None, None] * 1e5 + file.hybm.values[:, None, None] * file.PS.values.astype(float)
    )
    for i, j in [(0, 0), (20, 77), (33, 5), (63, 127)]:
        expected = np.interp(np.log([1e3, 1e4, 3e4]), log_pressure[:, i, j], file["T"].values[:, i, j])
        np.testing.assert_allclose(fields_read[:, i, j], expected, rtol=1e-6)
