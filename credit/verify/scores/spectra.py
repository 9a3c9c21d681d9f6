"""Power spectra by total wavenumber, from a spherical-harmonic analysis on a latitude-longitude grid.

The total wavenumber is the degree l of the spherical harmonics. The powers of a field at all wavenumbers add up to the
global mean of its square (Parseval's theorem). Wavenumbers that the grid does not resolve are left out, and so are
those that the source grid of a regridded field does not resolve.

Shapes: H x W cells, K total wavenumbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from credit.grid import LatLonGrid
from credit.physics.spherical_harmonics import build_analysis_matrices, max_wavenumber


class SphericalSpectrum:
    """Spherical-harmonic analysis that computes the power of fields on one grid by total wavenumber.

    Args:
        grid: grid of the fields.
        source_grids: grids from which the fields were regridded; wavenumbers that one of them does not resolve are left
            out.

    Attributes:
        wavenumbers: (K,) total wavenumbers 0, 1, ... that all grids resolve.
    """

    def __init__(self, grid: LatLonGrid, source_grids: Sequence[LatLonGrid] = ()) -> None:
        self._analysis = build_analysis_matrices(grid, max_wavenumber(grid))
        resolved_wavenumbers = [max_wavenumber(source) for source in (grid, *source_grids)]
        highest = min(resolved_wavenumbers)
        self.wavenumbers = np.arange(highest + 1)

    def power(self, fields: np.ndarray) -> np.ndarray:
        """Return the power of fields by total wavenumber.

        Args:
            fields: (..., H, W) fields without missing values.

        Returns:
            (..., K) float64 power at each of `wavenumbers`, in the square of the units of the fields.
        """
        # Fourier analysis along each row, then Legendre analysis across the rows for each zonal wavenumber m.
        waves = np.fft.rfft(np.asarray(fields, dtype=np.float64), axis=-1) / fields.shape[-1]
        power = np.zeros((*fields.shape[:-2], len(self._analysis)))
        for m, matrix in enumerate(self._analysis):
            # The harmonics of order m have the degrees m and above, one in each row of the matrix.
            coefficients = waves[..., m] @ matrix.T
            # A real field has the same power at wavenumber -m.
            multiplicity = 1.0 if m == 0 else 2.0
            power[..., m:] += multiplicity * np.abs(coefficients) ** 2
        return power[..., self.wavenumbers]
