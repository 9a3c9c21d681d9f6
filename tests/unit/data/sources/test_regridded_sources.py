"""Tests of sources on other grids than the run's: reading, the training store and errors."""

from __future__ import annotations

from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr
import yaml
from pydantic import ValidationError

from credit.cli.main import main
from credit.config.sections.data import DataConfig
from credit.data.formats.regrid import Regridder
from credit.data.reader import open_reader
from credit.data.sources.source_reader import open_sources
from credit.data.store.preprocess import write_training_store
from credit.data.store.store_reader import open_store, read_description
from credit.errors import DataError
from credit.grid import LatLonGrid
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

HOURS = np.arange(40) * 6
FINE = LatLonGrid.equiangular(37, 72, poles=True)
OTHER = LatLonGrid.equiangular(24, 40, poles=False)
RUN = {"rows": 19, "columns": 36, "poles": True}
TARGET = LatLonGrid.equiangular(**RUN)
T = random_fields(40, 2, *FINE.shape)
WIND = random_fields(40, *OTHER.shape, seed=1) - 280
LAND = (random_fields(*OTHER.shape, seed=2) > 280).astype(np.float32)


@pytest.fixture
def conf(tmp_path: Path) -> DataConfig:
    """Write one file in the package's order and one from the south and from -180. Return their config."""
    write_file(tmp_path / "t.nc", {"t": T}, HOURS, lat=FINE.lat, levels=[500, 850])
    reordered_fields = {
        name: np.roll(values[..., ::-1, :], 20, axis=-1) for name, values in (("u", WIND), ("land", LAND))
    }
    lon = np.arange(40) * 9.0 - 180
    attributes = {"u": {"units": "m s-1", "standard_name": "eastward_wind"}, "land": {"units": "1"}}
    write_file(tmp_path / "u.nc", reordered_fields, HOURS, lat=OTHER.lat[::-1], lon=lon, attributes=attributes)
    return make_conf(tmp_path)


def make_conf(tmp_path: Path, **options: object) -> DataConfig:
    """Return the config of `conf` with other options."""
    settings = {
        "p3": ["t"],
        "p2": ["u"],
        "static": ["land"],
        "levels": [850, 500],
        "grid": RUN,
        "variable_options": {"t": {"regrid": "conservative"}, "land": {"regrid": "nearest"}},
        "store": str(tmp_path / "store.zarr"),
    }
    return make_config([tmp_path / "t.nc", tmp_path / "u.nc"], **(settings | options))


def compute_expected(index: int) -> np.ndarray:
    t = Regridder(FINE, TARGET, "conservative").apply(T[index, ::-1])
    return np.concatenate([t, Regridder(OTHER, TARGET, "bilinear", vector=True).apply(WIND[index][None])])


def test_two_grids_are_regridded_to_a_third(conf: DataConfig) -> None:
    reader = open_sources(conf)
    assert reader.grid.describe_mismatch(TARGET) is None
    np.testing.assert_array_equal(reader.read(7), compute_expected(7))
    np.testing.assert_array_equal(
        [*reader.read_each([5, 6, 7])], [compute_expected(5), compute_expected(6), compute_expected(7)]
    )
    np.testing.assert_array_equal(reader.static()[0], Regridder(OTHER, TARGET, "nearest").apply(LAND))


def test_fields_on_the_target_grid_stay_unchanged(tmp_path: Path, conf: DataConfig) -> None:
    grid_option = {"like": str(tmp_path / "t.nc")}
    reader = open_sources(make_conf(tmp_path, grid=grid_option))
    assert reader.grid.describe_mismatch(FINE) is None
    np.testing.assert_array_equal(reader.read(3)[:2], T[3, ::-1])
    assert (
        open_sources(make_conf(tmp_path, grid={"like": str(tmp_path / "u.nc")})).grid.describe_mismatch(OTHER) is None
    )


def test_one_variable_on_two_grids(tmp_path: Path) -> None:
    early_file = write_file(tmp_path / "a.nc", {"t": T[:, 0][:4]}, HOURS[:4], lat=FINE.lat)
    late_file = write_file(tmp_path / "b.nc", {"t": WIND[:4] + 280}, HOURS[4:8])
    reader = open_sources(make_config([early_file, late_file], p2=["t"], grid=RUN))
    np.testing.assert_array_equal(reader.read(2)[0], Regridder(FINE, TARGET, "bilinear").apply(T[2, 0]))
    np.testing.assert_array_equal(reader.read(5)[0], Regridder(OTHER, TARGET, "bilinear").apply(WIND[1] + 280))


def test_bounds_of_the_file_are_used(tmp_path: Path) -> None:
    """The same rows with other bounds give other means."""
    grid = LatLonGrid.equiangular(4, 8, poles=False)
    edges = np.array([90.0, 60.0, 0.0, -60.0, -90.0])
    fields = {"height": np.tile(np.arange(4.0, dtype=np.float32)[:, None], (4, 1, 8))}
    path = write_file(tmp_path / "a.nc", fields, lat=grid.lat)
    add_bounds(path, edges)
    reader = open_sources(
        make_config(path, p2=["height"], grid={"rows": 2, "columns": 4, "poles": False}, regrid="conservative")
    )
    share = np.sin(np.deg2rad(60.0))
    np.testing.assert_allclose(reader.read(0)[0, :, 0], [share, 2 * share + 3 * (1 - share)], rtol=1e-6)


def add_bounds(path: Path, edges: np.ndarray) -> None:
    with netCDF4.Dataset(path, "a") as file:
        file.createDimension("two", 2)
        file["lat"].bounds = "lat_bnds"
        file.createVariable("lat_bnds", "f8", ("lat", "two"))[:] = np.stack([edges[:-1], edges[1:]], axis=1)


def test_mask_is_regridded(tmp_path: Path) -> None:
    sst = T[:, 0].copy()
    sst[:, 10:20, 30:50] = np.nan
    path = write_file(tmp_path / "a.nc", {"sst": sst}, HOURS, lat=FINE.lat)
    options = {"p2": ["sst"], "grid": RUN, "regrid": "conservative"}
    reader = open_sources(make_config(path, variable_options={"sst": {"missing": "fill_mean"}}, **options))
    assert np.isnan(reader.read(5)[0]).tolist() == reader.masks["sst"].tolist()
    assert reader.masks["sst"].sum() == pytest.approx(200 / 4, abs=10)
    with pytest.raises(DataError, match="values are missing"):
        open_sources(make_config(path, **options)).read(0)


def test_preprocess_writes_regridded_fields(tmp_path: Path, conf: DataConfig) -> None:
    raw = {"save_loc": str(tmp_path / "run"), "data": conf.model_dump(mode="json", exclude_defaults=True)}
    raw |= {"model": {"type": "wxformer"}, "trainer": {"max_steps": 1}}
    (tmp_path / "config.yml").write_text(yaml.safe_dump(raw))
    assert main(["preprocess", str(tmp_path / "config.yml")]) == 0
    store_reader = open_reader(conf)
    assert store_reader.grid.describe_mismatch(TARGET) is None
    assert len(store_reader.times) == 32
    np.testing.assert_array_equal(store_reader.read(9), compute_expected(9))
    np.testing.assert_array_equal(store_reader.static(), open_sources(conf).static())
    assert store_reader.statistics.names[0] == "t850"
    np.testing.assert_allclose(
        store_reader.statistics.mean[0], np.mean([compute_expected(n)[0] for n in range(16)]), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"grid": RUN | {"rows": 18, "poles": False}}, "data.grid: .*19.* in the store, .*18.* in the config"),
        ({"grid": None, "variable_options": {}}, "data.grid: .* in the store, None in the config"),
        ({"regrid": "conservative"}, "data.regrid: bilinear in the store, conservative in the config"),
        (
            {"variable_options": {"land": {"regrid": "nearest"}}},
            "data.variable_options.t.regrid: conservative in the store, None",
        ),
        (
            {
                "variable_options": {
                    "t": {"regrid": "conservative"},
                    "land": {"regrid": "nearest"},
                    "u": {"vector": "no"},
                }
            },
            "data.variable_options.u.vector: auto in the store, no in the config",
        ),
    ],
)
def test_store_with_other_grid_settings_is_refused(tmp_path: Path, conf: DataConfig, change: dict, named: str) -> None:
    write_training_store(conf)
    for open_or_write in (open_reader, write_training_store):
        with pytest.raises(DataError, match=named):
            open_or_write(make_conf(tmp_path, **change))


def test_store_of_an_earlier_version_has_the_grid_of_the_files(tmp_path: Path, conf: DataConfig) -> None:
    """Earlier versions wrote no grid into the identity of a store."""
    one_grid = {"p2": [], "static": [], "variable_options": {}}
    path = write_training_store(make_conf(tmp_path, grid=None, **one_grid))
    assert not [key for key in read_description(path)["identity"] if "grid" in key or "vector" in key]
    assert open_store(path).grid.describe_mismatch(FINE) is None
    with pytest.raises(DataError, match="data.grid: None in the store"):
        open_reader(make_conf(tmp_path, **one_grid))


def test_without_data_grid_all_files_must_have_the_same_grid(tmp_path: Path, conf: DataConfig) -> None:
    with pytest.raises(DataError, match=r"different grids: 37 x 72 cells against 24 x 40; set data\.grid"):
        open_sources(make_conf(tmp_path, grid=None, variable_options={}))


def test_regional_grids_are_refused(tmp_path: Path) -> None:
    europe = {"lat": np.linspace(70, 30, 9), "lon": np.linspace(-20, 40, 13)}
    path = write_file(tmp_path / "a.nc", {"t": random_fields(40, 9, 13)}, HOURS, **europe)
    with pytest.raises(DataError, match="only global grids"):
        open_sources(make_config(path, p2=["t"], grid=RUN))
    global_file = write_file(tmp_path / "b.nc", {"t": T[:, 0]}, HOURS, lat=FINE.lat)
    with pytest.raises(DataError, match=r"a\.nc.*only global grids"):
        open_sources(make_config(global_file, p2=["t"], grid={"like": str(path)}))


def test_invalid_grid_like_is_refused(tmp_path: Path, conf: DataConfig) -> None:
    with pytest.raises(DataError, match=r"data\.grid\.like: .*none\.nc does not exist"):
        open_sources(make_conf(tmp_path, grid={"like": str(tmp_path / "none.nc")}))
    xr.Dataset({"x": ("y", [1.0, 2.0])}).to_netcdf(tmp_path / "bare.nc")
    with pytest.raises(DataError, match=r"data\.grid\.like: .*bare\.nc has 0 latitude and 0 longitude coordinates"):
        open_sources(make_conf(tmp_path, grid={"like": str(tmp_path / "bare.nc")}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": {"rows": 19, "columns": 36}}, "set rows, columns and poles, or only like"),
        ({"grid": RUN | {"like": "a.nc"}}, "set rows, columns and poles, or only like"),
        ({"grid": {}}, "set rows, columns and poles, or only like"),
        ({"grid": RUN | {"pole": True}}, "pole"),
        ({"grid": None, "variable_options": {}, "regrid": "conservative"}, "regrid has no effect without grid"),
        ({"grid": None}, "variable_options.t.regrid has no effect"),
        ({"static": ["sin_latitude"], "variable_options": {"sin_latitude": {"regrid": "nearest"}}}, "has no effect"),
        ({"regrid": "nearest"}, "bilinear"),
    ],
)
def test_settings_without_meaning_are_refused(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_conf(tmp_path, **options)
