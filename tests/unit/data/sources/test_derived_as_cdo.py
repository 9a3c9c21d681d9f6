"""Tests of derived fields and extrapolation below the ground against CDO. They need an installed CDO."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit.data.sources.source_reader import open_sources
from tests.unit.data import hybrid_on_the_fly as hybrid
from tests.unit.data.hybrid_on_the_fly import ATMOSPHERE, DERIVED, LEVELS, config, fields_of


@pytest.fixture(scope="module")
def cdo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a GRIB file and CDO's results for it, and return their folder."""
    if shutil.which("cdo") is None:
        pytest.skip("cdo is not installed")
    folder = tmp_path_factory.mktemp("cdo")
    fields = fields_of("t", "u", "q", "lnsp", times=2)
    fields["zs"] = np.broadcast_to(ATMOSPHERE["zs"], fields["lnsp"].shape)
    path = hybrid.write(folder / "ml.grib", "grib", fields, hybrid.HOURS[:2])
    for operator in ("ml2plx,5000,20000,50000,85000,100000", "gheight", "sealevelpressure"):
        out = folder / f"{operator.split(',')[0]}.nc"
        subprocess.run(["cdo", "-s", "-f", "nc", "-b", "F64", operator, path, out], check=True, capture_output=True)
    return folder


def read_derived(folder: Path, time: int, **options: object) -> np.ndarray:
    source = {"rename": {"zs": "z"}}
    ground = {"surface_pressure": "lnsp", "surface_geopotential": "zs"}
    return open_sources(config(folder / "ml.grib", ground, source, **options)).read(time)


def test_netcdf_written_by_cdo_is_read(cdo_folder: Path) -> None:
    """The file has CDO's level numbers and names, and hyam and hyai on separate dimensions."""
    command = ["cdo", "-s", "-f", "nc4", "copy", cdo_folder / "ml.grib", cdo_folder / "ml.nc"]
    subprocess.run(command, check=True, capture_output=True)
    ground = {"surface_pressure": "lnsp", "surface_geopotential": "zs"}
    options = {"p3": ["t", "z"], "variable_options": {"z": DERIVED["z"]}}
    fields = open_sources(config(cdo_folder / "ml.nc", ground, {"rename": {"zs": "z"}}, **options)).read(1)
    np.testing.assert_allclose(fields, read_derived(cdo_folder, 1, **options), rtol=1e-6, atol=0.05)


def compute_ground(time: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return surface pressure, surface temperature, and temperature at sea level by the standard lapse rate."""
    surface = ATMOSPHERE["sp"][time].astype(np.float64)
    ratio = surface / hybrid.levels().lowest_pressure(surface)
    ground = ATMOSPHERE["t"][time, -1] * (1 + 0.0065 * hybrid.R / hybrid.G * (ratio - 1))
    return surface, ground, ground + 0.0065 * ATMOSPHERE["zs"] / hybrid.G


def test_geopotential_equals_cdo(cdo_folder: Path) -> None:
    options = {"levels": list(range(1, 25)), "level_units": "model_level", "variable_options": {"z": DERIVED["z"]}}
    cdo_fields = xr.load_dataset(cdo_folder / "gheight.nc", decode_times=False).zh.values[1] * hybrid.G
    np.testing.assert_allclose(read_derived(cdo_folder, 1, p3=["z"], **options), cdo_fields, rtol=1e-6)


def test_sea_level_pressure_equals_cdo(cdo_folder: Path) -> None:
    cdo_fields = xr.load_dataset(cdo_folder / "sealevelpressure.nc", decode_times=False).psl.values[1]
    derived_fields = read_derived(cdo_folder, 1, p3=["t"], p2=["msl"], variable_options={"msl": DERIVED["msl"]})[-1]
    _, ground, sea_level = compute_ground(1)
    # In all other cells Trenberth et al. limit the temperature at sea level to 290.5 K, but CDO does not.
    is_comparable = (ground > 290.5) | (sea_level <= 290.5)
    assert is_comparable.sum() > 130
    np.testing.assert_allclose(derived_fields[is_comparable], cdo_fields[is_comparable], atol=0.05)
    np.testing.assert_allclose(derived_fields, cdo_fields, atol=100.0)


def test_extrapolation_below_ground_equals_cdo(cdo_folder: Path) -> None:
    """Above the ground CDO is linear in p, so other tests compare that part with numpy."""
    cdo_fields = xr.load_dataset(cdo_folder / "ml2plx.nc", decode_times=False)
    derived_fields = np.split(read_derived(cdo_folder, 1), 3)
    surface, ground, sea_level = compute_ground(1)
    pressure = np.array(LEVELS)[:, None, None] * 100.0
    is_below_lowest = pressure > hybrid.levels().lowest_pressure(surface)
    is_under_ground = pressure > surface
    assert is_below_lowest.sum() > 150
    assert is_under_ground.sum() > 60
    for values, name in zip(derived_fields[1:], "uq", strict=True):
        np.testing.assert_allclose(values[is_below_lowest], cdo_fields[name].values[1][is_below_lowest], rtol=1e-6)
    # CDO uses no lapse rate over the sea. Just above the ground it moderates hot and cold surface temperatures.
    is_comparable = (is_under_ground & (ATMOSPHERE["zs"] > 0)) | (
        is_below_lowest & ~is_under_ground & (ground > 255) & (sea_level < 290.5)
    )
    assert is_comparable.sum() > 80
    np.testing.assert_allclose(derived_fields[0][is_comparable], cdo_fields["t"].values[1][is_comparable], atol=1e-3)
