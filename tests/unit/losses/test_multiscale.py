"""CRPS by scale: against brute force and single harmonics; weights, masks, and lengths that are refused."""

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


def build(**conf: object) -> Loss:
    return build_ensemble_loss({"kind": "multiscale_crps", "scales": SCALES, **conf})


def response(degree: int, length_km: float) -> float:
    return math.exp(-degree * (degree + 1) * (length_km / EARTH_RADIUS_KM) ** 2 / 2)


def test_parts_of_one_harmonic() -> None:
    """The Gaussian multiplies a harmonic by a number, and the differences between lengths add up to the field."""
    field_HW = make_harmonic(6, 2)
    parts = build().split_by_scale(field_HW.float())
    long, short = response(6, 3000), response(6, 1500)
    for part_HW, factor in zip(parts, (long, short - long, 1 - short), strict=True):
        torch.testing.assert_close(part_HW.double(), factor * field_HW, rtol=0, atol=1e-5)
    torch.testing.assert_close(sum(parts), field_HW.float(), rtol=0, atol=1e-6)


def test_smoothing_is_a_gaussian_of_the_distance() -> None:
    """A field of one high cell becomes exp(-d^2 / (2 length^2)) of the great-circle distance d."""
    length = 1500.0
    # Three lengths from the cell, its value is 0.011 of the maximum.
    field_HW = torch.zeros(GRID.shape, dtype=torch.float64)
    field_HW[6, 0] = 1.0
    smooth_HW = build(scales=["1500km", "0km"]).split_by_scale(field_HW.float())[0]
    angle = np.minimum(np.deg2rad(GRID.lon), 2 * np.pi - np.deg2rad(GRID.lon))
    expected = np.exp(-0.5 * (EARTH_RADIUS_KM * angle / length) ** 2)
    np.testing.assert_allclose(smooth_HW[6] / smooth_HW[6, 0], expected, atol=0.1)


def test_equals_brute_force() -> None:
    members, truth = draw_members(3)
    weights = [0.5, 1.0, 2.0]
    loss = build(alpha=0.5, scale_weights=weights, weights={"t": 3.0})(members, truth)

    def smooth(field_HW: Tensor, length_km: float) -> Tensor:
        responses = [response(degree, length_km) for degree in EXACT.degree_N.tolist()]
        return EXACT.synthesise(torch.tensor(responses) * EXACT.analyse(field_HW))

    # Members and truth are smoothed apart, the truth as a further member.
    fields = torch.cat([members, truth[:, None]], dim=1).double()
    coarse, middle = smooth(fields, 3000), smooth(fields, 1500)
    area = torch.from_numpy(GRID.area_weights())
    expected = 0.0
    for weight, part in zip(weights, (coarse, middle - coarse, fields - middle), strict=True):
        score = pair_form(part[:, :-1] - part[:, -1:], 0.5)
        expected += weight * ((score * area).sum((2, 3)) * torch.tensor([0.2, 0.2, 0.6])).sum(1).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.dtype == torch.float32


def test_it_sees_the_amplitude_of_waves_in_space() -> None:
    """Members with the right spread in each cell and noise instead of long waves score worse; by crps they do not."""
    generator = torch.Generator().manual_seed(5)
    draws = torch.randn(40, 5, 3, len(EXACT.degree_N), dtype=torch.complex128, generator=generator)
    # The truth has long waves. Noise of the same variance replaces them in the second ensemble.
    is_long_N = EXACT.degree_N <= 3
    long_waves = EXACT.synthesise(draws * is_long_N)
    noise = EXACT.synthesise(draws * ~is_long_N)
    noise = noise * (long_waves.var() / noise.var()).sqrt()
    truth = long_waves[:, 0]
    ratios = {}
    for kind, loss in {"crps": build_ensemble_loss({"kind": "crps", "alpha": 1.0}), "scales": build(alpha=1.0)}.items():
        right = loss(long_waves[:, 1:].float(), truth.float())
        wrong = loss(noise[:, 1:].float(), truth.float())
        ratios[kind] = (wrong / right).item()
    assert ratios["crps"] == pytest.approx(1.0, abs=0.1)
    assert ratios["scales"] > 1.2


def test_gradient() -> None:
    """Against finite differences in float64."""
    loss = build(alpha=0.95).double()
    error = torch.randn(1, 2, *GRID.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(error: Tensor) -> Tensor:
        return sum(ensemble_crps(part, 0.95).sum() for part in loss.split_by_scale(error))

    assert torch.autograd.gradcheck(score, error.requires_grad_(), fast_mode=True)


def test_missing_cells() -> None:
    """They count as cells without error in the smoothing, and have no weight and no influence."""
    mask = np.zeros(GRID.shape, dtype=bool)
    mask[:6] = True
    section = {"kind": "multiscale_crps", "scales": ["3000km", "0km"], "alpha": 1.0}
    loss = build_ensemble_loss(section, {"t": mask, "q": mask})
    members, truth = draw_members(4)
    members = members.requires_grad_()
    value = loss(members, truth)
    (gradient,) = torch.autograd.grad(value, members)
    changed = members.detach().clone()
    changed[..., :6, :] *= 5.0
    assert loss(changed, truth).item() == value.item()
    assert gradient[..., :6, :].abs().max() == 0 and gradient[..., 6:, :].abs().min() > 0

    valid = torch.from_numpy(~mask)
    error = (members - truth[:, None]).detach().double() * valid
    smooth = EXACT.synthesise(torch.tensor([response(n, 3000) for n in EXACT.degree_N]) * EXACT.analyse(error))
    weight_CHW = torch.from_numpy(GRID.masked_area_weights(valid.expand(3, *GRID.shape).numpy())) / 3
    expected = sum((pair_form(part, 1.0) * weight_CHW).sum() / 2 for part in (smooth, error - smooth))
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)


def test_equal_weights_of_cells() -> None:
    """Unlike losses of coefficients, this one is a mean over cells, so they may have equal weights."""
    members, truth = draw_members(2)
    loss = build(latitude_weights=False)
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
def test_wrong_scales(conf: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LOSSES.find_section("multiscale_crps").model_validate({"kind": "multiscale_crps", **conf})


def test_a_length_that_the_grid_does_not_resolve_is_refused() -> None:
    """13 x 24 cells resolve degree 8, half of which is left by a smoothing of 885 km."""
    assert SphericalTransform(GRID).max_degree == 8
    shortest = EARTH_RADIUS_KM * math.sqrt(2 * math.log(2) / (8 * 9))
    with pytest.raises(ConfigError, match=f"loss.scales: 400km is too short .* at least {math.ceil(shortest)}km"):
        build(scales=["3000km", "400km", "0km"])
    build(scales=["3000km", math.ceil(shortest), "0km"])
