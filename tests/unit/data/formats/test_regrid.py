"""Tests of regridding against closed forms, brute-force overlap areas, and SciPy's interpolation."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from scipy.interpolate import RegularGridInterpolator
from scipy.special import sph_harm_y

from credit.data.formats.regrid import Regridder
from credit.grid import LatLonGrid

GRIDS = {
    "quarter": LatLonGrid.equiangular(721, 1440, poles=True),
    "one": LatLonGrid.equiangular(181, 360, poles=True),
    "coarse": LatLonGrid.equiangular(32, 64, poles=False),
    "odd": LatLonGrid.equiangular(45, 100, poles=False),
    "shifted": LatLonGrid.from_coords(np.linspace(-88, 88, 45), np.arange(50) * 7.2 - 179)[0],
    "gaussian": LatLonGrid.from_coords(
        np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(48)[0])), np.arange(96) * 3.75
    )[0],
}
PAIRS = [("quarter", "one"), ("gaussian", "odd"), ("gaussian", "one"), ("shifted", "coarse"), ("coarse", "quarter")]
parametrize_grid_pairs = pytest.mark.parametrize(("source", "target"), PAIRS)


def compute_harmonic(grid: LatLonGrid, degree: int, order: int) -> np.ndarray:
    """Return a real spherical harmonic at the cell centres."""
    colatitude = np.deg2rad(90.0 - grid.lat)[:, None]
    longitude = np.deg2rad(grid.lon)
    return sph_harm_y(degree, order, colatitude, longitude).real


def compute_area_mean(fields: np.ndarray, grid: LatLonGrid) -> float:
    return float((fields.astype(np.float64) * grid.area_weights()).sum())


@pytest.mark.parametrize("method", ["bilinear", "conservative", "nearest"])
@parametrize_grid_pairs
def test_constant_field_stays_constant(source: str, target: str, method: str) -> None:
    source = GRIDS[source]
    target = GRIDS[target]
    regridded = Regridder(source, target, method).apply(np.full((2, *source.shape), 287.3, np.float32))
    assert regridded.shape == (2, *target.shape)
    assert regridded.dtype == np.float32
    assert regridded.flags.c_contiguous
    np.testing.assert_allclose(regridded, 287.3, rtol=5e-7)


@parametrize_grid_pairs
def test_conservative_keeps_the_global_mean(source: str, target: str) -> None:
    source = GRIDS[source]
    target = GRIDS[target]
    noise = np.random.default_rng(3).normal(280.0, 20.0, source.shape).astype(np.float32)
    regridded = Regridder(source, target, "conservative").apply(noise)
    assert compute_area_mean(regridded, target) == pytest.approx(compute_area_mean(noise, source), rel=1e-6)


@pytest.mark.parametrize(("source", "target"), [("gaussian", "odd"), ("shifted", "coarse"), ("coarse", "odd")])
def test_conservative_equals_counted_areas(source: str, target: str) -> None:
    """The reference divides the sphere into small pieces of equal area, and finds their cells in both grids."""
    source = GRIDS[source]
    target = GRIDS[target]
    values = np.random.default_rng(0).normal(size=source.shape)

    def find_cells(grid: LatLonGrid, sines: np.ndarray, longitudes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = np.searchsorted(-np.sin(np.deg2rad(grid.lat_bounds)), -sines) - 1
        width = 360.0 / len(grid.lon)
        return rows, np.floor((longitudes - grid.lon[0]) / width + 0.5).astype(int) % len(grid.lon)

    pieces_h = 2_000_000
    pieces_w = 1_800_000
    sines = 1.0 - 2.0 * (np.arange(pieces_h) + 0.5) / pieces_h
    longitudes = 360.0 * (np.arange(pieces_w) + 0.5) / pieces_w
    from_rows, from_columns = find_cells(source, sines, longitudes)
    to_rows, to_columns = find_cells(target, sines, longitudes)
    # Numbers of pieces of each (target, source) pair, first of rows, then of columns.
    by_row = np.zeros((target.shape[0], source.shape[0]))
    np.add.at(by_row, (to_rows, from_rows), 1.0)
    by_column = np.zeros((target.shape[1], source.shape[1]))
    np.add.at(by_column, (to_columns, from_columns), 1.0)
    pieces = by_row.sum(axis=1)[:, None] * by_column.sum(axis=1)
    expected = by_row @ values @ by_column.T / pieces
    regridded = Regridder(source, target, "conservative").apply(values)
    # The smallest latitude band of a target has 1200 pieces, so shares are accurate to 1 in 1200.
    np.testing.assert_allclose(regridded, expected, atol=3e-3)


@parametrize_grid_pairs
def test_bilinear_is_exact_for_linear_fields(source: str, target: str) -> None:
    """A field linear in latitude is exact between the outer rows.

    A field linear in longitude is exact except between the last and the first column, where it jumps.
    """
    source = GRIDS[source]
    target = GRIDS[target]
    regridder = Regridder(source, target, "bilinear")
    inside = (target.lat <= source.lat[0]) & (target.lat >= source.lat[-1])
    regridded = regridder.apply(np.broadcast_to(source.lat[:, None], source.shape))
    np.testing.assert_allclose(
        regridded[inside], np.broadcast_to(target.lat[inside, None], regridded[inside].shape), atol=2e-5
    )
    between = (target.lon >= source.lon[0]) & (target.lon <= source.lon[-1])
    regridded = regridder.apply(np.broadcast_to(source.lon, source.shape))[inside][:, between]
    np.testing.assert_allclose(regridded, np.broadcast_to(target.lon[between], regridded.shape), atol=5e-5)


@parametrize_grid_pairs
def test_bilinear_equals_scipy(source: str, target: str) -> None:
    source = GRIDS[source]
    target = GRIDS[target]
    values = np.random.default_rng(1).normal(size=source.shape).astype(np.float32)
    periodic_values = np.concatenate([values[:, -1:], values, values[:, :1]], axis=1)
    longitudes = np.concatenate([[source.lon[-1] - 360], source.lon, [source.lon[0] + 360]])
    reference = RegularGridInterpolator((-source.lat, longitudes), periodic_values)
    inside = (target.lat <= source.lat[0]) & (target.lat >= source.lat[-1])
    points = np.stack(np.meshgrid(-target.lat[inside], target.lon, indexing="ij"), axis=-1)
    regridded = Regridder(source, target, "bilinear").apply(values)[inside]
    np.testing.assert_allclose(regridded, reference(points), atol=5e-6)


@pytest.mark.parametrize(("degree", "order"), [(1, 0), (3, 2), (6, 5)])
@parametrize_grid_pairs
def test_errors_of_harmonics_are_of_second_order(source: str, target: str, degree: int, order: int) -> None:
    """Errors are at most h^2/8 (interpolation) and h^2/24 (cell means) of second derivatives, which reach l (l + 1)."""
    source = GRIDS[source]
    target = GRIDS[target]
    field = compute_harmonic(source, degree, order)
    truth = compute_harmonic(target, degree, order)
    source_step = np.deg2rad(max(180.0 / source.shape[0], 360.0 / source.shape[1]))
    target_step = np.deg2rad(max(180.0 / target.shape[0], 360.0 / target.shape[1]))
    curvature = degree * (degree + 1) * np.abs(truth).max()
    regridded = Regridder(source, target, "bilinear").apply(field)
    # The error of each of the two directions is at most h^2/8.
    assert np.abs(regridded - truth).max() <= source_step**2 / 4 * curvature + 1e-6
    if target_step >= 2 * source_step:
        regridded = Regridder(source, target, "conservative").apply(field)
        inner = np.abs(target.lat) < 80
        bound = (source_step + target_step) ** 2 / 6 * curvature
        assert np.abs(regridded - truth)[inner].max() <= bound


def test_row_on_the_pole_is_the_mean_of_the_nearest_row() -> None:
    gaussian = GRIDS["gaussian"]
    one_degree = GRIDS["one"]
    values = np.random.default_rng(2).normal(size=gaussian.shape)
    regridded = Regridder(gaussian, one_degree, "bilinear").apply(values)
    np.testing.assert_allclose(
        regridded[[0, -1]], np.broadcast_to(values[[0, -1]].mean(1)[:, None], (2, 360)), atol=1e-6
    )
    # Source rows on the poles keep their values.
    values = np.random.default_rng(2).normal(size=one_degree.shape).astype(np.float32)
    regridded = Regridder(one_degree, LatLonGrid.equiangular(91, 360, poles=True), "bilinear").apply(values)
    np.testing.assert_array_equal(regridded, values[::2])


def test_wind_across_a_pole_keeps_its_direction() -> None:
    """A uniform wind (1, 2) in the pole's tangent plane has u = 2 cos(lambda) - sin(lambda) at longitude lambda."""
    gaussian = GRIDS["gaussian"]
    one_degree = GRIDS["one"]

    def eastward(grid: LatLonGrid) -> np.ndarray:
        angle = np.deg2rad(grid.lon)
        return np.broadcast_to(2.0 * np.cos(angle) - np.sin(angle), grid.shape)

    regridded = Regridder(gaussian, one_degree, "bilinear", vector=True).apply(eastward(gaussian))
    step = np.deg2rad(360 / gaussian.shape[1])
    np.testing.assert_allclose(regridded, eastward(one_degree), atol=np.sqrt(5) * step**2 / 8 + 1e-5)
    scalar = Regridder(gaussian, one_degree, "bilinear").apply(eastward(gaussian))
    assert np.abs(scalar[0]).max() < 1e-6 < 1.0 < np.abs(regridded[0]).max()


def test_nearest_returns_values_of_the_source() -> None:
    source = GRIDS["gaussian"]
    target = GRIDS["odd"]
    categories = np.random.default_rng(4).integers(0, 16, source.shape).astype(np.float32)
    regridded = Regridder(source, target, "nearest").apply(categories)
    for row, column in ((0, 0), (22, 99), (44, 50), (10, 3)):
        nearest_row = np.abs(source.lat - target.lat[row]).argmin()
        lon_distance = np.abs((source.lon - target.lon[column] + 180) % 360 - 180)
        assert regridded[row, column] == categories[nearest_row, lon_distance.argmin()]
    assert set(np.unique(regridded)) <= set(np.unique(categories))


@pytest.mark.parametrize("method", ["bilinear", "conservative", "nearest"])
def test_missing_values_have_no_weight(method: str) -> None:
    source = GRIDS["quarter"]
    target = GRIDS["coarse"]
    regridder = Regridder(source, target, method)
    values = np.full((2, *source.shape), 5.0, np.float32)
    values[1, 200:400, 300:700] = np.nan
    regridded = regridder.apply(values)
    np.testing.assert_allclose(regridded[0], 5.0, rtol=1e-6)
    np.testing.assert_allclose(regridded[1][np.isfinite(regridded[1])], 5.0, rtol=1e-6)
    # Rows 200 to 399 are latitudes 40 to -9.75, columns 300 to 699 longitudes 75 to 174.75.
    lat = target.lat[:, None]
    lon = target.lon
    inside = (lat < 40.125) & (lat > -9.875) & (lon > 74.875) & (lon < 174.875)
    assert np.mean(np.isnan(regridded[1]) != inside) < 0.01


@pytest.mark.parametrize(
    ("columns", "lost", "missing"),
    [(8, [2], False), (8, [1, 3], False), (8, [1, 2], True), (20, [3, 4], False), (20, [3, 5, 7], True)],
)
def test_cell_is_missing_if_less_than_half_has_values(columns: int, lost: list[int], missing: bool) -> None:
    """A target cell is missing if less than half of its area has values.

    Column 1 of the target, 45 to 135 degrees, consists of columns 1, 2 and 3 of 8 source columns, with shares of 1/4,
    1/2 and 1/4. It consists of five of 20 source columns, with shares of 1/5.
    """
    source = LatLonGrid.equiangular(4, columns, poles=False)
    target = LatLonGrid.equiangular(4, 4, poles=False)
    values = np.ones(source.shape, np.float32)
    values[:, lost] = np.nan
    regridded = Regridder(source, target, "conservative").apply(values)[:, 1]
    assert np.isnan(regridded).all() if missing else np.allclose(regridded, 1.0, rtol=1e-6)


def test_infinite_values_are_not_hidden() -> None:
    source = GRIDS["coarse"]
    target = GRIDS["odd"]
    values = np.ones(source.shape, np.float32)
    values[3, 3] = np.inf
    for method in ("bilinear", "conservative", "nearest"):
        assert not np.isfinite(Regridder(source, target, method).apply(values)).all()


def test_pickled_regridder_is_small_and_equal() -> None:
    source = GRIDS["gaussian"]
    target = GRIDS["odd"]
    values = np.random.default_rng(5).normal(size=source.shape)
    regridder = Regridder(source, target, "bilinear")
    unpickled = pickle.loads(pickle.dumps(regridder))
    np.testing.assert_array_equal(unpickled.apply(values), regridder.apply(values))
    assert len(pickle.dumps(Regridder(GRIDS["quarter"], GRIDS["one"], "conservative"))) < 200_000
