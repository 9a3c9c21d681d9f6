"""Power spectra by total wavenumber, from a spherical-harmonic analysis on a latitude-longitude grid.

The powers of a field add up to the mean of its square (Parseval). Degrees above `max_wavenumber`, which the grid does
not resolve, are left out; so are those that the fields did not have on the grid that they came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from credit.grid import LatLonGrid
from credit.physics.spherical_harmonics import legendre, max_wavenumber


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

    def __init__(self, grid: LatLonGrid, origins: Sequence[LatLonGrid] = ()) -> None:
        """Analyse fields on `grid`; what is above the wavenumbers that all `origins` of fields resolve is left out."""
        highest = max_wavenumber(grid)
        self._analysis = _analysis_matrices(grid, highest)
        self.wavenumbers = np.arange(min(map(max_wavenumber, (grid, *origins))) + 1)

    def power(self, fields: np.ndarray) -> np.ndarray:
        """Return the power of `fields` (..., H, W) by total wavenumber, (..., K) float64, of `wavenumbers`."""
        waves = np.fft.rfft(np.asarray(fields, dtype=np.float64), axis=-1) / fields.shape[-1]
        power = np.zeros((*fields.shape[:-2], len(self._analysis)))
        for m, matrix in enumerate(self._analysis):
            coefficients = waves[..., m] @ matrix.T
            both_signs = 1.0 if m == 0 else 2.0
            power[..., m:] += both_signs * np.abs(coefficients) ** 2
        return power[..., self.wavenumbers]


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
