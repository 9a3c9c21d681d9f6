"""report.html in a browser: drawn curves equal the scores, and all controls work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from credit.channels import Channel
from credit.verify.table.table import WIND_METRICS, ScoreTable
from tests.browser.chromium import Chromium
from tests.browser.pages import make_table, remove_score, write_page

MARKUP_NAME = '<b>t&"'  # A name may contain any character.
OTHER = "other </script> <i>&'"
CHANNELS = [
    Channel("u500", "u", 500.0, "prognostic"),
    Channel("v500", "v", 500.0, "prognostic"),
    Channel("z850", "z", 850.0, "prognostic"),
    Channel("z500", "z", 500.0, "prognostic"),
    Channel(MARKUP_NAME, MARKUP_NAME, None, "prognostic"),
]


@pytest.fixture(scope="module")
def table() -> ScoreTable:
    return make_table(CHANNELS, OTHER, members=5, wind=True, events=True)


@pytest.fixture(scope="module")
def page(table: ScoreTable, folder: Path) -> Path:
    return write_page(table, folder / "full")


def read_drawn_curve(browser: Chromium, forecast: str) -> np.ndarray:
    """Return the values of a drawn curve, computed from the positions of two ticks of the axis."""
    selector = json.dumps(f'#chart .curve[data-forecast="{forecast}"]')
    path = browser.evaluate(f"document.querySelector({selector})?.getAttribute('d')")
    if path is None:
        return np.array([])
    ticks = browser.evaluate(
        "[...document.querySelectorAll('#chart .tick-y')].map((own) => [own.textContent, own.dataset.y])"
    )
    (first, y_first), (last, y_last) = ((float(text.replace("−", "-")), float(y)) for text, y in (ticks[0], ticks[-1]))
    y = np.array([float(point.split()[1]) for point in re.findall(r"[-\d.]+ [-\d.]+", path)])
    return first + (y - y_first) * (last - first) / (y_last - y_first)


def read_axis_range(browser: Chromium) -> float:
    """Return the difference between the last and the first tick of the value axis."""
    ticks = browser.evaluate("[...document.querySelectorAll('#chart .tick-y')].map((own) => own.textContent)")
    return float(ticks[-1].replace("−", "-")) - float(ticks[0].replace("−", "-"))


def read_listed_values(browser: Chromium, forecast: str) -> np.ndarray:
    """Return the values of a forecast in the table of all lead times."""
    texts = browser.evaluate(
        "[...document.querySelectorAll('#values tbody td')]"
        f".filter((own) => own.dataset.forecast === {json.dumps(forecast)}).map((own) => own.firstChild.textContent)"
    )
    return np.array([float(text.replace("−", "-")) for text in texts])


def read_texts(browser: Chromium, selector: str) -> list[str]:
    return browser.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((own) => own.textContent)")


def check_curves(browser: Chromium, table: ScoreTable, curves: dict[str, np.ndarray]) -> None:
    """Compare drawn and listed values with the expected curves."""
    for forecast, expected in curves.items():
        np.testing.assert_allclose(read_drawn_curve(browser, forecast), expected, atol=0.002 * read_axis_range(browser))
        np.testing.assert_allclose(read_listed_values(browser, forecast), expected, rtol=6e-4)


@pytest.mark.parametrize(
    ("channel", "level", "metric", "region", "season"),
    [
        ("z850", "850", "rmse", "global", "all"),
        ("z500", "500", "bias", "tropics", "DJF"),
        ("u500", "500", "acc", "extratropics_north", "MAM"),
        ("z850", "850", "crps", "tropics", "all"),
        ("z500", "500", "spread_skill", "global", "all"),
        ("v500", "500", "activity_ratio", "tropics", "MAM"),
    ],
)
def test_drawn_curves_equal_scores(
    browser: Chromium, page: Path, table: ScoreTable, channel: str, level: str, metric: str, region: str, season: str
) -> None:
    browser.open(page)
    choices = {"variable": channel[0], "level": level, "score": metric, "region": region, "season": season}
    for key, value in choices.items():
        browser.choose(f"#choose-{key}", value)
    curves = {name: table.scores_by_lead(name, channel, metric, region, season) for name in table.forecasts}
    curves = {name: curve for name, curve in curves.items() if np.isfinite(curve).all()}
    assert ("climatology" in curves) == (metric not in ("acc", "spread_skill"))
    assert len(read_texts(browser, "#chart .curve")) == len(curves)
    check_curves(browser, table, {name: curves[name] for name in set(curves) - {OTHER}})


def test_another_forecast_is_drawn_above_the_model(browser: Chromium, page: Path) -> None:
    """Its line is thinner, so that both lines are visible where they are nearly equal."""
    browser.open(page)
    read = "(own) => [own.dataset.forecast, own.getAttribute('stroke-width')]"
    curves = browser.evaluate(f"[...document.querySelectorAll('#chart .curve')].map({read})")
    (below, thick), (above, thin) = curves[-2:]
    assert (below, above) == ("model", OTHER) and float(thin) < float(thick)


def test_intervals_and_wind_vectors(browser: Chromium, page: Path, table: ScoreTable) -> None:
    browser.open(page)
    browser.choose("#choose-variable", "wind (vector)")
    assert "RMSE of the wind vector of wind (vector) at 500 hPa (m² s⁻²)" in read_texts(browser, "#chart-title")[0]
    wind_scores = table.dataset.sel(forecast="model", season="all", region="global").isel(wind=0)
    check_curves(browser, table, {"model": wind_scores[WIND_METRICS["rmse"]].values})
    browser.choose("#choose-lead", "72")
    low, high = (float(wind_scores[f"wind_vector_rmse_{end}"].sel(lead=72.0)) for end in ("low", "high"))
    texts = read_texts(browser, '#legend tr[data-forecast="model"] .range')[0].split(" to ")
    np.testing.assert_allclose([float(text) for text in texts], [low, high], rtol=6e-4)
    assert len(read_texts(browser, "#chart .interval")) == 4  # The other forecast has no scores of the wind vector.
    browser.choose("#choose-season", "MAM")
    assert "no intervals at 1 lead times" in read_texts(browser, "#meaning")[0]


def test_events_and_precipitation_are_of_their_channel(browser: Chromium, page: Path, table: ScoreTable) -> None:
    browser.open(page, "#variable=z&level=500&score=brier_skill:high&region=tropics")
    assert read_texts(browser, "#chart-title")[0].startswith("Brier skill score: high of z at 500 hPa, Tropics")
    assert "The event: z500 above 50000 m2 s-2." in read_texts(browser, "#meaning")[0]
    names = [name for name in table.forecasts if name != OTHER]
    curves = {name: table.scores_by_lead(name, "z500", "brier_skill:high", "tropics") for name in names}
    assert (curves["climatology"] == 0).all()
    check_curves(browser, table, curves)
    assert len(read_texts(browser, "#chart .interval")) == 5
    browser.choose("#choose-score", "seeps")
    check_curves(browser, table, {name: table.scores_by_lead(name, "z500", "seeps", "tropics") for name in names})
    browser.choose("#choose-level", "850")
    assert read_texts(browser, "#chart-title")[0].startswith("Root-mean-square error (RMSE) of z at 850 hPa")
    options = browser.evaluate("[...document.querySelectorAll('#choose-score option')].map((own) => own.value)")
    assert "rmse" in options and not {"seeps", "brier:high"} & set(options)


def test_a_cell_of_the_scorecard_shows_its_curves(browser: Chromium, page: Path, table: ScoreTable) -> None:
    browser.open(page)
    number = table.channels.index("v500")
    browser.click(f'#scorecard td[data-row="{number}"][data-lead="2"]')
    assert browser.evaluate("document.getElementById('choose-variable').value") == "v"
    assert browser.evaluate("document.getElementById('choose-lead').value") == "24"
    check_curves(browser, table, {"model": table.scores_by_lead("model", "v500")})
    difference = table.comparison("rmse_difference", "v500")[2] * 100
    significance = "significant" if table.comparison("significant", "v500")[2] else "not significant"
    expected = f"v500, 24 h, Global: RMSE {difference:+.1f} % against Best baseline ({significance}).".replace("-", "−")
    assert read_texts(browser, "#card-reading") == [expected]
    for key in ("ArrowDown", "ArrowLeft", "Enter"):
        browser.press(key)
    assert "z850, 12 h" in read_texts(browser, "#card-reading")[0]


@pytest.mark.parametrize("reference", ["best_baseline", OTHER])
def test_the_scorecard(browser: Chromium, page: Path, table: ScoreTable, reference: str) -> None:
    browser.open(page)
    browser.choose("#choose-region", "tropics")
    browser.choose("#choose-against", reference)
    for number, channel in enumerate(table.channels):
        texts = read_texts(browser, f'#scorecard td[data-row="{number}"]')
        difference = table.comparison("rmse_difference", channel, reference, "tropics") * 100
        significant = table.comparison("significant", channel, reference, "tropics")
        for text, value, is_significant in zip(texts, difference, significant, strict=True):
            assert float(text.rstrip("*").replace("−", "-")) == pytest.approx(
                value, abs=0.51 if abs(value) > 9.9 else 0.06
            )
            assert text.endswith("*") == bool(is_significant)
    assert any(text.endswith("*") for text in read_texts(browser, "#scorecard td"))


def test_scores_of_events_and_precipitation_are_in_the_scorecard(
    browser: Chromium, page: Path, table: ScoreTable
) -> None:
    """A click on their cells shows these scores. A click on another row of the same channel shows its RMSE again."""
    browser.open(page)
    heads = read_texts(browser, "#scorecard tbody th")
    for name, score in (("z500: SEEPS", "seeps"), ("high: Brier score", "brier:high")):
        number = heads.index(name)
        browser.click(f'#scorecard td[data-row="{number}"][data-lead="2"]')
        assert browser.evaluate("document.getElementById('choose-score').value") == score
        assert len(read_texts(browser, f'#scorecard td.chosen[data-row="{number}"]')) == 1
        metric, _, event = score.partition(":")
        difference = table.comparison(f"{metric}_difference:{event}", "z500")[2] * 100
        expected = f"{name}, 24 h, Global: {difference:+.1f} % against Best baseline".replace("-", "−")
        assert read_texts(browser, "#card-reading")[0].startswith(expected)
    browser.click(f'#scorecard td[data-row="{table.channels.index("z500")}"][data-lead="2"]')
    assert browser.evaluate("document.getElementById('choose-score').value") == "rmse"


def test_reference_without_scores_of_a_row(browser: Chromium, page: Path, table: ScoreTable) -> None:
    browser.open(page)
    browser.choose("#choose-against", OTHER)
    wind = len(table.channels)
    assert read_texts(browser, f'#scorecard td[data-row="{wind}"]') == [""] * 6
    browser.click(f'#scorecard td[data-row="{wind}"][data-lead="0"]')
    assert "no score of" in read_texts(browser, "#card-reading")[0]


def test_the_chart_is_read_by_mouse_and_keyboard(browser: Chromium, page: Path, table: ScoreTable) -> None:
    browser.open(page, "#variable=z&level=500&lead=24")
    value = '#legend tr[data-forecast="model"] .value'
    curve = table.scores_by_lead("model", "z500")
    assert float(read_texts(browser, value)[0]) == pytest.approx(curve[2], rel=6e-4)
    browser.point("#chart", 0.96)
    assert read_texts(browser, "#reading-lead") == ["at 240 h (10 d)"]
    assert float(read_texts(browser, value)[0]) == pytest.approx(curve[-1], rel=6e-4)
    browser.point("h1")
    assert read_texts(browser, "#reading-lead") == ["at 24 h"]
    browser.click("#chart", 0.96)
    assert "lead=240" in browser.evaluate("location.hash")
    browser.evaluate("document.getElementById('chart').focus()")
    browser.press("ArrowLeft")
    assert read_texts(browser, "#reading-lead") == ["at 72 h (3 d)"]
    browser.press("Home")
    assert browser.evaluate("document.getElementById('chart').getAttribute('aria-valuetext')").startswith("6 h: Model ")


def test_the_chart_is_read_by_touch(browser: Chromium, page: Path) -> None:
    browser.show(360, 780, phone=True)
    browser.open(page)
    browser.tap("#chart", 0.95)
    browser.wait("document.getElementById('reading-lead').textContent === 'at 240 h (10 d)'")


def test_forecasts_are_switched_off_and_on(browser: Chromium, page: Path) -> None:
    browser.open(page)
    button = '#legend tr[data-forecast="persistence"] button'
    for pressed, curves in (("false", 4), ("true", 5)):
        browser.click(button)
        assert browser.evaluate(f"document.querySelector('{button}').getAttribute('aria-pressed')") == pressed
        assert len(read_texts(browser, "#chart .curve")) == curves
        assert len(read_texts(browser, "#values thead th")) == curves + 1


def test_address_restores_view(browser: Chromium, page: Path) -> None:
    browser.open(page)
    browser.choose("#choose-variable", MARKUP_NAME)
    browser.choose("#choose-score", "acc")
    browser.choose("#choose-against", OTHER)
    browser.click('#legend tr[data-forecast="persistence"] button')
    address, title = browser.evaluate("location.hash"), read_texts(browser, "#chart-title")
    assert "<" not in address and title[0].startswith(f"Anomaly correlation of {MARKUP_NAME}, Global")
    browser.open(page, address)
    assert read_texts(browser, "#chart-title") == title
    assert browser.evaluate("document.getElementById('choose-against').value") == OTHER
    assert read_drawn_curve(browser, "persistence").size == 0 and read_drawn_curve(browser, "model").size == 6
    browser.evaluate("void (location.hash = '#variable=z&level=850&score=mae')")
    browser.wait("document.getElementById('chart-title').textContent.startsWith('Mean absolute error of z at 850 hPa')")
    browser.open(page, "#variable=none&level=x&score=y&lead=7&region=mars&hide=nobody")
    assert read_texts(browser, "#chart-title")[0].startswith("Root-mean-square error")


def test_names_are_text_and_never_markup(browser: Chromium, page: Path) -> None:
    browser.open(page)
    assert MARKUP_NAME in read_texts(browser, "#scorecard tbody th")
    assert OTHER in read_texts(browser, "#choose-against option")
    assert browser.evaluate("document.querySelectorAll('main b, main i').length") == 0
    members, notice = read_texts(browser, ".notice")
    assert f"Model 5, {OTHER} 1." in members and notice == "A <short> notice & more"


def lightness(browser: Chromium, selector: str, kind: str) -> float:
    """Return the mean of red, green and blue of a colour."""
    colour = browser.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{kind}")
    return float(np.mean([float(number) for number in re.findall(r"[\d.]+", colour)[:3]]))


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(browser: Chromium, page: Path, dark: bool) -> None:
    browser.show(1280, 900, dark=dark)
    browser.open(page)
    for selector in ("#interactive", "select"):
        paper, ink = (lightness(browser, selector, kind) for kind in ("backgroundColor", "color"))
        assert (paper < 50 and ink > 200) if dark else (paper > 240 and ink < 60), selector


@pytest.mark.parametrize("other", [OTHER, "wxformer_1deg_6h_residual_dropout0.1_seed1000_again"])
@pytest.mark.parametrize("width", [320, 360, 1280, 1920])
def test_no_page_is_wider_than_its_screen(browser: Chromium, folder: Path, width: int, other: str) -> None:
    path = write_page(make_table(CHANNELS, other, 5, wind=True, events=True), folder / f"{width}_{len(other)}")
    browser.show(width, 780, phone=width < 500)
    browser.open(path, "#variable=wind+%28vector%29&score=activity_ratio")
    browser.evaluate("document.querySelectorAll('details').forEach((own) => { own.open = true; })")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate("document.querySelector('#chart svg').getBoundingClientRect().right") <= width
    browser.choose("#choose-variable", MARKUP_NAME)
    legend, room = (
        f"document.querySelector('{selector}').getBoundingClientRect().width" for selector in ("#legend", "#curves")
    )
    assert browser.evaluate(f"{legend} <= {room} + 0.5")


def test_the_chart_follows_the_screen(browser: Chromium, page: Path, table: ScoreTable) -> None:
    browser.open(page)
    width = "document.querySelector('#chart svg').viewBox.baseVal.width"
    before = browser.evaluate(width)
    browser.show(360, 780, phone=True)
    browser.wait(f"{width} < {before} && {width} < 360")
    check_curves(browser, table, {"model": table.scores_by_lead("model", MARKUP_NAME)})


def test_without_script_the_main_scores_are_there(browser: Chromium, page: Path, table: ScoreTable) -> None:
    browser.open(page, script=False)
    assert browser.evaluate("getComputedStyle(document.getElementById('interactive')).display") == "none"
    assert browser.evaluate("document.getElementById('plain').getBoundingClientRect().height") > 100
    rows = [
        line.split("\t") for line in browser.evaluate("document.querySelector('#plain table').innerText").split("\n")
    ]
    (row,) = [row for row in rows if row[0] == "z500"]
    assert row[1] == "6 h" and float(row[2]) == pytest.approx(table.score("model", "z500", 6), rel=1e-3)
    browser.open(page)
    assert browser.evaluate("getComputedStyle(document.getElementById('plain')).display") == "none"


def test_a_single_channel(browser: Chromium, folder: Path) -> None:
    table = make_table(CHANNELS[-1:])
    browser.open(write_page(table, folder / "single"))
    assert browser.evaluate("document.getElementById('choose-variable').disabled") is True
    check_curves(browser, table, {name: table.scores_by_lead(name, MARKUP_NAME) for name in table.forecasts})


def test_score_without_values_shows_message(browser: Chromium, folder: Path) -> None:
    browser.open(write_page(remove_score(make_table(CHANNELS[:1]), "acc"), folder / "nothing"), "#score=acc")
    message = browser.evaluate("document.getElementById('chart').innerText")
    assert "This score is not available for this selection." in message
    assert read_texts(browser, "#legend tbody tr") == []
    browser.choose("#choose-score", "mae")
    assert len(read_texts(browser, "#chart .curve")) == 4


@pytest.fixture(scope="module")
def figures_page(folder: Path) -> Path:
    """Report with a wide figure, a small figure and an animation."""
    paths = folder / "wide.png", folder / "small.png", folder / "animation_t2m.gif"
    for path, width in zip(paths, (2200, 300, 946), strict=True):
        Image.new("RGB", (width, 200), "white").save(path)
    return write_page(make_table(CHANNELS[-1:]), folder / "figures", [(path.stem, path) for path in paths])


def test_a_wide_figure_keeps_its_size_in_its_frame_on_a_phone(browser: Chromium, figures_page: Path) -> None:
    """Text in the figure stays readable, and the page is not wider than the screen."""
    browser.show(360, 780, phone=True)
    browser.open(figures_page)
    browser.click(".moving summary")
    widths = browser.evaluate("[...document.querySelectorAll('.frame img')].map((own) => own.clientWidth)")
    assert widths[0] == 1100 and widths[1] == 300 and widths[2] == 473
    assert browser.evaluate("document.documentElement.scrollWidth") == 360
    assert browser.evaluate("document.querySelector('.narrow').checkVisibility()") is True
    frame, moved = ".frame[aria-label=wide]", "document.querySelector('.frame').scrollLeft"
    browser.click(frame)
    assert browser.evaluate("document.activeElement.ariaLabel") == "wide"
    browser.press("ArrowRight")
    browser.wait(f"{moved} > 0")
    browser.show(1400, 900)
    assert browser.evaluate(
        "document.querySelector('.frame').scrollWidth <= document.querySelector('.frame').clientWidth"
    )
    assert browser.evaluate("document.querySelector('.narrow').checkVisibility()") is False


def test_figures_are_dimmed_in_dark_mode(browser: Chromium, figures_page: Path) -> None:
    for dark in (False, True):
        browser.show(380, 780, dark=dark, phone=True)
        browser.open(figures_page)
        browser.place(".frame")
        shades = browser.evaluate(
            "[getComputedStyle(document.querySelector('.frame img')).filter.match(/[\\d.]+/)[0], "
            "getComputedStyle(document.querySelector('.frame')).backgroundColor.match(/\\d+/)[0]].map(Number)"
        )
        assert shades == [0.82, round(0.82 * 255)] if dark else shades == [1, 255]


def test_animation_moves_only_when_opened(browser: Chromium, folder: Path) -> None:
    small, large = folder / "animation_t2m.gif", folder / "animation_z500.gif"
    frames = [Image.new("P", (300, 100), color=number) for number in range(3)]
    frames[0].save(small, save_all=True, append_images=frames[1:])
    large.write_bytes(small.read_bytes().ljust(3_000_001, b"\0"))
    page = write_page(make_table(CHANNELS[-1:]), folder / "moving", [("t2m <moves>", small), ("z500 moves", large)])
    browser.open(page)
    seen = "document.querySelector('.moving img').checkVisibility()"
    assert browser.evaluate(seen) is False and browser.evaluate("document.querySelectorAll('.moving img').length") == 1
    browser.click(".moving summary")
    assert browser.evaluate(seen) is True
    assert browser.evaluate("document.querySelector('.moving img').naturalWidth") == 300
    assert browser.evaluate("document.querySelector('.moving img').alt") == "t2m <moves>"
    first, second = read_texts(browser, ".moving")
    assert "t2m <moves>" in first and "too large; figures/animation_z500.gif" in second
    assert browser.evaluate("document.querySelector('.moving .still').checkVisibility()") is False
    browser.show(1280, 900, calm=True)
    assert browser.evaluate(seen) is False
    assert browser.evaluate("document.querySelector('.moving .still').checkVisibility()") is True
    browser.click(".moving summary")
    assert browser.evaluate("document.querySelector('.moving .still').checkVisibility()") is False
