"""Sources on hybrid levels through the reader and the store: dialects, derived fields, the way back, refusals."""

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
from tests.unit.data import hybrid_on_the_fly as world
from tests.unit.data.files_on_the_fly import make_config, write_file
from tests.unit.data.hybrid_on_the_fly import ATMOSPHERE, DERIVED, GROUND, LEVELS, config, fields_of


@pytest.fixture(scope="module")
def all_variables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "ml.nc"
    return world.write(path, "ecmwf", fields_of("t", "u", "v", "q", "sp", "zs"))


def interpolate_by_numpy(name: str, time: int, levels: list[float]) -> np.ndarray:
    """Return a variable (levels, H, W) at levels in hPa, column by column; numpy holds the end values."""
    log_pressure = np.log(world.levels().pressure(ATMOSPHERE["sp"][time].astype(np.float64)))
    fields_read = np.empty((len(levels), world.H, world.W))
    for i, j in np.ndindex(world.H, world.W):
        column = ATMOSPHERE[name][time, :, i, j]
        fields_read[:, i, j] = np.interp(np.log(np.array(levels) * 100.0), log_pressure[:, i, j], column)
    return fields_read


def test_winds_and_humidity_as_numpy_interpolates_them(all_variables: Path) -> None:
    reader = open_sources(config(all_variables, p3=["u", "q"]))
    for time in (0, 7):
        expected = np.concatenate([interpolate_by_numpy("u", time, LEVELS), interpolate_by_numpy("q", time, LEVELS)])
        np.testing.assert_allclose(reader.read(time), expected, rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal([*reader.read_each([6, 7])], [reader.read(6), reader.read(7)])


@pytest.mark.parametrize("kind", ["cam", "cf", "grib"])
def test_every_dialect_gives_the_same(tmp_path: Path, all_variables: Path, kind: str) -> None:
    names = {"cam": {"sp": "PS", "zs": "PHIS", "t": "T"}, "grib": {"zs": "z", "sp": "lnsp"}}.get(kind, {})
    pressure = "lnsp" if kind == "grib" else "sp"
    fields = fields_of("t", "q", pressure, "zs", times=3)
    renamed = {names.get(name, name): values for name, values in fields.items()}
    path = world.write(tmp_path / f"ml.{kind}", kind, renamed, world.HOURS[:3])
    if kind == "grib":
        source = {"rename": names | {"sp": "lnsp"}, "format": "grib"}
    else:
        source = {"rename": names, "format": "netcdf"}
    derived = {name: DERIVED[name] for name in ("z", "msl")}
    options = {"p3": ["t", "q", "z"], "p2": ["msl"], "variable_options": derived}
    fields_read = open_sources(config(path, source=source, **options)).read(2)
    expected = open_sources(config(all_variables, **options)).read(2)
    for values, others, atol in zip(
        np.split(fields_read, [5, 10]), np.split(expected, [5, 10]), (1e-3, 1e-7, 0.1), strict=True
    ):
        np.testing.assert_allclose(values, others, rtol=1e-6, atol=atol)  # 24 bits a value in GRIB


def test_coefficients_from_a_file(tmp_path: Path, all_variables: Path) -> None:
    """As ECMWF publishes them: n, a [Pa], b of the half levels; or any netCDF file that has them."""
    bare = world.write(tmp_path / "bare.nc", "no", fields_of("t", "u", "q", "sp", "zs"))
    with pytest.raises(DataError, match=r"bare\.nc: the coefficients of its hybrid levels .*vertical\.coefficients"):
        open_sources(config(bare))
    a, b = world.half_levels()
    rows = [f"{n},{a_:.9f},{b_:.12f}" for n, (a_, b_) in enumerate(zip(a, b, strict=True))]
    (tmp_path / "L24.csv").write_text("\n".join(["n,a [Pa],b", *rows]))
    expected = open_sources(config(all_variables)).read(1)
    for table in (tmp_path / "L24.csv", all_variables):
        fields_read = open_sources(config(bare, GROUND | {"coefficients": str(table)})).read(1)
        np.testing.assert_allclose(fields_read, expected, rtol=1e-5)
    (tmp_path / "short.csv").write_text("\n".join(["n,a [Pa],b", *rows[4:]]))
    with pytest.raises(DataError, match=r"24 levels \(1 to 24\), but the coefficients are for 20"):
        open_sources(config(bare, GROUND | {"coefficients": str(tmp_path / "short.csv")}))
    (tmp_path / "full.csv").write_text("\n".join(["n,a [Pa],b", *rows[:-1]]))
    with pytest.raises(DataError, match="full.csv: coefficients of half levels must extend .* to the ground"):
        open_sources(config(bare, GROUND | {"coefficients": str(tmp_path / "full.csv")}))


def test_derived_fields_by_hand(all_variables: Path) -> None:
    reader = open_sources(config(all_variables, p3=["t", "z", "r", "ws"], p2=["msl"], variable_options=DERIVED))
    assert reader.attributes["z"]["units"] == "m2 s-2"
    assert reader.attributes["msl"]["units"] == "Pa"
    t, z, r, ws = np.split(reader.read(5)[:-1], 4)
    speed = np.hypot(ATMOSPHERE["u"][5], ATMOSPHERE["v"][5])
    surface = ATMOSPHERE["sp"][5].astype(np.float64)
    log_pressure = world.levels().pressure(surface)
    column = (slice(None), 4, 3)
    expected = np.interp(np.log(np.array(LEVELS) * 100.0), np.log(log_pressure[column]), speed[column])
    np.testing.assert_allclose(ws[column], expected, rtol=1e-5)
    # The hydrostatic equation between two levels; 24 levels leave it uncertain by some metres.
    p = np.linspace(2e4, 5e4, 20001)
    virtual = ATMOSPHERE["t"][5][column] * (1 + 0.60777 * ATMOSPHERE["q"][5][column])
    thickness = world.R * np.trapezoid(np.interp(np.log(p), np.log(log_pressure[column]), virtual) / p, p)
    assert z[1, 4, 3] - z[2, 4, 3] == pytest.approx(thickness, abs=40.0)
    assert (np.diff(z, axis=0) < 0).all()
    assert t.shape == z.shape
    assert r.min() >= 0
    assert np.isfinite(r).all()


def test_a_store_has_the_same_numbers_and_knows_how_they_were_made(tmp_path: Path, all_variables: Path) -> None:
    options = {"p3": ["t", "q", "z"], "p2": ["msl"], "variable_options": {n: DERIVED[n] for n in ("z", "msl")}}
    store = {"store": str(tmp_path / "store.zarr"), "grid": {"rows": 5, "columns": 8, "poles": True}}
    conf = config(all_variables, **options, **store)
    write_training_store(conf, progress=False)
    stored = open_reader(conf)
    sources = open_sources(conf)
    for index in (0, 11):
        np.testing.assert_array_equal(stored.read(index), sources.read(index))
    assert stored.attributes == sources.attributes
    with pytest.raises(DataError, match=r"data\.variable_options\.r\.derive|channels"):
        open_reader(
            config(
                all_variables,
                **options | {"p3": ["t", "q", "r"], "variable_options": {n: DERIVED[n] for n in ("r", "msl")}},
                **store,
            )
        )
    with pytest.raises(DataError, match=r"data\.sources: .*'vertical'"):
        open_reader(config(all_variables, GROUND | {"coefficients": str(all_variables)}, **options, **store))


def test_what_is_not_used_is_not_in_the_identity_of_a_store(tmp_path: Path) -> None:
    plain = config_identity(make_config(tmp_path / "a.nc", p2=["t2m"]))
    assert not [key for key in plain if "derive" in key or "inputs" in key or "coefficients" in key]
    assert "vertical" not in plain["data.sources"][0]


def test_the_way_back_to_hybrid_levels(tmp_path: Path, all_variables: Path) -> None:
    """A temperature that is linear in ln p, on pressure levels, arrives on hybrid levels as it must."""
    pressure = np.array([20, 50, 100, 200, 300, 500, 700, 850, 925.0])
    profile = np.tile((100.0 + 15.0 * np.log(pressure * 100))[None, :, None, None], (40, 1, world.H, world.W))
    fields = {"u": profile, "t": profile, "sp": ATMOSPHERE["sp"]}
    kinds = {"u": {"units": "m s-1"}, "sp": {"units": "Pa"}}
    path = write_file(tmp_path / "pl.nc", fields, world.HOURS, lat=world.LAT, levels=pressure, attributes=kinds)
    options = {"levels": [8, 15, 24], "level_units": "model_level", "coefficients": str(all_variables)}
    fields_read = open_sources(config(path, {"surface_pressure": "sp"}, p3=["u", "t"], **options)).read(3)
    target = world.levels().select([7, 14, 23]).pressure(ATMOSPHERE["sp"][3].astype(np.float64))
    inside = target < 92500
    for values in np.split(fields_read, 2):
        np.testing.assert_allclose(values[inside], (100.0 + 15.0 * np.log(target))[inside], rtol=1e-5)
    # Lower than the lowest pressure level: no wind shear, the standard lapse rate.
    u, t = (values[~inside] for values in np.split(fields_read, 2))
    assert len(u) > 3
    np.testing.assert_allclose(u, profile[0, -1, 0, 0], rtol=1e-6)
    standard = profile[0, -1, 0, 0] * (target[~inside] / 92500) ** (world.R * 0.0065 / world.G)
    np.testing.assert_allclose(t, standard, rtol=1e-6)
    with pytest.raises(DataError, match="level 1 .* is above the uppermost level of the source"):
        open_sources(config(path, {"surface_pressure": "sp"}, p3=["u"], **options | {"levels": [1, 24]}))


def test_a_run_on_the_sources_own_levels(all_variables: Path) -> None:
    """Without data.coefficients nothing is interpolated; derived fields are there."""
    options = {"level_units": "model_level", "levels": [10, 24]}
    reader = open_sources(config(all_variables, p3=["t", "z"], variable_options={"z": DERIVED["z"]}, **options))
    t, z = np.split(reader.read(4), 2)
    np.testing.assert_array_equal(t, ATMOSPHERE["t"][4][[9, 23]])
    bottom = world.levels().select([23])
    surface = ATMOSPHERE["sp"][4].astype(np.float64)
    layer = world.R * t[1] * (1 + 0.60777 * ATMOSPHERE["q"][4][23]) * np.log(surface / bottom.pressure(surface)[0])
    np.testing.assert_allclose(z[1] - ATMOSPHERE["zs"], layer, rtol=0.01)


def test_humidity_on_pressure_levels_needs_no_more(tmp_path: Path) -> None:
    """At 1000 hPa and 20 degC, saturation is 23.39 hPa (steam tables): q of 7.3 g/kg is half of it."""
    shape = (4, 2, 6, 12)
    fields = {"t": np.full(shape, 293.15), "q": np.full(shape, 7.3)}
    kinds = {"q": {"units": "g kg-1"}}
    path = write_file(tmp_path / "pl.nc", fields, levels=[500, 1000], attributes=kinds)
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


def test_blocks_of_rows_do_not_matter(all_variables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = config(all_variables, p3=["t", "z"], p2=["msl"], variable_options={n: DERIVED[n] for n in ("z", "msl")})
    surface_file = open_sources(conf).read(0)
    monkeypatch.setattr(derived_variables, "_BLOCK_VALUES", 2 * world.K * world.W)
    np.testing.assert_array_equal(open_sources(conf).read(0), surface_file)


def test_everything_on_one_grid(tmp_path: Path) -> None:
    """Surface pressure belongs to a source's own grid, whatever grid the run has."""
    column = world.write(tmp_path / "ml.nc", "ecmwf", fields_of("t"))
    pressure = {"sp": np.full((40, 6, 12), 1e5)}
    other = write_file(tmp_path / "sp.nc", pressure, world.HOURS, attributes={"sp": {"units": "Pa"}})
    sources = [{"path": str(column), "vertical": {"surface_pressure": "sp"}}, {"path": str(other)}]
    grid = {"rows": 5, "columns": 8, "poles": True}
    with pytest.raises(DataError, match=r"t: its inputs in .*ml\.nc and .*sp\.nc are on different grids"):
        open_sources(make_config("", sources=sources, p3=["t"], levels=[200], grid=grid))


def test_units_of_the_files(tmp_path: Path, all_variables: Path) -> None:
    """hPa, degC, g/kg and the height of the ground in m give what SI gives; the temperature stays in degC."""
    fields = fields_of("t", "q", "sp", "zs")
    odd = {
        "t": fields["t"] - np.float32(273.15),
        "q": fields["q"] * 1e3,
        "sp": fields["sp"] / 100,
        "zs": fields["zs"] / 9.80665,
    }
    path = world.write(tmp_path / "odd.nc", "ecmwf", odd)
    with netCDF4.Dataset(path, "a") as file:
        for name, units in (("t", "degC"), ("q", "g kg-1"), ("sp", "hPa"), ("zs", "m")):
            file[name].units = units
    options = {"p3": ["t", "z"], "p2": ["msl"], "variable_options": {n: DERIVED[n] for n in ("z", "msl")}}
    fields_read = open_sources(config(path, **options)).read(0)
    expected = open_sources(config(all_variables, **options)).read(0)
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


def test_surface_pressure_in_other_files(tmp_path: Path, all_variables: Path) -> None:
    column = world.write(tmp_path / "ml.nc", "ecmwf", fields_of("t", "u", "q"))
    surface_file = world.write(tmp_path / "sfc.nc", "no", fields_of("lnsp", "zs"))
    early = world.write(tmp_path / "early.nc", "no", fields_of("lnsp", "zs", times=30), world.HOURS[:30])
    ground = {"surface_pressure": "lnsp", "surface_geopotential": "zs"}
    sources = [{"path": str(column), "vertical": ground}, {"path": str(surface_file)}]
    fields_read = open_sources(make_config("", sources=sources, p3=["t", "u", "q"], levels=LEVELS)).read(8)
    np.testing.assert_allclose(fields_read, open_sources(config(all_variables)).read(8), rtol=1e-5, atol=1e-7)
    sources[1]["path"] = str(early)
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
def test_what_check_says(
    tmp_path: Path, all_variables: Path, capsys: pytest.CaptureFixture, change: dict, message: str
) -> None:
    conf = config(all_variables, **{"p3": ["t"]} | change)
    raw = {"save_loc": str(tmp_path / "run"), "data": conf.model_dump(mode="json", exclude_defaults=True)}
    raw |= {"model": {"type": "wxformer"}, "trainer": {"max_steps": 1}}
    (tmp_path / "config.yml").write_text(yaml.safe_dump(raw))
    assert main(["check", str(tmp_path / "config.yml")]) == 2
    problems = capsys.readouterr()
    text = " ".join((problems.out + problems.err).split())

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
def test_refused_configs(all_variables: Path, options: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(all_variables, **options)


def test_static_fields_are_not_interpolated(tmp_path: Path) -> None:
    path = world.write(tmp_path / "ml.nc", "ecmwf", fields_of("t", "sp", "zs") | {"lai": ATMOSPHERE["q"]})
    conf = config(path, p3=["t"])
    groups = conf.variables.model_dump() | {"static": {"vars_3D": ["lai"]}}
    with pytest.raises(DataError, match="lai is static and on levels, and its source has vertical"):
        open_sources(DataConfig(**conf.model_dump() | {"variables": groups}))


def test_inputs_must_be_on_the_same_levels(tmp_path: Path) -> None:
    """Above the uppermost 4 levels there is no humidity; it is not taken for that of other levels."""
    column = world.write(tmp_path / "ml.nc", "ecmwf", fields_of("t", "sp", "zs"))
    with xr.open_dataset(world.write(tmp_path / "q.nc", "ecmwf", fields_of("q")), decode_times=False) as file:
        file.isel(lev=slice(4, None)).to_netcdf(tmp_path / "low.nc")
    sources = [{"path": str(column), "vertical": GROUND}, {"path": str(tmp_path / "low.nc"), "vertical": GROUND}]
    different_levels = r"z: its inputs are on 24 levels in .*ml\.nc and on 20 different levels in .*low\.nc"
    with pytest.raises(DataError, match=different_levels):
        open_sources(make_config("", sources=sources, p3=["z"], levels=[500], variable_options={"z": DERIVED["z"]}))
    sources[0]["path"] = str(tmp_path / "gap.nc")
    with xr.open_dataset(column, decode_times=False) as file:
        file.isel(lev=slice(0, 20)).to_netcdf(tmp_path / "gap.nc")
    with pytest.raises(DataError, match=r"t has 20 levels \(1 to 20\) that do not extend to the ground"):
        open_sources(make_config("", sources=sources, p3=["z"], levels=[500], variable_options={"z": DERIVED["z"]}))


def test_levels_of_the_ifs(shared_data: Path) -> None:
    """Every fourth of ECMWF's 137 levels, from the list in a GRIB file; hPa as ECMWF's table of the levels has them."""
    path = shared_data / "ingest" / "ml_data.grib"
    levels = read_levels(open_grib(path, {}), "hybrid_1", None, str(path))
    assert levels.values.tolist() == list(range(1, 138, 4))
    pressure = levels.pressure(np.array(101325.0)) / 100
    np.testing.assert_allclose(pressure[[0, -1]], [0.0100, 1012.0494], atol=1e-4)


def test_a_field_of_another_model(shared_data: Path) -> None:
    """CAM's names, no P0 but levels that are named by it, the year 49; numpy column by column."""
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
