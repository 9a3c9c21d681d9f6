"""Tests of the spherical-harmonic transform against torch-harmonics, SciPy, single harmonics and the power spectrum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch_harmonics
from scipy.special import sph_legendre_p
from torch import Tensor

from credit.grid import LatLonGrid
from credit.physics.spherical_harmonics import compute_legendre
from credit.physics.spherical_transform import SphericalTransform
from credit.verify.scores.spectra import SphericalSpectrum
from tests.unit.analytic_reader import make_grid


def make_gaussian_grid(rows: int) -> LatLonGrid:
    sine, _ = np.polynomial.legendre.leggauss(rows)
    return LatLonGrid.from_coords(np.rad2deg(np.arcsin(sine)), np.arange(2 * rows) * 180.0 / rows)[0]


GRIDS = {
    "32 x 64": make_grid(32, 64),
    "33 x 64 with poles": make_grid(33, 64, poles=True),
    "45 x 60, odd rows": make_grid(45, 60),
    "17 x 33 with poles, odd columns": make_grid(17, 33, poles=True),
    "Gaussian 48 x 96": make_gaussian_grid(48),
    "181 x 360 with poles": make_grid(181, 360, poles=True),
}


def draw_coefficients(transform: SphericalTransform, *leading_shape: int, seed: int = 0) -> Tensor:
    """Return (..., N) complex128; those of order 0 are real."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*leading_shape, len(transform.degree_N))
    coefficient_N = torch.randn(*shape, dtype=torch.complex128, generator=generator)
    coefficient_N.imag[..., : transform.max_degree + 1] = 0
    return coefficient_N


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_round_trip(grid: LatLonGrid) -> None:
    transform = SphericalTransform(grid, dtype=torch.float64)
    expected = draw_coefficients(transform, 2, 3)
    field_HW = transform.synthesise(expected)
    assert field_HW.shape == (2, 3, *grid.shape)
    torch.testing.assert_close(transform.analyse(field_HW), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        transform.synthesise(transform.analyse(field_HW[1, 2])), field_HW[1, 2], rtol=0, atol=1e-10
    )


def test_degrees_that_the_grid_resolves() -> None:
    assert SphericalTransform(GRIDS["32 x 64"]).max_degree == 21
    assert SphericalTransform(GRIDS["181 x 360 with poles"]).max_degree == 120


@pytest.mark.parametrize(("degree", "order"), [(0, 0), (7, 0), (9, 4), (21, 21), (21, 1)])
def test_single_harmonic(degree: int, order: int) -> None:
    """A cos(m lon + phase) times a function of SciPy has the coefficient A exp(i phase) / 2, and no other."""
    grid, phase, amplitude = GRIDS["32 x 64"], 0.3, 2.5
    transform = SphericalTransform(grid, dtype=torch.float64)
    theta = np.deg2rad(90.0 - grid.lat)
    # SciPy's functions are orthonormal and have the sign (-1)^m, which the package leaves out.
    function_H = (-1) ** order * math.sqrt(4 * math.pi) * sph_legendre_p(degree, order, theta)[0]
    wave_W = np.cos(order * np.deg2rad(grid.lon) + phase)
    coefficient_N = transform.analyse(torch.from_numpy(amplitude * function_H[:, None] * wave_W))
    (index,) = torch.nonzero(coefficient_N.abs() > 1e-10).flatten().tolist()
    expected = amplitude * (math.cos(phase) if order == 0 else complex(math.cos(phase), math.sin(phase)) / 2)
    assert coefficient_N[index].item() == pytest.approx(expected, abs=1e-12)
    assert transform.degree_N[index] == degree
    assert transform.multiplicity_N[index] == (1 if order == 0 else 2)


def test_power_equals_that_of_the_verification() -> None:
    """The verification has the same power by degree, also for a field with waves beyond the resolved degrees."""
    grid = GRIDS["33 x 64 with poles"]
    transform = SphericalTransform(grid, can_synthesise=False, dtype=torch.float64)
    field_HW = np.random.default_rng(0).standard_normal((3, *grid.shape))
    power_L = transform.sum_by_degree(transform.analyse(torch.from_numpy(field_HW)).abs().square())
    np.testing.assert_allclose(power_L, SphericalSpectrum(grid).power(field_HW), rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "grid", "is_exact_for_all"),
    [
        ("equiangular", make_grid(65, 128, poles=True), False),
        ("equiangular", make_grid(181, 360, poles=True), False),
        ("legendre-gauss", make_gaussian_grid(48), True),
        ("legendre-gauss", make_gaussian_grid(128), True),
    ],
)
def test_equals_torch_harmonics(kind: str, grid: LatLonGrid, is_exact_for_all: bool) -> None:
    """On equiangular rows with poles, the quadrature of torch-harmonics is exact only up to degree (H - 1) / 2."""
    transform = SphericalTransform(grid, dtype=torch.float64)
    num_rows, num_columns = grid.shape
    # Largest degree that both transforms have.
    max_degree = transform.max_degree if is_exact_for_all else (num_rows - 1) // 2
    is_common_N = transform.degree_N <= max_degree
    options = {"lmax": max_degree + 1, "mmax": max_degree + 1, "grid": kind}
    coefficient_N = draw_coefficients(transform, 2, seed=1) * is_common_N
    field_HW = transform.synthesise(coefficient_N)
    if is_exact_for_all:
        # Gaussian quadrature is the least-squares fit of any field.
        noise = np.random.default_rng(1).standard_normal(field_HW.shape)
        field_HW = field_HW + torch.from_numpy(noise)
        coefficient_N = transform.analyse(field_HW)

    # The coefficients (degree, order) of torch-harmonics are of orthonormal harmonics with the sign (-1)^m.
    reference_LM = torch_harmonics.RealSHT(num_rows, num_columns, **options)(field_HW)
    order_N = torch.cat([torch.full((transform.max_degree + 1 - m,), m) for m in range(transform.max_degree + 1)])
    sign_N = 1.0 - 2.0 * (order_N % 2)
    reference_N = reference_LM[..., transform.degree_N[is_common_N], order_N[is_common_N]]
    reference_N = reference_N * sign_N[is_common_N] / math.sqrt(4 * math.pi)
    torch.testing.assert_close(reference_N, coefficient_N[..., is_common_N], rtol=0, atol=1e-9)
    reference_field_HW = torch_harmonics.InverseRealSHT(num_rows, num_columns, **options)(reference_LM)
    expected_HW = transform.synthesise(coefficient_N)
    # The field adds up thousands of harmonics, so its values are of the order of 100.
    torch.testing.assert_close(reference_field_HW, expected_HW, rtol=0, atol=1e-9 * expected_HW.std().item())


def test_single_precision_is_accurate() -> None:
    grid = GRIDS["181 x 360 with poles"]
    double_transform = SphericalTransform(grid, dtype=torch.float64)
    expected = draw_coefficients(double_transform, 2)
    field_HW = double_transform.synthesise(expected)
    transform = SphericalTransform(grid)
    coefficient_N = transform.analyse(field_HW.float())
    assert coefficient_N.dtype == torch.complex64
    rms = expected.abs().square().mean().sqrt()
    assert (coefficient_N - expected).abs().max() < 5e-6 * rms
    assert (transform.synthesise(coefficient_N) - field_HW).abs().max() < 5e-6 * field_HW.std()


def test_autocast_does_not_change_the_result() -> None:
    transform = SphericalTransform(GRIDS["32 x 64"])
    field_HW = torch.randn(2, *GRIDS["32 x 64"].shape, generator=torch.Generator().manual_seed(0))
    expected = transform.synthesise(transform.analyse(field_HW))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = transform.synthesise(transform.analyse(field_HW))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert transform.analyse(field_HW.bfloat16()).dtype == torch.complex64


def test_tf32_is_disabled_only_inside_the_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs have no TF32, so the test reads the setting where the products are computed."""
    transform = SphericalTransform(GRIDS["32 x 64"])
    precisions = []
    cat = torch.cat

    def record_precision(*args: object, **options: object) -> Tensor:
        precisions.append(torch.get_float32_matmul_precision())
        return cat(*args, **options)

    monkeypatch.setattr(torch, "cat", record_precision)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        transform.synthesise(transform.analyse(torch.zeros(32, 64)))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert precisions == ["highest", "highest"]


def test_gradients_equal_finite_differences() -> None:
    transform = SphericalTransform(make_grid(6, 12), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    field_HW = torch.randn(2, 6, 12, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(transform.analyse, field_HW)
    coefficient_N = draw_coefficients(transform, 2).requires_grad_()
    assert torch.autograd.gradcheck(transform.synthesise, coefficient_N)


def test_transform_moves_to_a_device_and_is_not_in_checkpoints() -> None:
    transform = SphericalTransform(GRIDS["32 x 64"])
    assert not transform.state_dict() and not list(transform.parameters())
    assert {buffer.device.type for buffer in transform.to("meta").buffers()} == {"meta"}
    # The training step of `credit check` uses tensors without values.
    field_HW = transform.synthesise(transform.analyse(torch.zeros(2, 32, 64, device="meta")))
    assert field_HW.is_meta and field_HW.shape == (2, 32, 64)


def test_legendre_functions_beyond_degree_200() -> None:
    """They equal SciPy's functions at the equator, and close to the poles, where functions of high order are tiny."""
    theta = np.deg2rad([0.0, 0.125, 0.25, 1.0, 5.0, 20.0, 45.0, 71.3, 90.0, 120.0, 179.75])
    for m in (0, 1, 2, 50, 199, 300, 479, 480):
        table = compute_legendre(480, m, np.cos(theta))
        for degree in {m, (m + 480) // 2, 480}:
            expected = math.sqrt(4 * math.pi) * sph_legendre_p(degree, m, theta)[0] * (-1) ** m
            np.testing.assert_allclose(table[degree - m], expected, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_round_trip_at_a_quarter_of_a_degree() -> None:
    grid = make_grid(721, 1440, poles=True)
    transform = SphericalTransform(grid)
    assert transform.max_degree == 480
    tables = [buffer for buffer in transform.buffers() if buffer.ndim == 2]
    assert sum(table.numel() * table.element_size() for table in tables) < 700e6
    expected = draw_coefficients(transform, 1).to(torch.complex64)
    result = transform.analyse(transform.synthesise(expected))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
