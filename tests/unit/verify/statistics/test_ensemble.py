"""Sums of ensemble scores against `scores` and numpy, and on ensembles of which the truth is one more member."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from credit.errors import DataError
from credit.verify.scores.rank_histogram import RankHistogram
from credit.verify.statistics.case_statistics import EnsembleStatistics
from credit.verify.statistics.error_moments import ReferenceFields
from tests.unit.verify.ensembles import CHANNELS, MEANS, WEIGHTS, WINDS, Cases, draw_cases, pooled

MEMBERS = 5


def _sums(cases: Cases, which: Iterable[int] | None = None) -> EnsembleStatistics:
    chosen = np.array(list(which or range(len(cases.truth))))
    sums = EnsembleStatistics.empty(chosen * 1440, 1, MEANS, cases.members.shape[1])
    for number, case in enumerate(chosen.tolist()):
        members = cases.members[case]
        truth = cases.truth[case]
        sums.add(number, 0, MEANS, members.mean(axis=0), ReferenceFields(truth, cases.normal[case]))
        sums.add_members(number, 0, MEANS, members, truth, "test")
    return sums


def test_the_library_and_numpy_agree() -> None:
    scores = pytest.importorskip("scores")
    cases = draw_cases(4, MEMBERS, spread=0.7)
    members, truth = cases.labelled
    metrics = {name: value[0, : len(CHANNELS)] for name, value in _sums(cases).metrics().items()}
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
        np.testing.assert_allclose(metrics[name], value, rtol=1e-9, err_msg=name)


def test_members_may_lie_in_memory_in_any_order() -> None:
    cases = draw_cases(2, MEMBERS)
    plain = _sums(cases)
    padded = np.concatenate([cases.members, cases.members], axis=2)
    cases.members = padded[:, :, : len(CHANNELS)]
    assert not cases.members[0].flags.c_contiguous
    for name, values in _sums(cases).arrays().items():
        np.testing.assert_array_equal(values, plain.arrays()[name], err_msg=name)


def test_rows_of_vectors_have_the_energy_score() -> None:
    """The second vector's component is masked, so both are."""
    scoringrules = pytest.importorskip("scoringrules")
    cases = draw_cases(2, MEMBERS)
    metrics = {name: value[0, len(CHANNELS)] for name, value in _sums(cases).metrics().items()}
    u, v = WINDS[0]
    members = cases.members[:, :, [u, v]]
    truth = cases.truth[:, [u, v]]
    for name, estimator in (("crps", "nrg"), ("crps_fair", "fair")):
        cells = scoringrules.es_ensemble(
            np.moveaxis(truth, 1, -1), np.moveaxis(members, (1, 2), (-2, -1)), estimator=estimator
        )
        np.testing.assert_allclose(metrics[name], (cells @ WEIGHTS.values.T).mean(axis=0), rtol=1e-9)
    squared = ((members.mean(axis=1) - truth) ** 2).sum(axis=1)
    variance = members.var(axis=1, ddof=1).sum(axis=1)
    ratio = (MEMBERS + 1) / MEMBERS * (variance @ WEIGHTS.values.T).mean(0) / (squared @ WEIGHTS.values.T).mean(0)
    np.testing.assert_allclose(metrics["spread_skill"], np.sqrt(ratio), rtol=1e-9)


def test_by_hand_the_root_is_last_and_over_the_correction() -> None:
    """Errors of the mean 1 and 3, variances 2 and 8: mean squares 5 and 5."""
    shape = MEANS.valid_CP.shape
    members = np.stack(
        [[np.full(shape, error - half), np.full(shape, error + half)] for error, half in ((1, 1), (-3, 2))]
    )
    cases = Cases(members * MEANS.valid_CP, np.zeros((2, *shape)), np.zeros((2, *shape)))
    metrics = {name: value[:, : len(CHANNELS)] for name, value in _sums(cases).metrics().items()}
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
    squares = np.stack([sums.squared_error[0, 0] * members / (members + 1) for sums in each])
    variances = np.stack([sums.variance[0, 0] for sums in each])
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
    assert (ratio > low).all()
    assert (ratio < high).all()


def test_parts_are_joined_in_any_order() -> None:
    cases = draw_cases(4, MEMBERS)
    all_cases = _sums(cases)
    parts = EnsembleStatistics.join([_sums(cases, range(1, 4)), _sums(cases, range(1))])
    assert parts.initial_times.tolist() == all_cases.initial_times.tolist()
    for name, value in all_cases.metrics().items():
        np.testing.assert_array_equal(parts.metrics()[name], value)


def test_unlike_ensembles_are_refused() -> None:
    cases = draw_cases(1, MEMBERS)
    sums = EnsembleStatistics.empty(np.zeros(1), 1, MEANS, MEMBERS + 1)
    with pytest.raises(DataError, match="here: has 5 members, all cases must have 6"):
        sums.add_members(0, 0, MEANS, cases.members[0], cases.truth[0], "here")
    sums.initial_times += 1440
    with pytest.raises(DataError, match="cannot be joined: they depend on the number"):
        EnsembleStatistics.join([sums, _sums(cases)])


def test_a_member_that_blew_up_is_named_and_a_masked_cell_does_not_matter() -> None:
    cases = draw_cases(1, MEMBERS)
    clean = _sums(cases).metrics()
    cases.members[0, 1, 2, ~MEANS.valid_CP[2]] = np.nan
    sums = EnsembleStatistics.empty(np.zeros(1), 1, MEANS, MEMBERS)
    sums.add_members(0, 0, MEANS, cases.members[0], cases.truth[0], "here")
    np.testing.assert_array_equal(sums.crps[0, 0], clean["crps"][0])
    cases.members[0, 1, 1, 7] = np.nan
    with pytest.raises(DataError, match="here, member 1: t2m is not finite outside its mask"):
        sums.add_members(0, 0, MEANS, cases.members[0], cases.truth[0], "here")


def test_ranks_of_unlike_numbers_are_refused() -> None:
    with pytest.raises(DataError, match="ranks among 4 members and among 5 cannot be added"):
        RankHistogram.zeros(1, MEANS, 4) + RankHistogram.zeros(1, MEANS, 5)
