"""Tests of building the layers of complete columns, and of the errors for incomplete columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from credit.config.sections.data import DataConfig
from credit.data.sources.levels.vertical_layers import VerticalLayers, build_layers
from credit.errors import ConfigError
from tests.unit.data import hybrid_on_the_fly as hybrid
from tests.unit.data.files_on_the_fly import make_config


def build_config(levels: list[float], units: str = "model_level", coefficients: Path | None = None) -> DataConfig:
    name = None if coefficients is None else str(coefficients)
    return make_config("a.nc", p3=["t"], levels=levels, level_units=units, coefficients=name)


@pytest.fixture(params=["cam", "ecmwf", "cf", "csv"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write the same half levels in the layout of an archive, and return the path."""
    if request.param == "csv":
        lines = [f"{n},{a!r},{b!r}" for n, (a, b) in enumerate(zip(*map(np.ndarray.tolist, hybrid.half_levels()), strict=True))]  # fmt: skip  # noqa: E501
        (tmp_path / "half.csv").write_text("n,a [Pa],b\n" + "\n".join(lines))
        return tmp_path / "half.csv"
    return hybrid.write(tmp_path / "levels.nc", request.param, hybrid.fields_of("t", "sp", times=1), hybrid.HOURS[:1])


def read_level_values(table: Path) -> list[float]:
    """Return the values of the level coordinate, which are pressures for CAM."""
    import xarray as xr

    if table.suffix == ".csv":
        return np.arange(1.0, hybrid.K + 1).tolist()
    with xr.open_dataset(table, decode_times=False) as data:
        return data.lev.values.tolist()


def test_half_levels_of_every_archive_are_read(table: Path) -> None:
    layers = build_layers(build_config(read_level_values(table), coefficients=table))
    a, b = hybrid.half_levels()
    np.testing.assert_allclose(layers.a, np.stack([a[:-1], a[1:]], axis=1), atol=1e-6)
    np.testing.assert_allclose(layers.b, np.stack([b[:-1], b[1:]], axis=1), atol=1e-12)
    assert not layers.cut_by_ground


def test_layers_are_in_the_order_of_the_levels(tmp_path: Path) -> None:
    table = hybrid.write(tmp_path / "levels.nc", "ecmwf", hybrid.fields_of("t", "sp", times=1), hybrid.HOURS[:1])
    down, up = (
        build_layers(build_config(list(order), coefficients=table)) for order in (range(1, 25), range(24, 0, -1))
    )
    assert np.array_equal(up.a, down.a[::-1])
    assert np.array_equal(up.b, down.b[::-1])


def test_pressure_levels_reach_from_0_to_the_ground() -> None:
    layers = build_layers(build_config([1000, 850, 700, 500, 300, 100], "hPa"))
    assert layers.a.tolist() == [
        [92500.0, 0.0], [77500.0, 92500.0], [60000.0, 77500.0], [40000.0, 60000.0], [20000.0, 40000.0], [0.0, 20000.0],
    ]  # fmt: skip
    assert layers.b.tolist() == [[0.0, 1.0], *[[0.0, 0.0]] * 5]
    assert layers.cut_by_ground
    assert np.array_equal(build_layers(build_config([1e5, 85e3, 7e4, 5e4, 3e4, 1e4], "Pa")).a, layers.a)


def test_round_trip_through_a_dict() -> None:
    layers = build_layers(build_config([50, 200, 400, 600, 800, 1000], "hPa"))
    restored = VerticalLayers.from_dict(layers.to_dict())
    assert restored.levels == layers.levels
    assert restored.cut_by_ground
    assert np.array_equal(restored.a, layers.a)
    assert np.array_equal(restored.b, layers.b)


@pytest.mark.parametrize(
    ("levels", "says"),
    [
        ([200, 400, 600, 800, 1000], "uppermost level must be at most 100 hPa"),
        ([50, 200, 400, 600, 800, 925], "lowest level at least 1000"),
        ([50, 300, 400, 600, 800, 1000], "distance between adjacent levels at most 200"),
        ([850, 700, 500, 250], r"data\.levels: 850, 700, 500, 250 hPa do not represent complete columns"),
        ([1000], "remove budgets from model.postprocess"),
    ],
)
def test_incomplete_columns_of_pressure_levels_are_refused(levels: list[float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_layers(build_config(levels, "hPa"))


def test_incomplete_columns_of_model_levels_are_refused(tmp_path: Path) -> None:
    all_levels = [float(n) for n in range(1, 25)]
    with pytest.raises(ConfigError, match=r"set data\.coefficients to a file"):
        build_layers(build_config(all_levels))
    table = hybrid.write(tmp_path / "levels.nc", "ecmwf", hybrid.fields_of("t", "sp", times=1), hybrid.HOURS[:1])
    with pytest.raises(ConfigError, match=r"data\.levels: 18 levels, 7, 8, 9 \.\.\. 24, are not the 24 levels of"):
        build_layers(build_config(all_levels[6:], coefficients=table))
    with pytest.raises(ConfigError, match="are not the 24 levels"):
        build_layers(build_config([*all_levels[:-1], 24.5], coefficients=table))
    import xarray as xr

    with xr.open_dataset(table, decode_times=False) as data:
        data.drop_vars(["hyai", "hybi"]).to_netcdf(tmp_path / "full.nc")
        data.isel(nhym=slice(0, 23), nhyi=slice(0, 24)).isel(lev=slice(0, 23)).to_netcdf(tmp_path / "short.nc")
    with pytest.raises(ConfigError, match="has no half levels"):
        build_layers(build_config(all_levels, coefficients=tmp_path / "full.nc"))
    with pytest.raises(ConfigError, match="no half levels"):  # the remaining half levels do not extend to the ground
        build_layers(build_config(all_levels[:23], coefficients=tmp_path / "short.nc"))
