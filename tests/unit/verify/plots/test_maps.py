"""Tests of maps: values, positions, scales and coastlines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.drawing.maps import (
    FIELD_COLORMAP,
    MapBackground,
    create_map_axes,
    draw_map,
    equal_earth,
)
from credit.drawing.style import create_figure, save_figure
from credit.grid import LatLonGrid
from credit.verify.plots.maps import plot_map_and_histogram, plot_maps
from tests.unit.analytic_reader import AnalyticReader, make_grid

GRIDS = {
    "from Greenwich": make_grid(12, 24),
    "with poles": make_grid(13, 24, poles=True),
    "half a column aside": LatLonGrid.from_coords(np.linspace(-85, 85, 18), np.arange(36) * 10.0 + 5.0)[0],
    "odd": LatLonGrid.from_coords(np.linspace(80, -80, 9), np.arange(15) * 24.0 - 180.0)[0],
}
CALENDAR = Calendar()


def draw_fields(grid: LatLonGrid, count: int) -> list[np.ndarray]:
    """Draw random fields (H, W) in K."""
    rng = np.random.default_rng(0)
    return [rng.normal(270.0, 10.0, grid.shape).astype(np.float32) for _ in range(count)]


def find_map_meshes(figure: Figure) -> list[QuadMesh]:
    """Return the meshes of the maps in a figure, row by row, without those of the colour bars."""
    maps = []
    for axis in figure.axes:
        axis_meshes = [collection for collection in axis.collections if isinstance(collection, QuadMesh)]
        # A colour bar is a mesh of one row or of one column.
        if axis_meshes and min(axis_meshes[0].get_array().shape[:2]) > 1:
            maps.append(axis_meshes[0])
    return maps


def test_the_projection_is_equal_earth() -> None:
    """The reference values are from pyproj 3.7 (+proj=eqearth +R=1)."""
    lon, lat = np.array([[0, 0], [180, 0], [90, 45], [-120, -30], [60, 80], [180, 90]], dtype=float).T
    x = [0.0, 2.706629984, 1.159854499, -1.687801117, 0.55675906, 1.603588648]
    y = [0.0, 0.0, 0.860231086, -0.59293512, 1.288211196, 1.317362759]
    np.testing.assert_allclose(equal_earth(lon, lat), [x, y], atol=1e-9)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_cells_are_drawn_around_their_centres(grid: LatLonGrid) -> None:
    background = MapBackground(grid, None)
    centres = (background.edges[:-1] + background.edges[1:]) / 2
    np.testing.assert_allclose((centres - grid.lon[background.column_order] + 180) % 360, 180, atol=1e-9)
    assert sorted(background.column_order) == list(range(len(grid.lon)))
    assert np.ptp(background.edges) == pytest.approx(360.0)
    assert abs(background.edges[0] + 180) <= 180 / len(grid.lon)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_cells_are_drawn_between_their_bounds(grid: LatLonGrid) -> None:
    """The drawn area of a cell equals its weight in the scores."""
    background, (field,) = MapBackground(grid, None), draw_fields(grid, 1)
    figure = create_figure(4, 2)
    mesh = draw_map(create_map_axes(figure, 1, 1)[0, 0], field, background, FIELD_COLORMAP, 250.0, 290.0)
    np.testing.assert_array_equal(mesh.get_array(), field[:, background.column_order])
    corners = mesh.get_coordinates()
    lon, lat = np.meshgrid(background.edges - background.edges[0] - 180.0, grid.lat_bounds)
    np.testing.assert_allclose(np.moveaxis(corners, -1, 0), equal_earth(lon, lat), atol=1e-12)
    diagonals = corners[1:, 1:] - corners[:-1, :-1], corners[1:, :-1] - corners[:-1, 1:]
    drawn_areas = np.abs(diagonals[0][..., 0] * diagonals[1][..., 1] - diagonals[0][..., 1] * diagonals[1][..., 0]) / 2
    cell_areas = 4 * np.pi * grid.area_weights()[:, background.column_order]
    # Within a row, meridians are drawn as straight lines, so areas differ slightly.
    np.testing.assert_allclose(drawn_areas, cell_areas, rtol=0.01)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_graticule_labels_are_at_their_degrees(grid: LatLonGrid) -> None:
    """Parallels are labelled at the left edge, meridians at the lower edge, and labels do not overlap."""
    background = MapBackground(grid, None)
    figure = create_figure(11 / 3, 2.05)
    axis = create_map_axes(figure, 1, 1)[0, 0]
    draw_map(axis, draw_fields(grid, 1)[0], background, FIELD_COLORMAP, 250.0, 290.0)
    texts = {text.get_text(): text for text in axis.texts}
    parallels = {"60°S": -60, "30°S": -30, "0°": 0, "30°N": 30, "60°N": 60}
    meridians = {"120°W": -120, "60°W": -60, "60°E": 60, "120°E": 120}
    assert len(axis.texts) == 10
    assert texts.keys() == parallels.keys() | meridians.keys()
    for text, lat in parallels.items():
        expected = equal_earth(np.array(-180.0), np.array(float(lat)))
        assert any(np.allclose(label.xy, expected) for label in axis.texts if label.get_text() == text), text
    for text, lon in meridians.items():
        np.testing.assert_allclose(texts[text].xy, background.project(np.array(float(lon)), np.array(-90.0)))
    FigureCanvasAgg(figure).draw()
    boxes = [label.get_window_extent() for label in axis.texts]
    assert not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[:n])
    assert all(figure.bbox.x0 <= box.x0 and figure.bbox.y0 <= box.y0 for box in boxes)


def test_truth_and_forecast_share_one_scale_and_each_error_has_its_own(tmp_path: Path) -> None:
    grid = GRIDS["from Greenwich"]
    land = np.zeros(grid.shape)
    land[3:6, 4:9] = 1.0
    background = MapBackground(grid, land)
    truth, forecast, spread, later = draw_fields(grid, 4)
    spread = np.abs(spread - 270)
    truth[0, 0] = np.nan
    fields_by_lead = {360: (truth, forecast, spread), 1440: (later, forecast, spread)}
    figures = []
    start = CALENDAR.parse("2001-03-01T00:00")
    save_figure(
        tmp_path / "map.png",
        lambda: figures.append(plot_maps("t2m", "K", fields_by_lead, start, CALENDAR, background)) or figures[0],
    )
    map_meshes = find_map_meshes(figures[0])
    for row, (true_field, mean, spread_field) in enumerate(fields_by_lead.values()):
        expected = true_field, mean, mean - true_field, spread_field
        for mesh, field in zip(map_meshes[4 * row : 4 * row + 4], expected, strict=True):
            np.testing.assert_array_equal(np.ma.filled(mesh.get_array(), np.nan), field[:, background.column_order])
    limits = [mesh.get_clim() for mesh in map_meshes]
    assert len({*limits[0:2], *limits[4:6]}) == 1
    for true_field, ((low, high), spread_limits) in zip((truth, later), (limits[2:4], limits[6:8]), strict=True):
        widest = np.nanpercentile(np.abs(forecast - true_field), 99.5)
        assert low == -high
        assert high == pytest.approx(widest)
        assert spread_limits == (0.0, high)
    titles = [axis.get_title() for axis in figures[0].axes if axis.get_title()]
    assert titles[0] == "Truth, 2001-03-01 06:00 UTC"
    assert titles[5] == "Ensemble mean at 24 h"
    assert titles[7].startswith("Spread, ")
    assert figures[0].get_suptitle().endswith("each error has its own scale")
    error = (forecast - later).astype(np.float64)
    rmse = np.sqrt((error**2 * grid.area_weights()).sum())
    assert titles[6] == f"Error, RMSE {rmse:.3g} K"
    assert (tmp_path / "map.png").stat().st_size > 20_000
    save_figure(tmp_path / "plot_map_and_histogram.png", plot_map_and_histogram, truth, truth, background, "K")


@pytest.mark.parametrize(("share", "has_own_scale"), [(0.5, False), (0.02, True)])
def test_a_spread_far_below_the_error_has_its_own_scale(share: float, has_own_scale: bool) -> None:
    """On the scale of the error, the map of the spread would be blank."""
    grid = GRIDS["from Greenwich"]
    truth, error = draw_fields(grid, 2)
    error = error - error.mean()
    spread = np.abs(share * error)
    start = CALENDAR.parse("2001-03-01T00:00")
    figure = plot_maps("t2m", "K", {360: (truth, truth + error, spread)}, start, CALENDAR, MapBackground(grid, None))
    map_meshes = find_map_meshes(figure)
    widest = np.percentile(np.abs(error), 99.5)
    assert map_meshes[2].get_clim() == pytest.approx((-widest, widest), rel=1e-4)
    assert map_meshes[3].get_clim() == pytest.approx((0.0, share * widest if has_own_scale else widest), rel=1e-4)
    bars = [axis.get_ylabel() for axis in figure.axes]
    assert "standard deviation (K)" + ("\nown scale: 0.02 of the error's" if has_own_scale else "") in bars


def find_coastline_points(background: MapBackground) -> np.ndarray:
    """Return the points of the drawn coastline in map coordinates, (N, 2)."""
    figure = create_figure(4, 2)
    axis = create_map_axes(figure, 1, 1)[0, 0]
    draw_map(axis, np.zeros(background.grid.shape), background, FIELD_COLORMAP, 0.0, 1.0)
    (contours,) = [collection for collection in axis.collections if isinstance(collection, ContourSet)]
    return np.concatenate([line for line in contours.allsegs[0] if len(line)])


def project_point(background: MapBackground, lon: float, lat: float) -> np.ndarray:
    return np.array(background.project(np.array(lon), np.array(lat)))


def test_the_coastline_runs_between_land_and_sea() -> None:
    grid = GRIDS["from Greenwich"]
    land = np.zeros(grid.shape)
    land[3:6, 4:9] = 1.0  # centres 37.5 to 7.5 north, 60 to 120 east; cells of 15 degrees
    background = MapBackground(grid, land)
    points = find_coastline_points(background)
    # The coastline is half way between the centres of land and sea cells.
    for lon, lat in ((52.5, 22.5), (127.5, 22.5), (90.0, 0.0), (90.0, 45.0)):
        assert np.linalg.norm(points - project_point(background, lon, lat), axis=1).min() < 0.01, (lon, lat)
    north, south = (project_point(background, 90.0, lat)[1] for lat in (45.0, 0.0))
    assert points[:, 1].max() == pytest.approx(north, abs=0.01)
    assert points[:, 1].min() == pytest.approx(south, abs=0.01)


def test_land_across_the_dateline_reaches_both_edges() -> None:
    grid = GRIDS["from Greenwich"]
    land = np.zeros(grid.shape)
    land[3:6, [11, 12, 13]] = 1.0  # 165, 180 and 195 east
    background = MapBackground(grid, land)
    points = find_coastline_points(background)
    for lon, lat in ((background.edges[0], 45.0), (background.edges[-1], 0.0), (-157.5, 22.5), (157.5, 22.5)):
        # A cell edge is 0.2 long. Between two centres, the coastline is straight on the map.
        assert np.linalg.norm(points - project_point(background, lon, lat), axis=1).min() < 0.05, (lon, lat)
    middle = np.abs(points[:, 0]) < project_point(background, 145.0, 52.5)[0]
    assert not middle.any()


def test_land_comes_from_the_mask_of_the_data_on_any_grid() -> None:
    variables = {
        "prognostic": {"vars_3D": [], "vars_2D": ["t2m"]},
        "static": {"vars_3D": [], "vars_2D": ["orography", "land_sea_mask"]},
    }
    grid = GRIDS["from Greenwich"]

    class LandMaskReader(AnalyticReader):
        def static(self) -> np.ndarray:
            fields_2HW = np.zeros((2, *grid.shape), dtype=np.float32)
            fields_2HW[0] = 7.0
            fields_2HW[1, 3:6, 4:9] = 1.0
            return fields_2HW

    reader = LandMaskReader(ChannelMap.build(variables, []), grid, CALENDAR, np.arange(2) * 360, lambda *_: np.zeros(1))
    assert MapBackground.build(reader).land is None  # No attribute identifies a land mask.
    reader.attributes["land_sea_mask"] = {"standard_name": "land_binary_mask"}
    np.testing.assert_array_equal(MapBackground.build(reader).land, reader.static()[1])
    coarse = make_grid(6, 12)
    land = MapBackground.build(reader, coarse).land
    area = coarse.area_weights(), grid.area_weights()
    assert land.shape == (6, 12)
    assert (land * area[0]).sum() == pytest.approx((reader.static()[1] * area[1]).sum(), rel=1e-5)
