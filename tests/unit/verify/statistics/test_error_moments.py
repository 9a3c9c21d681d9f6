"""Tests that error moments of several forecasts in one pass agree with plain float64 averages.

The fields have rows longer than a block of cells, climatologies that are sums of parts, winds whose components are not
neighbouring channels, and masks.
"""

from __future__ import annotations

import numpy as np
import pytest

from credit.channels import ChannelMap, select_channels
from credit.config.sections.verification import REGIONS
from credit.data.climatology.climatology import LazyWeightedSum
from credit.errors import DataError
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.error_moments import BaselineState, ErrorMoments, ReferenceFields, compute_error_moments
from credit.verify.statistics.regions import region_weights
from tests.unit.analytic_reader import make_grid

# Segments have more than two blocks, and some begin within a row.
GRID = make_grid(9, 2500, poles=True)
CHANNEL_MAP = ChannelMap.build({"prognostic": {"vars_3D": ["z"], "vars_2D": ["u10", "sst", "v10", "t2m"]}}, [500.0])
CHANNELS = CHANNEL_MAP.output
# Indices of the masked channel and of the wind's components.
SST = 2
WIND = (1, 3)
WEIGHTS = region_weights(GRID, {name: REGIONS[name] for name in ("global", "europe", "tropics")})
RNG = np.random.default_rng(5)
MASK = RNG.random(GRID.shape) < 0.3
# Mean and standard deviation of each channel.
MEAN = np.array([5e4, 3.0, 290.0, -2.0, 280.0])
SIZE = np.array([500.0, 8.0, 2.0, 6.0, 9.0])
DAMPING = np.array([0.9, 0.5, 0.0, 0.7, 1.0])


def _draw_field(share: float = 1.0) -> np.ndarray:
    noise = share * RNG.standard_normal((5, *GRID.shape))
    field = (MEAN[:, None, None] + SIZE[:, None, None] * noise).astype(np.float32)
    field[SST, MASK] = np.nan
    return field


TRUTH, START, FIRST_FORECAST, SECOND_FORECAST = _draw_field(), _draw_field(), _draw_field(), _draw_field()
PARTS = [_draw_field(0.2), _draw_field(0.2) - MEAN[:, None, None].astype(np.float32), 0.1 * FIRST_FORECAST]
LAZY = LazyWeightedSum(np.array([0.9, -0.3, 0.7], np.float32), PARTS)
START_LAZY = LazyWeightedSum(np.array([1.0, 0.2], np.float32), PARTS[:2])


def _build_area_mean() -> AreaMean:
    return AreaMean(CHANNELS, {"sst": MASK}, WEIGHTS, [WIND])


def _scale_sum(field: LazyWeightedSum, factor: np.float32) -> LazyWeightedSum:
    return LazyWeightedSum(field.weights, [part * factor for part in field.fields])


def _compute_moments(
    scale: float = 1.0, truth: np.ndarray = TRUTH, first_forecast: np.ndarray = FIRST_FORECAST
) -> dict[str, ErrorMoments]:
    factor = np.float32(scale)
    area_mean = _build_area_mean()
    lazy, start_lazy = (_scale_sum(field, factor) for field in (LAZY, START_LAZY))
    truth, start, first_forecast, second_forecast = (
        field * factor for field in (truth, START, first_forecast, SECOND_FORECAST)
    )
    state = BaselineState.build(area_mean, ReferenceFields(start, start_lazy, "start", "climatology at the start"))
    forecasts = {"one": first_forecast, "other": second_forecast}
    return compute_error_moments(area_mean, ReferenceFields(truth, lazy), forecasts, baselines=(state, DAMPING))


def _average_over_regions(values: np.ndarray) -> np.ndarray:
    """Return the area-weighted averages (C, R) of (C, H, W), without missing values."""
    averages = []
    for field in values:
        is_missing = np.isnan(field)
        field = np.where(is_missing, 0, field)
        averages.append([np.average(field, weights=np.where(is_missing, 0, weight)) for weight in WEIGHTS])
    return np.array(averages)


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e20])
def test_moments_of_all_forecasts_equal_float64_averages(scale: float) -> None:
    """Squares of some values exceed the range of float32; winds are then summed again in float64."""
    truth, start, first_forecast, second_forecast = (
        field.astype(np.float64) for field in (TRUTH, START, FIRST_FORECAST, SECOND_FORECAST)
    )
    normal = sum(w * part.astype(np.float64) for w, part in zip(LAZY.weights, PARTS, strict=True))
    initial_anomaly = start - (PARTS[0].astype(np.float64) + START_LAZY.weights[1] * PARTS[1].astype(np.float64))
    fields = {
        "persistence": start, "one": first_forecast, "other": second_forecast, "climatology": normal,
        "damped_persistence": normal + DAMPING[:, None, None] * initial_anomaly,
    }  # fmt: skip
    moments_by_name = _compute_moments(scale)
    assert set(moments_by_name) == set(fields)
    for name, forecast in fields.items():
        error = forecast - truth
        truth_anomaly = truth - normal
        forecast_anomaly = forecast - normal
        expected = {
            "truth_anomaly": (1, truth_anomaly),
            "truth_variance": (2, truth_anomaly**2),
            "error": (1, error),
            "absolute_error": (1, np.abs(error)),
            "squared_error": (2, error**2),
            "forecast_variance": (2, forecast_anomaly**2),
            "covariance": (2, forecast_anomaly * truth_anomaly),
        }
        for moment, (power, values) in expected.items():
            mean = getattr(moments_by_name[name], moment) / scale**power
            # Anomalies are float32 differences of large values.
            size = np.nanstd(values, axis=(1, 2))[:, None]
            difference = np.abs(mean - _average_over_regions(values))
            assert (difference <= 1e-5 * size + 1e-12).all(), (name, moment, difference / (size + 1e-30))
        u, v = WIND
        speed_error = np.hypot(forecast[u], forecast[v]) - np.hypot(truth[u], truth[v])
        error_length = np.hypot(error[u], error[v])
        for values, computed in zip(
            (speed_error, error_length),
            (moments_by_name[name].speed_error, moments_by_name[name].vector_error_length),
            strict=True,
        ):
            np.testing.assert_allclose(
                computed[0] / scale, _average_over_regions(values[None])[0], rtol=1e-5, atol=1e-5
            )


def test_every_block_of_cells_is_summed() -> None:
    """Change one cell in each block of a row, one at a time."""
    before = _compute_moments()["one"].absolute_error
    for column in (0, 1023, 1024, 2047, 2048, 2499):
        first_forecast = FIRST_FORECAST.copy()
        first_forecast[4, 4, column] = TRUTH[4, 4, column] + np.float32(1e5)
        change = _compute_moments(first_forecast=first_forecast)["one"].absolute_error - before
        error_before = abs(FIRST_FORECAST[4, 4, column] - TRUTH[4, 4, column])
        weight = WEIGHTS[0][4, column] / WEIGHTS[0].sum()
        assert change[4, 0] == pytest.approx((1e5 - error_before) * weight, rel=1e-3)


def test_channels_of_a_lazy_climatology_can_be_selected() -> None:
    for channels in ([1, 2, 3], [4, 0]):
        np.testing.assert_array_equal(np.asarray(select_channels(LAZY, channels)), np.asarray(LAZY)[channels])
    with pytest.raises(ValueError, match="copy=False"):
        np.array(LAZY, copy=False)


@pytest.mark.parametrize("part", [0, 2])
def test_a_missing_part_of_the_climatology_is_an_error(part: int) -> None:
    damaged_parts = [field.copy() for field in PARTS]
    damaged_parts[part][3, 2, 1500] = np.nan
    lazy = LazyWeightedSum(LAZY.weights, damaged_parts)
    with pytest.raises(DataError, match="^climatology: v10 is not finite outside its mask"):
        compute_error_moments(_build_area_mean(), ReferenceFields(TRUTH, lazy), {"one": FIRST_FORECAST})
