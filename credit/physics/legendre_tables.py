"""Dense tables of the Legendre transform for networks, cached for each grid in a process.

The tables of `credit.physics.spherical_transform` are compact: order m has only the degrees m and above, and each order
needs a separate product. In the tables of this module, all orders have the same degrees, with zeros for degrees below
the order. One batched product then transforms all orders, which is faster for fields with many channels.

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

# Values below this limit are set to zero, because processors are slow with subnormal numbers. The zeros do not change a
# sum, because other values are of the order of 1.
_NEGLIGIBLE = 1e-20


class LegendreTables(NamedTuple):
    """Tables of the Legendre transform, for all orders m and degrees l from 0 to a largest degree.

    Attributes:
        analysis_mlH: for each order, the matrix that maps Fourier coefficients of the rows to coefficients of the
            degrees.
        synthesis_mHl: for each order, the matrix that maps coefficients of the degrees to Fourier coefficients of the
            rows.
    """

    analysis_mlH: Tensor
    synthesis_mHl: Tensor


def max_resolved_degree(grid: LatLonGrid) -> int:
    """Return the largest degree up to which a field on a grid has unique spherical-harmonic coefficients.

    A row on a pole has no information on orders above 0, so a grid with rows on the poles resolves one degree less. The
    largest order must be below half the number of columns.
    """
    num_rows, num_columns = grid.shape
    num_degrees = num_rows - 1 if grid.has_pole_points else num_rows
    return min(num_degrees - 1, (num_columns - 1) // 2)


def find_tables(grid: LatLonGrid, max_degree: int, x: Tensor) -> LegendreTables:
    """Return the Legendre tables of a grid on the device of `x`. Only the first call for a grid builds the tables.

    The tables are computed in float64. Each table has (max_degree + 1)^2 * H numbers.

    Args:
        grid: grid of the fields.
        max_degree: largest degree and order, at most `max_resolved_degree` of the grid.
        x: tensor on the device of the tables. Tables are float64 if `x` is float64, otherwise float32. If `x` has no
            values (meta device, fake tensors), the tables are also without values. In `torch.export`, the tables with
            values become constants of the program.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    # `torch.export` also traces with fake tensors, but it needs tables with values as constants of the program.
    if x.is_meta or (isinstance(x, FakeTensor) and not torch.compiler.is_exporting()):
        num_degrees = max_degree + 1
        num_rows = grid.shape[0]
        return LegendreTables(
            x.new_empty(num_degrees, num_degrees, num_rows, dtype=dtype),
            x.new_empty(num_degrees, num_rows, num_degrees, dtype=dtype),
        )
    return _build_cached_tables(GridKey(grid), max_degree, x.device, dtype)


@functools.lru_cache(maxsize=16)
def _build_cached_tables(key: GridKey, max_degree: int, device: torch.device, dtype: torch.dtype) -> LegendreTables:
    """Build the tables of the grid in `key`. The latest tables are cached, so that all blocks and models share them."""
    num_degrees = max_degree + 1
    sine = np.sin(np.deg2rad(key.grid.lat))
    # The arrays are created in their final dtype, because the tables of a fine grid take up gigabytes in float64.
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
