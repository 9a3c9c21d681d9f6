"""Tests of spherical-harmonic power, against analytic harmonics, Parseval's theorem and SciPy."""

from __future__ import annotations

import numpy as np
import pytest

from credit.grid import LatLonGrid
from credit.physics.spherical_harmonics import compute_legendre, compute_quadrature_weights, max_wavenumber
from credit.verify.scores.spectra import SphericalSpectrum
from tests.unit.analytic_reader import make_grid


def _make_gaussian_grid(rows: int) -> LatLonGrid:
    sine, _ = np.polynomial.legendre.leggauss(rows)
    return LatLonGrid.from_coords(np.rad2deg(np.arcsin(sine)), np.arange(2 * rows) * 180.0 / rows)[0]


GRIDS = {
    "32 x 64": make_grid(32, 64),
    "61 x 120 with poles": make_grid(61, 120, poles=True),
    "181 x 360 with poles": make_grid(181, 360, poles=True),
    "Gaussian 48 x 96": _make_gaussian_grid(48),
}


def _build_harmonic(grid: LatLonGrid, degree: int, order: int, phase: float = 0.3) -> np.ndarray:
    """Return a real harmonic with a mean square of 1."""
    table = compute_legendre(degree, order, np.sin(np.deg2rad(grid.lat)))[-1]
    wave = np.cos(order * np.deg2rad(grid.lon) + phase) * np.sqrt(2.0) if order else np.ones(len(grid.lon))
    return table[:, None] * wave


def test_the_highest_wavenumber_is_resolved() -> None:
    assert max_wavenumber(GRIDS["32 x 64"]) == 21
    assert max_wavenumber(GRIDS["181 x 360 with poles"]) == 120


def test_wavenumbers_that_the_source_grid_does_not_resolve_are_omitted() -> None:
    """Cells of a coarse grid become steps on a fine one, which add power at wavenumbers that the field lacks."""
    coarse = make_grid(32, 64)
    fine = make_grid(96, 192)
    steps = np.kron(_build_harmonic(coarse, 15, 6), np.ones((3, 3)))
    full_spectrum, cut_spectrum = (
        SphericalSpectrum(fine),
        SphericalSpectrum(fine, [coarse, make_grid(181, 360, poles=True)]),
    )
    assert full_spectrum.wavenumbers[-1] == 64
    assert cut_spectrum.wavenumbers.tolist() == list(range(22))
    assert full_spectrum.power(steps)[22:].sum() > 0.05, "else this shows nothing"
    np.testing.assert_array_equal(cut_spectrum.power(steps), full_spectrum.power(steps)[:22])


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_the_quadrature_is_exact_on_the_grids_own_rows(grid: LatLonGrid) -> None:
    sine = np.sin(np.deg2rad(grid.lat))
    weights = compute_quadrature_weights(grid)
    assert weights.min() > 0
    for degree in range(0, len(sine), 2):
        assert weights @ sine**degree == pytest.approx(2.0 / (degree + 1), rel=1e-9)
        assert abs(weights @ sine ** (degree + 1)) < 1e-12


def test_quadrature_of_a_gaussian_grid_has_gauss_legendre_weights() -> None:
    np.testing.assert_allclose(
        compute_quadrature_weights(GRIDS["Gaussian 48 x 96"]), np.polynomial.legendre.leggauss(48)[1]
    )


def test_legendre_functions_agree_with_scipy() -> None:
    special = pytest.importorskip("scipy.special")
    sine = np.linspace(-0.999, 0.999, 41)
    for order in (0, 1, 7, 40):
        legendre = compute_legendre(60, order, sine)
        for degree in (order, order + 1, 60):
            expected = special.sph_harm_y(degree, order, np.arccos(sine), 0.0).real * np.sqrt(4 * np.pi) * (-1) ** order
            np.testing.assert_allclose(legendre[degree - order], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_a_harmonic_has_its_power_at_its_wavenumber(grid: LatLonGrid) -> None:
    spectrum = SphericalSpectrum(grid)
    highest = int(spectrum.wavenumbers[-1])
    for degree, order in ((0, 0), (1, 1), (5, 0), (6, 3), (highest, 0), (highest, highest // 2), (highest, highest)):
        power = spectrum.power(3.0 * _build_harmonic(grid, degree, order))
        expected = np.where(spectrum.wavenumbers == degree, 9.0, 0.0)
        np.testing.assert_allclose(power, expected, atol=1e-9)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_powers_add_up_to_the_mean_square(grid: LatLonGrid) -> None:
    """By Parseval's theorem, the mean square is the sum of the squared amplitudes."""
    spectrum = SphericalSpectrum(grid)
    rng = np.random.default_rng(2)
    pairs = [(degree, order) for degree in spectrum.wavenumbers[::3] for order in range(0, degree + 1, 2)]
    amplitudes = {pair: rng.standard_normal() for pair in pairs}
    field = sum(a * _build_harmonic(grid, *pair, phase=pair[0]) for pair, a in amplitudes.items())
    assert spectrum.power(field).sum() == pytest.approx(sum(a**2 for a in amplitudes.values()), rel=1e-9)
    assert spectrum.power(np.stack([field, 2 * field]))[1] == pytest.approx(4 * spectrum.power(field))
