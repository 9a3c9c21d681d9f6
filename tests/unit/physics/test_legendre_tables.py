"""Tests of the tables of the Legendre transform: inversion, the largest degree of a grid, and caching."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from credit.grid import LatLonGrid
from credit.physics import legendre_tables
from credit.physics.legendre_tables import find_tables, max_resolved_degree
from credit.physics.spherical_harmonics import build_gaussian_grid
from tests.unit.analytic_reader import make_grid

DOUBLE = torch.zeros(1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("grid", "limit"),
    [
        (make_grid(12, 24), 11),
        (make_grid(13, 24, poles=True), 11),
        (make_grid(12, 16), 7),
        (make_grid(12, 17), 8),
        (build_gaussian_grid(10, 20), 9),
    ],
)
def test_analysis_inverts_synthesis_up_to_the_largest_degree(grid: LatLonGrid, limit: int) -> None:
    assert max_resolved_degree(grid) == limit
    tables = find_tables(grid, limit, DOUBLE)
    product_mll = tables.analysis_mlH @ tables.synthesis_mHl
    # Degrees below the order are left out of both tables.
    is_valid_degree = torch.arange(limit + 1) >= torch.arange(limit + 1)[:, None]
    torch.testing.assert_close(product_mll, torch.diag_embed(is_valid_degree.double()), rtol=0, atol=1e-10)


def test_rows_on_the_poles_resolve_one_degree_less() -> None:
    grid = make_grid(13, 26, poles=True)
    assert max_resolved_degree(grid) == 11
    # With one degree more, the least-squares system is singular: rounding decides if the solver notices it.
    try:
        tables = find_tables(grid, 12, DOUBLE)
    except np.linalg.LinAlgError:
        return
    product_mll = tables.analysis_mlH @ tables.synthesis_mHl
    assert (product_mll[1, 1:, 1:] - torch.eye(12).double()).abs().max() > 0.1


def test_gaussian_rows_are_those_of_the_quadrature() -> None:
    grid = build_gaussian_grid(6, 12)
    nodes, _ = np.polynomial.legendre.leggauss(6)
    np.testing.assert_allclose(np.sin(np.deg2rad(grid.lat)), nodes[::-1], atol=1e-14)
    assert grid.shape == (6, 12)


def test_a_process_builds_tables_once(monkeypatch: pytest.MonkeyPatch) -> None:
    legendre_tables._build_cached_tables.cache_clear()
    builds = []
    build = legendre_tables.build_analysis_matrices
    monkeypatch.setattr(legendre_tables, "build_analysis_matrices", lambda *args: builds.append(args) or build(*args))
    with torch.inference_mode():
        first = find_tables(make_grid(8, 16), 5, torch.zeros(1))
    second = find_tables(make_grid(8, 16), 5, torch.zeros(1, dtype=torch.bfloat16))
    # Equal grids share tables, and dtypes with fewer digits use those in float32.
    assert first.analysis_mlH is second.analysis_mlH
    assert len(builds) == 1
    assert not first.analysis_mlH.is_inference()
    assert first.analysis_mlH.dtype == torch.float32
    assert find_tables(make_grid(8, 16), 5, DOUBLE).synthesis_mHl.dtype == torch.float64
    find_tables(make_grid(8, 16), 6, DOUBLE)
    find_tables(make_grid(8, 16, poles=True), 5, DOUBLE)
    assert len(builds) == 4


def test_no_tables_are_built_for_tensors_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legendre_tables, "_build_cached_tables", None)
    tables = find_tables(make_grid(721, 1440, poles=True), 480, torch.zeros(1, device="meta"))
    assert tables.analysis_mlH.is_meta and tables.analysis_mlH.shape == (481, 481, 721)
    with FakeTensorMode() as mode:
        tables = find_tables(make_grid(721, 1440, poles=True), 480, torch.zeros(1))
        assert tables.synthesis_mHl.fake_mode is mode and tables.synthesis_mHl.shape == (481, 721, 481)
