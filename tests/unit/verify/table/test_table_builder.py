"""Tests of the table, its files, scorecards and curves, on random statistics of three quarters of a year."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import credit.verify.report
from credit.calendar import Calendar
from credit.channels import Channel
from credit.cli.console.score_summary import format_summary
from credit.config.sections.verification import BASELINES
from credit.verify.plots.scores import draw_scorecards, plot_scorecard, plot_skill, scorecard_pages
from credit.verify.significance.bootstrap import confidence_intervals
from credit.verify.statistics.case_statistics import DeterministicStatistics
from credit.verify.statistics.seasons import cases_by_season
from credit.verify.table.table import COMMON_ATTRIBUTES, ScoreTable
from credit.verify.table.table_builder import TableAxes, TableRows, build_table
from tests.unit.analytic_reader import ATTRIBUTES

CALENDAR = Calendar()
INITIAL = CALENDAR.parse("2001-01-01") + 1440 * np.arange(270)
LEADS = np.array([360, 1440, 14400])
CHANNELS = [Channel(f"{name}500", name, 500.0, "prognostic") for name in ("u", "v", "t")]
ROWS = TableRows(CHANNELS, [(0, 1, "wind")], ATTRIBUTES)
ATTRIBUTES_OF_TABLE = {"n_cases": 270, "level_units": "hPa", "initial_times": "here to there"} | dict.fromkeys(
    COMMON_ATTRIBUTES, "x"
)
SIZES = {"model": 1.0, "other": 1.0, "persistence": 2.0, "damped_persistence": 1.5, "climatology": 3.0}

REPORT_FOLDER = Path(credit.verify.report.__file__).parent


def make_sums(size: float, seed: int, rows: int = 4) -> DeterministicStatistics:
    """Return statistics of 2 regions with squared errors of about `size`."""
    rng = np.random.default_rng(seed)
    shape = len(INITIAL), len(LEADS), rows, 2
    planes = {name: rng.gamma(5.0, 0.2 * size, shape) for name in DeterministicStatistics.array_names()}
    planes["covariance"] = 0.8 * np.sqrt(planes["forecast_variance"] * planes["truth_variance"])
    return DeterministicStatistics(INITIAL, *(planes[name] for name in DeterministicStatistics.array_names()))


@pytest.fixture(scope="module")
def sums() -> dict[str, tuple[DeterministicStatistics, list[int]]]:
    """Statistics of each forecast and its rows; `other` has u, v and thus the wind, but no t."""
    return {
        name: (make_sums(size, seed, 3), [0, 1, 3]) if name == "other" else (make_sums(size, seed), [0, 1, 2, 3])
        for seed, (name, size) in enumerate(SIZES.items())
    }


@pytest.fixture(scope="module")
def table(sums: dict[str, tuple[DeterministicStatistics, list[int]]]) -> ScoreTable:
    return build_table(
        sums, TableAxes(ROWS, LEADS, cases_by_season(INITIAL, CALENDAR), ["global", "tropics"]), ATTRIBUTES_OF_TABLE
    )


def build_large_table(regions: list[str], rows: int) -> ScoreTable:
    """Return a table of as many channels as `rows` in the given regions."""
    initial_times = INITIAL[:30]
    rng = np.random.default_rng(1)
    sums = {}
    for name, size in SIZES.items():
        shape = len(initial_times), len(LEADS), rows, len(regions)
        planes = [rng.gamma(5.0, 0.2 * size, shape) for _ in DeterministicStatistics.array_names()]
        sums[name] = DeterministicStatistics(initial_times, *planes), list(range(rows))
    channels = [Channel(f"u{level}", "u", float(level), "prognostic") for level in range(1, rows + 1)]
    table_rows = TableRows(channels, [], ATTRIBUTES)
    return build_table(
        sums, TableAxes(table_rows, LEADS, cases_by_season(initial_times, CALENDAR), regions), ATTRIBUTES_OF_TABLE
    )


def test_scores_of_a_season_are_those_of_its_cases(sums: dict, table: ScoreTable) -> None:
    assert table.seasons == ["all", "DJF", "MAM", "JJA", "SON"]
    assert table.dataset["n_cases"].values.tolist() == [270, 59, 92, 92, 27]
    assert table.dataset["n_blocks"].values.tolist() == [[54, 54, 22], [11, 11, 4], [18, 18, 7], [18, 18, 7], [5, 5, 2]]
    summer_cases = sums["persistence"][0].select(cases_by_season(INITIAL, CALENDAR)["JJA"])
    metrics = summer_cases.metrics()
    del metrics["crps"]  # the table has it only if there are ensembles
    for name, values in metrics.items():
        expected = values[1, 2, 1]
        assert table.score("persistence", "t500", 24, name, "tropics", "JJA") == expected, name
        wind = {"bias": "wind_speed_bias"}.get(name, f"wind_vector_{name}")
        selection = {"forecast": "persistence", "season": "JJA", "lead": 24.0, "region": "tropics"}
        assert float(table.dataset[wind].sel(**selection)[0]) == values[1, 3, 1], wind


def test_the_table_has_the_intervals_of_scores(sums: dict, table: ScoreTable) -> None:
    expected = confidence_intervals(sums["other"][0], 2, 14400)["mae"][:, 1, 0]
    ends = [table.scores_by_lead("other", "v500", f"mae_{end}")[2] for end in ("low", "high")]
    np.testing.assert_array_equal(ends, expected)
    for forecast in SIZES:
        low, value, high = (table.dataset[name].sel(forecast=forecast) for name in ("rmse_low", "rmse", "rmse_high"))
        assert ((low < value) & (value < high))[0, :2].all() and np.isnan(low[-1]).all()  # SON has too few blocks
    assert np.isnan(table.dataset["acc_low"].sel(forecast="climatology")).all()
    assert np.isnan(table.dataset["rmse"].sel(forecast="other", channel="t500")).all()


def test_the_csv_file_has_a_row_for_every_score(table: ScoreTable, tmp_path: Path) -> None:
    table.write(tmp_path)
    with open(tmp_path / "scores.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    # Forecasts with a row x metrics x leads x regions x seasons. The climatology has neither acc nor acc_wb2.
    assert len(rows) == (4 + 3 + 4 * 3) * 8 * 3 * 2 * 5 - 4 * 2 * 3 * 2 * 5
    conditions = {"forecast": "model", "variable": "wind", "region": "tropics", "season": "MAM", "lead_hours": "24"}
    (row,) = (row for row in rows if conditions.items() <= row.items() and row["metric"] == "wind_vector_rmse")
    selection = {"forecast": "model", "season": "MAM", "lead": 24.0, "region": "tropics"}
    for column, name in (("value", "rmse"), ("low", "rmse_low"), ("high", "rmse_high")):
        expected = float(table.dataset[f"wind_vector_{name}"].sel(**selection)[0])
        assert float(row[column]) == pytest.approx(expected, rel=1e-7)
    assert (row["n_cases"], row["n_blocks"], row["units"], row["level"]) == ("92", "18", "m s-1", "500")
    (row,) = (
        row for row in rows if conditions.items() <= row.items() and row["metric"] == "wind_vector_activity_ratio"
    )
    assert (row["units"], row["low"]) == ("1", "")


def test_stars_and_hatching_need_twenty_blocks(table: ScoreTable) -> None:
    assert table.comparison("significant", "u500").tolist() == [True, True, True]
    assert table.comparison("significant", "u500", "other").tolist() == [False, False, False]
    seasons = table.dataset["significant"].any(("reference", "channel", "lead", "region"))
    assert seasons.values.tolist() == [True, False, False, False, False]
    lines = format_summary(table, show_all=True).splitlines()
    best_baseline = min(table.score(name, "u500", 6) for name in BASELINES)
    ratio = table.score("model", "u500", 6) / best_baseline
    assert "1*" in lines[2].replace(f"{ratio:.2f}", "1")
    assert "54 blocks at the first lead time and 22 at the last" in lines[-1]
    assert "false discovery rate of 5 %" in lines[-1]
    assert "only where" not in lines[-1]


@pytest.mark.parametrize("reference", ["best_baseline", "other"])
def test_the_scorecard_hatches_significant_differences(table: ScoreTable, reference: str) -> None:
    figure = plot_scorecard(table, reference, table.regions)
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in panels] == ["Global", "Tropics"]
    for axis, region in zip(panels, ("global", "tropics"), strict=True):
        mesh, hatched = axis.collections
        comparison = table.dataset.sel(reference=reference, season="all", region=region)
        expected = np.concatenate([comparison["rmse_difference"], comparison["wind_rmse_difference"]]) * 100
        np.testing.assert_array_equal(np.ma.filled(mesh.get_array(), np.nan), expected)
        assert hatched.get_hatch() == "///"
        assert len(hatched.get_paths()) == int(comparison["significant"].sum() + comparison["wind_significant"].sum())
    assert [text.get_text() for text in panels[0].get_yticklabels()] == ["u500", "v500", "t500", "wind 500"]


@pytest.mark.parametrize(
    ("count", "rows", "shapes"),
    [
        (1, 4, [(1, 1)]),
        (5, 4, [(1, 5)]),
        (6, 4, [(2, 3)]),
        (9, 4, [(2, 5)]),
        (13, 4, [(3, 5)]),
        (7, 100, [(1, 4), (1, 3)]),
    ],
)
def test_every_region_has_its_panel(count: int, rows: int, shapes: list[tuple[int, int]]) -> None:
    """Boxes of users have panels, too. A page has a limited size, and all pages have the same colour limits."""
    names = ["global", *(f"a_box_of_a_user_with_a_long_name_{number}" for number in range(1, count))]
    table = build_large_table(names, rows)
    pages = scorecard_pages(table)
    assert [region for page in pages for region in page] == names
    limits = set()
    for page, (down, across) in zip(pages, shapes, strict=True):
        figure = plot_scorecard(table, "best_baseline", page)
        panels = [axis for axis in figure.axes if axis.get_title()]
        assert [axis.get_title().replace("\n", "") for axis in panels] == [
            table.display_name(region) for region in page
        ]
        assert panels[0].get_gridspec().get_geometry() == (down, across)
        for axis, name in zip(panels, page, strict=True):
            values_drawn = np.ma.filled(axis.collections[0].get_array(), np.nan)
            expected = table.dataset["rmse_difference"].sel(reference="best_baseline", season="all", region=name)
            np.testing.assert_array_equal(values_drawn, expected.values * 100)
            limits.add(axis.collections[0].get_clim())
        FigureCanvasAgg(figure).draw()
        titles = [axis.title.get_window_extent() for axis in panels]
        assert not any(a.overlaps(b) for number, a in enumerate(titles) for b in titles[:number])
    assert len(limits) == 1


def test_scorecards_have_their_files(tmp_path: Path) -> None:
    captions, paths = zip(*draw_scorecards(build_large_table(["global", *"abcde"], 100), tmp_path), strict=True)
    names = ["scorecard.png", "scorecard_page2.png", "scorecard_1.png", "scorecard_1_page2.png"]
    assert [path.name for path in paths] == names
    assert all(path.stat().st_size > 20_000 for path in paths)
    assert "best of the three baselines" in captions[1]
    assert "against other," in captions[2]


def test_a_title_with_a_long_name_fits_on_the_page(sums: dict) -> None:
    name = "operational_ensemble_of_the_other_centre_at_nine_kilometres"
    renamed_sums = {name if key == "other" else key: value for key, value in sums.items()}
    renamed_table = build_table(
        renamed_sums,
        TableAxes(ROWS, LEADS, cases_by_season(INITIAL, CALENDAR), ["global", "tropics"]),
        ATTRIBUTES_OF_TABLE,
    )
    figure = plot_scorecard(renamed_table, name, ["global"])
    FigureCanvasAgg(figure).draw()
    box = figure._suptitle.get_window_extent()
    assert name in figure.get_suptitle().replace("\n", "")
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1


def compute_luminance(rgb: np.ndarray) -> np.ndarray:
    """Return the relative luminance of sRGB colours (..., 3), 0 to 1: WCAG 2.2."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def test_hatching_is_visible_on_every_colour(table: ScoreTable) -> None:
    """Black has a contrast of at least 4.5 to every colour of the scale, as WCAG 2.2 requires for small text."""
    mesh, hatched = plot_scorecard(table, "best_baseline", ["global"]).axes[0].collections
    assert hatched.get_edgecolor()[0].tolist() == [0, 0, 0, 1]
    colours = np.vstack([mesh.cmap(np.linspace(0, 1, 101)), mesh.cmap(np.ma.masked_all(1))])[:, :3]
    assert ((compute_luminance(colours) + 0.05) / 0.05).min() > 4.5


def test_the_scorecard_of_the_page_has_the_same_colours(table: ScoreTable) -> None:
    mesh = plot_scorecard(table, "best_baseline", ["global"]).axes[0].collections[0]
    css = (REPORT_FOLDER / "scores.css.j2").read_text()
    for rule, end in (("better", 0.0), ("worse", 1.0)):
        colour = rf"\.{rule} {{ background-color: rgb\((\d+) (\d+) (\d+) / calc\(([\d.]+) \*"
        *rgb, share = re.search(colour, css).groups()
        for strength in (1.0, 0.5):
            over_white = 1 + float(share) * strength * (np.array(rgb, dtype=float) / 255 - 1)
            drawn_colour = mesh.cmap(0.5 + (end - 0.5) * strength)[:3]
            np.testing.assert_allclose(drawn_colour, over_white, atol=1.5 / 255, err_msg=rule)


@pytest.mark.parametrize("place", [0, 1], ids=["light", "dark"])
def test_hatching_of_the_page_is_visible_on_every_colour(place: int) -> None:
    """A line has a contrast of at least 3 to its cell, as WCAG 2.2 requires for graphics, in the page's colours."""
    style, card = ((REPORT_FOLDER / f"{name}.css.j2").read_text() for name in ("style", "scores"))
    *hatch, cover = map(float, re.findall(r"--hatch: rgb\((\d+) (\d+) (\d+) / ([\d.]+)\)", style)[place])
    paper = np.array([int(part, 16) for part in re.findall("..", re.findall("--paper: #(.{6})", style)[place])])
    for red, green, blue, share in re.findall(r"color: rgb\((\d+) (\d+) (\d+) / calc\(([\d.]+) \*", card):
        for strength in np.linspace(0, float(share), 11):
            cell = paper + strength * (np.array([red, green, blue], dtype=float) - paper)
            line = cell + cover * (np.array(hatch) - cell)
            low, high = sorted(compute_luminance(np.stack([cell, line]) / 255))
            assert (high + 0.05) / (low + 0.05) > 3, (cell, line)


def test_correlations_have_one_axis(table: ScoreTable) -> None:
    """The axis begins at 0 or at the smallest value, so that panels can be compared."""
    axes = plot_skill(table, table.channels).axes[3:]
    assert {axis.get_ylim() for axis in axes} == {(0.0, 1.005)}
    table_with_negative_acc = ScoreTable(table.dataset.copy(deep=True))
    table_with_negative_acc.dataset["acc"].values[0, 0, 1, -1, 0] = -0.3
    axes = plot_skill(table_with_negative_acc, table_with_negative_acc.channels).axes[3:]
    assert {axis.get_ylim() for axis in axes} == {(-0.3, 1.005)}


def test_the_legend_names_every_curve_and_fits_in_the_figure(
    sums: dict[str, tuple[DeterministicStatistics, list[int]]],
) -> None:
    """The names of the other forecasts are long, and one of them lacks the channel of the first panel."""
    names = [f"wxformer_1deg_6h_residual_dropout0.{number}_seed1000" for number in range(1, 6)]
    others = {names[0]: sums["other"]} | dict.fromkeys(names[1:], sums["model"])
    seasons = cases_by_season(INITIAL, CALENDAR)
    model_and_baselines = {name: sums[name] for name in sums if name != "other"}
    table = build_table(
        model_and_baselines | others, TableAxes(ROWS, LEADS, seasons, ["global", "tropics"]), ATTRIBUTES_OF_TABLE
    )
    for channels in (["t500"], ["t500", "u500"]):
        figure = plot_skill(table, channels)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        (legend,) = figure.legends
        legend_names = {text.get_text().replace("\n", "") for text in legend.get_texts()}
        missing_names = {names[0]} if channels == ["t500"] else set()
        assert legend_names == {table.display_name(name) for name in table.forecasts} - missing_names
        for box in (legend.get_window_extent(), figure._suptitle.get_window_extent()):
            assert figure.bbox.x0 <= box.x0
            assert box.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= box.y0
            assert box.y1 <= figure.bbox.y1
        assert legend.get_window_extent().y1 <= min(axis.get_tightbbox().y0 for axis in figure.axes)


def test_the_table_for_the_terminal_has_aligned_columns(
    sums: dict[str, tuple[DeterministicStatistics, list[int]]],
) -> None:
    """A name may be longer than a number, and the other forecast may lack a channel."""
    name = "a_model_with_a_very_long_name"
    renamed_sums = {name if key == "other" else key: value for key, value in sums.items()}
    table = build_table(
        renamed_sums,
        TableAxes(ROWS, LEADS, cases_by_season(INITIAL, CALENDAR), ["global", "tropics"]),
        ATTRIBUTES_OF_TABLE,
    )
    head, *rows = format_summary(table, name, show_all=True).splitlines()[1 : 2 + 3 * len(LEADS)]
    end = head.index(name[:20]) + 20
    assert all(len(row) == len(head) for row in rows)
    assert "nan" not in "".join(rows)
    for row, channel in zip(rows, np.repeat(["u500", "v500", "t500"], len(LEADS)), strict=True):
        assert (row[end - 2 : end] == " -") == (channel == "t500")
        assert row[end - 1] != " "
        assert row[end] == " "


def test_curves_are_shaded_between_the_ends_of_intervals(table: ScoreTable) -> None:
    figure = plot_skill(table, ["t500"])
    upper, lower = figure.axes
    assert len(upper.lines) == len(upper.collections) == 4  # the other forecast has no t
    assert len(lower.lines) == 3  # the climatology has no correlation
    low = table.scores_by_lead("model", "t500", "rmse_low")
    assert upper.collections[0].get_paths()[0].vertices[:, 1].min() == pytest.approx(low.min())
