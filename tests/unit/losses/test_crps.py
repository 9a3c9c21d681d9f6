"""Tests of the CRPS as a training loss: against scoringrules, brute force, autograd and a closed form."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scoringrules
import torch
from torch import Tensor

from credit.config.registry import LOSSES
from credit.errors import ConfigError
from credit.losses.base import Loss
from credit.losses.build import build_loss
from credit.losses.crps import ensemble_crps
from tests.unit.losses.test_losses import CHANNELS, GRID

NUM_MEMBERS = (2, 3, 4, 8, 16)
ALPHAS = (0.0, 0.5, 0.95, 1.0)


def build_ensemble_loss(conf: dict, masks: dict[str, np.ndarray] | None = None) -> Loss:
    section = LOSSES.find_section(conf["kind"]).model_validate({"scaling": "state", **conf})
    return build_loss(section, CHANNELS, GRID, np.array([0.5, 0.1, 0.02]), masks or {})


def draw_members(num_members: int, seed: int = 0, **options: object) -> tuple[Tensor, Tensor]:
    """Return members (2, M, 3, H, W) and the truth (2, 3, H, W)."""
    generator = torch.Generator().manual_seed(seed)
    members = torch.randn(2, num_members, 3, *GRID.shape, generator=generator, **options)
    truth = torch.randn(2, 3, *GRID.shape, generator=generator, **options)
    return members, truth


def pair_form(error: Tensor, alpha: float) -> Tensor:
    """Return the score by its definition, in differentiable operations on (B, M, ...)."""
    num_members = error.shape[1]
    pair_sum = sum((error[:, j] - error[:, k]).abs() for j, k in itertools.combinations(range(num_members), 2))
    factor = (num_members - 1 + alpha) / (num_members**2 * (num_members - 1))
    return error.abs().mean(1) - factor * pair_sum


@pytest.mark.parametrize("num_members", NUM_MEMBERS)
@pytest.mark.parametrize(("alpha", "estimator"), [(0.0, "nrg"), (1.0, "fair")])
def test_equals_scoringrules(num_members: int, alpha: float, estimator: str) -> None:
    members, truth = draw_members(num_members)
    expected = scoringrules.crps_ensemble(
        truth.double().numpy(), members.double().numpy(), m_axis=1, estimator=estimator
    )
    score = ensemble_crps(members - truth[:, None], alpha)
    np.testing.assert_allclose(score.numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_members", NUM_MEMBERS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_score_and_gradient_equal_the_pair_form(num_members: int, alpha: float) -> None:
    members, truth = draw_members(num_members, seed=1, dtype=torch.float64)
    error = (members - truth[:, None]).requires_grad_()
    expected = pair_form(error, alpha)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), error)
    score = ensemble_crps(error, alpha)
    (gradient,) = torch.autograd.grad(score.sum(), error)
    torch.testing.assert_close(score, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)
    assert score.min() >= 0


@pytest.mark.parametrize("alpha", ALPHAS)
def test_ties_have_the_gradient_of_the_pair_form(alpha: float) -> None:
    """Some members are equal, and some equal the truth. The derivative of |x| at 0 is 0, as in autograd."""
    error = torch.tensor([[1.0, 1.0, -2.0, 0.0], [0.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    expected = pair_form(error, alpha)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), error)
    score = ensemble_crps(error, alpha)
    (gradient,) = torch.autograd.grad(score.sum(), error)
    torch.testing.assert_close(score, expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-7)
    # In the fair score, an error of the last member has no cost if all others equal the truth.
    assert gradient[1, 3].item() == pytest.approx((1 - alpha) / 16, abs=1e-7)


@pytest.mark.parametrize("num_members", [2, 4, 16])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_gaussian_ensemble_reaches_the_best_spread(num_members: int, alpha: float) -> None:
    """Minimise over the spread r of members r * n_j for a truth of deviation 1. The best r has a closed form."""
    k = (num_members - 1 + alpha) / (num_members * math.sqrt(2))
    best_spread = k / math.sqrt(1 - k * k)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(200_000 // num_members, num_members, generator=generator, dtype=torch.float64)
    truth = torch.randn(len(noise), 1, generator=generator, dtype=torch.float64)
    spread = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([spread], lr=0.5, max_iter=12)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = ensemble_crps(spread * noise - truth, alpha).mean()
        loss.backward()
        return loss

    optimizer.step(evaluate)
    assert spread.item() == pytest.approx(best_spread, abs=0.02)


def test_float32_is_accurate_for_nearly_equal_members() -> None:
    members, truth = draw_members(4, dtype=torch.float64)
    members = 300.0 + truth[:, None] + 1e-3 * members
    error = members.float() - (300.0 + truth).float()[:, None]
    score = ensemble_crps(error, 1.0)
    # The reference is the float64 score of the same float32 errors, so cancellation would be visible.
    torch.testing.assert_close(score.double(), pair_form(error.double(), 1.0), rtol=1e-4, atol=1e-12)


def test_loss_is_the_weighted_mean_of_the_score() -> None:
    members, truth = draw_members(4)
    loss = build_ensemble_loss({"kind": "crps", "alpha": 0.5, "weights": {"t": 3.0}})(members, truth)
    area_CHW = torch.from_numpy(GRID.masked_area_weights(np.ones((3, *GRID.shape), dtype=bool)))
    score_BCHW = pair_form((members - truth[:, None]).double(), 0.5)
    score_BC = (score_BCHW * area_CHW).sum((2, 3))
    expected = (score_BC * torch.tensor([0.2, 0.2, 0.6])).sum(1).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss.dtype == torch.float32


def test_one_member_is_the_mean_absolute_error() -> None:
    members, truth = draw_members(1)
    crps = build_ensemble_loss({"kind": "crps"})(members, truth)
    assert crps.item() == build_ensemble_loss({"kind": "mae"})(members, truth).item()


def test_missing_truth_masks_the_pair_term() -> None:
    """Members have no influence and no gradient where the truth is missing."""
    mask = np.zeros(GRID.shape, dtype=bool)
    mask[:6] = True
    loss = build_ensemble_loss({"kind": "crps", "alpha": 1.0}, {"t": mask, "q": mask})
    members, truth = draw_members(4)
    members = members.requires_grad_()
    loss_value = loss(members, truth)
    (gradient,) = torch.autograd.grad(loss_value, members)
    changed_members = members.detach().clone()
    changed_members[..., :6, :] *= 5.0
    assert loss(changed_members, truth).item() == loss_value.item()
    assert gradient[..., :6, :].abs().max() == 0 and gradient[..., 6:, :].abs().min() > 0


def test_global_mean_term_is_added() -> None:
    members, truth = draw_members(4)
    loss_without_term = build_ensemble_loss({"kind": "crps"})(members, truth)
    loss_with_term = build_ensemble_loss({"kind": "crps", "global_mean": 10.0})(members, truth)
    area = torch.from_numpy(GRID.masked_area_weights(np.ones((3, *GRID.shape), dtype=bool)))
    mean_error = ((members - truth[:, None]).double() * area).sum((3, 4))
    expected = 10.0 * pair_form(mean_error, 0.95).mean()
    assert (loss_with_term - loss_without_term).item() == pytest.approx(expected.item(), rel=1e-4)


def test_sum_adds_its_weighted_terms() -> None:
    members, truth = draw_members(4)
    terms = [{"kind": "crps", "weight": 0.5}, {"kind": "mse", "weight": 2.0}]
    total = build_ensemble_loss({"kind": "sum", "terms": terms, "weights": {"t": 3.0}})(members, truth)
    crps = build_ensemble_loss({"kind": "crps", "weights": {"t": 3.0}})(members, truth)
    mse = build_ensemble_loss({"kind": "mse", "weights": {"t": 3.0}})(members, truth)
    assert total.item() == pytest.approx(0.5 * crps.item() + 2.0 * mse.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("conf", "coupled_dims"),
    [
        ({"kind": "mse"}, set()),
        ({"kind": "mae", "global_mean": 1.0}, {"cells"}),
        ({"kind": "crps"}, set()),
        ({"kind": "crps", "global_mean": 1.0}, {"cells"}),
        ({"kind": "sum", "terms": [{"kind": "crps"}, {"kind": "mse"}]}, set()),
        ({"kind": "sum", "terms": [{"kind": "crps"}, {"kind": "huber", "global_mean": 1.0}]}, {"cells"}),
    ],
)
def test_coupled_dimensions(conf: dict, coupled_dims: set[str]) -> None:
    assert build_ensemble_loss(conf).coupled_dims == coupled_dims


def test_loss_couples_all_dimensions_by_default() -> None:
    assert Loss.coupled_dims == {"cells", "channels"}


def test_saved_sum_can_be_read() -> None:
    """A saved config has every key of every term."""
    section = LOSSES.find_section("sum")
    terms = [{"kind": "crps", "weight": 0.5}, {"kind": "crps", "alpha": 1.0}]
    loss = section.model_validate({"kind": "sum", "terms": terms, "weights": {"t": 3.0}, "scaling": "state"})
    assert loss.needs_members
    assert section.model_validate(loss.model_dump(mode="json")) == loss


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ([], "terms"),
        ([{"kind": "crps", "scaling": "state"}], "loss.terms.0 sets scaling, but all terms share this key"),
        ([{"kind": "sum", "terms": [{"kind": "mse"}]}], '"sum" is not a loss'),
        ([{"kind": "crsp"}], "crsp"),
    ],
)
def test_wrong_terms_are_refused(terms: list[dict], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        LOSSES.find_section("sum").model_validate({"kind": "sum", "terms": terms})
