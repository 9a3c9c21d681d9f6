"""Tests of rank histograms, against `scores`, and on ensembles with the truth as one more member."""

from __future__ import annotations

import numpy as np
import pytest

from credit.verify.scores.rank_histogram import RankHistogram
from credit.verify.statistics.case_statistics import EnsembleStatistics
from tests.unit.verify.ensembles import MEANS, NAMES, WEIGHTS, Cases, draw_cases, to_precipitation


def _build_histogram(cases: Cases, case_range: range | None = None) -> RankHistogram:
    sums = RankHistogram.zeros(1, MEANS, cases.members.shape[1])
    for case in case_range or range(len(cases.truth)):
        members = cases.members[case]
        statistics = EnsembleStatistics.empty(np.zeros(1), 1, MEANS, len(members))
        sums.add(0, statistics.add_members(0, 0, MEANS, members, cases.truth[case], "test"))
    return sums


def _convert_to_precipitation(cases: Cases) -> Cases:
    mean = np.where(MEANS.valid_CP, np.array([5e4, 280.0, 290.0])[:, None], 0.0)
    return Cases(to_precipitation(cases.members - mean), to_precipitation(cases.truth - mean), cases.normal)


@pytest.mark.filterwarnings("ignore:Encountered a NaN:UserWarning")  # NaN in masked cells
@pytest.mark.parametrize("ties", [False, True])
def test_the_library_agrees(ties: bool) -> None:
    scores = pytest.importorskip("scores")
    cases = draw_cases(3, 6, spread=0.6)
    if ties:
        cases = _convert_to_precipitation(cases)
        assert 0.2 < (cases.truth[:, :2] == 0).mean() < 0.8
    members, truth = cases.labelled
    frequencies = _build_histogram(cases).frequencies()[0]
    for region in range(len(NAMES)):
        expected = scores.probability.rank_histogram(
            members, truth, "member", preserve_dims=["channel"], weights=WEIGHTS[region]
        )
        np.testing.assert_allclose(frequencies[:, region], expected.transpose("channel", "rank"), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("count", [2, 7])
def test_histogram_is_flat_if_the_truth_is_one_more_member(count: int, ties: bool) -> None:
    """200 independent cases give the standard error of each frequency."""
    cases = draw_cases(200, count, seed=count)
    if ties:
        cases = _convert_to_precipitation(cases)
    ranks_by_case = np.stack([_build_histogram(cases, range(case, case + 1)).ranks[0] for case in range(200)])
    error = ranks_by_case.std(axis=0, ddof=1) / np.sqrt(len(ranks_by_case))
    flat = 1 / (count + 1)
    assert (np.abs(ranks_by_case.mean(axis=0) - flat) < 4.5 * error).all()
    assert error.max() < 0.1 * flat
    metrics = _build_histogram(cases).metrics()
    assert metrics["rank_deviation"].max() < 0.1
    np.testing.assert_allclose(metrics["rank_outliers"], 1, atol=0.1)


def test_the_shape_shows_wrong_spread_and_bias() -> None:
    narrow, wide = (_build_histogram(draw_cases(50, 7, spread=spread)) for spread in (0.5, 2.0))
    assert narrow.metrics()["rank_outliers"].min() > 1.5
    assert wide.metrics()["rank_outliers"].max() < 0.7
    for sums in (narrow, wide):
        assert sums.metrics()["rank_deviation"].min() > 0.25
    cases = draw_cases(1, 7)
    cases.truth += 1e3 * MEANS.valid_CP
    above = _build_histogram(cases)
    np.testing.assert_allclose(above.frequencies()[..., -1], 1)
    np.testing.assert_allclose(above.metrics()["rank_deviation"], 2 * 7 / 8)


def test_a_truth_equal_to_all_members_is_shared_among_all_ranks() -> None:
    cases = draw_cases(1, 4)
    cases.members[:] = cases.truth[:, None]
    sums = _build_histogram(cases)
    np.testing.assert_allclose(sums.frequencies(), 1 / 5)
    np.testing.assert_allclose(sums.metrics()["rank_deviation"], 0, atol=1e-12)


def test_histograms_can_be_added_and_ranks_of_a_case_sum_to_1() -> None:
    cases = draw_cases(3, 4)
    histogram = _build_histogram(cases)
    np.testing.assert_allclose(histogram.ranks.sum(axis=-1), 3)
    parts = _build_histogram(cases, range(1)) + _build_histogram(cases, range(1, 3))
    np.testing.assert_array_equal(parts.ranks, histogram.ranks)


def test_sums_do_not_depend_on_the_order_of_the_cases() -> None:
    """Sums are equal to the last bit, so scores do not depend on the number of processes that share the cases."""
    cases = _convert_to_precipitation(draw_cases(60, 6))
    histogram_by_case = [_build_histogram(cases, range(case, case + 1)) for case in range(60)]
    order = np.random.default_rng(0).permutation(60)
    # Three processes share the shuffled cases; their histograms are added in another order still.
    process_histograms = []
    for process in range(3):
        process_histogram = RankHistogram.zeros(1, MEANS, 6)
        for case in order[process::3]:
            process_histogram = process_histogram + histogram_by_case[case]
        process_histograms.append(process_histogram)
    shared = process_histograms[2] + process_histograms[0] + process_histograms[1]
    np.testing.assert_array_equal(shared.ranks, _build_histogram(cases).ranks)
    np.testing.assert_array_equal(shared.frequencies(), _build_histogram(cases).frequencies())
