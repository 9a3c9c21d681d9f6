"""Tests of ensemble scores, against `scores` and numpy, and on ensembles with the truth as one more member."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from credit.errors import DataError
from credit.verify.scores.rank_histogram import RankHistogram
from credit.verify.statistics.case_statistics import EnsembleStatistics
from credit.verify.statistics.error_moments import ReferenceFields
from tests.unit.verify.ensembles import CHANNELS, MEANS, WEIGHTS, WINDS, Cases, average_over_cases, draw_cases

MEMBERS = 5


def _build_sums(cases: Cases, case_indices: Iterable[int] | None = None) -> EnsembleStatistics:
    selected_cases = np.array(list(case_indices or range(len(cases.truth))))
    sums = EnsembleStatistics.empty(selected_cases * 1440, 1, MEANS, cases.members.shape[1])
    for number, case in enumerate(selected_cases.tolist()):
        members = cases.members[case]
        truth = cases.truth[case]
        sums.add(number, 0, MEANS, members.mean(axis=0), ReferenceFields(truth, cases.normal[case]))
        sums.add_members(number, 0, MEANS, members, truth, "test")
    return sums


def test_the_library_and_numpy_agree() -> None:
    scores = pytest.importorskip("scores")
    cases = draw_cases(4, MEMBERS, spread=0.7)
    members, truth = cases.labelled
    metrics = {name: value[0, : len(CHANNELS)] for name, value in _build_sums(cases).metrics().items()}
    error = members.mean("member") - truth
    variance = members.var("member", ddof=1)
    expected = {
        "rmse": np.sqrt(average_over_cases(error**2)),
        "mae": average_over_cases(abs(error)),
        "spread": np.sqrt(average_over_cases(variance)),
        "spread_skill": np.sqrt((MEMBERS + 1) / MEMBERS * average_over_cases(variance) / average_over_cases(error**2)),
        "rmse_member": np.sqrt(average_over_cases(((members - truth) ** 2).mean("member"))),
    }
    for name, method in (("crps", "ecdf"), ("crps_fair", "fair")):
        cells = scores.probability.crps_for_ensemble(members, truth, "member", method=method, preserve_dims="all")
        expected[name] = average_over_cases(cells)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-9, err_msg=name)


def test_members_may_have_any_memory_layout() -> None:
    cases = draw_cases(2, MEMBERS)
    contiguous_sums = _build_sums(cases)
    padded = np.concatenate([cases.members, cases.members], axis=2)
    cases.members = padded[:, :, : len(CHANNELS)]
    assert not cases.members[0].flags.c_contiguous
    for name, values in _build_sums(cases).arrays().items():
        np.testing.assert_array_equal(values, contiguous_sums.arrays()[name], err_msg=name)


def test_rows_of_vectors_have_the_energy_score() -> None:
    """Rows of vectors follow the rows of channels; the wind has no masked cells here."""
    scoringrules = pytest.importorskip("scoringrules")
    cases = draw_cases(2, MEMBERS)
    metrics = {name: value[0, len(CHANNELS)] for name, value in _build_sums(cases).metrics().items()}
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


def test_scores_of_two_cases_by_hand() -> None:
    """Errors of the mean are 1 and -3, variances are 2 and 8, so the mean square and the mean variance are 5."""
    shape = MEANS.valid_CP.shape
    members = np.stack(
        [[np.full(shape, error - half), np.full(shape, error + half)] for error, half in ((1, 1), (-3, 2))]
    )
    cases = Cases(members * MEANS.valid_CP, np.zeros((2, *shape)), np.zeros((2, *shape)))
    metrics = {name: value[:, : len(CHANNELS)] for name, value in _build_sums(cases).metrics().items()}
    np.testing.assert_allclose(metrics["rmse"], np.sqrt(5))  # The mean of roots would be 2.
    np.testing.assert_allclose(metrics["mae"], 2)
    np.testing.assert_allclose(metrics["spread"], np.sqrt(5))  # The mean of roots would be 1.5 sqrt(2).
    np.testing.assert_allclose(metrics["spread_skill"], np.sqrt(1.5))  # The factor 3/2 is under the root.
    # Squared errors of members are 0 and 4, 25 and 1.
    np.testing.assert_allclose(metrics["rmse_member"], np.sqrt(7.5))
    # Absolute errors of members are 0 and 2, 5 and 1; distances are 2 and 4.
    np.testing.assert_allclose(metrics["crps"], ((1 - 2 / 4) + (3 - 4 / 4)) / 2)
    np.testing.assert_allclose(metrics["crps_fair"], ((1 - 2 / 2) + (3 - 4 / 2)) / 2)


@pytest.mark.parametrize("members", [2, 3, 5])
def test_a_consistent_ensemble_has_the_ratio_1(members: int) -> None:
    """Deviations differ between cells by up to a factor of 3; 300 independent cases give the standard error."""
    cases = draw_cases(300, members, seed=members)
    ratio = _build_sums(cases).metrics()["spread_skill"][0]
    sums_by_case = [_build_sums(cases, range(case, case + 1)) for case in range(300)]
    squares = np.stack([sums.squared_error[0, 0] * members / (members + 1) for sums in sums_by_case])
    variances = np.stack([sums.variance[0, 0] for sums in sums_by_case])
    # Standard error of the logarithm of a ratio of two means, halved because of the root.
    error = 0.5 * np.sqrt(
        (squares / squares.mean(0) - variances / variances.mean(0)).var(axis=0, ddof=1) / len(squares)
    )
    assert error.max() < 0.015
    assert (np.abs(np.log(ratio)) < 4 * error).all()
    # The test detects two usual mistakes: no correction, and a correction without the root.
    for wrong_factor in (np.sqrt(members / (members + 1)), np.sqrt((members + 1) / members)):
        assert (np.abs(np.log(ratio * wrong_factor)) > 4 * error).all()


@pytest.mark.parametrize(("spread", "low", "high"), [(0.5, 0.45, 0.6), (2.0, 1.5, 2.0)])
def test_the_ratio_shows_too_little_and_too_much_spread(spread: float, low: float, high: float) -> None:
    ratio = _build_sums(draw_cases(50, 10, spread=spread)).metrics()["spread_skill"]
    assert (ratio > low).all()
    assert (ratio < high).all()


def test_parts_are_joined_in_any_order() -> None:
    cases = draw_cases(4, MEMBERS)
    all_cases = _build_sums(cases)
    parts = EnsembleStatistics.join([_build_sums(cases, range(1, 4)), _build_sums(cases, range(1))])
    assert parts.initial_times.tolist() == all_cases.initial_times.tolist()
    for name, value in all_cases.metrics().items():
        np.testing.assert_array_equal(parts.metrics()[name], value)


def test_ensembles_of_different_sizes_are_refused() -> None:
    cases = draw_cases(1, MEMBERS)
    sums = EnsembleStatistics.empty(np.zeros(1), 1, MEANS, MEMBERS + 1)
    with pytest.raises(DataError, match="here: has 5 members, all cases must have 6"):
        sums.add_members(0, 0, MEANS, cases.members[0], cases.truth[0], "here")
    sums.initial_times += 1440
    with pytest.raises(DataError, match="cannot be joined: they depend on the number"):
        EnsembleStatistics.join([sums, _build_sums(cases)])


def test_a_member_that_is_not_finite_is_named_and_masked_cells_are_ignored() -> None:
    cases = draw_cases(1, MEMBERS)
    expected_metrics = _build_sums(cases).metrics()
    cases.members[0, 1, 2, ~MEANS.valid_CP[2]] = np.nan
    sums = EnsembleStatistics.empty(np.zeros(1), 1, MEANS, MEMBERS)
    sums.add_members(0, 0, MEANS, cases.members[0], cases.truth[0], "here")
    np.testing.assert_array_equal(sums.crps[0, 0], expected_metrics["crps"][0])
    cases.members[0, 1, 1, 7] = np.nan
    with pytest.raises(DataError, match="here, member 1: t2m is not finite outside its mask"):
        sums.add_members(0, 0, MEANS, cases.members[0], cases.truth[0], "here")


def test_rank_histograms_of_different_sizes_cannot_be_added() -> None:
    with pytest.raises(DataError, match="ranks among 4 members and among 5 cannot be added"):
        RankHistogram.zeros(1, MEANS, 4) + RankHistogram.zeros(1, MEANS, 5)
