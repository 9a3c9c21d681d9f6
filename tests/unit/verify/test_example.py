"""Tests of the example forecast over all lead times: means and frames, Hovmoeller diagrams and animations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image, ImageSequence

from credit.calendar import Calendar
from credit.channels import Channel
from credit.config.sections.verification import VerificationConfig
from credit.drawing.maps import FIELD_COLORMAP, MISSING_COLOR, MapBackground
from credit.drawing.style import save_figure
from credit.errors import ConfigError, CreditError
from credit.verify.example import ExampleCollector, ExampleEvolution, band_weights
from credit.verify.partial_scores import PartialScores
from credit.verify.plots.animation import write_animation
from credit.verify.plots.example import draw_example
from credit.verify.plots.hovmoeller import plot_hovmoeller, plot_latitude_time, time_edges
from credit.verify.scorer import score_forecasts
from tests.unit.analytic_reader import make_grid
from tests.unit.verify.conftest import LEADS, MODEL_ERROR, Run, make_config

CALENDAR = Calendar()
START = CALENDAR.parse("2001-03-01T00:00")
CHANNELS = [Channel("t2m", "t2m", None, "prognostic"), Channel("sst", "sst", None, "prognostic")]


def build_empty_scores() -> PartialScores:
    return PartialScores(np.array([0]), statistics={}, events={}, seeps={}, histograms={})


def collect_example(
    leads: Sequence[int], truth: np.ndarray, members: Callable[[int], np.ndarray], masks: dict[str, np.ndarray]
) -> PartialScores:
    """Collect the means of both channels over the band of 30 to 60 degrees."""
    collector = ExampleCollector(
        VerificationConfig(hovmoeller_band=(30.0, 60.0)), make_grid(), CHANNELS, masks, leads, ["t2m", "sst"]
    )
    scores = build_empty_scores()
    for lead in leads:
        collector.add(scores, lead, truth, members(lead))
    return scores


@pytest.mark.parametrize("band", [(30.0, 60.0), (-90.0, 90.0), (-10.0, 10.0), (41.0, 43.0)])
def test_the_weights_of_a_band_are_its_area(band: tuple[float, float]) -> None:
    weights = band_weights(make_grid(), band) * 24
    south, north = np.sin(np.deg2rad(band))
    assert weights.sum() == pytest.approx((north - south) / 2, rel=1e-12)


def test_means_over_a_band() -> None:
    """The area mean of sin(latitude), over a cell or a band, is half the sum of the sines of its bounds."""
    grid = make_grid()
    sines = np.sin(np.deg2rad(grid.lat_bounds))
    means = np.broadcast_to(((sines[:-1] + sines[1:]) / 2)[:, None], (2, *grid.shape))
    mask = np.zeros(grid.shape, dtype=bool)
    mask[2, :3] = mask[:, 5] = True  # three columns lack 45 to 60 north, and one lacks all rows

    def build_members(lead: int) -> np.ndarray:
        return np.stack([means, 3 * means + lead])

    scores = collect_example([360, 720], means, build_members, {"sst": mask})
    truth, forecast = scores.band_means["t2m", 720]
    expected = (np.sin(np.deg2rad(30)) + np.sin(np.deg2rad(60))) / 2
    np.testing.assert_allclose(truth, expected, rtol=1e-12)
    np.testing.assert_allclose(forecast, 2 * expected + 360, rtol=1e-6)
    truth, _ = scores.band_means["sst", 360]
    np.testing.assert_allclose(truth[:3], (np.sin(np.deg2rad(30)) + np.sin(np.deg2rad(45))) / 2, rtol=1e-12)
    assert np.isnan(truth[5])
    assert np.isfinite(np.delete(truth, 5)).all()
    assert not scores.animation_frames


def test_zonal_means() -> None:
    """The expected values are means by numpy; a row in which all cells are masked has no mean."""
    grid = make_grid()
    rng = np.random.default_rng(1)
    truth = rng.normal(280, 10, (2, *grid.shape))
    members = rng.normal(280, 10, (3, 2, *grid.shape))
    mask = rng.random(grid.shape) < 0.4
    mask[4] = True
    scores = collect_example([360, 720], truth, lambda lead: members + lead, {"sst": mask})
    assert scores.zonal_means.keys() == scores.band_means.keys()
    for number, name in enumerate(("t2m", "sst")):
        is_valid = ~mask if name == "sst" else np.ones(grid.shape, dtype=bool)
        for zonal_mean, field in zip(scores.zonal_means[name, 720], (truth, (members + 720).mean(axis=0)), strict=True):
            expected = [
                row[row_is_valid].mean() if row_is_valid.any() else np.nan
                for row, row_is_valid in zip(field[number], is_valid, strict=True)
            ]
            np.testing.assert_allclose(zonal_mean, expected, rtol=1e-6)
    assert np.isnan(scores.zonal_means["sst", 360][0][4])
    assert np.isfinite(scores.zonal_means["t2m", 360]).all()


def test_frames_are_limited_in_number_and_size() -> None:
    """Of 200 lead times at half a degree, 60 remain at one degree, including the first and the last."""
    grid = make_grid(40, 720)
    leads = [60 * number for number in range(1, 201)]
    wave = np.cos(np.deg2rad(grid.lon)) * np.ones((2, 40, 1))
    collector = ExampleCollector(VerificationConfig(animate=["t2m"]), grid, CHANNELS, {}, leads, [])
    scores = build_empty_scores()
    for lead in leads:
        collector.add(scores, lead, wave + lead / 12000, wave[None])
    evolution = collector.build_evolution(scores, 1)
    frame_leads = [lead for _, lead in evolution.animation_frames]
    assert len(frame_leads) == 60
    assert (frame_leads[0], frame_leads[-1]) == (60, 12000)
    assert not evolution.band_means
    truth, forecast = evolution.animation_frames["t2m", 12000]
    assert truth.shape == forecast.shape == evolution.frame_grid.shape == (180, 360)
    wave = np.cos(np.deg2rad(evolution.frame_grid.lon))
    np.testing.assert_allclose(truth, 1 + np.broadcast_to(wave, truth.shape), atol=1e-4)


def test_scoring_collects_the_example_at_all_lead_times(run: Run) -> None:
    verification = score_forecasts(run.config, run.reader, run.archive)
    evolution = verification.evolution
    weights = band_weights(run.reader.grid, (35.0, 60.0))
    assert set(evolution.band_means) == {(name, lead) for name in ("z500", "t2m", "tp") for lead in LEADS}
    assert set(evolution.zonal_means) == set(evolution.band_means)
    assert set(evolution.animation_frames) == {("t2m", lead) for lead in LEADS}
    assert not evolution.is_ensemble
    for lead in LEADS:
        truth_fields = run.reader.read(run.reader.index_of(verification.example_time + lead))
        truth, forecast = evolution.band_means["z500", lead]
        np.testing.assert_allclose(truth, weights @ truth_fields[0] / weights.sum(), rtol=1e-6)
        np.testing.assert_allclose(forecast - truth, MODEL_ERROR, rtol=1e-3)
        truth, forecast = evolution.zonal_means["z500", lead]
        np.testing.assert_allclose(truth, truth_fields[0].mean(axis=1), rtol=1e-6)
        np.testing.assert_allclose(forecast - truth, MODEL_ERROR, rtol=1e-3)
        np.testing.assert_array_equal(evolution.animation_frames["t2m", lead][0], truth_fields[3])
        np.testing.assert_allclose(evolution.animation_frames["t2m", lead][1] - truth_fields[3], MODEL_ERROR, rtol=1e-3)


def test_wrong_channels_and_bands_are_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'verification.animate: "z50" is not scored; did you mean "z500"'):
        score_forecasts(make_config(tmp_path, animate=["z50"]), run.reader, run.archive)
    for band in ([60, 35], [35, 35], [35, 91]):
        with pytest.raises(ValueError, match=r"hovmoeller_band: \[\d+, \d+\] is not \[south, north\] within -90..90"):
            VerificationConfig(hovmoeller_band=band)


@pytest.mark.parametrize(("leads", "value"), [((360,), 1.0), ((360, 720), np.nan)])
def test_no_diagram_without_times_or_cells(run: Run, tmp_path: Path, leads: tuple[int, ...], value: float) -> None:
    strips = {("sst", lead): (np.full(24, value),) * 2 for lead in leads}
    zonal = {("sst", lead): (np.full(12, value),) * 2 for lead in leads}
    evolution = ExampleEvolution(strips, (-90.0, -80.0), zonal, {}, run.reader.grid, False)
    table = SimpleNamespace(units=lambda name: "K", display_name=lambda name: "waves")
    maps = {("sst", leads[-1]): (np.ones((12, 24)),) * 2}
    verification = SimpleNamespace(
        grid=run.reader.grid, evolution=evolution, example_time=START, maps=maps, table=table, figure_channels=["sst"]
    )
    assert [path.name for _, path in draw_example(verification, run.reader, tmp_path)] == ["maps_sst.png"]


def test_waves_move_through_the_diagram_at_their_speed(tmp_path: Path) -> None:
    """The fields are cos(k (lon - c t)). The drawn values have the given k and c; the forecast is slower."""
    background = MapBackground(make_grid(12, 48), None)
    speeds = (11.0, 7.0)
    wavenumber = 5
    lon = background.grid.lon
    strips = {
        minutes: tuple(np.cos(np.deg2rad(wavenumber * (lon - speed * minutes / 1440))) for speed in speeds)
        for minutes in range(360, 360 * 21, 360)
    }
    figures: list[Figure] = []

    def draw_figure() -> Figure:
        figures.append(plot_hovmoeller("z500", "m2 s-2", strips, (35.0, 60.0), "waves", START, CALENDAR, background))
        return figures[0]

    save_figure(tmp_path / "h.png", draw_figure)
    panels = [axis for axis in figures[0].axes if axis.get_title()]
    assert [axis.get_title() for axis in panels] == ["Truth", "Forecast", "Error"]
    assert figures[0].get_suptitle() == "z500, mean over 35°N to 60°N: waves from 2001-03-01 00:00 UTC"
    values = []
    limits = []
    for axis in panels:
        assert axis.yaxis_inverted()
        (mesh,) = axis.collections
        corners = mesh.get_coordinates()
        longitudes = (corners[0, :-1, 0] + corners[0, 1:, 0]) / 2
        days = (corners[:-1, 0, 1] + corners[1:, 0, 1]) / 2
        np.testing.assert_allclose(days, np.arange(1, 21) / 4, rtol=1e-12)
        values.append(np.asarray(mesh.get_array()))
        limits.append(mesh.get_clim())
    for speed, values_TX in zip(speeds, values, strict=False):
        phase = np.unwrap(np.angle(values_TX @ np.exp(-1j * wavenumber * np.deg2rad(longitudes))))
        slope, start = np.polyfit(days, -np.rad2deg(phase) / wavenumber, 1)
        assert slope == pytest.approx(speed, rel=1e-9)
        assert start == pytest.approx(0.0, abs=1e-9)
    np.testing.assert_allclose(values[2], values[1] - values[0], atol=1e-12)
    assert limits[0] == limits[1]
    assert limits[2][0] == -limits[2][1] < 0
    assert panels[0].get_ylabel() == "Lead time (days)"
    assert panels[0].get_xlabel() == "Longitude"


def test_zonal_means_are_drawn_at_their_latitudes(tmp_path: Path) -> None:
    """Every cell of a panel has the given value; a masked row is missing in all panels."""
    grid = make_grid()
    rng = np.random.default_rng(2)
    zonal = {minutes: tuple(rng.normal(280, 5, (2, 12))) for minutes in range(360, 360 * 9, 360)}
    for fields in zonal.values():
        fields[0][3] = fields[1][3] = np.nan
    figures: list[Figure] = []

    def draw_figure() -> Figure:
        figures.append(plot_latitude_time("sst", "K", zonal, "ensemble mean of waves", START, CALENDAR, grid))
        return figures[0]

    save_figure(tmp_path / "h.png", draw_figure)
    panels = [axis for axis in figures[0].axes if axis.get_title()]
    assert [axis.get_title() for axis in panels] == ["Truth", "Forecast", "Error"]
    assert figures[0].get_suptitle() == "sst, zonal mean: ensemble mean of waves from 2001-03-01 00:00 UTC"
    zonal_means = np.array(list(zonal.values())).transpose(1, 2, 0)
    for axis, expected in zip(panels, (*zonal_means, zonal_means[1] - zonal_means[0]), strict=True):
        (mesh,) = axis.collections
        corners = mesh.get_coordinates()
        np.testing.assert_allclose((corners[:-1, 0, 1] + corners[1:, 0, 1]) / 2, grid.lat)
        np.testing.assert_allclose((corners[0, :-1, 0] + corners[0, 1:, 0]) / 2, 6 * np.arange(1, 9))
        np.testing.assert_array_equal(np.ma.filled(mesh.get_array(), np.nan), expected)
        assert axis.get_ylim() == (-90, 90)
        assert axis.get_xlabel() == "Lead time (hours)"
    assert [label.get_text() for label in panels[0].get_yticklabels()][::3] == ["90°S", "0°", "90°N"]
    assert panels[0].collections[0].get_clim() == panels[1].collections[0].get_clim()


def test_edges_are_half_way_between_times() -> None:
    np.testing.assert_allclose(time_edges(np.array([6.0, 12.0, 24.0])), [3.0, 9.0, 18.0, 30.0])


def test_frames_of_an_animation_have_the_colours_of_their_values(tmp_path: Path) -> None:
    """Each field has one value, whose colour a frame must have; all frames have the same limits."""
    background = MapBackground(make_grid(), None)
    leads = [360 * number for number in range(1, 12)]
    truth = np.linspace(270.0, 290.0, 11)
    forecast = np.linspace(290.0, 270.0, 11)
    frames = {
        lead: tuple(np.full(background.grid.shape, value) for value in values)
        for lead, values in zip(leads, zip(truth, forecast, strict=True), strict=True)
    }
    missing_fields = [field.copy() for field in frames[leads[4]]]
    missing_fields[0][:] = np.nan
    frames[leads[4]] = tuple(missing_fields)
    path = write_animation(tmp_path / "a.gif", "t2m", "K", frames, "Forecast", START, CALENDAR, background)
    with Image.open(path) as image:
        assert (image.format, image.n_frames, image.info["loop"]) == ("GIF", 11, 0)
        assert 800 < image.width < 1200
        assert image.getpixel((1, 1)) is not None
        durations = []
        pictures = []
        for frame in ImageSequence.Iterator(image):
            durations.append(frame.info["duration"])
            pictures.append(np.asarray(frame.convert("RGB")))
    assert durations == [250] * 10 + [1500]
    for number, picture in enumerate(pictures):
        assert tuple(picture[0, 0]) == (255, 255, 255)
        for values, panel in zip((truth, forecast), np.array_split(picture, 2, axis=1), strict=True):
            colours, counts = np.unique(panel.reshape(-1, 3) @ [65536, 256, 1], return_counts=True)
            main_colour = int(colours[:-1][counts[:-1].argmax()])  # The last colour is white, the background.
            color = np.array([main_colour >> 16, main_colour >> 8 & 255, main_colour & 255])
            expected = 255 * np.array(colormaps[FIELD_COLORMAP]((values[number] - 270.0) / 20.0)[:3])
            if number == 4 and values is truth:
                expected = np.array([int(MISSING_COLOR[position : position + 2], 16) for position in (1, 3, 5)])
            assert np.abs(color - expected).max() <= 4  # all values share 96 colours
    assert not list(tmp_path.glob(".*"))


def test_an_animation_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    background = MapBackground(make_grid(), None)
    frames = {lead: (np.zeros((12, 24)), np.ones((12, 24))) for lead in (360, 720)}
    with pytest.raises(CreditError, match="a.gif: cannot be written"):
        write_animation(tmp_path / "none" / "a.gif", "t2m", "K", frames, "Forecast", START, CALENDAR, background)
