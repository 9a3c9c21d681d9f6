"""Tests of the statistics against numpy on the complete array."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.data.kernels import compute_moments
from credit.data.store.statistics import Moments, Statistics, describe_coarse_packing, fit_statistics
from credit.errors import DataError
from tests.unit.analytic_reader import AnalyticReader, make_grid

STEP = 360
GROUPS = {
    "prognostic": {"vars_3D": ["z"], "vars_2D": ["t2m"]},
    "dynamic_forcing": {"vars_3D": [], "vars_2D": ["sst"]},
}


def make_reader(fields: np.ndarray, times: np.ndarray, land: np.ndarray | None = None) -> AnalyticReader:
    """Return a reader of fields (N, 4, H, W): z850, z500, t2m, sst."""
    channels = ChannelMap.build(GROUPS, [850, 500], masked_variables=[] if land is None else ["sst"])
    row_of = {int(time): row for row, time in enumerate(times)}
    masks = {} if land is None else {"sst": land}
    grid = make_grid(*fields.shape[-2:])
    return AnalyticReader(channels, grid, Calendar(), times, lambda time, row: fields[row_of[time], row], masks)


@pytest.fixture
def fields() -> np.ndarray:
    """Return a random walk around a large mean, (40, 4, 6, 12) float32, for which naive sums of squares are wrong."""
    rng = np.random.default_rng(1)
    walk = np.cumsum(rng.normal(0, [[[[50]], [[120]], [[0.5]], [[0.1]]]], (40, 4, 6, 12)), axis=0)
    return (walk + np.array([15000, 55000, 280, 290]).reshape(1, 4, 1, 1)).astype(np.float32)


def test_mean_std_range_and_tendency_equal_numpy(fields: np.ndarray) -> None:
    times = np.arange(40) * STEP
    statistics = fit_statistics(make_reader(fields, times), times[2], times[-3], STEP)
    part = fields[2:-2].astype(np.float64)
    change = np.diff(part, axis=0)
    assert statistics.names == ("z850", "z500", "t2m", "sst")
    for name, expected in {
        "mean": part.mean(axis=(0, 2, 3)),
        "std": part.std(axis=(0, 2, 3)),
        "minimum": part.min(axis=(0, 2, 3)),
        "maximum": part.max(axis=(0, 2, 3)),
        "tendency_mean": change.mean(axis=(0, 2, 3)),
        "tendency_std": change.std(axis=(0, 2, 3)),
        "count": np.full(4, 36 * 72),
    }.items():
        np.testing.assert_allclose(getattr(statistics, name), expected, rtol=1e-12, atol=1e-12, err_msg=name)


def test_merged_moments_do_not_depend_on_the_division(fields: np.ndarray) -> None:
    valid = np.ones(fields.shape[1:], dtype=bool)
    moments_at_once = Moments.of_fields(
        np.moveaxis(fields, 1, 0).reshape(4, -1, 1), np.ones((4, 40 * 72, 1), dtype=bool)
    )
    for cuts in ([], [1], [7, 8, 30], list(range(1, 40))):
        merged = Moments.empty(4)
        for part in np.split(fields, cuts):
            time_moments = Moments.empty(4)
            for field in part:
                time_moments = time_moments.merge(Moments.of_fields(field, valid))
            merged = merged.merge(time_moments)
        np.testing.assert_allclose(merged.mean, moments_at_once.mean, rtol=1e-12)
        np.testing.assert_allclose(merged.std(), moments_at_once.std(), rtol=1e-12)
        np.testing.assert_array_equal(merged.count, moments_at_once.count)


@pytest.mark.parametrize("compute", [Moments.of_fields, compute_moments])
@pytest.mark.parametrize("cells", [1, 63, 64, 65, 200])
def test_moments_of_any_number_of_cells(cells: int, compute: Callable[..., Moments]) -> None:
    """Cells beyond a multiple of 64 are summed one by one."""
    random = np.random.default_rng(cells)
    fields, before = random.normal(280.0, 20.0, (2, 3, 1, cells)).astype(np.float32)
    valid = random.random((3, 1, cells)) < 0.7
    # One channel without masked cells, and one without valid cells.
    valid[0] = True
    valid[1] = False
    for earlier in (None, before):
        moments = compute(fields, valid, earlier)
        difference = fields.astype(np.float64) - (0.0 if earlier is None else earlier)
        for channel in range(3):
            values = difference[channel][valid[channel]]
            mean = values.mean() if len(values) else 0.0
            expected = [
                len(values),
                mean,
                ((values - mean) ** 2).sum(),
                values.min(initial=np.inf),
                values.max(initial=-np.inf),
            ]
            np.testing.assert_allclose(moments.to_rows()[:, channel], expected, rtol=1e-12, atol=1e-10)


def test_statistics_without_a_store_do_not_import_numba() -> None:
    """Import and compilation of numba take longer than the statistics of a small run."""
    script = (
        "import sys, numpy as np; from credit.data.store.statistics import Moments; "
        "Moments.of_fields(np.ones((1, 2, 3), np.float32), np.ones((1, 2, 3), bool)); assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_masked_cells_do_not_count(fields: np.ndarray) -> None:
    times = np.arange(40) * STEP
    land = np.zeros(fields.shape[2:], dtype=bool)
    land[:3] = True
    statistics = fit_statistics(make_reader(fields, times, land), times[0], times[-1], STEP).select(["sst", "t2m"])
    sea = fields[:, 3][:, ~land].astype(np.float64)
    np.testing.assert_allclose([statistics.mean[0], statistics.std[0]], [sea.mean(), sea.std()], rtol=1e-12)
    np.testing.assert_allclose(statistics.tendency_std[0], np.diff(sea, axis=0).std(), rtol=1e-9)
    assert [statistics.minimum[0], statistics.maximum[0]] == [sea.min(), sea.max()]
    assert statistics.count.tolist() == [40 * 36, 40 * 72]
    np.testing.assert_allclose(statistics.mean[1], fields[:, 2].astype(np.float64).mean(), rtol=1e-12)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_changes_are_over_exactly_one_step(fields: np.ndarray, every: int) -> None:
    """The data have shorter intervals than the step, and a gap."""
    times = np.arange(40) * STEP
    times[20:] += STEP // 2 if every == 1 else STEP
    statistics = fit_statistics(make_reader(fields, times), times[0], times[-1], STEP * every)
    changes = []
    for start, end in itertools.combinations(range(40), 2):
        if times[end] - times[start] == STEP * every:
            changes.append(fields[end].astype(np.float64) - fields[start])
    assert 0 < len(changes) < 40
    change = np.stack(changes)
    np.testing.assert_allclose(statistics.tendency_std, change.std(axis=(0, 2, 3)), rtol=1e-11)


def test_small_tendency_std_is_raised_with_a_message(fields: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    fields[:, 3] = fields[:1, 3] + 1e-3 * np.arange(40).reshape(40, 1, 1)
    with caplog.at_level(logging.INFO):
        statistics = fit_statistics(make_reader(fields, np.arange(40) * STEP), 0, 40 * STEP, STEP)
    assert statistics.tendency_std[3] == 0.01 * statistics.std[3]
    assert "sst: tendency_std" in caplog.text
    assert "t2m: tendency_std" not in caplog.text


def test_coarse_packing_is_reported(fields: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    channels = make_reader(fields, np.arange(40)).channels.time_varying_stored
    std = np.array([50.0, 120.0, 0.5, 0.1])
    # 0.3 x 0.5 x sqrt(6) = 0.3674
    assert describe_coarse_packing(channels, std, {"z": 20.0, "t2m": 0.367}) == []
    (line,) = describe_coarse_packing(channels, std, {"z": 20.0, "t2m": 0.368})
    assert line.startswith("t2m: values in the files are rounded to 0.368")
    # A forcing is not predicted, so its rounding does not matter.
    assert next(channel.group for channel in channels if channel.name == "sst") == "dynamic_forcing"
    assert describe_coarse_packing(channels, std, {"sst": 1.0}) == []
    with caplog.at_level(logging.WARNING):
        fit_statistics(make_reader(fields, np.arange(40) * STEP), 0, 40 * STEP, STEP, {"t2m": 1.0})
    assert "t2m: values in the files are rounded to 1" in caplog.text


def test_data_without_usable_changes_are_refused(fields: np.ndarray) -> None:
    times = np.arange(40) * STEP
    with pytest.raises(DataError, match="no two differ by 5h"):
        fit_statistics(make_reader(fields, times), 0, times[-1], 300)
    fields[:, 2] = 280
    with pytest.raises(DataError, match="^t2m: constant in the complete training period"):
        fit_statistics(make_reader(fields, times), 0, times[-1], STEP)


def test_round_trip_through_json_and_selection_by_name(fields: np.ndarray) -> None:
    statistics = fit_statistics(make_reader(fields, np.arange(40) * STEP), 0, 40 * STEP, STEP)
    restored = Statistics.from_dict(json.loads(json.dumps(statistics.to_dict())))
    assert restored.names == statistics.names
    assert restored.count.dtype == np.int64
    for name in ("mean", "std", "minimum", "maximum", "tendency_mean", "tendency_std", "count"):
        np.testing.assert_array_equal(getattr(restored, name), getattr(statistics, name))
    selected = statistics.select(["t2m", "z850"])
    assert selected.names == ("t2m", "z850")
    assert selected.mean.tolist() == [statistics.mean[2], statistics.mean[0]]
