"""Tests of reading real files with unusual layouts, against the values that netCDF4 and cfgrib read."""

from __future__ import annotations

from pathlib import Path

import cfgrib
import netCDF4
import numpy as np
import pytest
import xarray as xr

from credit.config.sections.data import DataConfig
from credit.data.sources.source_reader import open_sources
from credit.errors import DataError
from tests.unit.data.files_on_the_fly import make_config


@pytest.fixture
def ingest_folder(shared_data: Path) -> Path:
    """Return the folder with the files."""
    return shared_data / "ingest"


def read_values(path: Path, name: str) -> np.ndarray:
    """Return a variable in the order of the file, unpacked, as float32."""
    with netCDF4.Dataset(path) as file:
        return np.ma.filled(file[name][:].astype(np.float64), np.nan).astype(np.float32)


def test_era_interim_with_one_time_per_file(ingest_folder: Path) -> None:
    reader = open_sources(make_config(ingest_folder / "ERA_Interim_2017?.nc", p2=["t2m", "sp"]))
    assert [reader.calendar.format(time) for time in reader.times] == ["2017-02-01T12:00", "2017-03-01T12:00"]
    assert reader.grid.shape == (241, 480)
    assert reader.grid.has_pole_points
    with netCDF4.Dataset(ingest_folder / "ERA_Interim_2017b.nc") as file:
        north_first = file["latitude"][0] > 0
    t2m = read_values(ingest_folder / "ERA_Interim_2017b.nc", "t2m")[0]
    np.testing.assert_array_equal(reader.read(1)[0], t2m if north_first else t2m[::-1])
    assert reader.attributes["sp"]["standard_name"] == "surface_air_pressure"


def test_era5_with_level_longitude_latitude(ingest_folder: Path) -> None:
    path = ingest_folder / "era5_tl31_19590102T00.nc"
    reader = open_sources(make_config(path, p3=["temperature"], levels=[850, 500]))
    with netCDF4.Dataset(path) as file:
        rows = [int(np.flatnonzero(file["level"][:] == level)[0]) for level in (850, 500)]
        descending = file["latitude"][0] > 0
    expected = read_values(path, "temperature")[rows].swapaxes(1, 2)
    np.testing.assert_array_equal(reader.read(0), expected if descending else expected[:, ::-1])
    # Colder above, warmer at the equator.
    assert reader.read(0)[0].mean() > reader.read(0)[1].mean()
    assert reader.read(0)[0, 16].mean() > reader.read(0)[0, [0, -1]].mean()


def test_gaussian_rows_and_longitudes_from_minus_180(ingest_folder: Path) -> None:
    path = ingest_folder / "t_in_Celsius_1.nc"
    reader = open_sources(make_config(path, p2=["tC"]))
    assert len(reader.times) == 40
    assert set(np.diff(reader.times)) == {360}
    assert reader.grid.lon[0] == 0
    assert reader.grid.lat[0] > 88
    assert reader.attributes["tC"]["units"] == "degC"
    np.testing.assert_array_equal(reader.read(7)[0], np.roll(read_values(path, "tC")[7], 96, axis=-1))


def test_a_climate_model_without_leap_days(ingest_folder: Path) -> None:
    path = ingest_folder / "sresa1b_ncar_ccsm3-example.nc"
    reader = open_sources(make_config(path, p3=["ua"], p2=["tas"], static=["area"], levels=[50000], level_units="Pa"))
    assert reader.calendar.name == "noleap"
    assert reader.calendar.format(reader.times[0]) == "2000-05-16T12:00"
    with netCDF4.Dataset(path) as file:
        row = int(np.flatnonzero(file["plev"][:] == 50000)[0])
        bounds = np.sort(np.unique(np.round(file["lat_bnds"][:], 6)))[::-1]
    np.testing.assert_array_equal(reader.read(0)[0], read_values(path, "ua")[0, row, ::-1])
    np.testing.assert_allclose(reader.grid.lat_bounds, bounds, atol=1e-5)
    # The reference is the cell areas in the file.
    areas = reader.static()[0] / reader.static()[0].sum()
    np.testing.assert_allclose(reader.grid.area_weights(), areas, rtol=2e-3)


def test_hybrid_levels_need_their_level_units(ingest_folder: Path) -> None:
    with pytest.raises(DataError, match="data.level_units: model_level"):
        open_sources(make_config(ingest_folder / "83.nc", p3=["T"], levels=[992.528]))
    reader = open_sources(make_config(ingest_folder / "83.nc", p3=["T"], levels=[992.528], level_units="model_level"))
    np.testing.assert_array_equal(reader.read(0)[0], read_values(ingest_folder / "83.nc", "T")[0, -1, ::-1])


def test_a_climate_model_on_one_degree(ingest_folder: Path) -> None:
    """Regridding keeps the global mean with the cell areas of the file, which differ slightly from the package's."""
    path = ingest_folder / "sresa1b_ncar_ccsm3-example.nc"
    options = {"p2": ["tas"], "grid": {"rows": 181, "columns": 360, "poles": True}, "regrid": "conservative"}
    reader = open_sources(make_config(path, **options))
    expected = np.average(read_values(path, "tas")[0], weights=read_values(path, "area"))
    assert (reader.read(0)[0] * reader.grid.area_weights()).sum() == pytest.approx(expected, rel=1e-5)


def test_celsius_to_kelvin_and_from_gaussian_to_equiangular(ingest_folder: Path) -> None:
    path = ingest_folder / "t_in_Celsius_1.nc"
    grid = {"rows": 32, "columns": 64, "poles": False}
    reader = open_sources(make_config(path, p2=["tC"], grid=grid, variable_options={"tC": {"units": "K"}}))
    assert reader.attributes["tC"]["units"] == "K"
    assert reader.grid.shape == (32, 64)
    values = read_values(path, "tC")[7]
    assert values.min() + 273.1 < reader.read(7)[0].min() < reader.read(7)[0].max() < values.max() + 273.2


ON_MODEL_LEVELS = {"level_units": "model_level"}
MEMBER = {"select": {"number": 3}}
MASKED = {"p2": ["t2m"], "variable_options": {"t2m": {"missing": "fill_mean"}}}
# Each file with its variables, by number of dimensions, and options. Variables are compared at every time.
READ = [
    ("2t.nc", {"p2": ["t2m"]}),
    ("83.nc", {"p3": ["T", "U"], "p2": ["PS"], "levels": [992.528, 4.8093], **ON_MODEL_LEVELS}),
    ("ERA_Interim_2017a.nc", {"p2": ["t2m", "sp", "tp", "u10"]}),
    ("ERA_Interim_2017b.nc", {"p2": ["t2m", "sp", "tp", "u10"]}),
    ("data.nc", {"p3": ["t"], "levels": [500]}),
    ("era5_tl31_19590102T00.nc", {"p3": ["specific_humidity"], "levels": [1000, 1]}),
    ("sresa1b_ncar_ccsm3-example.nc", {"p3": ["ua"], "p2": ["tas", "pr"], "levels": [100, 10]}),
    ("t_in_Celsius_1.nc", {"p2": ["tC"]}),
    ("vinth2p.nc", {"p3": ["T"], "p2": ["PS"], "levels": [4.8093, 992.5282], **ON_MODEL_LEVELS}),
    ("era5-levels-members.grib", {"p3": ["t", "z"], "levels": [500, 850], **MEMBER}),
    ("global.grib2", {"p3": ["avg_t"], "levels": [1000]}),
    ("hpa_and_pa.grib", {"p3": ["t"], "levels": [1]}),
    ("regular_ll_msl.grib", {"p2": ["prmsl"]}),
    ("scanning_mode_64.grib", {"p2": ["skt"]}),
    ("t_time_series.grib", {"p3": ["t", "z"], "levels": [1000]}),
    ("tuv_pl.grib", {"p3": ["t", "u", "v"], "levels": [300, 1000]}),
    ("uv.grib", {"p3": ["u", "v"], "levels": [1000]}),
    ("z500.grib", {"p3": ["z"], "levels": [500]}),
]
REFUSED = [
    ("tas_day_CESM2-WACCM_historical_r1i1p1f1_gn_20000101-20091231.nc", {"p2": ["tas"]}, "only global grids"),
    ("mrsos_day_HadGEM2-ES_rcp45_r1i1p1_20051201-20151130.nc", {"p2": ["mrsos"]}, "only global grids"),
    ("z_20140801.nc", {"p2": ["z"]}, "no latitude and longitude"),
    ("hgt.nc", {"p2": ["HGT"]}, "months since.*rewrite the time axis"),
    ("era5_msl_2025120100_2.5x2.5.nc", {"p2": ["msl"]}, "no file of data.sources has a time axis.*cdo settaxis"),
    ("era5_uv850_2025120100_2.5x2.5.nc", {"p2": ["u"]}, "no file of data.sources has a time axis.*cdo settaxis"),
    ("data.nc", {"p3": ["t"], "levels": [500, 1000]}, "t, level 1000 at .*: 7550 of 65160 values are missing"),
    ("vinth2p.nc", {"p3": ["T"], "levels": [850]}, "data.level_units: model_level"),
    ("era5-levels-members.grib", {"p3": ["t"], "levels": [850]}, r"number 0, 1, .*N.select: \{number: 0\}"),
    ("era5-levels-members.grib", {"p2": ["t"], **MEMBER}, "t is in vars_2D but is on 2 levels"),
    ("fields_with_missing_values.grib", {"p2": ["t2m"]}, "10808 of 16380 values are missing.*missing: fill_mean"),
    ("fields_with_missing_values.grib", MASKED, "83 differ; a mask that changes in time is not supported"),
    ("hpa_and_pa.grib", {"p3": ["t"], "levels": [1, 0.01]}, "t, level 0.01 .*: the whole field is missing"),
    ("ml_data.grib", {"p3": ["t"], "levels": [1], **ON_MODEL_LEVELS}, "312 degrees without a column.*only global"),
    ("reduced_gg.grib", {"p2": ["u10"]}, r"u10 is on a reduced grid .*cdo setgridtype,regular"),
]


def build_config(path: Path, select: dict | None = None, **options: object) -> DataConfig:
    """Return a data section with one source."""
    return make_config("", sources=[{"path": str(path), "select": select or {}}], **options)


def read_independently(path: Path, name: str, levels: list[float] | None, select: dict) -> np.ndarray:
    """Return a variable (time, levels or 1, lat, lon) read by netCDF4 through xarray or by cfgrib, north to south."""
    if path.suffix == ".nc":
        dataset = xr.open_dataset(path, engine="netcdf4", decode_times=False)
        array = dataset[name]
    else:
        # cfgrib reads one type of level at a time, and names variables by their CF names.
        keys = {"cfVarName": name, "typeOfLevel": "isobaricInhPa"} if levels else {"cfVarName": name}
        dataset = cfgrib.open_dataset(path, filter_by_keys=keys, indexpath="", time_dims=("valid_time",))
        array = dataset[name].sel(select) if select else dataset[name]
    roles = {"lat": "latitude", "lon": "longitude", "plev": "level", "lev": "level", "isobaricInhPa": "level"}
    array = array.rename({old: new for old, new in roles.items() if old in array.coords or old in array.dims})
    array = array.rename({"valid_time": "time"} if "valid_time" in array.coords else {})
    array = array.expand_dims([dim for dim in ("time", "level") if dim not in array.dims])
    if levels:
        units_per_hpa = 100 if array.level.attrs.get("units") == "Pa" else 1
        array = array.isel(level=[int(np.abs(array.level.values - level * units_per_hpa).argmin()) for level in levels])
    array = array.transpose("time", "level", "latitude", "longitude").sortby("time")
    array = array.assign_coords(longitude=array.longitude % 360).sortby("longitude")
    return array.sortby("latitude", ascending=False).values.astype(np.float32)


@pytest.mark.parametrize(("name", "options"), READ, ids=[name for name, _ in READ])
def test_fields_equal_those_of_other_libraries(ingest_folder: Path, name: str, options: dict) -> None:
    reader = open_sources(build_config(ingest_folder / name, **options))
    fields = np.stack([reader.read(index) for index in range(len(reader.times))])
    levels = options.get("levels")
    select = options.get("select", {})
    parts = [read_independently(ingest_folder / name, variable, levels, select) for variable in options.get("p3", ())]
    parts += [read_independently(ingest_folder / name, variable, None, select) for variable in options.get("p2", ())]
    np.testing.assert_array_equal(fields, np.concatenate(parts, axis=1))


@pytest.mark.parametrize(("name", "options", "reason"), REFUSED)
def test_unusable_files_are_refused_with_the_reason(ingest_folder: Path, name: str, options: dict, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        reader = open_sources(build_config(ingest_folder / name, **options))
        for index in range(len(reader.times)):
            reader.read(index)


def test_file_without_time_provides_static_fields(ingest_folder: Path, shared_data: Path) -> None:
    daily_files = shared_data / "era_interim_msl" / "erai_msl_2.5deg_daily_%Y%m.nc"
    sources = [
        {"path": str(daily_files)},
        {
            "path": str(ingest_folder / "era5_msl_2025120100_2.5x2.5.nc"),
            "variables": ["fixed"],
            "rename": {"fixed": "msl"},
        },
    ]
    reader = open_sources(make_config("", sources=sources, p2=["msl"], static=["fixed"]))
    assert len(reader.times) == 31
    assert reader.static().mean() > 9e4


def test_long_series_with_a_mask(shared_data: Path) -> None:
    path = shared_data / "cobe_sst" / "cobe_sst_monthly_5.625deg_1950-2009.nc"
    reader = open_sources(make_config(path, p2=["sst"], variable_options={"sst": {"missing": "fill_mean"}}))
    np.testing.assert_array_equal(reader.read(719)[0], read_values(path, "sst")[719, ::-1])
    assert 0.2 < reader.masks["sst"].mean() < 0.5


def test_sample_equals_its_archive(shared_data: Path) -> None:
    """The sample contains the packed values of the archive unchanged."""
    fields = {"p3": ["z"], "p2": ["msl"], "static": ["land_sea_mask"], "levels": [500]}
    sample = open_sources(make_config("sample:speedy", **fields))
    archive = open_sources(make_config(shared_data / "speedy" / "*.nc", **fields))
    np.testing.assert_array_equal(sample.static(), archive.static())
    assert np.isin(sample.times, archive.times).all()
    for index in range(0, len(sample.times), 97):
        np.testing.assert_array_equal(sample.read(index), archive.read(archive.index_of(int(sample.times[index]))))
