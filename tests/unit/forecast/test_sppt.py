"""Stochastically perturbed tendencies: the random fields, and the changes that they multiply."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from credit.config.sections.inference import EnsembleConfig
from credit.forecast.ensemble.section import SPPTSection
from credit.forecast.ensemble.sppt import build_tendency_perturbation
from credit.forecast.rollout import ForecastInputs, ForecastStart, build_starts, forecast_batch
from tests.unit.forecast.test_perturbations import GRID, STEP, ConstantFrames, Growth, make_stepper

CPU = torch.device("cpu")


def compute_factors(starts: list[ForecastStart], steps: int, control: bool = True, **options: object) -> np.ndarray:
    """Return the factors of the first steps, (steps, B, H, W)."""
    conf = EnsembleConfig(members=50, stochastic=SPPTSection(**options), control=control)
    factor_fields = build_tendency_perturbation(conf, GRID, STEP)(starts, CPU)
    return np.stack([factor.numpy()[:, 0] for factor in itertools.islice(factor_fields, steps)])


def test_fields_have_size_memory_and_correlation() -> None:
    r = compute_factors(build_starts([0], 41), 30, amplitude=0.2, length=2000, time="12h") - 1
    assert (r[:, 0] == 0).all(), "the control is not perturbed"
    r = r[:, 1:]
    assert r.mean() == pytest.approx(0, abs=0.02)
    # The amplitude is reached in the first step already.
    np.testing.assert_allclose(r.std(axis=(1, 2, 3)), 0.2, rtol=0.15)
    for lag in (1, 2, 4):
        expected = np.exp(-lag * 6 / 12)
        assert np.corrcoef(r[lag:].ravel(), r[:-lag].ravel())[0, 1] == pytest.approx(expected, abs=0.06)
    # The distance between neighbours along the equator is 1251 km.
    rows = r[:, :, 7:9]
    neighbour_correlation = np.corrcoef(rows[..., :-1].ravel(), rows[..., 1:].ravel())[0, 1]
    assert neighbour_correlation == pytest.approx(np.exp(-(1251**2) / (2 * 2000**2)), abs=0.05)


def test_factors_are_never_negative() -> None:
    factor_fields = compute_factors(build_starts([0], 10), 10, amplitude=2.0)[:, 1:]
    assert factor_fields.min() == 0.0 and factor_fields.max() == 2.0


def test_a_member_does_not_depend_on_its_batch() -> None:
    starts = build_starts([0, 1440], 3)
    batch_factors = compute_factors(starts, 3, control=False)
    separate = np.concatenate([compute_factors([start], 3, control=False) for start in starts], axis=1)
    np.testing.assert_array_equal(batch_factors, separate)
    assert len({row.tobytes() for row in batch_factors[0]}) == 6


def test_only_changes_of_prognostic_channels_are_multiplied() -> None:
    stepper = make_stepper(Growth())
    state, forcing = torch.randn(2, 2, 1, *GRID.shape), torch.zeros(2, 1, 1, *GRID.shape)
    factor = torch.rand(2, 1, *GRID.shape) * 2
    plain = stepper.step(state, forcing)
    perturbed = stepper.step(state, forcing, factor)
    initial = state[:, :, 0]
    torch.testing.assert_close(perturbed[:, :2] - initial, factor * (plain[:, :2] - initial), rtol=1e-4, atol=1e-5)
    assert torch.equal(perturbed[:, 2:], plain[:, 2:])


def test_members_with_equal_initial_states_diverge() -> None:
    class NonZero(ConstantFrames):
        """Nonzero frames, for which the network predicts changes that can be multiplied."""

        def prognostic(self, minutes: int) -> np.ndarray:
            return super().prognostic(minutes) + 1.0

    conf = EnsembleConfig(members=3, stochastic=SPPTSection())
    starts = build_starts([0], 3)
    stepper = make_stepper(Growth())
    inputs = ForecastInputs(NonZero(), STEP, 1)
    draw_factors = build_tendency_perturbation(conf, GRID, STEP)
    ensemble = list(forecast_batch(stepper, inputs, starts, 3, draw_factors=draw_factors))
    single_forecast = list(forecast_batch(stepper, inputs, starts[:1], 3))
    for step, (members, single) in enumerate(zip(ensemble, single_forecast, strict=True)):
        assert torch.equal(members[0], single[0]), step
        assert (members[1] - members[2]).abs().max() > 0.1
