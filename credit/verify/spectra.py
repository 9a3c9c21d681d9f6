"""Power spectra by total wavenumber, from a spherical-harmonic analysis on a latitude-longitude grid.

Harmonics are normalised so that the mean of their square over the sphere is 1; hence the powers of a field add up to
the mean of its square (Parseval). Degrees above `max_wavenumber`, which the grid does not resolve, are left out.
"""

from __future__ import annotations

import numpy as np

from credit.grid import LatLonGrid


def max_wavenumber(grid: LatLonGrid) -> int:
    """Return the largest total wavenumber whose squares the grid still resolves: 21 on 32 x 64 (the 2/3 rule)."""
    rows, columns = grid.shape
    return min(2 * rows, columns) // 3


def latitude_quadrature(grid: LatLonGrid) -> np.ndarray:
    """Return (H,) weights that integrate polynomials of the sine of latitude up to degree H - 1 exactly; they sum to 2.

    They are the interpolatory weights of the grid's own rows, which are Clenshaw and Curtis's on an equiangular grid
    with poles, Fejer's on one without, and Gauss's on a Gaussian grid.
    """
    colatitude = np.deg2rad(90.0 - grid.lat)
    order = np.arange(len(colatitude))
    integrals = np.zeros(len(order))
    integrals[::2] = 2.0 / (1.0 - order[::2].astype(np.float64) ** 2)  # of cos(k theta) sin(theta) over 0..pi
    return np.linalg.solve(np.cos(order[:, None] * colatitude), integrals)


class SphericalSpectrum:
    """Power by total wavenumber on one grid.

    The coefficients of each zonal wavenumber are the quadrature-weighted least-squares fit, so that a field made of
    resolved harmonics is analysed exactly on any rows.
    """

    def __init__(self, grid: LatLonGrid) -> None:
        self.wavenumbers = np.arange(max_wavenumber(grid) + 1)
        self._analysis = _analysis_matrices(grid, int(self.wavenumbers[-1]))

    def power(self, fields: np.ndarray) -> np.ndarray:
        """Return the power of `fields` (..., H, W) by total wavenumber, (..., max_wavenumber + 1) float64."""
        waves = np.fft.rfft(np.asarray(fields, dtype=np.float64), axis=-1) / fields.shape[-1]
        power = np.zeros((*fields.shape[:-2], len(self.wavenumbers)))
        for m, matrix in enumerate(self._analysis):
            coefficients = waves[..., m] @ matrix.T
            both_signs = 1.0 if m == 0 else 2.0
            power[..., m:] += both_signs * np.abs(coefficients) ** 2
        return power


def legendre(max_degree: int, m: int, sine: np.ndarray) -> np.ndarray:
    """Return the associated Legendre functions of order `m`, degrees m..max_degree, (max_degree - m + 1, H) float64.

    Normalised so that half the integral of their square over -1..1 is 1. The recursion in the degree is the stable one
    (Holmes and Featherstone 2002, doi:10.1007/s00190-002-0216-2, eq. 11).
    """
    cosine = np.sqrt(np.maximum(1.0 - sine**2, 0.0))
    table = np.zeros((max_degree - m + 1, len(sine)))
    table[0] = 1.0
    for k in range(1, m + 1):
        table[0] *= np.sqrt((2 * k + 1) / (2 * k)) * cosine
    if max_degree > m:
        table[1] = np.sqrt(2 * m + 3) * sine * table[0]
    for degree in range(m + 2, max_degree + 1):
        upper = np.sqrt((4.0 * degree**2 - 1.0) / (degree**2 - m**2))
        lower = np.sqrt(((degree - 1.0) ** 2 - m**2) / (4.0 * (degree - 1.0) ** 2 - 1.0))
        table[degree - m] = upper * (sine * table[degree - m - 1] - lower * table[degree - m - 2])
    return table


def _analysis_matrices(grid: LatLonGrid, max_degree: int) -> list[np.ndarray]:
    """Return, for each zonal wavenumber m, the matrix (degrees, H) from values on rows to coefficients."""
    sine = np.sin(np.deg2rad(grid.lat))
    weights = np.maximum(latitude_quadrature(grid), 1e-12)  # very uneven rows can have negative ones
    matrices = []
    for m in range(max_degree + 1):
        functions = legendre(max_degree, m, sine)
        weighted = functions * weights
        matrices.append(np.linalg.solve(weighted @ functions.T, weighted))
    return matrices
