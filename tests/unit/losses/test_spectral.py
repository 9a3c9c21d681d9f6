"""Tests of losses of spherical-harmonic coefficients against brute force, closed forms, and finite differences."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from credit.errors import ConfigError
from credit.losses.crps import ensemble_crps
from credit.losses.spectral import adjusted_squared_error
from credit.physics.spherical_transform import SphericalTransform
from tests.unit.analytic_reader import make_grid
from tests.unit.losses.test_crps import build_ensemble_loss, draw_members, pair_form
from tests.unit.losses.test_losses import GRID

EXACT = SphericalTransform(GRID, dtype=torch.float64)


def make_harmonic(degree: int, order: int, phase: float = 0.0) -> Tensor:
    """Return the real field (H, W) of one harmonic with the coefficient exp(i phase)."""
    coefficient_N = torch.zeros(len(EXACT.degree_N), dtype=torch.complex128)
    # Orders ascend, so this is the coefficient of the given order among those of the degree.
    index = torch.nonzero(EXACT.degree_N == degree)[order]
    coefficient_N[index] = complex(math.cos(phase), math.sin(phase))
    return EXACT.synthesise(coefficient_N)


def expand_field(field_HW: Tensor) -> Tensor:
    """Return (1, 3, H, W) with the same field in each channel, float32."""
    return field_HW.float().expand(1, 3, *GRID.shape)


@pytest.mark.parametrize("alpha", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("num_members", [1, 2, 5])
def test_crps_of_complex_errors_equals_its_definition(num_members: int, alpha: float) -> None:
    """Score and gradient of complex numbers equal the definition. Some members are equal."""
    error = torch.randn(2, num_members, 7, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    error[0, 0, 0] = 0
    error[1, -1] = error[1, 0]
    error.requires_grad_()
    expected = error[:, 0].abs() if num_members == 1 else pair_form(error, alpha)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), error)
    score = ensemble_crps(error, alpha)
    (gradient,) = torch.autograd.grad(score.sum(), error)
    assert score.dtype == torch.float64
    torch.testing.assert_close(score, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)


def test_spectral_crps_equals_brute_force() -> None:
    """The reference is a sum over coefficients and pairs of members in Python numbers."""
    alpha, num_members = 0.5, 3
    members, truth = draw_members(num_members)
    conf = {"kind": "spectral_crps", "alpha": alpha, "weights": {"t": 3.0}}
    loss = build_ensemble_loss(conf)(members, truth)
    coefficients = EXACT.analyse(torch.cat([members, truth[:, None]], dim=1)).numpy()
    multiplicity = EXACT.multiplicity_N.tolist()
    factor = (num_members - 1 + alpha) / (num_members**2 * (num_members - 1))
    expected = 0.0
    for sample, (channel, weight) in itertools.product(range(2), enumerate([0.2, 0.2, 0.6])):
        for n, count in enumerate(multiplicity):
            *forecasts, observed = coefficients[sample, :, channel, n]
            error = sum(abs(forecast - observed) for forecast in forecasts) / num_members
            spread = sum(abs(first - second) for first, second in itertools.combinations(forecasts, 2))
            expected += weight * count * (error - factor * spread) / 2
    # 8 is the largest degree on 13 x 24 cells.
    assert EXACT.max_degree == 8
    assert loss.item() == pytest.approx(expected / 9, rel=1e-5)
    assert loss.dtype == torch.float32


def test_spectral_crps_of_one_harmonic() -> None:
    """One member has an error of 0.5 in one coefficient. It counts twice, divided by the root of 81 coefficients."""
    truth_BCHW = expand_field(make_harmonic(5, 3, phase=0.4))
    prediction_BMCHW = (1.5 * truth_BCHW)[:, None]
    value = build_ensemble_loss({"kind": "spectral_crps"})(prediction_BMCHW, truth_BCHW)
    assert value.item() == pytest.approx(2 * 0.5 / 9, rel=1e-5)
    # A shift of all longitudes changes nothing.
    shifted = build_ensemble_loss({"kind": "spectral_crps"})(prediction_BMCHW.roll(5, -1), truth_BCHW.roll(5, -1))
    assert shifted.item() == pytest.approx(value.item(), rel=1e-5)


def test_weights_of_spectral_crps_and_crps_are_comparable() -> None:
    """Gradients have the same mean square, and errors with equal variance in all coefficients have the same loss."""
    generator = torch.Generator().manual_seed(3)
    coefficient_N = torch.randn(40, 1, 3, len(EXACT.degree_N), dtype=torch.complex128, generator=generator)
    coefficient_N.imag[..., : EXACT.max_degree + 1] = 0
    error = EXACT.synthesise(coefficient_N).float()
    area = torch.from_numpy(GRID.area_weights()).float()
    # Rows on the poles are excluded, because they have many more cells than the harmonics can resolve.
    values, gradient_norms = [], []
    for kind in ("crps", "spectral_crps"):
        prediction = error.clone().requires_grad_()
        loss = build_ensemble_loss({"kind": kind})(prediction, torch.zeros_like(error[:, 0]))
        (gradient,) = torch.autograd.grad(loss, prediction)
        values.append(loss.item())
        gradient_norms.append((gradient.square() / area)[..., 1:-1, :].sum().sqrt().item())
    assert values[1] == pytest.approx(values[0], rel=0.1)
    assert gradient_norms[1] == pytest.approx(gradient_norms[0], rel=0.1)


def test_gradient_of_spectral_crps() -> None:
    """The reference is finite differences of transform and score in float64."""
    transform = SphericalTransform(make_grid(4, 8), dtype=torch.float64)
    error = torch.randn(1, 3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(error: Tensor) -> Tensor:
        return (ensemble_crps(transform.analyse(error), 0.95) * transform.multiplicity_N).sum()

    assert torch.autograd.gradcheck(score, error.requires_grad_())


def test_missing_cells_have_no_influence_on_spectral_crps() -> None:
    mask = np.zeros(GRID.shape, dtype=bool)
    mask[:6] = True
    loss = build_ensemble_loss({"kind": "spectral_crps", "alpha": 1.0}, {"t": mask, "q": mask})
    members, truth = draw_members(4)
    members = members.requires_grad_()
    value = loss(members, truth)
    (gradient,) = torch.autograd.grad(value, members)
    changed_members = members.detach().clone()
    changed_members[..., :6, :] *= 5.0
    assert loss(changed_members, truth).item() == value.item()
    assert gradient[..., :6, :].abs().max() == 0 and gradient[..., 6:-1, :].abs().min() > 0


def compute_published_amse(forecast: Tensor, truth: Tensor) -> Tensor:
    """Return the adjusted squared error of each degree as in arXiv:2501.19374, eq. 6, from fields in float64."""
    forecast_N, truth_N = EXACT.analyse(forecast), EXACT.analyse(truth)
    power = EXACT.sum_by_degree(forecast_N.abs().square())
    truth_power = EXACT.sum_by_degree(truth_N.abs().square())
    cross_power = EXACT.sum_by_degree((forecast_N * truth_N.conj()).real)
    coherence = cross_power / (power * truth_power).sqrt()
    return (power.sqrt() - truth_power.sqrt()).square() + 2 * torch.maximum(power, truth_power) * (1 - coherence)


def test_amse_equals_the_published_formula() -> None:
    """The formula applies to resolved waves. All other waves contribute their squared error."""
    members, truth = draw_members(2)
    loss = build_ensemble_loss({"kind": "amse"})
    resolved = [EXACT.synthesise(EXACT.analyse(fields.double())) for fields in (members, truth)]
    expected = compute_published_amse(resolved[0], resolved[1][:, None]).sum(-1).mean()
    assert loss(resolved[0], resolved[1]).item() == pytest.approx(expected.item(), rel=1e-5)
    area = torch.from_numpy(GRID.area_weights())
    error = (members - truth[:, None]).double()
    unresolved = error - EXACT.synthesise(EXACT.analyse(error))
    expected += (unresolved.square() * area).sum((-1, -2)).mean()
    assert loss(members, truth).item() == pytest.approx(expected.item(), rel=1e-5)


def test_amse_of_one_harmonic() -> None:
    """Twice the amplitude and a shifted phase have closed forms."""
    truth_HW = make_harmonic(5, 3)
    loss = build_ensemble_loss({"kind": "amse"})
    larger = loss(expand_field(2 * truth_HW)[:, None], expand_field(truth_HW))
    # The harmonic has the power 2, because it counts twice.
    assert larger.item() == pytest.approx(2.0, rel=1e-5)
    shifted = loss(expand_field(make_harmonic(5, 3, phase=0.7))[:, None], expand_field(truth_HW))
    assert shifted.item() == pytest.approx(2 * 2 * (1 - math.cos(0.7)), rel=1e-5)


def test_amse_does_not_reward_blur() -> None:
    """For waves out of phase, the squared error prefers a small amplitude. The adjusted error is least at 1."""
    truth, wave = make_harmonic(6, 2), make_harmonic(6, 2, phase=1.2)
    values = {}
    for kind in ("amse", "mse"):
        loss = build_ensemble_loss({"kind": kind})
        values[kind] = [loss(expand_field(a * wave)[:, None], expand_field(truth)).item() for a in (0.3, 0.6, 1.0, 1.3)]
    assert int(np.argmin(values["mse"])) == 0
    assert int(np.argmin(values["amse"])) == 2


def test_amse_of_a_nearly_perfect_forecast_in_single_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(1, 3, *GRID.shape, generator=generator)
    error = 1e-4 * torch.randn(1, 3, *GRID.shape, generator=generator)
    forecast = truth + error
    exact = compute_published_amse(forecast.double(), truth.double())
    transform = SphericalTransform(GRID)
    # The rounding of the sum to float32 is an error of 6e-8 of the field, 6e-4 of the difference.
    result = adjusted_squared_error(transform.analyse(forecast - truth), transform.analyse(truth), transform)
    torch.testing.assert_close(result.double(), exact, rtol=3e-3, atol=0)


def test_gradient_of_amse() -> None:
    transform = SphericalTransform(make_grid(4, 8), dtype=torch.float64)
    error, target = torch.randn(2, 1, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def cost(error: Tensor) -> Tensor:
        return adjusted_squared_error(transform.analyse(error), transform.analyse(target), transform)

    assert torch.autograd.gradcheck(cost, error.requires_grad_())


def test_amse_of_fields_without_power_is_finite() -> None:
    loss = build_ensemble_loss({"kind": "amse"})
    zero = torch.zeros(1, 3, *GRID.shape)
    _, truth = draw_members(1)
    for prediction, target in ((zero, zero), (zero, truth[:1]), (truth[:1], zero)):
        prediction = prediction[:, None].clone().requires_grad_()
        value = loss(prediction, target)
        (gradient,) = torch.autograd.grad(value, prediction)
        assert torch.isfinite(value) and torch.isfinite(gradient).all()


def test_amse_refuses_missing_cells() -> None:
    mask = np.zeros(GRID.shape, dtype=bool)
    mask[3, 4] = True
    with pytest.raises(ConfigError, match="loss.kind: amse .* t, because it has missing cells"):
        build_ensemble_loss({"kind": "amse"}, {"t": mask})
    # Inputs and variables without weight may have missing cells.
    build_ensemble_loss({"kind": "amse"}, {"sst": mask})
    build_ensemble_loss({"kind": "amse", "weights": {"t": 0.0}}, {"t": mask})


@pytest.mark.parametrize("kind", ["spectral_crps", "amse"])
def test_equal_weights_of_cells_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"loss.latitude_weights: false does not fit loss.kind {kind}"):
        build_ensemble_loss({"kind": kind, "latitude_weights": False})
    terms = [{"kind": "crps"}, {"kind": kind, "weight": 0.5}]
    with pytest.raises(ConfigError, match=f"loss.latitude_weights: false does not fit loss.kind {kind}"):
        build_ensemble_loss({"kind": "sum", "terms": terms, "latitude_weights": False})


def test_spectral_losses_may_be_terms_of_a_sum() -> None:
    members, truth = draw_members(4)
    scales = {"kind": "multiscale_crps", "scales": ["3000km", "0km"]}
    terms = [{"kind": "crps"}, {"kind": "spectral_crps", "weight": 0.5}, {"kind": "amse", "weight": 0.25}]
    total = build_ensemble_loss({"kind": "sum", "terms": [*terms, scales], "weights": {"t": 3.0}})
    expected = 0.0
    for term in (*terms, scales):
        conf = {key: value for key, value in term.items() if key != "weight"}
        expected += term.get("weight", 1.0) * build_ensemble_loss({**conf, "weights": {"t": 3.0}})(members, truth)
    assert total(members, truth).item() == pytest.approx(expected.item(), rel=1e-6)
    assert total.coupled_dims == {"cells"}
    assert not total.state_dict() and not list(total.parameters())


@pytest.mark.parametrize("kind", ["spectral_crps", "amse", "multiscale_crps"])
def test_bfloat16_outputs_are_scored_in_float32(kind: str) -> None:
    """The loss is computed in float32."""
    members, truth = draw_members(2)
    scales = {"scales": ["3000km", "0km"]} if kind == "multiscale_crps" else {}
    loss = build_ensemble_loss({"kind": kind, **scales})
    expected = loss(members.bfloat16().float(), truth)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(members.bfloat16(), truth)
    assert value.dtype == torch.float32 and value.item() == expected.item()
