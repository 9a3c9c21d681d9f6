"""Ensembles: perturbations of the initial state, lagged members, dropout, and their description."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from credit.config.sections.execution import ParallelismConfig
from credit.config.sections.inference import EnsembleConfig
from credit.errors import ConfigError
from credit.forecast.ensemble.perturbations import build_perturbation, describe_ensemble, enable_dropout
from credit.forecast.ensemble.section import GaussianOrBredSection, SPPTSection
from credit.forecast.rollout import ForecastInputs, ForecastStart, build_starts, forecast_batch
from credit.forecast.stepper import Stepper
from credit.grid import LatLonGrid
from credit.models.wxformer import WXFormer
from credit.parallel.mesh import build_mesh, plan_degrees
from credit.parallel.parallelize import parallelize
from credit.parallel.process_info import fake_process_group
from credit.parallel.tensor.dropout import RankRandomState
from tests.unit.analytic_reader import make_grid
from tests.unit.forecast.clamps import build_clamp_chain
from tests.unit.forecast.test_stepper import CHANNELS, TENDENCY, build_normalizer

STEP = 360
GRID = make_grid(16, 32)
SMALL = {
    "image_height": 16, "image_width": 32, "in_channels": 4, "out_channels": 3, "frames": 1, "output_frames": 1,
    "dim": [8, 16, 32, 64], "depth": [1, 1, 1, 1], "dim_head": 8, "global_window_size": [2, 2, 1, 1],
    "local_window_size": [4, 2, 1, 1], "padding": {"mode": "earth", "lat": [8, 8], "lon": [8, 8]},
}  # fmt: skip


class Growth(nn.Module):
    """A residual network that multiplies anomalies of the first channel by 3 and of the second by 1.5 in a step."""

    def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        state = x_BCTHW[:, :2, -1:]
        scale = build_normalizer().tendency_scale_C[None, :, None, None, None]
        change = torch.tensor([2.0, 0.5])[None, :, None, None, None] * state / scale
        return torch.cat([change, torch.zeros_like(state[:, :1])], dim=1)


class ConstantFrames:
    """Frames in which every field is 0 in normalised units."""

    def prognostic(self, minutes: int) -> np.ndarray:
        return np.stack([np.full(GRID.shape, value, dtype=np.float32) for value in (10.0, -5.0)])

    def forcing(self, minutes: int, initial: int | None = None) -> np.ndarray:
        return np.zeros((1, *GRID.shape), dtype=np.float32)


def make_stepper(model: nn.Module, minimum: list[float] | None = None, grid: LatLonGrid = GRID) -> Stepper:
    valid = torch.ones(2, *grid.shape, dtype=torch.bool)
    valid[1, 3, 5] = False
    clamps = build_clamp_chain(CHANNELS, build_normalizer(), minimum)
    return Stepper(model, CHANNELS, build_normalizer(), torch.ones(1, *grid.shape), True, valid, postprocess=clamps)


def compute_perturbations(
    conf: EnsembleConfig, starts: list[ForecastStart], model: nn.Module | None = None, **options
) -> np.ndarray:
    """Return the perturbations in physical units, (B, C, H, W), of a state that is 10 and -5 everywhere."""
    stepper = make_stepper(model or Growth(), **options)
    perturb = build_perturbation(conf, stepper, ForecastInputs(ConstantFrames(), STEP, 1), GRID)
    state = perturb(starts, torch.zeros(len(starts), 2, 1, *GRID.shape))
    return stepper.normalizer.decode(state[:, :, 0], "prognostic").numpy() - np.array([10.0, -5.0])[:, None, None]


@pytest.mark.parametrize("kind", ["gaussian", "correlated"])
def test_noise_has_the_configured_amplitude(kind: str) -> None:
    conf = EnsembleConfig(members=61, perturbation=GaussianOrBredSection(kind=kind, amplitude=0.5, length=2000))
    perturbed = compute_perturbations(conf, build_starts([0], 61))
    assert np.abs(perturbed[0]).max() < 1e-5, "the control starts from the analysis"
    expected = 0.5 * np.array(TENDENCY[:2])
    # 30 independent fields, of which the correlated ones have some dozens of degrees of freedom each
    np.testing.assert_allclose(perturbed[1:].std(axis=(0, 2, 3)), expected, rtol=0.1)
    np.testing.assert_allclose(perturbed[1::2], -perturbed[2::2], atol=1e-5)
    assert np.abs(perturbed[:, 1, 3, 5]).max() < 1e-5, "what is always missing stays"
    neighbours = np.corrcoef(perturbed[1::2, 0, 4:12, :-1].ravel(), perturbed[1::2, 0, 4:12, 1:].ravel())[0, 1]
    assert neighbours > 0.7 if kind == "correlated" else abs(neighbours) < 0.1


def test_a_member_does_not_depend_on_its_batch() -> None:
    conf = EnsembleConfig(members=4, perturbation=GaussianOrBredSection(), control=False)
    starts = build_starts([0, 1440], 4)
    batch_perturbations = compute_perturbations(conf, starts)
    separate = np.concatenate([compute_perturbations(conf, [start]) for start in reversed(starts)])[::-1]
    np.testing.assert_array_equal(batch_perturbations, separate)
    assert len({row.tobytes() for row in batch_perturbations}) == 8
    other_seed = compute_perturbations(
        EnsembleConfig(members=4, perturbation=GaussianOrBredSection(), control=False, seed=1), starts
    )
    assert np.abs(other_seed - batch_perturbations).max() > 0.01


def test_minimum_holds() -> None:
    conf = EnsembleConfig(members=3, perturbation=GaussianOrBredSection(kind="gaussian", amplitude=3.0))
    perturbed = compute_perturbations(conf, build_starts([0], 3), minimum=[9.9, -torch.inf, -torch.inf])
    assert perturbed[:, 0].min() == pytest.approx(-0.1, abs=1e-5) and perturbed[:, 0].max() > 0.5


def test_bred_vectors_follow_the_fastest_growth() -> None:
    """After five cycles of two steps, the faster channel has grown 2^10 times as much as the other."""
    section = GaussianOrBredSection(kind="bred", amplitude=0.2, cycles=5, cycle="12h")
    conf = EnsembleConfig(members=3, perturbation=section)
    perturbed = compute_perturbations(conf, build_starts([0], 3))[1:] / np.array(TENDENCY[:2])[:, None, None]
    area = GRID.area_weights() / GRID.area_weights().sum()
    size = np.sqrt((perturbed**2 * area).sum(axis=(2, 3)))
    # The amplitude is a mean over both channels, and the first channel has nearly all of the perturbation.
    np.testing.assert_allclose(size[:, 0], 0.2 * np.sqrt(2), rtol=1e-3)
    assert (size[:, 1] < 0.01 * size[:, 0]).all()


def test_lagged_members_start_earlier_and_are_valid_at_the_same_time() -> None:
    starts = build_starts([1440], 3, lag_minutes=720)
    assert [start.analysis_minutes for start in starts] == [1440, 720, 0]

    class TimeFrames(ConstantFrames):
        """Frames whose first channel is the time in minutes."""

        def prognostic(self, minutes: int) -> np.ndarray:
            fields = super().prognostic(minutes)
            fields[0] = minutes
            return fields

        def forcing(self, minutes: int, initial: int | None = None) -> np.ndarray:
            # The step to the last lead time begins at 1440. Members with a shorter lag continue with this forcing.
            assert minutes <= 1440
            return super().forcing(minutes, initial)

    class TimeStep(nn.Module):
        """Network that adds one time step to the first channel."""

        def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
            change = torch.zeros(len(x_BCTHW), 3, 1, *GRID.shape)
            change[:, 0] = STEP / TENDENCY[0]
            return change

    inputs = ForecastInputs(TimeFrames(), STEP, 1)
    outputs = list(forecast_batch(make_stepper(TimeStep()), inputs, starts, 5))
    for step, output in enumerate(outputs, start=1):
        valid = [start.analysis_minutes + step * STEP for start in starts]
        np.testing.assert_allclose(output[:, 0, 0, 0], valid, rtol=1e-5)


def test_enabled_dropout_enters_the_random_state_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the masks of ranks that split a network differ, also in an ensemble, whose layers are in evaluation mode."""
    enter_calls: list[int] = []
    monkeypatch.setattr(RankRandomState, "enter", lambda *_: enter_calls.append(1))
    with fake_process_group(2), torch.no_grad():
        mesh = build_mesh(plan_degrees(ParallelismConfig(tensor=2), 2), 0, "cpu")
        model = WXFormer.from_kwargs(**SMALL | {"dim_head": 4}, attn_dropout=0.2, ff_dropout=0.1).eval()
        parallelize(model, mesh.device_mesh, shard=False)
        model(torch.randn(1, 4, 1, 16, 32))
        assert not enter_calls
        enable_dropout(model)
        model(torch.randn(1, 4, 1, 16, 32))
    assert len(enter_calls) == 16, "four parts of each of four layers"


@pytest.mark.parametrize("rates", [{"attn_dropout": 0.2}, {"ff_dropout": 0.1}], ids=str)
def test_dropout_draws_in_evaluation_and_nothing_else_changes(rates: dict[str, float]) -> None:
    model = WXFormer.from_kwargs(**SMALL, **rates).eval()
    x = torch.randn(1, 4, 1, 16, 32)
    with torch.no_grad():
        before = [model(x), model(x)]
        enable_dropout(model)
        after = [model(x), model(x)]
        torch.manual_seed(3)
        seeded = model(x)
        torch.manual_seed(3)
        seeded_again = model(x)
    assert torch.equal(*before) and not torch.equal(*after) and torch.equal(seeded, seeded_again)
    assert not model.training
    with pytest.raises(ConfigError, match=r"inference.ensemble.dropout: the network was trained without"):
        enable_dropout(WXFormer.from_kwargs(**SMALL))


def test_description_of_an_ensemble() -> None:
    assert not EnsembleConfig(members=3).has_added_spread
    section = GaussianOrBredSection(kind="bred", cycle="8h")
    conf = EnsembleConfig(members=3, perturbation=section, dropout=True, stochastic=SPPTSection())
    assert describe_ensemble(conf) == (
        "3 members; seed 0; bred perturbations of 0.3 deviations of change, 500 km, 3 cycles of 8h; dropout; "
        "changes times 1 + 0.5 r, r of 500 km and 6h; member 0 unperturbed"
    )


def test_ensembles_that_differ_are_described_differently() -> None:
    base = {"members": 3, "perturbation": {"kind": "bred"}, "stochastic": {}, "lagged": "6h", "dropout": True}
    changes = [
        {}, {"members": 4}, {"seed": 1}, {"control": False}, {"dropout": False}, {"lagged": "12h"}, {"lagged": None},
        {"stochastic": None}, {"perturbation": None}, {"perturbation": None, "control": False},
        *({"perturbation": {"kind": "bred"} | options} for options in (
            {"kind": "gaussian"}, {"kind": "correlated"}, {"amplitude": 1.0}, {"length": 600}, {"cycles": 2},
            {"cycle": "12h"},
        )),
        *({"stochastic": options} for options in ({"amplitude": 0.4}, {"length": 600}, {"time": "12h"})),
    ]  # fmt: skip
    descriptions = {describe_ensemble(EnsembleConfig(**base | change)) for change in changes}
    assert len(descriptions) == len(changes)


def test_perturbation_that_needs_whole_fields_is_refused_on_divided_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin's perturbation works on this rank's part of the fields only if it declares this."""
    monkeypatch.setattr("credit.forecast.ensemble.perturbations.GaussianPerturbation.supports_domain", False)
    conf = EnsembleConfig(members=2, perturbation=GaussianOrBredSection(kind="gaussian"))
    stepper = make_stepper(Growth())
    stepper.domain = object()
    with pytest.raises(ConfigError, match="gaussian does not declare.*set inference.parallelism.domain to 1"):
        build_perturbation(conf, stepper, ForecastInputs(ConstantFrames(), STEP, 1), GRID)
