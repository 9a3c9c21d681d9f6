"""Dense tables of the Legendre transform for networks, cached for each grid in a process.

`credit.physics.spherical_transform` stores only degrees from the order upwards, which is compact, and multiplies order
by order. Here all orders have the same number of degrees, with zeros for degrees below the order. One batched product
then transforms all orders, which is faster for fields with many channels.

Shape suffixes: H latitude rows, m orders, l degrees.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from credit.grid import GridKey, LatLonGrid
from credit.physics.spherical_harmonics import build_analysis_matrices, compute_legendre

# Smaller values are set to zero. They do not change a sum, because other values are of the order of 1, and processors
# are slow with subnormal numbers.
_NEGLIGIBLE = 1e-20


class LegendreTables(NamedTuple):
    """Tables for all orders m and degrees l from 0 to a largest degree.

    Attributes:
        analysis_mlH: matrix of each order from Fourier coefficients of the rows to coefficients of the degrees.
        synthesis_mHl: matrix of each order from coefficients of the degrees to Fourier coefficients of the rows.
    """

    analysis_mlH: Tensor
    synthesis_mHl: Tensor


def max_resolved_degree(grid: LatLonGrid) -> int:
    """Return the largest degree for which the coefficients of a field on a grid are unique.

    A row on a pole has no information on orders above 0, so a grid with such rows resolves one degree less. The largest
    order must be below half the number of columns.
    """
    num_rows, num_columns = grid.shape
    num_degrees = num_rows - 1 if grid.has_pole_points else num_rows
    return min(num_degrees - 1, (num_columns - 1) // 2)


def find_tables(grid: LatLonGrid, max_degree: int, x: Tensor) -> LegendreTables:
    """Return the tables of a grid on the device of a tensor; the first call builds them, later calls reuse them.

    The tables are computed in float64. Each has (max_degree + 1)^2 * H numbers.

    Args:
        grid: grid of the fields.
        max_degree: largest degree and order, at most `max_resolved_degree` of the grid.
        x: tensor on the device of the tables. Tables are float64 if `x` is float64, otherwise float32. If `x` has no
            values (meta device, fake tensors), the tables are empty and not built. In `torch.export`, the real tables
            become constants of the program.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    # `torch.export` also traces with fake tensors, but needs the real tables as constants of the program.
    if x.is_meta or (isinstance(x, FakeTensor) and not torch.compiler.is_exporting()):
        num_degrees = max_degree + 1
        num_rows = grid.shape[0]
        return LegendreTables(
            x.new_empty(num_degrees, num_degrees, num_rows, dtype=dtype),
            x.new_empty(num_degrees, num_rows, num_degrees, dtype=dtype),
        )
    return _load_tables(GridKey(grid), max_degree, x.device, dtype)


@functools.lru_cache(maxsize=16)
def _load_tables(key: GridKey, max_degree: int, device: torch.device, dtype: torch.dtype) -> LegendreTables:
    """Build the tables of the grid in `key`; the last few are cached, so that all blocks and models share them."""
    num_degrees = max_degree + 1
    sine = np.sin(np.deg2rad(key.grid.lat))
    # The arrays have their final type from the start, because the tables of a fine grid take gigabytes in float64.
    numpy_dtype = np.float64 if dtype == torch.float64 else np.float32
    analysis_mlH = np.zeros((num_degrees, num_degrees, len(sine)), numpy_dtype)
    synthesis_mHl = np.zeros((num_degrees, len(sine), num_degrees), numpy_dtype)
    for m, analysis_lH in enumerate(build_analysis_matrices(key.grid, max_degree)):
        functions_lH = compute_legendre(max_degree, m, sine)
        # Order m has the degrees m to `max_degree`.
        analysis_mlH[m, m:] = np.where(np.abs(analysis_lH) < _NEGLIGIBLE, 0, analysis_lH)
        synthesis_mHl[m, :, m:] = np.where(np.abs(functions_lH) < _NEGLIGIBLE, 0, functions_lH).T
    # A tensor that is created in inference mode could not be used in a later backward pass.
    with torch.inference_mode(False):
        return LegendreTables(
            torch.from_numpy(analysis_mlH).to(device),
            torch.from_numpy(synthesis_mHl).to(device),
        )
