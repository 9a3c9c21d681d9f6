"""Tests of deterministic scores, against two libraries and values computed by hand."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import credit
from credit.channels import Channel, ChannelMap
from credit.config.sections.verification import REGIONS
from credit.errors import DataError
from credit.utils import threads
from credit.verify.statistics import kernels
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.case_statistics import DeterministicStatistics
from credit.verify.statistics.error_moments import ReferenceFields
from credit.verify.statistics.regions import region_weights
from credit.verify.statistics.wind_vectors import wind_pairs
from tests.unit.analytic_reader import ATTRIBUTES, make_grid

CHANNELS = ChannelMap.build({"prognostic": {"vars_3D": ["z"], "vars_2D": ["t2m", "sst"]}}, [500.0]).output
GRIDS = {"small": make_grid(8, 16), "181 x 360 with poles": make_grid(181, 360, poles=True)}
CASES = 3


def _draw_cases(grid, masked: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
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


def _build_sums(
    grid, cases: dict[str, np.ndarray], masks: dict[str, np.ndarray], case_range: range, dtype: type = np.float64
) -> DeterministicStatistics:
    """Return the statistics of cases whose fields are rounded to float32 and then have the given dtype."""
    means = AreaMean(CHANNELS, masks, region_weights(grid, _select_regions(grid)))
    sums = DeterministicStatistics.empty(1440 * np.array(case_range), 1, means)
    for number, case in enumerate(case_range):
        fields = [cases[name][case].astype(np.float32).astype(dtype) for name in cases]
        sums.add(number, 0, means, fields[0], ReferenceFields(*fields[1:]))
    return sums


def _select_regions(grid) -> dict:
    """Return some regions that have cells on the grid."""
    names_on_small_grids = ["global", "tropics", "extratropics", "extratropics_north", "extratropics_south"]
    return {
        name: REGIONS[name] for name in (["global", "europe", "ausnz"] if len(grid.lat) > 100 else names_on_small_grids)
    }


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float32, 1e-6), (np.float64, 1e-8)])
def test_scores_agree_with_the_libraries(grid, masked: bool, dtype: type, rtol: float) -> None:
    """RMSE, bias and MAE are compared with `scores`, and the correlation with `xskillscore`."""
    scores = pytest.importorskip("scores")
    xskillscore = pytest.importorskip("xskillscore")
    cases, masks = _draw_cases(grid, masked)
    metrics = {name: score[0] for name, score in _build_sums(grid, cases, masks, range(CASES), dtype).metrics().items()}
    dims = ("case", "channel", "latitude", "longitude")
    data = {name: xr.DataArray(value.astype(np.float32).astype(np.float64), dims=dims) for name, value in cases.items()}
    for number, region_weight in enumerate(region_weights(grid, _select_regions(grid))):
        weights = xr.DataArray(region_weight, dims=dims[2:])
        options = {"reduce_dims": ["case", "latitude", "longitude"], "weights": weights}
        mse = scores.continuous.mse(data["forecast"], data["truth"], **options)
        np.testing.assert_allclose(metrics["rmse"][:, number], np.sqrt(mse), rtol=rtol)
        mae = scores.continuous.mae(data["forecast"], data["truth"], **options)
        np.testing.assert_allclose(metrics["mae"][:, number], mae, rtol=rtol)
        bias = scores.continuous.additive_bias(data["forecast"], data["truth"], **options)
        np.testing.assert_allclose(metrics["bias"][:, number], bias, rtol=rtol)
        anomalies = [(data[name] - data["normal"]) for name in ("forecast", "truth")]
        # The uncentred correlation equals the centred one of the fields together with their negatives.
        mirrored = [xr.concat([a, -a], "sign") for a in anomalies]
        case_weights = weights.expand_dims(sign=2, case=CASES)
        for metric, dim in (("acc", ["sign", *dims[:1], *dims[2:]]), ("acc_wb2", ["sign", *dims[2:]])):
            metric_weights = case_weights if metric == "acc" else case_weights.isel(case=0)
            expected = [
                xskillscore.pearson_r(*(m.isel(channel=c) for m in mirrored), dim, metric_weights, skipna=True).mean()
                for c in range(len(CHANNELS))
            ]
            np.testing.assert_allclose(metrics[metric][:, number], expected, rtol=rtol)


def test_joined_parts_equal_all_cases_to_the_last_bit() -> None:
    cases, masks = _draw_cases(GRIDS["small"], True)
    all_cases = _build_sums(GRIDS["small"], cases, masks, range(CASES))
    first = _build_sums(GRIDS["small"], cases, masks, range(1))
    last = _build_sums(GRIDS["small"], cases, masks, range(1, CASES))
    for joined in (DeterministicStatistics.join([first, last]), DeterministicStatistics.join([last, first])):
        for name in ("initial_times", *DeterministicStatistics.array_names()):
            np.testing.assert_array_equal(getattr(joined, name), getattr(all_cases, name))
        for name, value in all_cases.metrics().items():
            np.testing.assert_array_equal(joined.metrics()[name], value)
    with pytest.raises(DataError, match="an initial time in common"):
        DeterministicStatistics.join([all_cases, last])
    chosen = all_cases.select(np.array([True, False, False]))
    np.testing.assert_array_equal(chosen.metrics()["rmse"], first.metrics()["rmse"])


def test_activity_is_the_standard_deviation_of_the_anomaly_in_space() -> None:
    grid = GRIDS["181 x 360 with poles"]
    cases, masks = _draw_cases(grid, True)
    metrics = _build_sums(grid, cases, masks, range(CASES)).metrics()
    weights = region_weights(grid, _select_regions(grid))
    for name, metric in (("forecast", "activity"), ("truth", "activity_truth")):
        anomaly = cases[name].astype(np.float32).astype(float) - cases["normal"].astype(np.float32)
        for channel, region in ((0, 0), (1, 1), (2, 2)):
            is_valid = np.isfinite(anomaly[0, channel])
            variances = [
                np.cov(field[channel][is_valid], aweights=weights[region][is_valid], ddof=0) for field in anomaly
            ]
            assert metrics[metric][0, channel, region] == pytest.approx(np.sqrt(np.mean(variances)), rel=1e-9)
    np.testing.assert_allclose(metrics["activity_ratio"], metrics["activity"] / metrics["activity_truth"])


def test_wind_vectors() -> None:
    """The expected scores are those of complex numbers u + iv."""
    grid = GRIDS["small"]
    channels = [Channel(name, name, None, "prognostic") for name in ("u10", "t2m", "v10")]
    means = AreaMean(channels, {}, region_weights(grid, _select_regions(grid)), [(0, 2)])
    cases, _ = _draw_cases(grid, False)
    sums = DeterministicStatistics.empty(np.arange(CASES), 1, means)
    for case in range(CASES):
        forecast, truth, normal = (means.flatten(cases[name][case], name) for name in cases)
        sums.add(case, 0, means, forecast, ReferenceFields(truth, normal))
    vector = {name: field[:, 0] + 1j * field[:, 2] for name, field in cases.items()}
    error = vector["forecast"] - vector["truth"]
    forecast_anomaly = vector["forecast"] - vector["normal"]
    truth_anomaly = vector["truth"] - vector["normal"]

    def mean(values: np.ndarray) -> complex:
        return (values.mean(axis=0) * grid.area_weights()).sum()

    centred = [forecast_anomaly[case] - (forecast_anomaly[case] * grid.area_weights()).sum() for case in range(CASES)]
    expected = {
        "rmse": np.sqrt(mean(np.abs(error) ** 2)),
        "mae": mean(np.abs(error)),
        "bias": mean(np.abs(vector["forecast"]) - np.abs(vector["truth"])),
        "acc": mean((forecast_anomaly * truth_anomaly.conj()).real)
        / np.sqrt(mean(np.abs(forecast_anomaly) ** 2) * mean(np.abs(truth_anomaly) ** 2)),
        "activity": np.sqrt(mean(np.abs(np.array(centred)) ** 2)),
    }
    metrics = sums.metrics()
    for name, value in expected.items():
        assert metrics[name][0, 3, 0] == pytest.approx(value, rel=1e-9), name


def test_a_small_bias_of_large_values_keeps_its_digits() -> None:
    """The field is geopotential of the stratosphere, whose float32 values have a spacing of 1/32 m2 s-2."""
    grid = GRIDS["181 x 360 with poles"]
    channels = CHANNELS[:1]
    rng = np.random.default_rng(6)
    truth = (5e5 + 2e3 * rng.standard_normal((1, *grid.shape))).astype(np.float32)
    error = 40 * rng.standard_normal(truth.shape)
    error += 0.01 - (error * grid.area_weights()).sum()
    fields = (truth + error).astype(np.float32), truth, np.full_like(truth, 5e5)
    means = AreaMean(channels, {}, region_weights(grid, {"global": REGIONS["global"]}))
    sums = DeterministicStatistics.empty(np.arange(1), 1, means)
    sums.add(0, 0, means, fields[0], ReferenceFields(*fields[1:]))
    exact = ((fields[0].astype(np.float64) - truth) * grid.area_weights()).sum()
    assert sums.error.item() == pytest.approx(exact, rel=1e-5)
    assert 0.005 < exact < 0.015


@pytest.mark.parametrize("scale", [1e20, 1e-16, 1e-20, 1e-23])
def test_squares_beyond_float32_are_added_up_in_float64(scale: float) -> None:
    grid = GRIDS["small"]
    cases = {name: np.full((CASES, len(CHANNELS), *grid.shape), value) for name, value in
             {"forecast": 3 * scale, "truth": scale, "normal": 0.0}.items()}  # fmt: skip
    metrics = _build_sums(grid, cases, {}, range(CASES), np.float32).metrics()
    np.testing.assert_allclose(metrics["rmse"], 2 * scale, rtol=1e-6)
    np.testing.assert_allclose(metrics["acc"], 1.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_region_averages_its_own_cells(dtype: type) -> None:
    """Regions are bands, overlapping boxes, boxes across the meridian of 0 degrees, and pairs of boxes."""
    grid = GRIDS["181 x 360 with poles"]
    pair = REGIONS["europe"] + REGIONS["ausnz"]
    weights = region_weights(grid, REGIONS | {"pair": pair, "across a pole": REGIONS["arctic"] + REGIONS["europe"]})
    cases, masks = _draw_cases(grid, True)
    fields = [field[0].astype(np.float32).astype(dtype) for field in cases.values()]
    means = AreaMean(CHANNELS, masks, weights)
    sums = DeterministicStatistics.empty(np.arange(1), 1, means)
    sums.add(0, 0, means, fields[0], ReferenceFields(*fields[1:]))
    forecast, truth, _ = (field.astype(np.float64) for field in fields)
    error = np.nan_to_num(forecast - truth)
    for channel, mask in enumerate((False, False, masks["sst"])):
        for region, weight in enumerate(weights):
            options = {"weights": np.where(mask, 0.0, weight)}
            means_of_errors = [
                plane[0, 0, channel, region] for plane in (sums.error, sums.squared_error, sums.absolute_error)
            ]
            expected = [np.average(values[channel], **options) for values in (error, error**2, np.abs(error))]
            np.testing.assert_allclose(means_of_errors, expected, rtol=1e-6)
    flat = means.means_of_channel(means.flatten(forecast, "forecast")[:1], 0)
    np.testing.assert_allclose(flat[0], [np.average(forecast[0], weights=weight) for weight in weights], rtol=1e-12)


def test_one_channel_beyond_float32_does_not_change_the_others() -> None:
    grid = GRIDS["small"]
    cases, _ = _draw_cases(grid, False)
    statistics_before = _build_sums(grid, cases, {}, range(CASES), np.float32)
    for field in cases.values():
        field[:, 1] *= 1e-23
    statistics = _build_sums(grid, cases, {}, range(CASES), np.float32)
    for name, values in statistics.arrays().items():
        np.testing.assert_array_equal(
            values[..., [0, 2], :], statistics_before.arrays()[name][..., [0, 2], :], err_msg=name
        )
    np.testing.assert_allclose(
        statistics.metrics()["rmse"][0, 1], 1e-23 * statistics_before.metrics()["rmse"][0, 1], rtol=1e-6
    )


def test_threads_compute_equal_sums_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    cases, masks = _draw_cases(GRIDS["small"], True)
    sums_of_one_thread = _build_sums(GRIDS["small"], cases, masks, range(CASES)).arrays()
    monkeypatch.setattr(threads, "_MIN_CELLS_PER_THREAD", 1)
    threads._pool.clear()
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 2)
    for name, values in _build_sums(GRIDS["small"], cases, masks, range(CASES)).arrays().items():
        np.testing.assert_array_equal(values, sums_of_one_thread[name], err_msg=name)
    assert threads._pool


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_wind_beyond_float32_is_summed_and_does_not_change_other_regions(dtype: type) -> None:
    grid = GRIDS["small"]
    channels = [Channel(name, name, None, "prognostic") for name in ("u10", "v10")]
    means = AreaMean(channels, {}, region_weights(grid, _select_regions(grid)), [(0, 1)])
    truth = np.random.default_rng(2).standard_normal((2, *grid.shape)).astype(dtype)
    forecast = truth.copy()
    forecast[0, -1, 3] = 1e22
    sums = DeterministicStatistics.empty(np.arange(1), 1, means)
    sums.add(0, 0, means, forecast, ReferenceFields(truth, np.zeros_like(truth)))
    error_by_region = dict(zip(_select_regions(grid), sums.absolute_error[0, 0, 2], strict=True))
    assert error_by_region["global"] == pytest.approx(1e22 * grid.area_weights()[-1, 3], rel=1e-5)
    assert error_by_region["tropics"] == error_by_region["extratropics_north"] == 0


def test_sums_are_computed_if_a_full_disk_prevents_caching_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_disk_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out = np.zeros((1, 1))
    sums = kernels.compiled(kernels.field_sums.__wrapped__)
    monkeypatch.setattr("numba.core.caching._Cache.save_overload", raise_disk_full)
    monkeypatch.setattr("numba.core.caching.Cache.save_overload", raise_disk_full)
    monkeypatch.setattr("numba.core.caching.Cache.load_overload", lambda *_: None)
    sums(np.ones(3), (np.zeros(1, int), np.full(1, 3)), out)
    assert out[0, 0] == 3


def test_sums_do_not_need_a_writable_folder(tmp_path: Path) -> None:
    """This is the case of a package in a read-only container, and of a user without a home folder."""
    package = tmp_path / "credit"
    shutil.copytree(Path(credit.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "*.nc"))
    code = "import numpy as np\nfrom credit.verify.statistics.kernels import field_sums\nout = np.zeros((1, 1))\n"
    code += "field_sums(np.ones(3), (np.zeros(1, int), np.full(1, 3)), out)\nprint(credit.verify.__path__, out)"
    (tmp_path / "__pycache__").touch()
    # A file with the name of the folder prevents its creation, even by root.
    (package / "verify" / "__pycache__").touch()
    unusable_folders = {"HOME": str(tmp_path / "__pycache__"), "XDG_CACHE_HOME": str(tmp_path / "__pycache__")}
    command = [sys.executable, "-c", "import credit\n" + code]
    process = subprocess.run(command, cwd=tmp_path, env=os.environ | unusable_folders, capture_output=True, text=True)
    assert str(package) in process.stdout and "[[3.]]" in process.stdout, process.stderr


def test_rmse_is_the_root_of_the_mean_over_cases() -> None:
    grid = GRIDS["small"]
    cases = {name: np.zeros((CASES, len(CHANNELS), *grid.shape)) for name in ("forecast", "truth", "normal")}
    cases["forecast"] += np.array([3.0, 0.0, 0.0])[:, None, None, None]
    metrics = _build_sums(grid, cases, {}, range(CASES)).metrics()
    np.testing.assert_allclose(metrics["rmse"], np.sqrt(3.0))
    np.testing.assert_allclose(metrics["bias"], 1.0)
    assert np.isnan(metrics["acc"]).all()  # The truth has no anomaly.


def test_a_pole_row_has_the_weight_of_half_a_cell() -> None:
    grid = GRIDS["181 x 360 with poles"]
    means = AreaMean(CHANNELS[:1], {}, region_weights(grid, _select_regions(grid)))
    field = np.zeros((1, *grid.shape))
    field[0, 0] = 1.0
    expected = (1 - np.sin(np.deg2rad(89.5))) / 2
    assert means.means_of_channel(means.flatten(field, "pole"), 0)[0, 0] == pytest.approx(expected, rel=1e-9)


def test_a_forecast_that_is_not_finite_is_refused() -> None:
    grid = GRIDS["small"]
    mask = np.zeros(grid.shape, dtype=bool)
    mask[0, 0] = True
    means = AreaMean(CHANNELS, {"sst": mask}, region_weights(grid, _select_regions(grid)))
    field = np.zeros((len(CHANNELS), *grid.shape))
    field[2, 0, 0] = np.nan
    assert (means.flatten(field, "masked") == 0).all()
    field[1, 3, 3] = np.inf
    with pytest.raises(DataError, match="forecast at 24 h: t2m is not finite"):
        means.flatten(field, "forecast at 24 h")


def test_wind_components_are_paired_by_level() -> None:
    names = [("u", 850.0), ("u", 500.0), ("t", 500.0), ("v", 500.0), ("u10", None), ("v10", None), ("v", 250.0)]
    channels = [Channel(f"{n}{level or ''}", n, level, "prognostic") for n, level in names]
    assert wind_pairs(channels, ATTRIBUTES, {}) == [(1, 3, "wind"), (4, 5, "wind10")]
    assert wind_pairs(channels, ATTRIBUTES, {"u10": np.ones((2, 2), dtype=bool)}) == [(1, 3, "wind")]


@pytest.mark.parametrize("standard_name", ["", "unknown", "of CF"])
@pytest.mark.parametrize(
    ("u", "v", "wind"),
    [
        ("u10", "v10", "wind10"),
        ("10u", "10v", "10wind"),
        ("10m_u_component_of_wind", "10m_v_component_of_wind", "10m_wind_component_of_wind"),
        ("u_component_of_wind", "v_component_of_wind", "wind_component_of_wind"),
    ],
)
def test_wind_components_are_paired_by_names_of_archives(u: str, v: str, wind: str, standard_name: str) -> None:
    names = {"100v": "northward_wind", u: "eastward_wind", v: "northward_wind", "t": "air_temperature"}
    channels = [Channel(name, name, None, "prognostic") for name in names]
    attributes = {
        name: {"standard_name": cf_name if standard_name == "of CF" else standard_name}
        for name, cf_name in names.items()
    }
    assert wind_pairs(channels, attributes, {}) == [(1, 2, wind)]
    attributes[u]["standard_name"] = "eastward_sea_water_velocity"
    assert wind_pairs(channels, attributes, {}) == []
