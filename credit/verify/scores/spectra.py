"""Power spectra by total wavenumber, from a spherical-harmonic analysis on a latitude-longitude grid.

The total wavenumber is the degree l of the spherical harmonics. The powers of a field at all wavenumbers add up to the
global mean of the squared field (Parseval's theorem). Spectra contain only wavenumbers that the grid resolves. For a
regridded field, its source grid must also resolve them.

Shapes: H x W cells, K total wavenumbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from credit.grid import LatLonGrid
from credit.physics.spherical_harmonics import build_analysis_matrices, max_wavenumber


class SphericalSpectrum:
    """Computation of the power of fields at each total wavenumber, by spherical-harmonic analysis on one grid.

    Args:
        grid: grid of the fields.
        source_grids: grids from which the fields were regridded. Wavenumbers that one of these grids does not resolve
            are left out.

    Attributes:
        wavenumbers: (K,) total wavenumbers 0, 1, ... that all grids resolve.
    """

    def __init__(self, grid: LatLonGrid, source_grids: Sequence[LatLonGrid] = ()) -> None:
        self._analysis = build_analysis_matrices(grid, max_wavenumber(grid))
        resolved_wavenumbers = [max_wavenumber(source) for source in (grid, *source_grids)]
        highest = min(resolved_wavenumbers)
        self.wavenumbers = np.arange(highest + 1)

    def power(self, fields: np.ndarray) -> np.ndarray:
        """Return the power of fields at each total wavenumber.

        Args:
            fields: (..., H, W) fields without missing values.

        Returns:
            (..., K) float64 power at each of `wavenumbers`, in the square of the units of the fields.
        """
        # A Fourier analysis along each row is followed by a Legendre analysis across rows for each zonal wavenumber m.
        waves = np.fft.rfft(np.asarray(fields, dtype=np.float64), axis=-1) / fields.shape[-1]
        power = np.zeros((*fields.shape[:-2], len(self._analysis)))
        for m, matrix in enumerate(self._analysis):
            # Each row of the matrix belongs to one harmonic of order m; the degrees are m, m + 1, ...
            coefficients = waves[..., m] @ matrix.T
            # A real field has the same power at wavenumber -m.
            multiplicity = 1.0 if m == 0 else 2.0
            power[..., m:] += multiplicity * np.abs(coefficients) ** 2
        return power[..., self.wavenumbers]
