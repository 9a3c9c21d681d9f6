"""Coordinates, orientation and cell areas."""

from __future__ import annotations

import numpy as np
import pytest

from credit.errors import DataError
from credit.grid import LatLonGrid

EQUIANGULAR = (np.arange(32) * 5.625 - 87.1875, np.arange(64) * 5.625)


def compute_gaussian_latitudes(rows: int) -> tuple[np.ndarray, np.ndarray]:
    sine, weights = np.polynomial.legendre.leggauss(rows)
    return np.rad2deg(np.arcsin(sine)), weights


@pytest.mark.parametrize("rows", ["up", "down"])
@pytest.mark.parametrize("start", [0.0, -180.0, 2.8125, -177.1875])
def test_fields_are_reordered_to_north_to_south_and_eastward(rows: str, start: float) -> None:
    """The values of the field encode latitude and longitude, so wrong positions are visible."""
    lat = EQUIANGULAR[0] if rows == "up" else EQUIANGULAR[0][::-1]
    lon = EQUIANGULAR[1] + start
    field = lat[:, None] * 1000 + np.mod(lon, 360.0)
    grid, orientation = LatLonGrid.from_coords(lat.astype(np.float32), lon.astype(np.float32))
    assert grid.shape == (32, 64) and grid.lat.dtype == np.float64
    assert (np.diff(grid.lat) < 0).all() and (np.diff(grid.lon) > 0).all()
    assert grid.lon[0] >= 0 and grid.lon[-1] < 360
    np.testing.assert_allclose(orientation.apply(field[None])[0], grid.lat[:, None] * 1000 + grid.lon, atol=1e-2)
    assert orientation.apply(field).flags.c_contiguous


def test_longitude_near_0_is_0() -> None:
    lon = np.arange(-180.0, 180.0, 0.25)
    lon[720] = -7.6e-6  # Rounding error of sums in float32.
    grid, _ = LatLonGrid.from_coords(np.linspace(90, -90, 721), lon)
    assert grid.lon[0] == 0.0 and grid.lon[1] == 0.25


def test_areas_with_pole_points() -> None:
    grid, _ = LatLonGrid.from_coords(np.linspace(-90, 90, 181), np.arange(360.0))
    area = grid.area_weights()
    assert grid.has_pole_points and area.shape == (181, 360)
    assert area.sum() == pytest.approx(1.0, rel=1e-12)
    cap = (1 - np.sin(np.deg2rad(89.5))) / 2 / 360
    assert area[0, 0] == pytest.approx(cap, rel=1e-9) and area[-1, 7] == pytest.approx(cap, rel=1e-9)
    middle = np.sin(np.deg2rad(0.5)) / 360
    assert area[90, 0] == pytest.approx(middle, rel=1e-9)


def test_areas_without_pole_points_are_proportional_to_the_cosine() -> None:
    grid, _ = LatLonGrid.from_coords(*EQUIANGULAR)
    band = grid.area_weights()[:, 0]
    cosine = np.cos(np.deg2rad(grid.lat))
    assert not grid.has_pole_points
    np.testing.assert_allclose(band / band.sum(), cosine / cosine.sum(), rtol=1e-9)


def test_areas_of_a_gaussian_grid_are_near_gausss_weights() -> None:
    lat, weights = compute_gaussian_latitudes(64)
    grid, _ = LatLonGrid.from_coords(lat, np.arange(128) * 360 / 128)
    ratio = grid.area_weights().sum(axis=1) / (weights / 2)
    np.testing.assert_allclose(ratio[1:-1], 1.0, rtol=2e-3)
    np.testing.assert_allclose(ratio[[0, -1]], 1.058, rtol=2e-3)  # Edges halfway between rows widen the polar cap.
    assert grid.area_weights().sum() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("rows", ["up", "down"])
def test_areas_from_latitude_bounds(rows: str) -> None:
    lat = np.array([-75.0, -30.0, 10.0, 60.0])
    edges = np.array([-90.0, -60.0, 0.0, 20.0, 90.0])
    bounds = np.stack([edges[:-1], edges[1:]], axis=1)
    if rows == "down":
        lat, bounds = lat[::-1], bounds[::-1, ::-1]
    grid, _ = LatLonGrid.from_coords(lat, np.arange(0.0, 360.0, 30.0), bounds)
    expected = -np.diff(np.sin(np.deg2rad(edges[::-1]))) / 2
    np.testing.assert_allclose(grid.area_weights().sum(axis=1), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("lat", "lon", "message"),
    [
        (np.linspace(20, 60, 30), EQUIANGULAR[1], "do not reach the poles; only global grids"),
        (EQUIANGULAR[0], np.linspace(0, 90, 64), "are not equally spaced around the globe"),
        (
            EQUIANGULAR[0],
            np.append(EQUIANGULAR[1], 360.0),
            r"columns 0 and 64, .* \(0 and 360 degrees\)",
        ),
        (EQUIANGULAR[0], EQUIANGULAR[1][:-1], "are not equally spaced"),
        (np.append(EQUIANGULAR[0], 87.1875), EQUIANGULAR[1], "latitudes repeat"),
        (EQUIANGULAR[0] * 1.2, EQUIANGULAR[1], "is outside -90..90"),
        (np.where(EQUIANGULAR[0] > 80, np.nan, EQUIANGULAR[0]), EQUIANGULAR[1], "finite values"),
        (np.zeros((2, 2)), EQUIANGULAR[1], "latitude must be a 1-D coordinate"),
    ],
)
def test_invalid_grids_are_refused(lat: np.ndarray, lon: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=f"data.nc: .*{message}"):
        LatLonGrid.from_coords(lat, lon, origin="data.nc")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-1], "have shape"),
        (lambda b: b + np.array([0.5, 0.0]), "leave gaps or do not enclose"),
        (lambda b: np.clip(b, -80, 90), "do not reach the poles|do not enclose"),
    ],
)
def test_invalid_bounds_are_refused(change, message: str) -> None:
    lat = np.array([-67.5, -22.5, 22.5, 67.5])
    bounds = np.stack([lat - 22.5, lat + 22.5], axis=1)
    with pytest.raises(DataError, match=message):
        LatLonGrid.from_coords(lat, np.arange(0.0, 360.0, 45.0), change(bounds), "data.nc")


def test_round_trip_and_difference() -> None:
    grid, _ = LatLonGrid.from_coords(*EQUIANGULAR)
    assert grid.describe_mismatch(LatLonGrid.from_dict(grid.to_dict())) is None
    assert grid.describe_mismatch(LatLonGrid.from_coords(EQUIANGULAR[0].astype(np.float32), EQUIANGULAR[1])[0]) is None
    shifted, _ = LatLonGrid.from_coords(EQUIANGULAR[0], EQUIANGULAR[1] + 1)
    assert grid.describe_mismatch(shifted) == "longitude 0 is 0 against 1"
    other_grid, _ = LatLonGrid.from_coords(np.linspace(90, -90, 33), EQUIANGULAR[1])
    assert grid.describe_mismatch(other_grid) == "32 x 64 cells against 33 x 64"
