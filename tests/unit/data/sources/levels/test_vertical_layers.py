"""Layers of whole columns, or an error that says what is lacking."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from credit.config.sections.data import DataConfig
from credit.data.sources.levels.vertical_layers import VerticalLayers, build_layers
from credit.errors import ConfigError
from tests.unit.data import hybrid_on_the_fly as world
from tests.unit.data.files_on_the_fly import make_config


def config(levels: list[float], units: str = "model_level", coefficients: Path | None = None) -> DataConfig:
    name = None if coefficients is None else str(coefficients)
    return make_config("a.nc", p3=["t"], levels=levels, level_units=units, coefficients=name)


@pytest.fixture(params=["cam", "ecmwf", "cf", "csv"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The same half levels, as different archives write them."""
    if request.param == "csv":
        lines = [f"{n},{a!r},{b!r}" for n, (a, b) in enumerate(zip(*map(np.ndarray.tolist, world.half_levels()), strict=True))]  # fmt: skip  # noqa: E501
        (tmp_path / "half.csv").write_text("n,a [Pa],b\n" + "\n".join(lines))
        return tmp_path / "half.csv"
    return world.write(tmp_path / "levels.nc", request.param, world.fields_of("t", "sp", times=1), world.HOURS[:1])


def numbers(table: Path) -> list[float]:
    """Return what the levels are called: CAM calls them by their pressure."""
    import xarray as xr

    if table.suffix == ".csv":
        return np.arange(1.0, world.K + 1).tolist()
    with xr.open_dataset(table, decode_times=False) as data:
        return data.lev.values.tolist()


def test_half_levels_of_every_archive(table: Path) -> None:
    layers = build_layers(config(numbers(table), coefficients=table))
    a, b = world.half_levels()
    np.testing.assert_allclose(layers.a, np.stack([a[:-1], a[1:]], axis=1), atol=1e-6)
    np.testing.assert_allclose(layers.b, np.stack([b[:-1], b[1:]], axis=1), atol=1e-12)
    assert not layers.cut_by_ground


def test_levels_in_another_order(tmp_path: Path) -> None:
    table = world.write(tmp_path / "levels.nc", "ecmwf", world.fields_of("t", "sp", times=1), world.HOURS[:1])
    down, up = (build_layers(config(list(order), coefficients=table)) for order in (range(1, 25), range(24, 0, -1)))
    assert np.array_equal(up.a, down.a[::-1])
    assert np.array_equal(up.b, down.b[::-1])


def test_pressure_levels_reach_from_0_to_the_ground() -> None:
    layers = build_layers(config([1000, 850, 700, 500, 300, 100], "hPa"))
    assert layers.a.tolist() == [
        [92500.0, 0.0], [77500.0, 92500.0], [60000.0, 77500.0], [40000.0, 60000.0], [20000.0, 40000.0], [0.0, 20000.0],
    ]  # fmt: skip
    assert layers.b.tolist() == [[0.0, 1.0], *[[0.0, 0.0]] * 5]
    assert layers.cut_by_ground
    assert np.array_equal(build_layers(config([1e5, 85e3, 7e4, 5e4, 3e4, 1e4], "Pa")).a, layers.a)


def test_what_a_checkpoint_keeps() -> None:
    layers = build_layers(config([50, 200, 400, 600, 800, 1000], "hPa"))
    again = VerticalLayers.from_dict(layers.to_dict())
    assert again.levels == layers.levels
    assert again.cut_by_ground
    assert np.array_equal(again.a, layers.a)
    assert np.array_equal(again.b, layers.b)


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
def test_pressure_levels_that_are_no_column(levels: list[float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_layers(config(levels, "hPa"))


def test_model_levels_that_are_no_column(tmp_path: Path) -> None:
    every = [float(n) for n in range(1, 25)]
    with pytest.raises(ConfigError, match=r"set data\.coefficients to a file"):
        build_layers(config(every))
    table = world.write(tmp_path / "levels.nc", "ecmwf", world.fields_of("t", "sp", times=1), world.HOURS[:1])
    with pytest.raises(ConfigError, match=r"data\.levels: 18 levels, 7, 8, 9 \.\.\. 24, are not the 24 levels of"):
        build_layers(config(every[6:], coefficients=table))
    with pytest.raises(ConfigError, match="are not the 24 levels"):
        build_layers(config([*every[:-1], 24.5], coefficients=table))
    import xarray as xr

    with xr.open_dataset(table, decode_times=False) as data:
        data.drop_vars(["hyai", "hybi"]).to_netcdf(tmp_path / "full.nc")
        data.isel(nhym=slice(0, 23), nhyi=slice(0, 24)).isel(lev=slice(0, 23)).to_netcdf(tmp_path / "short.nc")
    with pytest.raises(ConfigError, match="has no half levels"):
        build_layers(config(every, coefficients=tmp_path / "full.nc"))
    with pytest.raises(ConfigError, match="no half levels"):  # those that there are do not reach the ground
        build_layers(config(every[:23], coefficients=tmp_path / "short.nc"))
