"""Tests of regions, which select cells by their centres, and of seasons."""

from __future__ import annotations

import numpy as np
import pytest

from credit.calendar import Calendar
from credit.config.sections.verification import REGIONS, VerificationConfig
from credit.errors import ConfigError
from credit.verify.statistics.regions import region_weights, scored_regions
from credit.verify.statistics.seasons import cases_by_season
from tests.unit.analytic_reader import make_grid

# Northern and southern bound and width in degrees. The area is the difference of sines times the share of the circle.
AREAS = {
    "global": (90, -90, 360), "tropics": (20, -20, 360), "extratropics_north": (90, 20, 360), "europe": (75, 35, 55),
    "north_america": (60, 25, 45), "north_atlantic": (65, 25, 60), "north_pacific": (60, 25, 85),
    "east_asia": (60, 25, 47.5), "ausnz": (-12.5, -45, 55), "arctic": (90, 60, 360), "antarctic": (-60, -90, 360),
}  # fmt: skip


def test_rows_on_an_edge_belong_to_both_sides() -> None:
    grid = make_grid(19, 4, poles=True)  # every 10 degrees
    weights = dict(zip(REGIONS, region_weights(grid, {n: REGIONS[n] for n in list(REGIONS)[:5]}), strict=False))
    rows = {name: grid.lat[weight[:, 0] > 0].tolist() for name, weight in weights.items()}
    assert rows["tropics"] == [20, 10, 0, -10, -20]
    assert rows["extratropics_north"] == [90, 80, 70, 60, 50, 40, 30, 20]
    assert rows["extratropics"] == rows["extratropics_north"] + rows["extratropics_south"]
    assert len(rows["global"]) == 19


def test_regions_have_their_area_and_place() -> None:
    """The bounds of regions are edges of cells of half a degree, so the cells cover exactly the region."""
    grid = make_grid(360, 720)
    shifted = type(grid)(grid.lat, grid.lon + 0.25, grid.lat_bounds)
    for name, weight in zip(REGIONS, region_weights(shifted, REGIONS), strict=True):
        assert weight.sum() == pytest.approx(1.0, abs=1e-12)
        if name in AREAS:
            north, south, width = AREAS[name]
            area = (np.sin(np.deg2rad(north)) - np.sin(np.deg2rad(south))) / 2 * width / 360
            assert grid.area_weights()[weight > 0].sum() == pytest.approx(area, rel=1e-9), name
    columns = shifted.lon[(region_weights(shifted, {"europe": REGIONS["europe"]})[0] > 0).any(axis=0)]
    assert columns.min() == 0.25
    assert columns[columns < 180].max() == 42.25
    assert columns[columns > 180].min() == 347.75


def test_boxes_of_a_user_are_regions() -> None:
    conf = VerificationConfig.model_validate(
        {"regions": ["global"], "boxes": {"alps": {"lat": [43, 48], "lon": [-5, 17]}, "band": {"lat": [-5, 5]}}}
    )
    grid = make_grid(37, 72, poles=True)  # every 5 degrees
    weights = region_weights(grid, scored_regions(conf))
    assert list(scored_regions(conf)) == ["global", "alps", "band"]
    rows, columns = np.nonzero(weights[1])
    assert set(grid.lat[rows]) == {45.0}
    assert grid.lon[columns].tolist() == [0, 5, 10, 15, 355]
    assert (weights[2] > 0).sum() == 3 * 72


def test_a_region_without_a_cell_is_named() -> None:
    with pytest.raises(ConfigError, match="region ausnz: lat -45 to -12.5, lon 120 to 175 has no cell on"):
        region_weights(make_grid(3, 8), {"ausnz": REGIONS["ausnz"]})


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"regions": ["global", "europ"]}, '"europ" is not a known region; .* in boxes; did you mean "europe"'),
        ({"regions": ["europe"]}, "must contain global"),
        ({"regions": ["global", "europe", "europe"]}, "contains a region twice"),
        ({"boxes": {"arctic": {"lat": [70, 90]}}}, '"arctic" is the name of a built-in region'),
        ({"boxes": {"here": {"lat": [50, 40]}}}, r"\[50, 40\] is not \[south, north\]"),
        ({"boxes": {"here": {"lon": [-190, 40]}}}, r"\[-190, 40\] is not \[west, east\]"),
    ],
)
def test_wrong_regions_are_refused(raw: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        VerificationConfig.model_validate(raw)


def test_seasons_are_by_the_month_of_the_initial_time() -> None:
    calendar = Calendar("noleap")
    texts = ["2001-02-28T18:00", "2001-03-01", "2001-08-31T18:00", "2001-12-01", "2002-01-15"]
    seasons = cases_by_season(np.array([calendar.parse(text) for text in texts]), calendar)
    assert {name: np.flatnonzero(is_in_season).tolist() for name, is_in_season in seasons.items()} == {
        "all": [0, 1, 2, 3, 4], "DJF": [0, 3, 4], "MAM": [1], "JJA": [2],
    }  # fmt: skip
