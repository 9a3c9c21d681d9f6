"""Power spectra by total wavenumber, from a spherical-harmonic analysis on a latitude-longitude grid.

The powers of a field add up to the mean of its square (Parseval). Degrees above `max_wavenumber`, which the grid does
not resolve, are left out; so are those that the source grid of a regridded field does not resolve.

Shapes: H x W cells, K total wavenumbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from credit.grid import LatLonGrid
from credit.physics.spherical_harmonics import compute_legendre, max_wavenumber


def latitude_quadrature(grid: LatLonGrid) -> np.ndarray:
    """Return (H,) weights that integrate polynomials of the sine of latitude up to degree H - 1 exactly; they sum to 2.

    They are the interpolatory weights of the grid's own rows, which are Clenshaw and Curtis's on an equiangular grid
    with poles, Fejer's on one without, and Gauss's on a Gaussian grid.
    """
    colatitude = np.deg2rad(90.0 - grid.lat)
    order = np.arange(len(colatitude))
    integrals = np.zeros(len(order))
    # Integrals of cos(k theta) sin(theta) over 0..pi; those of odd k are zero.
    integrals[::2] = 2.0 / (1.0 - order[::2].astype(np.float64) ** 2)
    return np.linalg.solve(np.cos(order[:, None] * colatitude), integrals)


class SphericalSpectrum:
    """Analysis of the power of fields on one grid by total wavenumber.

    The coefficients of each zonal wavenumber are the quadrature-weighted least-squares fit, so that a field made of
    resolved harmonics is analysed exactly on any rows.

    Args:
        grid: grid of the fields.
        source_grids: grids that the fields were regridded from; wavenumbers that one of them does not resolve are left
            out.

    Attributes:
        wavenumbers: (K,) total wavenumbers 0, 1, ... that all grids resolve.
    """

    def __init__(self, grid: LatLonGrid, source_grids: Sequence[LatLonGrid] = ()) -> None:
        self._analysis = _analysis_matrices(grid, max_wavenumber(grid))
        highest = min(max_wavenumber(source) for source in (grid, *source_grids))
        self.wavenumbers = np.arange(highest + 1)

    def power(self, fields: np.ndarray) -> np.ndarray:
        """Return the power of fields by total wavenumber.

        Args:
            fields: (..., H, W).

        Returns:
            (..., K) float64 of `wavenumbers`, in the square of the units of the fields.
        """
        # Fourier analysis along each row, then Legendre analysis across the rows for each zonal wavenumber m.
        waves = np.fft.rfft(np.asarray(fields, dtype=np.float64), axis=-1) / fields.shape[-1]
        power = np.zeros((*fields.shape[:-2], len(self._analysis)))
        for m, matrix in enumerate(self._analysis):
            coefficients = waves[..., m] @ matrix.T
            # A real field has the same power at wavenumber -m.
            multiplicity = 1.0 if m == 0 else 2.0
            power[..., m:] += multiplicity * np.abs(coefficients) ** 2
        return power[..., self.wavenumbers]


def _analysis_matrices(grid: LatLonGrid, max_degree: int) -> list[np.ndarray]:
    """Return, for each zonal wavenumber m, the matrix (degrees, H) from values on rows to coefficients."""
    sine = np.sin(np.deg2rad(grid.lat))
    # Very uneven rows can have negative weights.
    weights = np.maximum(latitude_quadrature(grid), 1e-12)
    matrices = []
    for m in range(max_degree + 1):
        functions = compute_legendre(max_degree, m, sine)
        weighted = functions * weights
        matrices.append(np.linalg.solve(weighted @ functions.T, weighted))
    return matrices
