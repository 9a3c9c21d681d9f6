"""Tests of random fields on the sphere: variance and correlation, near the poles as well."""

from __future__ import annotations

import numpy as np
import pytest

from credit.grid import LatLonGrid
from credit.physics.spherical_harmonics import EARTH_RADIUS_KM, CorrelatedNoise
from tests.unit.analytic_reader import make_grid


@pytest.fixture(scope="module")
def grid() -> LatLonGrid:
    return make_grid(48, 96)


def test_variance_is_one_everywhere(grid: LatLonGrid) -> None:
    fields = CorrelatedNoise(grid, 1500.0).draw(4000, np.random.default_rng(1))
    assert fields.dtype == np.float32
    # The standard error of a variance of 4000 draws is 0.022.
    np.testing.assert_allclose(fields.var(axis=0), 1.0, atol=5 * 0.022)


@pytest.mark.parametrize("row", [1, 24])
def test_correlation_depends_on_the_distance(grid: LatLonGrid, row: int) -> None:
    """The reference is exp(-d^2 / 2 L^2) of great-circle distances d along a row near the pole or near the equator."""
    length = 1000.0
    fields = CorrelatedNoise(grid, length).draw(6000, np.random.default_rng(2))
    lat = np.deg2rad(grid.lat)
    lon = np.deg2rad(grid.lon)
    angle = np.arccos(np.clip(np.sin(lat[row]) ** 2 + np.cos(lat[row]) ** 2 * np.cos(lon - lon[0]), -1.0, 1.0))
    expected = np.exp(-0.5 * (EARTH_RADIUS_KM * angle / length) ** 2)
    correlation = (fields[:, row] * fields[:, row, :1]).mean(axis=0)
    np.testing.assert_allclose(correlation, expected, atol=5 / np.sqrt(6000) + 0.01)


def test_the_same_seed_gives_the_same_fields(grid: LatLonGrid) -> None:
    noise = CorrelatedNoise(grid, 500.0)
    first, repeated, other = (noise.draw(2, np.random.default_rng(seed)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, repeated)
    assert np.abs(first - other).max() > 0.1
