"""Tests of the scores of baselines, against plain float64 averages of their fields."""

from __future__ import annotations

import numpy as np
import pytest

from credit.channels import ChannelMap
from credit.config.sections.verification import BASELINES, REGIONS
from credit.data.splits import Split
from credit.errors import DataError
from credit.verify.scores import baselines
from credit.verify.scores.baselines import build_baseline_fields, fit_damping
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.case_statistics import DeterministicStatistics
from credit.verify.statistics.error_moments import BaselineState, ReferenceFields, compute_error_moments
from credit.verify.statistics.regions import region_weights
from tests.unit.analytic_reader import make_grid

# Some regions begin in the middle of a row of this grid.
GRID = make_grid(181, 360, poles=True)
CHANNELS = ChannelMap.build({"prognostic": {"vars_3D": ["z"], "vars_2D": ["u10", "v10", "sst"]}}, [500.0]).output
MASK = np.random.default_rng(3).random(GRID.shape) < 0.3
WEIGHTS = region_weights(GRID, {name: REGIONS[name] for name in ("global", "europe", "antarctic")})
DAMPING = np.array([0.9, 0.0, 1e-7, 0.4])


def _draw_fields() -> dict[str, np.ndarray]:
    """Return float32 truth and climatology at two times, NaN in masked cells; anomalies are much smaller than means."""
    rng = np.random.default_rng(1)
    mean = np.array([5e4, 3.0, -2.0, 290.0])
    size = np.array([500.0, 8.0, 6.0, 2.0])
    names = ("start", "normal_start", "truth", "normal")
    fields = {}
    for name in names:
        noise = rng.standard_normal((4, *GRID.shape)) * (0.2 if "normal" in name else 1.0)
        fields[name] = (mean[:, None, None] + size[:, None, None] * noise).astype(np.float32)
        fields[name][3, MASK] = np.nan
    return fields


def _compute_statistics(fields: dict[str, np.ndarray]) -> dict[str, DeterministicStatistics]:
    means = AreaMean(CHANNELS, {"sst": MASK}, WEIGHTS, [(1, 2)])
    sums = {name: DeterministicStatistics.empty(np.zeros(1), 1, means) for name in BASELINES}
    start, normal_start, truth, normal = fields.values()
    state = BaselineState.build(means, ReferenceFields(start, normal_start))
    reference = ReferenceFields(truth, normal, "later truth", "later climatology")
    for name, moments in compute_error_moments(means, reference, {}, baselines=(state, DAMPING)).items():
        sums[name].add_moments(0, 0, means, moments)
    return sums


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float32, 1e-6), (np.float64, 1e-9)])
@pytest.mark.parametrize("scale", [1.0, 1e18, 1e-25])
def test_sums_of_the_baselines(dtype: type, rtol: float, scale: float) -> None:
    """Squares of some fields exceed the range of float32."""
    fields = {name: field.astype(dtype) * dtype(scale) for name, field in _draw_fields().items()}
    anomaly = (fields["start"] - fields["normal_start"]).astype(np.float64)
    start, _, truth, normal = (field.astype(np.float64) for field in fields.values())
    damped = DAMPING[:, None, None] * anomaly
    fields_by_baseline = build_baseline_fields(start, anomaly, normal, DAMPING[:, None, None])
    for name, sums in _compute_statistics(fields).items():
        error = fields_by_baseline[name] - truth
        truth_anomaly = truth - normal
        forecast_anomaly = damped if name == "damped_persistence" else fields_by_baseline[name] - normal
        planes = {
            "error": error, "absolute_error": np.abs(error), "squared_error": error**2,
            "forecast_variance": forecast_anomaly**2, "truth_variance": truth_anomaly**2,
            "covariance": forecast_anomaly * truth_anomaly,
        }  # fmt: skip
        for plane, values in planes.items():
            for channel, mask in enumerate((False, False, False, MASK)):
                weights = np.where(mask, 0.0, WEIGHTS)
                expected = [np.average(np.nan_to_num(values[channel]), weights=weight) for weight in weights]
                mean = getattr(sums, plane)[0, 0, channel]
                # The mean of values of both signs may be close to 0.
                atol = 0.02 * rtol * np.nanstd(values[channel]) + 1e-300
                message = f"{name} {plane} {channel}"
                np.testing.assert_allclose(mean, expected, rtol=rtol, atol=atol, err_msg=message)
        u = error[1]
        v = error[2]
        lengths = np.hypot(fields_by_baseline[name][1], fields_by_baseline[name][2]) - np.hypot(truth[1], truth[2])
        for plane, values in (("absolute_error", np.hypot(u, v)), ("error", lengths)):
            expected = [np.average(values, weights=weight) for weight in WEIGHTS]
            mean = getattr(sums, plane)[0, 0, 4]
            # The error of the length is the difference of two mean lengths.
            atol = 0.02 * rtol * np.hypot(truth[1], truth[2]).mean()
            np.testing.assert_allclose(mean, expected, rtol=rtol, atol=atol, err_msg=f"{name} {plane}")
        np.testing.assert_allclose(
            sums.squared_error[0, 0, 4], sums.squared_error[0, 0, [1, 2]].sum(axis=0), rtol=1e-12
        )
    assert (_compute_statistics(fields)["climatology"].forecast_variance == 0).all()


@pytest.mark.parametrize("held", [None, 2, 1])
def test_the_damping_is_the_slope_over_all_pairs_of_times(held: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training times have a gap, one lead time has only two pairs, and memory may be limited to `held` anomalies."""
    grid = make_grid(8, 16)
    rng = np.random.default_rng(4)
    weights = grid.area_weights()
    mask = rng.random(grid.shape) < 0.3
    times = np.delete(360 * np.arange(30), 11)
    fields = {minutes: rng.standard_normal((4, *grid.shape)).astype(np.float32) for minutes in times.tolist()}
    for minutes, previous_time in zip(times[1:].tolist(), times.tolist(), strict=False):
        fields[minutes] += np.float32(0.9) * fields[previous_time]
        fields[minutes][3, mask] = np.nan
    normal = (0.1 * rng.standard_normal((4, *grid.shape))).astype(np.float32)
    means = AreaMean(CHANNELS, {"sst": mask}, weights[None])
    leads = np.array([360, 1080, 9000])
    train = Split("train", 720, 28 * 360)
    times_read = []

    def read(minutes: int) -> np.ndarray:
        times_read.append(minutes)
        return fields[minutes]

    if held is not None:
        monkeypatch.setattr(baselines, "_ANOMALY_BYTES", held * normal.nbytes)
    damping = fit_damping(read, times, lambda _: normal, train, leads, means)
    train_times = [minutes for minutes in times.tolist() if 720 <= minutes <= 28 * 360]
    for row, lead in enumerate(leads.tolist()):
        pairs = [(fields[t] - normal, fields[t + lead] - normal) for t in train_times if t + lead in train_times]
        product, square = (
            sum(
                (np.nan_to_num(first * other).astype(np.float64) * weights).sum(axis=(1, 2))
                for first, other in pairs_of_sum
            )
            for pairs_of_sum in (pairs, [(first, first) for first, _ in pairs])
        )
        np.testing.assert_allclose(damping[row], product / square if pairs else 0.0, rtol=1e-6, atol=1e-8)
    assert (len(times_read) == len(set(times_read))) == (held is None)
    assert damping[0].min() > 0.2
    assert len(pairs) == 2


def test_products_are_equal_if_computed_together_or_separately() -> None:
    """Ranks divide the training data, so the number of products in a call depends on the number of ranks."""
    means = AreaMean(CHANNELS, {"sst": MASK}, GRID.area_weights()[None])
    fields = _draw_fields()
    reference = ReferenceFields(fields["truth"], fields["normal"])
    fit = baselines._AnomalyProducts(lambda minutes: None, lambda minutes: None, set(), [], means)
    first_anomalies = [np.nan_to_num(fields[name] + shift) for shift in range(4) for name in fields]
    together = fit._average_products_at(first_anomalies, reference)
    separately = [fit._average_products_at([first_anomaly], reference)[0] for first_anomaly in first_anomalies]
    np.testing.assert_array_equal(together, separately)


@pytest.mark.parametrize(
    ("which", "named"),
    [("truth", "later truth"), ("normal", "later climatology"), ("start", "truth"), ("normal_start", "climatology")],
)
def test_a_missing_value_is_an_error(which: str, named: str) -> None:
    fields = _draw_fields()
    fields[which][1, 90, 180] = np.inf
    with pytest.raises(DataError, match=f"^{named}: u10 is not finite outside its mask"):
        _compute_statistics(fields)
