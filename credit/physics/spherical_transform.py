"""Spherical-harmonic transform of fields on a latitude-longitude grid, in torch.

A real field is the sum over degrees l and orders m of

    f = sum_l a_l0 P_l0(sin lat) + 2 Re sum_{m > 0} sum_{l >= m} a_lm P_lm(sin lat) exp(i m lon),

with the Legendre functions P_lm of `credit.physics.spherical_harmonics`. The mean of f^2 over the sphere is the sum of
abs(a_lm)^2, with a factor of 2 for orders above 0. A coefficient a_lm equals the coefficient of an orthonormal harmonic
divided by sqrt(4 pi). Longitude 0 is the first column of the grid.

Shape suffixes: H latitude rows, W longitude columns, N coefficients (pairs of degree and order), K fields, l degrees of
one order, m orders, 2 real and imaginary part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from credit.grid import LatLonGrid
from credit.physics.spherical_harmonics import build_analysis_matrices, compute_legendre, max_wavenumber

# Table values below this limit are set to zero. The zeros do not change a sum, because other values are of the order
# of 1.
_NEGLIGIBLE = 1e-20


class SphericalTransform(nn.Module):
    """Spherical-harmonic analysis and synthesis of fields; both are linear and differentiable.

    The analysis is exact, up to rounding, for fields with degrees of at most `max_degree`. For any other field it
    returns the coefficients of the nearest field with these degrees, by a weighted least-squares fit.

    Analysis and synthesis have one table each, with N x H numbers. In float32, a table takes up 5 MB for 181 x 360
    cells and 334 MB for 721 x 1440 cells. For 721 x 1440 cells, building the tables takes ten seconds and 2.3 GB of
    host memory. The tables are computed in float64. Checkpoints do not contain the tables.

    Args:
        grid: grid of the fields.
        can_synthesise: True to also build the table for `synthesise`.
        dtype: float32 or float64, the dtype of the tables. Fields are converted to this dtype, also under autocast, and
            matrix products do not use TF32.

    Attributes:
        max_degree: largest degree, `max_wavenumber` of the grid.
        degree_N: (N,) degree l of each coefficient, int64. Coefficients are sorted by order: first order 0 with the
            degrees 0 to `max_degree`, then order 1 with the degrees 1 to `max_degree`, and so on.
        multiplicity_N: (N,) weight of each coefficient in a sum over positive and negative orders: 1 for order 0 and 2
            for other orders, because the coefficient of order -m of a real field is the complex conjugate.
    """

    def __init__(self, grid: LatLonGrid, can_synthesise: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.max_degree = max_wavenumber(grid)
        self._grid_shape = grid.shape
        # Order m has the degrees m to `max_degree`.
        orders = range(self.max_degree + 1)
        self._num_degrees = [self.max_degree + 1 - m for m in orders]
        degrees = [np.arange(m, self.max_degree + 1) for m in orders]
        # The coefficients of order 0 come first.
        multiplicity_N = np.full(sum(self._num_degrees), 2.0)
        multiplicity_N[: self.max_degree + 1] = 1.0
        analysis_NH = np.concatenate(build_analysis_matrices(grid, self.max_degree))
        self._register_table("_analysis_NH", analysis_NH, dtype)
        # Free the float64 table before building the next table, which has the same size.
        del analysis_NH
        if can_synthesise:
            sine = np.sin(np.deg2rad(grid.lat))
            functions = [compute_legendre(self.max_degree, m, sine) for m in orders]
            self._register_table("_functions_NH", np.concatenate(functions), dtype)
        self._register_table("multiplicity_N", multiplicity_N, dtype)
        self._register_table("degree_N", np.concatenate(degrees), torch.int64)

    def _register_table(self, name: str, values: np.ndarray, dtype: torch.dtype) -> None:
        """Store a table in a non-persistent buffer, which moves with the module to a device.

        Args:
            name: name of the buffer.
            values: the table; the method sets negligible values to 0 in place.
            dtype: dtype of the buffer.
        """
        # Functions of high order are very small near the poles, and processors are slow with subnormal numbers.
        values[np.abs(values) < _NEGLIGIBLE] = 0
        self.register_buffer(name, torch.from_numpy(values).to(dtype), persistent=False)

    def analyse(self, field_HW: Tensor) -> Tensor:
        """Return the spherical-harmonic coefficients of real fields.

        Args:
            field_HW: (..., H, W) of any real dtype.

        Returns:
            Complex coefficients (..., N) in the units of the fields.
        """
        num_columns = self._grid_shape[1]
        leading_shape = field_HW.shape[:-2]
        with _full_precision(field_HW.device):
            field_KHW = field_HW.to(self._analysis_NH.dtype).reshape(-1, *self._grid_shape)
            # Fourier coefficients of each row; orders above `max_degree` are dropped.
            waves_KHm = torch.fft.rfft(field_KHW)[..., : self.max_degree + 1] / num_columns
            # Real and imaginary parts of all fields are the rows of one matrix for each order, (2 K, H).
            waves_m2KH = torch.view_as_real(waves_KHm).permute(2, 3, 0, 1).flatten(1, 2)
            coefficients = []
            for waves_2KH, table_lH in zip(waves_m2KH.unbind(), self._split_table("_analysis_NH"), strict=True):
                coefficients.append(waves_2KH @ table_lH.T)
            coefficient_2KN = torch.cat(coefficients, dim=1).unflatten(0, (2, -1))
            coefficient_KN = torch.complex(*coefficient_2KN.unbind())
        return coefficient_KN.reshape(*leading_shape, -1)

    def synthesise(self, coefficient_N: Tensor) -> Tensor:
        """Return the real fields that have the given coefficients; the inverse of `analyse`.

        Args:
            coefficient_N: (..., N) complex coefficients.

        Returns:
            Fields (..., H, W) in the units of the coefficients.
        """
        num_columns = self._grid_shape[1]
        leading_shape = coefficient_N.shape[:-1]
        with _full_precision(coefficient_N.device):
            coefficient_KN = coefficient_N.reshape(-1, coefficient_N.shape[-1])
            coefficient_2KN = torch.cat([coefficient_KN.real, coefficient_KN.imag])
            waves = []
            orders = coefficient_2KN.split(self._num_degrees, dim=1)
            for coefficient_2Kl, table_lH in zip(orders, self._split_table("_functions_NH"), strict=True):
                waves.append(coefficient_2Kl @ table_lH)
            waves_2KHm = torch.stack(waves, dim=-1).unflatten(0, (2, -1))
            waves_KHm = torch.complex(*waves_2KHm.unbind())
            # The inverse transform adds the conjugate of each order above 0, and divides by W.
            field_KHW = torch.fft.irfft(waves_KHm * num_columns, n=num_columns)
        return field_KHW.reshape(*leading_shape, *self._grid_shape)

    def sum_by_degree(self, values_N: Tensor) -> Tensor:
        """Sum the values of each degree over its orders, weighted by `multiplicity_N` (2 for orders above 0).

        Args:
            values_N: (..., N) real values, one for each coefficient, such as abs(a)^2.

        Returns:
            Sums (..., max_degree + 1), one for each degree.
        """
        counted_N = values_N * self.multiplicity_N
        orders = counted_N.split(self._num_degrees, dim=-1)
        # Order m has no degrees below m, so it is padded with m zeros before the orders are added up. `index_add` is
        # not used, because its order of operations varies from call to call on a GPU.
        padded_orders = torch.stack([functional.pad(order_values, (m, 0)) for m, order_values in enumerate(orders)])
        return padded_orders.sum(0)

    def _split_table(self, name: str) -> tuple[Tensor, ...]:
        """Split the table in the buffer `name` into one part for each order m, (max_degree + 1 - m, H)."""
        return getattr(self, name).split(self._num_degrees)


@contextlib.contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Context in which matrix products on a device use neither autocast nor TF32.

    With autocast or TF32, the rounding errors of the longest waves would exceed the amplitude of the shortest waves.
    """
    no_autocast: contextlib.AbstractContextManager = contextlib.nullcontext()
    # The meta device, on which `credit check` runs a training step, has no autocast.
    if device.type != "meta":
        no_autocast = torch.autocast(device.type, enabled=False)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with no_autocast:
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
