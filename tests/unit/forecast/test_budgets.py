"""Budgets: integrals against closed forms, gradients against finite differences, and closed budgets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from credit.data.sources.levels.vertical_layers import VerticalLayers
from credit.forecast.postprocess import budgets
from credit.forecast.postprocess.budgets import ColumnIntegrator
from credit.grid import LatLonGrid
from tests.unit.data.hybrid_on_the_fly import half_levels

H, W, K = 4, 6, 12
GRID = LatLonGrid.equiangular(H, W, poles=False)
G = 9.80665
CPU = torch.device("cpu")


def build_hybrid_layers(top: float = 0.0) -> VerticalLayers:
    """Return layers of a hybrid coordinate; `top` is added to the pressure of the uppermost half level."""
    a, b = half_levels(K)
    a[0] = top
    a_edges = np.stack([a[:-1], a[1:]], axis=1)
    b_edges = np.stack([b[:-1], b[1:]], axis=1)
    return VerticalLayers(tuple(range(1, K + 1)), a_edges, b_edges, cut_by_ground=False)


def build_pressure_layers(num_levels: int = 40) -> VerticalLayers:
    """Return layers around pressure levels, with edges half way between them."""
    levels = np.linspace(2500, 100000, num_levels)
    edges = (levels[1:] + levels[:-1]) / 2
    a = np.zeros((num_levels, 2))
    a[1:, 0] = edges
    a[:-1, 1] = edges
    # The lower edge of the lowest layer is the ground.
    b = np.zeros((num_levels, 2))
    b[-1, 1] = 1.0
    return VerticalLayers(tuple(levels), a, b, cut_by_ground=True)


def draw_uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


SP = 5e4 + 5.5e4 * draw_uniform(2, H, W)


@pytest.mark.parametrize(
    "layers",
    [build_hybrid_layers(), build_hybrid_layers(50.0), build_pressure_layers(K)],
    ids=["hybrid", "with a top", "pressure"],
)
def test_a_constant_integrates_to_the_mass_of_the_column(layers: VerticalLayers) -> None:
    """The integral is exactly (ps - top) / g times the constant, also over mountains."""
    columns = ColumnIntegrator(layers, GRID, CPU)
    integral = columns.integrate(torch.full((2, K, H, W), 0.01), SP)
    # The constant is 0.01 in float32.
    np.testing.assert_allclose(integral, 0.01 * (SP - layers.a[0, 0]) / G, rtol=1e-7)
    slope = columns.differentiate_integral(torch.ones(2, K, H, W), SP)
    np.testing.assert_allclose(slope, 1 / G, rtol=1e-12)


@pytest.mark.parametrize("layers", [build_hybrid_layers(), build_pressure_layers(K)], ids=["hybrid", "pressure"])
def test_an_isothermal_dry_atmosphere_at_rest(layers: VerticalLayers) -> None:
    """Heat is cp T ps / g, water is 0, dry mass is ps / g, and ground of constant height adds its geopotential."""
    columns = ColumnIntegrator(layers, GRID, CPU)
    zero = torch.zeros(2, K, H, W)
    temperature = torch.full((2, K, H, W), 250.0)
    mean = columns.global_mean(SP)
    np.testing.assert_allclose(
        budgets.compute_global_mean_heat(columns, SP, temperature, zero), 3.5 * 287.0597 * 250 * mean / G, rtol=1e-12
    )
    np.testing.assert_allclose(budgets.compute_global_mean_dry_mass(columns, SP, zero), mean / G, rtol=1e-12)
    assert budgets.compute_global_mean_water(columns, SP, zero).eq(0).all()
    ground = torch.full((H, W), 5000.0)
    other_energy = budgets.compute_global_mean_other_energy(columns, SP, zero, zero + 3.0, zero + 4.0, ground)
    np.testing.assert_allclose(other_energy, (5000 + 12.5) * mean / G, rtol=1e-12)


def test_a_profile_converges_to_its_integral() -> None:
    """q = c p^3 has the integral c ps^4 / (4 g); the error falls as 1 / n^2 (n levels), except in the lowest layer."""
    errors = []
    for count in (40, 160):
        layers = build_pressure_layers(count)
        middle = torch.tensor(layers.levels)[None, :, None, None] * torch.ones(1, count, H, W)
        columns = ColumnIntegrator(layers, GRID, CPU)
        exact = 0.015 / 1e15 * 1e5**4 / 4 / G
        errors.append(
            abs(columns.integrate(0.015 * (middle / 1e5) ** 3, torch.full((1, H, W), 1e5)).mean() / exact - 1)
        )
    assert errors[0] < 0.02 and errors[1] < errors[0] / 3


def test_layers_below_the_ground_do_not_count() -> None:
    layers = build_pressure_layers(K)
    columns = ColumnIntegrator(layers, GRID, CPU)
    x = draw_uniform(1, K, H, W)
    below = torch.tensor(layers.a[:, 0] >= 7e4)[None, :, None, None]
    ground = torch.full((1, H, W), 7e4)
    changed_below = torch.where(below, x + 100.0, x)
    assert below.any() and torch.equal(columns.integrate(x, ground), columns.integrate(changed_below, ground))


def test_means_are_area_weighted() -> None:
    """sin^2 of latitude has the mean 1/3 on a sphere."""
    grid = LatLonGrid.equiangular(180, 4, poles=False)
    lat = torch.from_numpy(grid.lat)[None, :, None] * torch.ones(1, 180, 4)
    mean = ColumnIntegrator(build_hybrid_layers(), grid, CPU).global_mean(torch.sin(torch.deg2rad(lat)) ** 2)
    assert mean.item() == pytest.approx(1 / 3, rel=1e-4)


def test_sums_are_float64() -> None:
    """2^24 + 1 is not a float32 number, so sums in float32 would lose the 1."""
    grid = LatLonGrid.equiangular(64, 128, poles=False)
    mean = ColumnIntegrator(build_hybrid_layers(), grid, CPU).global_mean(
        torch.full((1, 64, 128), 16777216.0).double() + 1
    )
    assert mean.dtype == torch.float64 and mean.item() == pytest.approx(16777217, rel=1e-12)
    integral = ColumnIntegrator(build_hybrid_layers(), grid, CPU).integrate(
        torch.full((1, K, 64, 128), 0.1), torch.full((1, 64, 128), 1e5)
    )
    assert integral.dtype == torch.float64
    np.testing.assert_allclose(integral, np.float64(np.float32(0.1)) * 1e5 / G, rtol=1e-13)


@pytest.mark.parametrize("layers", [build_hybrid_layers(), build_pressure_layers(K)], ids=["hybrid", "pressure"])
def test_gradients(layers: VerticalLayers) -> None:
    columns = ColumnIntegrator(layers, GRID, CPU)
    sp = SP.clone().requires_grad_()
    q, t = 0.02 * draw_uniform(2, K, H, W, seed=1), 200 + 80 * draw_uniform(2, K, H, W, seed=2)
    rain = draw_uniform(2, H, W, seed=3)
    for tensor in (q, t, rain):
        tensor.requires_grad_()
    target = budgets.compute_global_mean_dry_mass(columns, SP, q.detach()) * torch.tensor([1.01, 0.98])

    def close_pressure(sp, q):
        return budgets.close_dry_mass(columns, target, sp, q) / 1e5

    def close_rain(sp, q, rain):
        return budgets.close_water(columns, 20 + budgets.compute_global_mean_water(columns, sp, q), rain)

    def close_temperature(sp, q, t):
        heat = budgets.compute_global_mean_heat(columns, sp, t, q)
        other_energy = budgets.compute_global_mean_other_energy(
            columns, sp, q, t - 240, 0.5 * t - 120, torch.ones(H, W)
        )
        return budgets.close_energy(3e9 - other_energy, t, heat) / 300

    options = {"fast_mode": True, "atol": 1e-6, "rtol": 1e-4}
    # The step of 1e-4 Pa is large compared with rounding errors, and does not move the ground across a layer edge.
    assert torch.autograd.gradcheck(close_pressure, (sp, q), eps=1e-4, **options)
    assert torch.autograd.gradcheck(close_rain, (sp, q, rain), eps=1e-4, **options)
    assert torch.autograd.gradcheck(close_temperature, (sp, q, t), eps=1e-4, **options)


@pytest.mark.parametrize(
    "layers",
    [build_hybrid_layers(), build_hybrid_layers(50.0), build_pressure_layers(K)],
    ids=["hybrid", "with a top", "pressure"],
)
def test_dry_mass_is_closed_by_a_single_factor(layers: VerticalLayers) -> None:
    columns = ColumnIntegrator(layers, GRID, CPU)
    q = 0.02 * draw_uniform(2, K, H, W, seed=1)
    target = budgets.compute_global_mean_dry_mass(columns, SP, q) * torch.tensor([1.03, 0.96])
    closed = budgets.close_dry_mass(columns, target, SP, q)
    # On pressure levels, cells where the ground passes an edge leave a small residual.
    rtol = 1e-13 if columns.is_linear else 1e-7
    np.testing.assert_allclose(budgets.compute_global_mean_dry_mass(columns, closed, q), target, rtol=rtol)
    factor = closed / SP
    np.testing.assert_allclose(factor, factor[:, :1, :1].expand_as(factor), rtol=1e-14)


def test_rain_is_scaled_but_never_negative() -> None:
    columns = ColumnIntegrator(build_hybrid_layers(), GRID, CPU)
    rain = draw_uniform(3, H, W)
    closed = budgets.close_water(columns, torch.tensor([2.0, -1.0, 0.0]), rain)
    np.testing.assert_allclose(columns.global_mean(closed), [2.0, 0.0, 0.0], rtol=1e-13, atol=1e-15)
    dry = budgets.close_water(columns, torch.tensor([2.0]), torch.zeros(1, H, W))
    assert dry.eq(0).all(), "without rain, there is nothing to scale"
