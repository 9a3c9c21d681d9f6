"""Comparison of post-processes of divided fields with those of whole fields."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from credit.data.sources.levels.vertical_layers import VerticalLayers
from credit.forecast.postprocess.budgets import ColumnIntegrator, close_dry_mass, compute_global_mean_dry_mass
from credit.forecast.postprocess.hyperdiffusion import WaveFilter
from credit.grid import LatLonGrid
from credit.parallel.domain.division import divide_field
from credit.parallel.domain.domain import Domain


def compare_wave_filter(num_parts: tuple[int, int], poles: bool) -> dict[str, float]:
    """Collective: return the largest differences of hyperdiffusion, relative to the largest value.

    Args:
        num_parts: (M, N) numbers of parts of the rows and of the columns.
        poles: True for a grid with rows on the poles.
    """
    grid = LatLonGrid.equiangular(11 if poles else 10, 12, poles)
    is_vector = torch.tensor([True, False, False])
    is_unmasked = torch.tensor([True, True, False])

    def build(domain: Domain | None) -> Callable[[Tensor], Tensor]:
        return WaveFilter(grid, 360, 360, 2, is_vector, is_unmasked, domain)

    return _compare(build, grid.shape, num_parts)


def compare_dry_mass(num_parts: tuple[int, int]) -> dict[str, float]:
    """Collective: return the largest differences of the dry-mass budget, relative to the largest value."""
    grid = LatLonGrid.equiangular(10, 12, False)
    edges = np.array([[0.0, 30000.0], [30000.0, 60000.0], [60000.0, 0.0]])
    fractions = np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    layers = VerticalLayers((150.0, 450.0, 850.0), edges, fractions, cut_by_ground=False)

    def build(domain: Domain | None) -> Callable[[Tensor], Tensor]:
        columns = ColumnIntegrator(layers, grid, torch.device("cpu"), domain)

        def close(x_BCHW: Tensor) -> Tensor:
            pressure_BHW = 1e5 * (1 + 0.01 * x_BCHW[:, 0])
            water_BKHW = 0.01 * x_BCHW.square()
            target_B = compute_global_mean_dry_mass(columns, pressure_BHW, water_BKHW).detach() * 1.01
            return close_dry_mass(columns, target_B, pressure_BHW, water_BKHW)[:, None]

        return close

    return _compare(build, grid.shape, num_parts)


def _compare(
    build: Callable[[Domain | None], Callable[[Tensor], Tensor]], shape: tuple[int, int], num_parts: tuple[int, int]
) -> dict[str, float]:
    """Collective: return the largest relative differences of output and gradient between divided and whole fields.

    Args:
        build: function that builds the post-process of a domain, or of whole fields if the domain is None.
        shape: number of rows and columns of the grid.
        num_parts: (M, N) numbers of parts.
    """
    domain = Domain(dist.group.WORLD, divide_field(shape, num_parts))
    slices = (..., *domain.part.slices)
    generator = torch.Generator().manual_seed(1)
    x_BCHW = torch.randn(2, 3, *shape, generator=generator)
    whole_BCHW = x_BCHW.clone().requires_grad_()
    expected_BCHW = build(None)(whole_BCHW)
    cotangent_BCHW = torch.randn(expected_BCHW.shape, generator=generator, dtype=expected_BCHW.dtype)
    expected_BCHW.backward(cotangent_BCHW)
    part_BCHW = x_BCHW[slices].clone().requires_grad_()
    result_BCHW = build(domain)(part_BCHW)
    result_BCHW.backward(cotangent_BCHW[slices])
    errors = torch.stack(
        [
            (result_BCHW - expected_BCHW[slices]).abs().max() / expected_BCHW.abs().max(),
            (part_BCHW.grad - whole_BCHW.grad[slices]).abs().max() / whole_BCHW.grad.abs().max(),
        ]
    ).double()
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return dict(zip(("output", "gradient"), errors.tolist(), strict=True))
