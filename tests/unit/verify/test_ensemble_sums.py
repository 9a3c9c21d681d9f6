"""Sums of ensemble scores against `scores` and numpy, and on ensembles of which the truth is one more member."""

from __future__ import annotations

import numpy as np
import pytest

from credit.errors import DataError
from credit.verify.addable import AddableSums
from credit.verify.ensemble_sums import EnsembleSums
from credit.verify.events import EventSums
from credit.verify.rank_histogram import RankHistogram
from credit.verify.sums import ScoreSums
from tests.unit.verify.ensembles import CHANNELS, MEANS, Cases, draw_cases, pooled

MEMBERS = 5


def _sums(cases: Cases, which: range | None = None) -> EnsembleSums:
    sums = EnsembleSums.zeros(1, len(CHANNELS), cases.members.shape[1])
    for case in which or range(len(cases.truth)):
        sums.add(0, MEANS, cases.members[case], cases.truth[case], cases.normal[case])
    return sums


def test_the_library_and_numpy_agree() -> None:
    scores = pytest.importorskip("scores")
    cases = draw_cases(4, MEMBERS, spread=0.7)
    members, truth = cases.labelled
    ours = {name: value[0] for name, value in _sums(cases).metrics().items()}
    error = members.mean("member") - truth
    variance = members.var("member", ddof=1)
    expected = {
        "rmse": np.sqrt(pooled(error**2)),
        "mae": pooled(abs(error)),
        "spread": np.sqrt(pooled(variance)),
        "spread_skill": np.sqrt((MEMBERS + 1) / MEMBERS * pooled(variance) / pooled(error**2)),
        "rmse_member": np.sqrt(pooled(((members - truth) ** 2).mean("member"))),
    }
    for name, method in (("crps", "ecdf"), ("crps_fair", "fair")):
        cells = scores.probability.crps_for_ensemble(members, truth, "member", method=method, preserve_dims="all")
        expected[name] = pooled(cells)
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-9, err_msg=name)
    assert set(ours) == {*expected, "acc"}


def test_the_mean_is_scored_like_a_single_forecast() -> None:
    cases = draw_cases(3, MEMBERS)
    single = ScoreSums.zeros(1, len(CHANNELS))
    for members, truth, normal in zip(cases.members, cases.truth, cases.normal, strict=True):
        single.add(0, MEANS, members.mean(axis=0), truth, normal)
    single.cases += len(cases.truth)
    ours, theirs = _sums(cases).metrics(), single.metrics()
    for name in ("rmse", "mae", "acc"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9, err_msg=name)


def test_by_hand_the_root_is_last_and_over_the_correction() -> None:
    """Errors of the mean 1 and 3, variances 2 and 8: mean squares 5 and 5."""
    shape = MEANS.valid_CN.shape
    sums = EnsembleSums.zeros(1, len(CHANNELS), 2)
    for error, half_distance in ((1.0, 1.0), (-3.0, 2.0)):
        members = np.stack([np.full(shape, error - half_distance), np.full(shape, error + half_distance)])
        sums.add(0, MEANS, members * MEANS.valid_CN, np.zeros(shape), np.zeros(shape))
    metrics = sums.metrics()
    np.testing.assert_allclose(metrics["rmse"], np.sqrt(5))  # the mean of roots would be 2
    np.testing.assert_allclose(metrics["mae"], 2)
    np.testing.assert_allclose(metrics["spread"], np.sqrt(5))  # the mean of roots would be 1.5 sqrt(2)
    np.testing.assert_allclose(metrics["spread_skill"], np.sqrt(1.5))  # without the root of the factor 1.5
    # members' squared errors 0 and 4, 25 and 1
    np.testing.assert_allclose(metrics["rmse_member"], np.sqrt(7.5))
    # members' absolute errors 0 and 2, 5 and 1; distances 2 and 4
    np.testing.assert_allclose(metrics["crps"], ((1 - 2 / 4) + (3 - 4 / 4)) / 2)
    np.testing.assert_allclose(metrics["crps_fair"], ((1 - 2 / 2) + (3 - 4 / 2)) / 2)


@pytest.mark.parametrize("members", [2, 3, 5])
def test_a_consistent_ensemble_has_the_ratio_1(members: int) -> None:
    """Deviations differ from cell to cell by a factor of 3; 300 independent cases give the standard error."""
    cases = draw_cases(300, members, seed=members)
    ratio = _sums(cases).metrics()["spread_skill"][0]
    each = [_sums(cases, range(case, case + 1)) for case in range(300)]
    squares = np.stack([sums.squared[0] * members / (members + 1) for sums in each])
    variances = np.stack([sums.variance[0] for sums in each])
    # of the logarithm of a ratio of two means, halved for the root
    error = 0.5 * np.sqrt(
        (squares / squares.mean(0) - variances / variances.mean(0)).var(axis=0, ddof=1) / len(squares)
    )
    assert error.max() < 0.015
    assert (np.abs(np.log(ratio)) < 4 * error).all()
    # the usual mistakes would be seen: no correction, and one without its root
    for wrong in (np.sqrt(members / (members + 1)), np.sqrt((members + 1) / members)):
        assert (np.abs(np.log(ratio * wrong)) > 4 * error).all()


@pytest.mark.parametrize(("spread", "low", "high"), [(0.5, 0.45, 0.6), (2.0, 1.5, 2.0)])
def test_too_little_and_too_much_spread_show(spread: float, low: float, high: float) -> None:
    ratio = _sums(draw_cases(50, 10, spread=spread)).metrics()["spread_skill"]
    assert (ratio > low).all() and (ratio < high).all()


def test_sums_add_up_whatever_the_split() -> None:
    cases = draw_cases(4, MEMBERS)
    whole = _sums(cases)
    parts = _sums(cases, range(1)) + _sums(cases, range(1, 4))
    assert parts.cases.tolist() == whole.cases.tolist() == [4]
    for name, value in whole.metrics().items():
        np.testing.assert_allclose(parts.metrics()[name], value, rtol=1e-12)


def test_one_member_has_no_spread() -> None:
    cases = draw_cases(2, 1)
    metrics = _sums(cases).metrics()
    for name in ("spread", "spread_skill", "crps_fair"):
        assert np.isnan(metrics[name]).all()
    np.testing.assert_allclose(metrics["crps"], metrics["mae"], rtol=1e-12)
    np.testing.assert_allclose(metrics["rmse_member"], metrics["rmse"], rtol=1e-12)


def test_a_lead_time_without_a_case_has_no_score() -> None:
    sums = EnsembleSums.zeros(2, len(CHANNELS), MEMBERS)
    cases = draw_cases(1, MEMBERS)
    sums.add(1, MEANS, cases.members[0], cases.truth[0], cases.normal[0])
    for value in sums.metrics().values():
        assert np.isnan(value[0]).all() and np.isfinite(value[1]).all()


def test_unlike_ensembles_are_refused() -> None:
    cases = draw_cases(1, MEMBERS)
    sums = EnsembleSums.zeros(1, len(CHANNELS), MEMBERS + 1)
    with pytest.raises(DataError, match="has 5 members, the sums are for 6"):
        sums.add(0, MEANS, cases.members[0], cases.truth[0], cases.normal[0])
    with pytest.raises(DataError, match="members is 6 in one and 5 in the other"):
        sums + _sums(cases)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (RankHistogram.zeros(1, 3, 4), RankHistogram.zeros(2, 3, 4)),
        (EventSums.zeros(1, 2, 3, 4), EventSums.zeros(1, 1, 3, 4)),
    ],
)
def test_unlike_shapes_are_refused(one: AddableSums, other: AddableSums) -> None:
    with pytest.raises(DataError, match="the shape of"):
        one + other
