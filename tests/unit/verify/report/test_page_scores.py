"""Tests of the scores that report.html contains."""

from __future__ import annotations

import base64
import json
import zlib

import numpy as np
import pytest

from credit.channels import Channel
from credit.drawing.style import format_units
from credit.verify.plots.scores import forecast_styles, plot_scorecard
from credit.verify.report.page_scores import build_page_scores, encode_page_scores, pack_curves, superscript_units
from credit.verify.report.score_descriptions import SCORE_DESCRIPTIONS
from credit.verify.table.table import ScoreTable
from tests.browser.pages import make_table


def unpack_curve(packed: list[int | None] | None, length: int) -> np.ndarray:
    """Return the values of a packed curve, as the page computes them."""
    if packed is None:
        return np.full(length, np.nan)
    total = 0
    values = []
    for step in packed[1:]:
        total += step or 0
        values.append(np.nan if step is None else total * 10.0 ** packed[0])
    return np.array(values)


@pytest.fixture(scope="module")
def table() -> ScoreTable:
    channels = [Channel(f"{name}500", name, 500.0, "prognostic") for name in ("u", "v", "t")]
    return make_table(channels, "other", members=4, wind=True)


def test_packed_curves_have_five_digits_of_their_largest_value() -> None:
    rng = np.random.default_rng(0)
    curves = rng.normal(size=(500, 12)) * 10.0 ** rng.integers(-9, 9, (500, 1))
    curves[rng.random(curves.shape) < 0.2] = np.nan
    curves[3] = np.nan
    curves[4] = 0.0
    packed = pack_curves(curves)
    assert packed[3] is None
    assert packed[4] == [0] + [0] * 12
    for packed_curve, curve in zip(packed, curves, strict=True):
        error = np.abs(unpack_curve(packed_curve, 12) - curve)
        np.testing.assert_array_equal(np.isnan(error), np.isnan(curve))
        assert np.isnan(curve).all() or np.nanmax(error) <= 0.5001e-4 * np.nanmax(np.abs(curve))


def test_packed_whole_numbers_are_exact() -> None:
    assert pack_curves(np.array([[1.0, 1.0, 0.0, np.nan, 1.0]])) == [[0, 1, 0, -1, None, 1]]


def test_a_small_table_is_stored_completely(table: ScoreTable) -> None:
    scores, omission_text = build_page_scores(table, "v500")
    decoded_scores = json.loads(zlib.decompress(base64.b64decode(encode_page_scores(scores))))
    assert decoded_scores == scores
    assert scores["rows"][scores["first_row"]]["name"] == "v500"
    assert [score["name"] for score in scores["metrics"]] == list(SCORE_DESCRIPTIONS)
    assert "acc_wb2" in omission_text
    assert "season" not in omission_text
    assert "lead times" not in omission_text
    for name in ("rmse", "acc_low", "crps", "spread_skill_high"):
        values = table.dataset[name].values
        for index in np.ndindex(values.shape[:3]):
            forecast, season, channel = index
            for region in range(values.shape[-1]):
                packed_curve = scores["curves"][name][season][forecast][channel][region]
                np.testing.assert_allclose(unpack_curve(packed_curve, 6), values[index][:, region], rtol=1e-3)


def test_names_of_a_user_are_shown_unchanged() -> None:
    table = make_table([Channel("t500", "t", 500.0, "prognostic")], "IFS_hres")
    scores, _ = build_page_scores(table, "t500")
    labels = {forecast["name"]: forecast["label"] for forecast in scores["forecasts"]}
    assert labels["IFS_hres"] == "IFS_hres"
    assert labels["damped_persistence"] == "Damped persistence"
    assert plot_scorecard(table, "IFS_hres", table.regions).get_suptitle().startswith("Model against IFS_hres ")
    assert (
        plot_scorecard(table, "best_baseline", table.regions).get_suptitle().startswith("Model against best baseline ")
    )


def test_events_and_precipitation_have_one_row() -> None:
    channels = [Channel(f"{name}500", name, 500.0, "prognostic") for name in ("u", "v", "t", "z")]
    table = make_table(channels, members=4, events=True)
    scores, omission_text = build_page_scores(table, "v500")
    extra = {score["name"]: score for score in scores["metrics"] if score["rows"] is not None}
    assert {name: score["rows"] for name, score in extra.items()} == dict.fromkeys(
        ("seeps", "brier:high", "brier_skill:high"), [3]
    )
    assert extra["brier:high"]["label"] == "Brier score: high"
    assert "uncertainty" in omission_text
    for name in ("seeps", "seeps_high", "brier:high", "brier_low:high"):
        metric, _, event = name.partition(":")
        values = table.dataset[metric].sel(forecast="model", season="all").values[0 if event else 3]
        rows = scores["curves"][name][0][0]
        assert rows[:3] == [None] * 3
        for region in range(3):
            np.testing.assert_allclose(unpack_curve(rows[3][region], 6), values[:, region], rtol=1e-3)
    assert scores["curves"]["brier_skill:high"][0][3][3] == [[0] + [0] * 6] * 3  # curve of the climatology


def test_a_large_page_omits_intervals_seasons_and_lead_times(table: ScoreTable) -> None:
    budgets = []
    for max_values in (10**6, 14_000, 1000):
        scores, omission_text = build_page_scores(table, "v500", max_values)
        intervals = scores["curves"]["rmse_low"]
        budgets.append((len(scores["seasons"]), len(scores["leads"]), [interval is not None for interval in intervals]))
        for text, is_expected in (
            ("single seasons (DJF, MAM)", len(scores["seasons"]) == 1),
            ("the intervals of single seasons", intervals[-1] is None and len(scores["seasons"]) > 1),
            (f"{6 - len(scores['leads'])} of the 6 lead times", len(scores["leads"]) < 6),
        ):
            assert (text in omission_text) == is_expected, text
    assert budgets == [(3, 6, [True] * 3), (3, 6, [True, False, False]), (1, 3, [True])]
    assert scores["leads"] == [6.0, 12.0, 240.0]


def test_the_page_has_the_colours_of_the_figures(table: ScoreTable) -> None:
    scores, _ = build_page_scores(table, "u500")
    forecasts = {forecast["name"]: forecast for forecast in scores["forecasts"]}
    page_colours = {name: forecast["colour"] for name, forecast in forecasts.items()}
    figure_colours = {name: style["color"] for name, style in forecast_styles(table).items()}
    assert page_colours == figure_colours
    assert forecasts["persistence"]["dash"]
    assert not forecasts["model"]["dash"]


def test_units_are_written_with_raised_exponents() -> None:
    assert superscript_units("m2 s-2") == "m² s⁻²"
    assert superscript_units("kg kg-1") == "kg kg⁻¹"
    assert superscript_units("1") == "1"
    assert superscript_units("1e-5 s-1") == "1e-5 s⁻¹"
    for units in ("m**2 s**-2", "m^2 s^-2", "m2/s2"):  # spelling of ERA5, and others
        assert superscript_units(units) == "m² s⁻²"
        assert format_units(units) == "m$^{2}$ s$^{-2}$"
