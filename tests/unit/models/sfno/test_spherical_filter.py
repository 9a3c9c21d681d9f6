"""Transform of tokens, filter and block against torch-harmonics, in values and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_harmonics
from torch import Tensor

from credit.grid import LatLonGrid
from credit.models.initialise import initialise_
from credit.models.sfno.model import SFNOBlock
from credit.models.sfno.spherical_filter import SphericalFilter
from credit.models.sfno.token_transform import TokenTransform
from credit.physics.spherical_harmonics import build_gaussian_grid
from tests.unit.analytic_reader import make_grid

from .small import build, build_section, draw_fields, perturb

GRIDS = {
    "equiangular": make_grid(17, 32, poles=True),
    "legendre-gauss": build_gaussian_grid(9, 18),
}


def build_transform(grid: LatLonGrid, max_degree: int, dtype: torch.dtype = torch.float64) -> TokenTransform:
    transform = TokenTransform(grid, max_degree)
    transform.load_tables(torch.zeros(1, dtype=dtype))
    return transform


def draw_tokens(grid: LatLonGrid, dim: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, *grid.shape, dim, dtype=torch.float64, generator=generator)


def build_torch_harmonics(kind: str, max_degree: int) -> tuple[torch_harmonics.RealSHT, torch_harmonics.InverseRealSHT]:
    """Return the transforms of torch-harmonics, whose fields are (..., H, W)."""
    options = {"lmax": max_degree + 1, "mmax": max_degree + 1, "grid": kind}
    shape = GRIDS[kind].shape
    return torch_harmonics.RealSHT(*shape, **options).double(), torch_harmonics.InverseRealSHT(
        *shape, **options
    ).double()


def build_block(before: TokenTransform, after: TokenTransform) -> SFNOBlock:
    """Return a float64 block with 3 channels whose weights, also those of norms, are random numbers."""
    block = SFNOBlock(build_section(dim=3), before, after)
    initialise_(block, seed=0)
    return perturb(block).double()


def to_fields(x_BHWC: Tensor) -> Tensor:
    return x_BHWC.permute(0, 3, 1, 2)


def to_tokens(x_BCHW: Tensor) -> Tensor:
    return x_BCHW.permute(0, 2, 3, 1)


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("max_degree", [4, 8])
def test_transform_equals_torch_harmonics(kind: str, max_degree: int) -> None:
    """The field has waves of all degrees. The quadrature of torch-harmonics is exact up to degree 8 on both grids."""
    transform = build_transform(GRIDS[kind], max_degree)
    x_BHWC = draw_tokens(GRIDS[kind])
    analysis, synthesis = build_torch_harmonics(kind, max_degree)
    coefficient_lRD = transform.analyse(x_BHWC)
    # The harmonics of torch-harmonics are orthonormal, and have the sign (-1)^m.
    reference_BClm = analysis(to_fields(x_BHWC)) / (4 * torch.pi) ** 0.5
    sign_m = 1.0 - 2.0 * (torch.arange(max_degree + 1) % 2)
    expected_lmBC = (reference_BClm * sign_m).permute(2, 3, 0, 1)
    expected_lRD = torch.cat((expected_lmBC.real, expected_lmBC.imag), dim=-1).flatten(1, 2)
    torch.testing.assert_close(coefficient_lRD, expected_lRD, rtol=0, atol=1e-12)
    expected_BCHW = synthesis(analysis(to_fields(x_BHWC)))
    torch.testing.assert_close(to_fields(transform.synthesise(coefficient_lRD)), expected_BCHW, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grid", [make_grid(5, 8), make_grid(5, 7, poles=True)])
def test_gradients(grid: LatLonGrid) -> None:
    transform = build_transform(grid, 3)
    assert torch.autograd.gradcheck(transform.analyse, draw_tokens(grid, 2).requires_grad_())
    coefficient_lRD = transform.analyse(draw_tokens(grid, 2))
    # An imaginary mean of a row must have neither an effect nor a gradient.
    coefficient_lRD = (coefficient_lRD + 0.5).requires_grad_()
    assert torch.autograd.gradcheck(transform.synthesise, coefficient_lRD)


@pytest.mark.parametrize(
    ("kind_before", "kind_after"),
    [
        ("equiangular", "equiangular"),
        ("equiangular", "legendre-gauss"),
        ("legendre-gauss", "legendre-gauss"),
        ("legendre-gauss", "equiangular"),
    ],
)
def test_block_equals_one_of_torch_harmonics(kind_before: str, kind_after: str) -> None:
    max_degree = 7
    before = build_transform(GRIDS[kind_before], max_degree)
    after = before
    if kind_after != kind_before:
        after = build_transform(GRIDS[kind_after], max_degree)
    block = build_block(before, after)
    x_BHWC = draw_tokens(GRIDS[kind_before]).requires_grad_()
    y_BHWC = block(x_BHWC)

    analysis, _ = build_torch_harmonics(kind_before, max_degree)
    _, synthesis = build_torch_harmonics(kind_after, max_degree)
    norm = block.norm
    normed_BHWC = F.layer_norm(x_BHWC, (3,), norm.weight, norm.bias)
    weight_lio = torch.view_as_complex(block.filter.weight)
    filtered_BClm = torch.einsum("bilm,lio->bolm", analysis(to_fields(normed_BHWC)), weight_lio)
    skip_BHWC = x_BHWC
    if kind_after != kind_before:
        skip_BHWC = to_tokens(synthesis(analysis(to_fields(x_BHWC))))
    expected_BHWC = skip_BHWC + to_tokens(synthesis(filtered_BClm))
    mlp = block.feed_forward
    normed_BHWC = F.layer_norm(expected_BHWC, (3,), mlp.norm.weight, mlp.norm.bias)
    hidden_BHWK = F.gelu(F.linear(normed_BHWC, mlp.expand.weight, mlp.expand.bias))
    expected_BHWC = expected_BHWC + F.linear(hidden_BHWK, mlp.contract.weight, mlp.contract.bias)
    torch.testing.assert_close(y_BHWC, expected_BHWC, rtol=0, atol=1e-11)

    tensors = [x_BHWC, *block.parameters()]
    upstream = torch.randn(y_BHWC.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    gradients = torch.autograd.grad(y_BHWC, tensors, upstream)
    expected_gradients = torch.autograd.grad(expected_BHWC, tensors, upstream)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("shift", [1, 5, 11])
def test_rotation_in_longitude_commutes_with_a_block(kind: str, shift: int) -> None:
    transform = build_transform(GRIDS[kind], 7)
    block = build_block(transform, transform)
    x_BHWC = draw_tokens(GRIDS[kind])
    rotated_BHWC = block(x_BHWC.roll(shift, dims=2))
    torch.testing.assert_close(rotated_BHWC, block(x_BHWC).roll(shift, dims=2), rtol=0, atol=1e-12)
    assert (block(x_BHWC.roll(1, dims=1)) - block(x_BHWC).roll(1, dims=1)).abs().max() > 1e-3


def test_initial_filter_multiplies_the_variance_by_its_gain() -> None:
    """The input field is isotropic and has no waves beyond the largest degree."""
    grid = make_grid(32, 64)
    transform = build_transform(grid, 15, torch.float32)
    dim = 64
    layer = SphericalFilter(dim, transform, transform, gain=0.25)
    value = layer.initial_value("weight", layer.weight.shape, torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.weight.copy_(value)
    noise_BHWC = torch.randn(4, *grid.shape, dim, generator=torch.Generator().manual_seed(1))
    x_BHWC = transform.synthesise(transform.analyse(noise_BHWC))
    area_HW1 = torch.from_numpy(grid.area_weights()).float()[..., None]
    change_BHWC = layer(torch.zeros_like(x_BHWC), x_BHWC)
    ratio = (change_BHWC.square() * area_HW1).sum() / (x_BHWC.square() * area_HW1).sum()
    assert ratio.item() == pytest.approx(0.25, rel=0.05)


def test_filter_is_float32_under_autocast() -> None:
    grid = GRIDS["equiangular"]
    transform = build_transform(grid, 7, torch.float32)
    layer = build(dim=3).blocks[0].filter
    layer.analysis = layer.synthesis = transform
    layer.weight = torch.nn.Parameter(torch.randn(8, 3, 3, 2))
    x_BHWC = draw_tokens(grid).float()
    expected_BHWC = layer(x_BHWC, x_BHWC)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_BHWC = layer(x_BHWC, x_BHWC)
    assert torch.equal(y_BHWC, expected_BHWC)
    # Tokens and weights in bfloat16, as in FSDP2's mixed precision, are multiplied in float32 as well.
    layer.bfloat16()
    y_BHWC = layer(x_BHWC.bfloat16(), x_BHWC.bfloat16())
    assert y_BHWC.dtype == torch.bfloat16
    torch.testing.assert_close(y_BHWC.float(), expected_BHWC, rtol=0.03, atol=0.1)


def test_copies_share_the_tables() -> None:
    model = build(scale_factor=2)
    model(draw_fields(model))
    twin = copy.deepcopy(model)
    outer, inner = twin.transforms
    assert outer is not model.transforms[0]
    assert outer._tables.analysis_mlH is model.transforms[0]._tables.analysis_mlH
    assert twin.blocks[0].filter.analysis is outer and twin.blocks[0].filter.synthesis is inner
