"""Spherical harmonics on the rows of a latitude-longitude grid, and random fields that are sums of harmonics.

The harmonics are normalised so that the mean of their square over the sphere is 1. A harmonic has a degree l (total
wavenumber) and an order m (zonal wavenumber). `credit.physics.spherical_transform` transforms fields in torch.

Shape suffixes: H latitude rows, W longitude columns.
"""

from __future__ import annotations

import numpy as np

from credit.grid import LatLonGrid

EARTH_RADIUS_KM = 6371.0


def max_wavenumber(grid: LatLonGrid) -> int:
    """Return the largest total wavenumber that the 2/3 rule allows on a grid, for example 21 on 32 x 64 cells.

    A circle of n points resolves wavenumbers up to n / 2. The 2/3 rule allows wavenumbers up to 2/3 of this limit. With
    this rule, products of two waves are not aliased to an allowed wave (S. A. Orszag, J. Atmos. Sci. 28, 1074, 1971). A
    meridian circle of the grid has 2 H points, and a parallel has W points.
    """
    num_rows, num_columns = grid.shape
    return min(2 * num_rows, num_columns) // 3


def compute_legendre(max_degree: int, m: int, sine: np.ndarray) -> np.ndarray:
    """Compute the associated Legendre functions of order `m`.

    The functions are normalised so that the mean of their square over the sine of latitude, from -1 to 1, is 1. The
    recursion over the degree is numerically stable (Holmes and Featherstone 2002, doi:10.1007/s00190-002-0216-2,
    eq. 11).

    Args:
        max_degree: largest degree, at least `m`.
        m: order (zonal wavenumber).
        sine: (H,) sine of the latitude of each row.

    Returns:
        The functions of degrees m to `max_degree` at each row, (max_degree - m + 1, H) float64.
    """
    cosine = np.sqrt(np.maximum(1.0 - sine**2, 0.0))
    table = np.zeros((max_degree - m + 1, len(sine)))
    # Compute degree m by recursion from degree 0, along the diagonal on which degree and order are equal.
    table[0] = 1.0
    for k in range(1, m + 1):
        table[0] *= np.sqrt((2 * k + 1) / (2 * k)) * cosine
    # Degree m + 1 depends on one lower degree; each higher degree depends on two lower degrees.
    if max_degree > m:
        table[1] = np.sqrt(2 * m + 3) * sine * table[0]
    for degree in range(m + 2, max_degree + 1):
        factor_1 = np.sqrt((4.0 * degree**2 - 1.0) / (degree**2 - m**2))
        factor_2 = np.sqrt(((degree - 1.0) ** 2 - m**2) / (4.0 * (degree - 1.0) ** 2 - 1.0))
        table[degree - m] = factor_1 * (sine * table[degree - m - 1] - factor_2 * table[degree - m - 2])
    return table


def compute_quadrature_weights(grid: LatLonGrid) -> np.ndarray:
    """Return the quadrature weights of the rows for integrals over the sine of latitude, (H,) float64, with the sum 2.

    The weights integrate polynomials of the sine of latitude up to degree H - 1 exactly. They are equal to the
    Clenshaw-Curtis weights on an equiangular grid with poles, to the Fejer weights on an equiangular grid without
    poles, and to the Gauss weights on a Gaussian grid.
    """
    colatitude = np.deg2rad(90.0 - grid.lat)
    order = np.arange(len(colatitude))
    integrals = np.zeros(len(order))
    # Integrals of cos(k theta) sin(theta) over 0..pi, which are zero for odd k.
    integrals[::2] = 2.0 / (1.0 - order[::2].astype(np.float64) ** 2)
    # Row k of the matrix is cos(k theta) at each row of the grid: a polynomial of degree k of the sine of latitude.
    return np.linalg.solve(np.cos(order[:, None] * colatitude), integrals)


def build_analysis_matrices(grid: LatLonGrid, max_degree: int) -> list[np.ndarray]:
    """Return the matrices of the Legendre transform, one for each order m from 0 to `max_degree`.

    A matrix maps the Fourier coefficients of order m of all rows to the coefficients of the harmonics of order m. It is
    a least-squares fit with the quadrature weights. For sums of harmonics up to `max_degree`, the fit is exact on any
    rows; the quadrature without a fit would be exact only on Gaussian rows.

    Args:
        grid: grid of the fields.
        max_degree: largest degree, at most `credit.physics.legendre_tables.max_resolved_degree` of the grid.

    Returns:
        A float64 matrix (max_degree - m + 1, H) for each order m, with a row for each degree from m to `max_degree`.
    """
    sine = np.sin(np.deg2rad(grid.lat))
    # Very uneven rows can have negative weights, with which the fit may have no minimum.
    weights = np.maximum(compute_quadrature_weights(grid), 1e-12)
    matrices = []
    for m in range(max_degree + 1):
        functions = compute_legendre(max_degree, m, sine)
        weighted = functions * weights
        # Solve the normal equations of the weighted least-squares fit.
        matrices.append(np.linalg.solve(weighted @ functions.T, weighted))
    return matrices


def build_gaussian_grid(num_rows: int, num_columns: int) -> LatLonGrid:
    """Return a Gaussian grid: its rows are the nodes of Gauss-Legendre quadrature, and column 0 is at longitude 0.

    The quadrature on the rows integrates products of two harmonics up to degree `num_rows` - 1 exactly.

    Args:
        num_rows: number of rows.
        num_columns: number of columns.
    """
    sine, _ = np.polynomial.legendre.leggauss(num_rows)
    lon = np.arange(num_columns) * 360.0 / num_columns
    return LatLonGrid.from_coords(np.rad2deg(np.arcsin(sine)), lon, origin="Gaussian grid")[0]


def compute_gaussian_response(degree: np.ndarray, length_km: float) -> np.ndarray:
    """Return the factor by which a Gaussian filter multiplies each degree l: exp(-l (l + 1) length^2 / (2 R^2)).

    The filter is the solution of the heat equation on the sphere. If the length is small compared to the radius R of
    the Earth, the filter is a Gaussian exp(-d^2 / (2 length^2)) of the distance d.

    Args:
        degree: degrees l, any shape.
        length_km: standard deviation of the Gaussian in km.

    Returns:
        Factors between 0 and 1, with the shape of `degree`.
    """
    return np.exp(-degree * (degree + 1) * (length_km / EARTH_RADIUS_KM) ** 2 / 2)


class CorrelatedNoise:
    """Generator of random fields of variance 1 with the correlation exp(-d^2 / (2 length^2)) at the distance d.

    The power of each harmonic is proportional to the `compute_gaussian_response` of its degree.

    Args:
        grid: grid of the fields.
        length_km: correlation length in km. Wavenumbers above `max_wavenumber` of the grid are omitted.
    """

    def __init__(self, grid: LatLonGrid, length_km: float) -> None:
        degree = np.arange(max_wavenumber(grid) + 1)
        power = compute_gaussian_response(degree, length_km)
        # Drop harmonics with negligible power to save time. Power decreases with the degree, so the degrees 0 to
        # `max_degree` remain.
        power = power[power > 1e-8]
        self._num_columns = grid.shape[1]
        sine = np.sin(np.deg2rad(grid.lat))
        max_degree = len(power) - 1
        # A degree l has 2 l + 1 harmonics; the variances of all harmonics add up to 1.
        num_harmonics = 2 * np.arange(max_degree + 1) + 1
        amplitude = np.sqrt(power / (power * num_harmonics).sum())
        # Legendre functions of each order m, (degrees, H), multiplied by the amplitude of their degree.
        self._functions = []
        for m in range(max_degree + 1):
            self._functions.append(compute_legendre(max_degree, m, sine) * amplitude[m:, None])

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """Return independent random fields, (count, H, W) float32, dimensionless.

        Args:
            count: number of fields.
            generator: source of the random numbers; generators in the same state return the same fields.
        """
        # Fourier coefficients of each row. An inverse transform along the rows computes the fields.
        num_rows = self._functions[0].shape[1]
        waves = np.zeros((count, num_rows, self._num_columns // 2 + 1), dtype=np.complex128)
        for m, functions in enumerate(self._functions):
            real, imaginary = generator.standard_normal((2, count, len(functions)))
            # An order above 0 has two harmonics, sqrt(2) cos and sqrt(2) sin, and irfft doubles its coefficient.
            # For order 0, the imaginary part is sampled but not used.
            amplitudes = real
            if m > 0:
                amplitudes = (real - 1j * imaginary) / np.sqrt(2)
            waves[..., m] = amplitudes @ functions
        return np.fft.irfft(waves * self._num_columns, n=self._num_columns, axis=-1).astype(np.float32)
