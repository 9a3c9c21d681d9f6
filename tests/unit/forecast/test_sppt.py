"""Stochastically perturbed tendencies: the random fields, and what they multiply."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from credit.config.schema_inference import EnsembleConfig
from credit.forecast.ensemble.section import SPPTSection
from credit.forecast.ensemble.sppt import build_stochastic
from credit.forecast.rollout import ForecastStart, forecast, make_starts
from tests.unit.forecast.test_perturbations import GRID, STEP, Growth, Still, make_stepper

CPU = torch.device("cpu")


def factors(starts: list[ForecastStart], steps: int, control: bool = True, **chosen: object) -> np.ndarray:
    """Return the factors of the first steps, (steps, B, H, W)."""
    conf = EnsembleConfig(members=50, stochastic=SPPTSection(**chosen), control=control)
    drawn = build_stochastic(conf, GRID, STEP)(starts, CPU)
    return np.stack([factor.numpy()[:, 0] for factor in itertools.islice(drawn, steps)])


def test_fields_have_size_memory_and_correlation() -> None:
    r = factors(make_starts([0], 41), 30, amplitude=0.2, length=2000, time="12h") - 1
    assert (r[:, 0] == 0).all(), "the control is not perturbed"
    r = r[:, 1:]
    assert r.mean() == pytest.approx(0, abs=0.02)
    # as soon as the first step
    np.testing.assert_allclose(r.std(axis=(1, 2, 3)), 0.2, rtol=0.15)
    for lag in (1, 2, 4):
        expected = np.exp(-lag * 6 / 12)
        assert np.corrcoef(r[lag:].ravel(), r[:-lag].ravel())[0, 1] == pytest.approx(expected, abs=0.06)
    # neighbours along the equator are 1251 km apart
    rows = r[:, :, 7:9]
    near = np.corrcoef(rows[..., :-1].ravel(), rows[..., 1:].ravel())[0, 1]
    assert near == pytest.approx(np.exp(-(1251**2) / (2 * 2000**2)), abs=0.05)


def test_no_change_turns_round() -> None:
    drawn = factors(make_starts([0], 10), 10, amplitude=2.0)[:, 1:]
    assert drawn.min() == 0.0 and drawn.max() == 2.0


def test_a_member_does_not_depend_on_its_batch() -> None:
    starts = make_starts([0, 1440], 3)
    together = factors(starts, 3, control=False)
    apart = np.concatenate([factors([start], 3, control=False) for start in starts], axis=1)
    np.testing.assert_array_equal(together, apart)
    assert len({row.tobytes() for row in together[0]}) == 6


def test_changes_are_multiplied_and_the_rest_is_not() -> None:
    stepper = make_stepper(Growth())
    state, forcing = torch.randn(2, 2, 1, *GRID.shape), torch.zeros(2, 1, 1, *GRID.shape)
    factor = torch.rand(2, 1, *GRID.shape) * 2
    plain, moved = stepper.step(state, forcing), stepper.step(state, forcing, factor)
    last = state[:, :, 0]
    torch.testing.assert_close(moved[:, :2] - last, factor * (plain[:, :2] - last), rtol=1e-4, atol=1e-5)
    assert torch.equal(moved[:, 2:], plain[:, 2:])


def test_members_part_though_they_start_alike() -> None:
    class Away(Still):
        """Not at rest, so that there is change to multiply."""

        def prognostic(self, minutes: int) -> np.ndarray:
            return super().prognostic(minutes) + 1.0

    conf = EnsembleConfig(members=3, stochastic=SPPTSection())
    starts, stepper = make_starts([0], 3), make_stepper(Growth())
    made = list(forecast(stepper, Away(), starts, 3, STEP, 1, stochastic=build_stochastic(conf, GRID, STEP)))
    alone = list(forecast(stepper, Away(), starts[:1], 3, STEP, 1))
    for step, (members, single) in enumerate(zip(made, alone, strict=True)):
        assert torch.equal(members[0], single[0]), step
        assert (members[1] - members[2]).abs().max() > 0.1
