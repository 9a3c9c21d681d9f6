"""Rank histograms against `scores`, and on ensembles of which the truth is one more member."""

from __future__ import annotations

import numpy as np
import pytest

from credit.verify.scores.rank_histogram import RankHistogram
from credit.verify.statistics.case_statistics import EnsembleStatistics
from tests.unit.verify.ensembles import MEANS, NAMES, WEIGHTS, Cases, draw_cases, rainy


def _rank(cases: Cases, which: range | None = None) -> RankHistogram:
    sums = RankHistogram.zeros(1, MEANS, cases.members.shape[1])
    for case in which or range(len(cases.truth)):
        members = cases.members[case]
        statistics = EnsembleStatistics.empty(np.zeros(1), 1, MEANS, len(members))
        sums.add(0, statistics.add_members(0, 0, MEANS, members, cases.truth[case], "test"))
    return sums


def _rain(cases: Cases) -> Cases:
    centre = np.where(MEANS.valid_CP, np.array([5e4, 280.0, 290.0])[:, None], 0.0)
    return Cases(rainy(cases.members - centre), rainy(cases.truth - centre), cases.normal)


@pytest.mark.filterwarnings("ignore:Encountered a NaN:UserWarning")  # the masked cells
@pytest.mark.parametrize("ties", [False, True])
def test_the_library_agrees(ties: bool) -> None:
    scores = pytest.importorskip("scores")
    cases = draw_cases(3, 6, spread=0.6)
    if ties:
        cases = _rain(cases)
        assert 0.2 < (cases.truth[:, :2] == 0).mean() < 0.8
    members, truth = cases.labelled
    frequencies = _rank(cases).frequencies()[0]
    for region in range(len(NAMES)):
        expected = scores.probability.rank_histogram(
            members, truth, "member", preserve_dims=["channel"], weights=WEIGHTS[region]
        )
        np.testing.assert_allclose(frequencies[:, region], expected.transpose("channel", "rank"), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("count", [2, 7])
def test_it_is_flat_where_the_truth_is_one_more_member(count: int, ties: bool) -> None:
    """200 independent cases give the standard error of each frequency."""
    cases = draw_cases(200, count, seed=count)
    if ties:
        cases = _rain(cases)
    each = np.stack([_rank(cases, range(case, case + 1)).ranks[0] for case in range(200)])
    error = each.std(axis=0, ddof=1) / np.sqrt(len(each))
    flat = 1 / (count + 1)
    assert (np.abs(each.mean(axis=0) - flat) < 4.5 * error).all()
    assert error.max() < 0.1 * flat
    metrics = _rank(cases).metrics()
    assert metrics["rank_deviation"].max() < 0.1
    np.testing.assert_allclose(metrics["rank_outliers"], 1, atol=0.1)


def test_the_shape_tells_what_is_wrong() -> None:
    narrow, wide = (_rank(draw_cases(50, 7, spread=spread)) for spread in (0.5, 2.0))
    assert narrow.metrics()["rank_outliers"].min() > 1.5
    assert wide.metrics()["rank_outliers"].max() < 0.7
    for sums in (narrow, wide):
        assert sums.metrics()["rank_deviation"].min() > 0.25
    cases = draw_cases(1, 7)
    cases.truth += 1e3 * MEANS.valid_CP
    above = _rank(cases)
    np.testing.assert_allclose(above.frequencies()[..., -1], 1)
    np.testing.assert_allclose(above.metrics()["rank_deviation"], 2 * 7 / 8)


def test_a_truth_that_equals_all_members_has_every_rank() -> None:
    cases = draw_cases(1, 4)
    cases.members[:] = cases.truth[:, None]
    sums = _rank(cases)
    np.testing.assert_allclose(sums.frequencies(), 1 / 5)
    np.testing.assert_allclose(sums.metrics()["rank_deviation"], 0, atol=1e-12)


def test_sums_add_up_and_each_case_counts_1() -> None:
    cases = draw_cases(3, 4)
    histogram = _rank(cases)
    np.testing.assert_allclose(histogram.ranks.sum(axis=-1), 3)
    parts = _rank(cases, range(1)) + _rank(cases, range(1, 3))
    np.testing.assert_array_equal(parts.ranks, histogram.ranks)


def test_sums_do_not_depend_on_the_order_of_the_cases() -> None:
    """To the last bit, as scores must not on the number of processes that share the cases."""
    cases = _rain(draw_cases(60, 6))
    each = [_rank(cases, range(case, case + 1)) for case in range(60)]
    order = np.random.default_rng(0).permutation(60)
    # Three processes share the shuffled cases; their histograms are added in another order still.
    process_histograms = []
    for process in range(3):
        process_histogram = RankHistogram.zeros(1, MEANS, 6)
        for case in order[process::3]:
            process_histogram = process_histogram + each[case]
        process_histograms.append(process_histogram)
    shared = process_histograms[2] + process_histograms[0] + process_histograms[1]
    np.testing.assert_array_equal(shared.ranks, _rank(cases).ranks)
    np.testing.assert_array_equal(shared.frequencies(), _rank(cases).frequencies())
