"""Scores against two libraries and against what can be said by hand."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from credit.channels import Channel, ChannelMap
from credit.errors import DataError
from credit.verify.sums import REGIONS, CellMeans, ScoreSums, region_weights, wind_pairs
from tests.unit.analytic_reader import ATTRIBUTES, make_grid

CHANNELS = ChannelMap.build({"prognostic": {"vars_3D": ["z"], "vars_2D": ["t2m", "sst"]}}, [500.0]).output
GRIDS = {"small": make_grid(8, 16), "181 x 360 with poles": make_grid(181, 360, poles=True)}
CASES = 3


def _cases(grid, masked: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    shape = (CASES, len(CHANNELS), *grid.shape)
    truth = 280 + 10 * rng.standard_normal(shape)
    forecast = truth + 1 + 5 * rng.standard_normal(shape)
    normal = 280 + 2 * rng.standard_normal(shape)
    masks = {}
    if masked:
        masks["sst"] = rng.random(grid.shape) < 0.3
        for field in (truth, forecast, normal):
            field[:, 2, masks["sst"]] = np.nan
    return {"forecast": forecast, "truth": truth, "normal": normal}, masks


def _sums(grid, cases: dict[str, np.ndarray], masks: dict[str, np.ndarray], which: range) -> ScoreSums:
    means = CellMeans(grid, CHANNELS, masks)
    sums = ScoreSums.zeros(1, len(CHANNELS))
    for case in which:
        fields = [means.flatten(cases[name][case].astype(np.float32), name) for name in cases]
        sums.add(0, means, *fields)
        sums.cases += 1
    return sums


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("masked", [False, True])
def test_scores_agree_with_the_libraries(grid, masked: bool) -> None:
    """`scores` for rmse, bias and mae; `xskillscore` for the correlation."""
    scores = pytest.importorskip("scores")
    xskillscore = pytest.importorskip("xskillscore")
    cases, masks = _cases(grid, masked)
    ours = {name: score[0] for name, score in _sums(grid, cases, masks, range(CASES)).metrics().items()}
    dims = ("case", "channel", "latitude", "longitude")
    data = {name: xr.DataArray(value.astype(np.float32).astype(np.float64), dims=dims) for name, value in cases.items()}
    for number in range(len(REGIONS)):
        weights = xr.DataArray(region_weights(grid)[number], dims=dims[2:])
        over = {"reduce_dims": ["case", "latitude", "longitude"], "weights": weights}
        mse = scores.continuous.mse(data["forecast"], data["truth"], **over)
        np.testing.assert_allclose(ours["rmse"][:, number], np.sqrt(mse), rtol=1e-9)
        mae = scores.continuous.mae(data["forecast"], data["truth"], **over)
        np.testing.assert_allclose(ours["mae"][:, number], mae, rtol=1e-9)
        bias = scores.continuous.additive_bias(data["forecast"], data["truth"], **over)
        np.testing.assert_allclose(ours["bias"][:, number], bias, rtol=1e-8)
        anomalies = [(data[name] - data["normal"]) for name in ("forecast", "truth")]
        # an uncentred correlation is the centred one of a field and its mirror image
        mirrored = [xr.concat([a, -a], "sign") for a in anomalies]
        everywhere = weights.expand_dims(sign=2, case=CASES)
        for metric, dim in (("acc", ["sign", *dims[:1], *dims[2:]]), ("acc_wb2", ["sign", *dims[2:]])):
            own = everywhere if metric == "acc" else everywhere.isel(case=0)
            theirs = [
                xskillscore.pearson_r(*(m.isel(channel=c) for m in mirrored), dim, own, skipna=True).mean()
                for c in range(len(CHANNELS))
            ]
            np.testing.assert_allclose(ours[metric][:, number], theirs, rtol=1e-8)


def test_sums_add_up_whatever_the_split() -> None:
    grid = GRIDS["small"]
    cases, masks = _cases(grid, masked=True)
    whole = _sums(grid, cases, masks, range(CASES)).metrics()
    parts = (_sums(grid, cases, masks, range(1)) + _sums(grid, cases, masks, range(1, CASES))).metrics()
    for name, value in whole.items():
        np.testing.assert_allclose(parts[name], value, rtol=1e-12)


def test_the_root_is_taken_last() -> None:
    grid = GRIDS["small"]
    cases = {name: np.zeros((CASES, len(CHANNELS), *grid.shape)) for name in ("forecast", "truth", "normal")}
    cases["forecast"] += np.array([3.0, 0.0, 0.0])[:, None, None, None]
    metrics = _sums(grid, cases, {}, range(CASES)).metrics()
    np.testing.assert_allclose(metrics["rmse"], np.sqrt(3.0))
    np.testing.assert_allclose(metrics["bias"], 1.0)
    assert np.isnan(metrics["acc"]).all()  # the truth has no anomaly


def test_a_pole_row_counts_as_the_half_cell_that_it_is() -> None:
    grid = GRIDS["181 x 360 with poles"]
    means = CellMeans(grid, CHANNELS[:1], {})
    field = np.zeros((1, *grid.shape))
    field[0, 0] = 1.0
    expected = (1 - np.sin(np.deg2rad(89.5))) / 2
    assert means.mean(means.flatten(field, "pole"))[0, 0] == pytest.approx(expected, rel=1e-9)


def test_regions_are_weatherbench2s() -> None:
    grid = make_grid(19, 4, poles=True)  # every 10 degrees
    weights = dict(zip(REGIONS, region_weights(grid), strict=True))
    rows = {name: grid.lat[weight[:, 0] > 0].tolist() for name, weight in weights.items()}
    assert rows["tropics"] == [20, 10, 0, -10, -20]
    assert rows["extratropics_north"] == [90, 80, 70, 60, 50, 40, 30, 20]
    assert rows["extratropics"] == rows["extratropics_north"] + rows["extratropics_south"]
    assert len(rows["global"]) == 19
    for weight in weights.values():
        assert weight.sum() == pytest.approx(1.0)


def test_a_forecast_that_is_not_finite_is_refused() -> None:
    grid = GRIDS["small"]
    mask = np.zeros(grid.shape, dtype=bool)
    mask[0, 0] = True
    means = CellMeans(grid, CHANNELS, {"sst": mask})
    field = np.zeros((len(CHANNELS), *grid.shape))
    field[2, 0, 0] = np.nan
    assert (means.flatten(field, "masked") == 0).all()
    field[1, 3, 3] = np.inf
    with pytest.raises(DataError, match="forecast at 24 h: t2m is not finite"):
        means.flatten(field, "forecast at 24 h")


def test_wind_components_find_each_other() -> None:
    names = [("u", 850.0), ("u", 500.0), ("t", 500.0), ("v", 500.0), ("u10", None), ("v10", None), ("v", 250.0)]
    channels = [Channel(f"{n}{level or ''}", n, level, "prognostic") for n, level in names]
    assert wind_pairs(channels, ATTRIBUTES) == [(1, 3, "wind"), (4, 5, "wind10")]
