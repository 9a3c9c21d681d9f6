"""Tests of the multiscale CRPS against brute force and single harmonics, and of weights, masks and refused lengths."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from credit.config.registry import LOSSES
from credit.errors import ConfigError
from credit.losses.base import Loss
from credit.losses.crps import ensemble_crps
from credit.physics.spherical_harmonics import EARTH_RADIUS_KM
from credit.physics.spherical_transform import SphericalTransform
from tests.unit.losses.test_crps import build_ensemble_loss, draw_members, pair_form
from tests.unit.losses.test_losses import GRID
from tests.unit.losses.test_spectral import EXACT, make_harmonic

SCALES = ["3000km", "1500km", "0km"]


def build_multiscale_loss(**conf: object) -> Loss:
    return build_ensemble_loss({"kind": "multiscale_crps", "scales": SCALES, **conf})


def gaussian_response(degree: int, length_km: float) -> float:
    return math.exp(-degree * (degree + 1) * (length_km / EARTH_RADIUS_KM) ** 2 / 2)


def test_scales_of_one_harmonic() -> None:
    """A Gaussian multiplies a harmonic by a factor. The differences between lengths add up to the field."""
    field_HW = make_harmonic(6, 2)
    parts = build_multiscale_loss().split_by_scale(field_HW.float())
    long, short = gaussian_response(6, 3000), gaussian_response(6, 1500)
    for part_HW, factor in zip(parts, (long, short - long, 1 - short), strict=True):
        torch.testing.assert_close(part_HW.double(), factor * field_HW, rtol=0, atol=1e-5)
    torch.testing.assert_close(sum(parts), field_HW.float(), rtol=0, atol=1e-6)


def test_smoothing_is_a_gaussian_of_the_distance() -> None:
    """A field with one nonzero cell becomes exp(-d^2 / (2 length^2)), where d is the great-circle distance."""
    length = 1500.0
    # At a distance of three lengths, the expected value is 0.011 of the maximum.
    field_HW = torch.zeros(GRID.shape, dtype=torch.float64)
    field_HW[6, 0] = 1.0
    smooth_HW = build_multiscale_loss(scales=["1500km", "0km"]).split_by_scale(field_HW.float())[0]
    angle = np.minimum(np.deg2rad(GRID.lon), 2 * np.pi - np.deg2rad(GRID.lon))
    expected = np.exp(-0.5 * (EARTH_RADIUS_KM * angle / length) ** 2)
    np.testing.assert_allclose(smooth_HW[6] / smooth_HW[6, 0], expected, atol=0.1)


def test_equals_brute_force() -> None:
    members, truth = draw_members(3)
    weights = [0.5, 1.0, 2.0]
    loss = build_multiscale_loss(alpha=0.5, scale_weights=weights, weights={"t": 3.0})(members, truth)

    def smooth(field_HW: Tensor, length_km: float) -> Tensor:
        responses = [gaussian_response(degree, length_km) for degree in EXACT.degree_N.tolist()]
        return EXACT.synthesise(torch.tensor(responses) * EXACT.analyse(field_HW))

    # Members and truth are smoothed separately. The truth is an additional member.
    fields = torch.cat([members, truth[:, None]], dim=1).double()
    coarse, middle = smooth(fields, 3000), smooth(fields, 1500)
    area = torch.from_numpy(GRID.area_weights())
    expected = 0.0
    for weight, part in zip(weights, (coarse, middle - coarse, fields - middle), strict=True):
        score = pair_form(part[:, :-1] - part[:, -1:], 0.5)
        expected += weight * ((score * area).sum((2, 3)) * torch.tensor([0.2, 0.2, 0.6])).sum(1).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.dtype == torch.float32


def test_noise_instead_of_long_waves_scores_worse() -> None:
    """Members with noise instead of long waves, but with the right spread in each cell, score worse.

    The CRPS does not distinguish them.
    """
    generator = torch.Generator().manual_seed(5)
    draws = torch.randn(40, 5, 3, len(EXACT.degree_N), dtype=torch.complex128, generator=generator)
    # The truth has long waves. Noise of the same variance replaces them in the second ensemble.
    is_long_N = EXACT.degree_N <= 3
    long_waves = EXACT.synthesise(draws * is_long_N)
    noise = EXACT.synthesise(draws * ~is_long_N)
    noise = noise * (long_waves.var() / noise.var()).sqrt()
    truth = long_waves[:, 0]
    ratios = {}
    for kind, loss in {
        "crps": build_ensemble_loss({"kind": "crps", "alpha": 1.0}),
        "scales": build_multiscale_loss(alpha=1.0),
    }.items():
        long_wave_loss = loss(long_waves[:, 1:].float(), truth.float())
        noise_loss = loss(noise[:, 1:].float(), truth.float())
        ratios[kind] = (noise_loss / long_wave_loss).item()
    assert ratios["crps"] == pytest.approx(1.0, abs=0.1)
    assert ratios["scales"] > 1.2


def test_gradient_equals_finite_differences() -> None:
    """The reference is finite differences in float64."""
    loss = build_multiscale_loss(alpha=0.95).double()
    error = torch.randn(1, 2, *GRID.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(error: Tensor) -> Tensor:
        return sum(ensemble_crps(part, 0.95).sum() for part in loss.split_by_scale(error))

    assert torch.autograd.gradcheck(score, error.requires_grad_(), fast_mode=True)


def test_missing_cells_have_no_influence() -> None:
    """Missing cells are cells without error in the smoothing, and have no weight and no influence."""
    mask = np.zeros(GRID.shape, dtype=bool)
    mask[:6] = True
    section = {"kind": "multiscale_crps", "scales": ["3000km", "0km"], "alpha": 1.0}
    loss = build_ensemble_loss(section, {"t": mask, "q": mask})
    members, truth = draw_members(4)
    members = members.requires_grad_()
    value = loss(members, truth)
    (gradient,) = torch.autograd.grad(value, members)
    changed_members = members.detach().clone()
    changed_members[..., :6, :] *= 5.0
    assert loss(changed_members, truth).item() == value.item()
    assert gradient[..., :6, :].abs().max() == 0 and gradient[..., 6:, :].abs().min() > 0

    valid = torch.from_numpy(~mask)
    error = (members - truth[:, None]).detach().double() * valid
    smooth = EXACT.synthesise(torch.tensor([gaussian_response(n, 3000) for n in EXACT.degree_N]) * EXACT.analyse(error))
    weight_CHW = torch.from_numpy(GRID.masked_area_weights(valid.expand(3, *GRID.shape).numpy())) / 3
    expected = sum((pair_form(part, 1.0) * weight_CHW).sum() / 2 for part in (smooth, error - smooth))
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)


def test_equal_weights_of_cells_are_allowed() -> None:
    """Unlike losses of coefficients, this loss is a mean over cells, so cells may have equal weights."""
    members, truth = draw_members(2)
    loss = build_multiscale_loss(latitude_weights=False)
    parts = loss.split_by_scale(members - truth[:, None])
    expected = sum(ensemble_crps(part, 0.95).mean() for part in parts)
    assert loss(members, truth).item() == pytest.approx(expected.item(), rel=1e-5)


def test_lengths_are_read_with_and_without_unit() -> None:
    section = LOSSES.find_section("multiscale_crps")
    conf = section.model_validate({"kind": "multiscale_crps", "scales": ["800km", 400, "0 km"]})
    assert conf.scales == [800.0, 400.0, 0.0] and conf.needs_members
    assert section.model_validate(conf.model_dump(mode="json")) == conf


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({}, "scales"),
        ({"scales": ["0km"]}, "scales"),
        ({"scales": ["800km", "400km"]}, r"loss.scales: \[800km, 400km\] must descend and end with 0km"),
        ({"scales": ["400km", "800km", "0km"]}, "must descend"),
        ({"scales": ["800km", "800km", "0km"]}, "must descend"),
        ({"scales": ["800m", "0km"]}, "scales"),
        ({"scales": ["-800km", "0km"]}, "scales"),
        ({"scales": ["800km", "0km"], "scale_weights": [1.0]}, "one weight for each of the 2 loss.scales"),
        ({"scales": ["800km", "0km"], "scale_weights": [0.0, 0.0]}, "one weight must be above 0"),
        ({"scales": ["800km", "0km"], "scale_weights": [1.0, -1.0]}, "scale_weights"),
    ],
)
def test_wrong_scales_are_refused(conf: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LOSSES.find_section("multiscale_crps").model_validate({"kind": "multiscale_crps", **conf})


def test_a_length_that_the_grid_does_not_resolve_is_refused() -> None:
    """13 x 24 cells resolve degree 8. A smoothing of 885 km halves the amplitude of this degree."""
    assert SphericalTransform(GRID).max_degree == 8
    shortest = EARTH_RADIUS_KM * math.sqrt(2 * math.log(2) / (8 * 9))
    with pytest.raises(ConfigError, match=f"loss.scales: 400km is too short .* at least {math.ceil(shortest)}km"):
        build_multiscale_loss(scales=["3000km", "400km", "0km"])
    build_multiscale_loss(scales=["3000km", math.ceil(shortest), "0km"])
