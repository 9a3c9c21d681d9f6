"""Stepper: residual outputs, feedback, gradients through a rollout, and recomputation."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import nn

from credit.channels import ChannelMap
from credit.data.normalize import Normalizer
from credit.data.store.statistics import Statistics
from credit.forecast.stepper import Stepper, slice_forcing_by_step
from credit.grid import LatLonGrid
from credit.losses.build import build_loss
from credit.losses.section import PointwiseSection

from .clamps import build_clamp_chain

GROUPS = {
    "prognostic": ["a", "b"],
    "diagnostic": ["rain"],
    "dynamic_forcing": ["sun"],
    "static": ["land"],
}
CHANNELS = ChannelMap.build({name: {"vars_3D": [], "vars_2D": members} for name, members in GROUPS.items()}, [])
NAMES = ("a", "b", "rain", "sun", "land")
MEAN, STD, TENDENCY = [10.0, -5.0, 1.0, 0.0, 0.5], [2.0, 4.0, 0.5, 1.0, 0.5], [0.2, 2.0, 0.4, 0.5, 0.0]


def build_normalizer() -> Normalizer:
    zeros = np.zeros(5)
    statistics = Statistics(NAMES, np.array(MEAN), np.array(STD), zeros, zeros, zeros, np.array(TENDENCY), zeros)
    return Normalizer(CHANNELS, statistics, {}, {})


class Constant(nn.Module):
    """Network that returns the same values in every cell, and stores its input as `seen`."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        self.seen = x_BCTHW
        batch, _, _, rows, columns = x_BCTHW.shape
        return self.values[None, :, None, None, None].expand(batch, -1, 1, rows, columns)


def build_stepper(model: nn.Module, residual: bool, minimum: list[float] | None = None) -> Stepper:
    valid = torch.ones(2, 4, 8, dtype=torch.bool)
    clamps = build_clamp_chain(CHANNELS, build_normalizer(), minimum)
    return Stepper(model, CHANNELS, build_normalizer(), torch.ones(1, 4, 8), residual, valid, postprocess=clamps)


def test_the_input_has_every_group_in_order() -> None:
    model = Constant([0.0, 0.0, 0.0])
    stepper = build_stepper(model, residual=False)
    stepper.step(torch.full((2, 2, 2, 4, 8), 3.0), torch.full((2, 1, 2, 4, 8), 7.0))
    assert model.seen.shape == (2, 4, 2, 4, 8)
    assert model.seen[0, :, 0, 0, 0].tolist() == [3.0, 3.0, 7.0, 1.0]  # land: (1 - 0.5) / 0.5


def test_residual_by_name_and_unit() -> None:
    """Prognostic: last frame + tendency deviation x output; diagnostic: mean + deviation x output."""
    stepper = build_stepper(Constant([1.0, -2.0, 3.0]), residual=True)
    physical = torch.tensor([12.0, -1.0])[None, :, None, None, None].expand(1, 2, 1, 4, 8)
    state = stepper.normalizer.encode(physical, "prognostic")
    out = stepper.normalizer.decode(stepper.step(state, torch.zeros(1, 1, 1, 4, 8)), "output")
    assert out[0, :, 0, 0].tolist() == pytest.approx([12.0 + 0.2, -1.0 - 2 * 2.0, 1.0 + 3 * 0.5], rel=1e-5)


class Computed(nn.Module):
    """Network that computes its output from its input; the caller may write into it if `output_is_new` is True."""

    def __init__(self, output_is_new: bool) -> None:
        super().__init__()
        self.output_is_new = output_is_new
        self.output_addresses: list[int] = []

    def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        output = torch.tensor([1.0, -2.0, 0.5])[None, :, None, None, None] + 0.1 * x_BCTHW[:, :3, -1:]
        self.output_addresses.append(output.data_ptr())
        return output


class Cached(nn.Module):
    """Network that returns the same tensor at every call."""

    output = None

    def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        if self.output is None:
            self.output = torch.linspace(-1, 1, 96).reshape(1, 3, 1, 4, 8)
        return self.output


def compute_forecasts(stepper: Stepper, mode: type, frames: int = 1) -> list[torch.Tensor]:
    with mode():
        state = torch.linspace(-1, 1, 64 * frames).reshape(1, 2, frames, 4, 8)
        state_before = state.clone()
        outputs = stepper.rollout(state, lambda number: torch.full((1, 1, frames, 4, 8), float(number)), 3)
        forecasts = [output.clone() for output in outputs]
        assert torch.equal(state, state_before)
    return forecasts


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("minimum", [None, [-torch.inf, -0.1, 1.2]])
@pytest.mark.parametrize("frames", [1, 2])
def test_inference_mode_gives_the_same_forecasts(residual: bool, minimum: list[float] | None, frames: int) -> None:
    for network in (Computed(True), Computed(False), Cached(), Constant([1.0, -2.0, 0.5])):
        stepper = build_stepper(network, residual, minimum)
        expected = compute_forecasts(stepper, torch.no_grad, frames)
        forecasts = compute_forecasts(stepper, torch.inference_mode, frames)
        for forecast, expected_forecast in zip(forecasts, expected, strict=True):
            assert torch.equal(forecast, expected_forecast)


def test_a_new_output_is_reused_for_the_result() -> None:
    for output_is_new in (True, False):
        network = Computed(output_is_new)
        with torch.inference_mode():
            result = build_stepper(network, residual=True).step(torch.zeros(1, 2, 1, 4, 8), torch.zeros(1, 1, 1, 4, 8))
        assert (result.data_ptr() == network.output_addresses[0]) == output_is_new


def test_minimum_in_physical_units() -> None:
    stepper = build_stepper(Constant([0.0, 0.0, -9.0]), residual=True, minimum=[-torch.inf, -torch.inf, 0.0])
    out = stepper.decode(stepper.step(torch.zeros(1, 2, 1, 4, 8), torch.zeros(1, 1, 1, 4, 8)))
    assert out[0, 2].eq(0).all()


def test_rollout_feeds_back_prognostic_channels_only() -> None:
    stepper = build_stepper(Constant([1.0, 0.0, 5.0]), residual=True)
    history = torch.zeros(1, 2, 2, 4, 8)
    forcing = torch.arange(5.0)[None, None, :, None, None].expand(1, 1, 5, 4, 8)
    seen = []
    for output in stepper.rollout(history, slice_forcing_by_step(forcing, 2), 4):
        seen.append(stepper.model.seen[0, :, :, 0, 0].tolist())
        last = output
    assert last[0, 0, 0, 0].item() == pytest.approx(4 * 0.1)  # four steps of 0.2 / 2
    assert seen[2][2] == [2.0, 3.0]  # the third step's forcing window
    assert seen[2][0] == pytest.approx([0.1, 0.2])  # and its two frames of history


def test_a_forecast_releases_its_initial_state() -> None:
    stepper = build_stepper(Constant([1.0, -1.0, 2.0]), residual=True)
    states = [torch.zeros(1, 2, 1, 4, 8)]
    initial_state = weakref.ref(states[0])
    with torch.inference_mode():
        outputs = stepper.rollout(states.pop(), lambda _: torch.zeros(1, 1, 1, 4, 8), 3)
        next(outputs)
    assert initial_state() is None


def test_masked_cells_of_the_state_stay_at_the_mean() -> None:
    valid = torch.ones(2, 4, 8, dtype=torch.bool)
    valid[0, :2] = False
    stepper = Stepper(Constant([1.0, 1.0, 0.0]), CHANNELS, build_normalizer(), torch.ones(1, 4, 8), True, valid)
    list(stepper.rollout(torch.zeros(1, 2, 1, 4, 8), lambda _: torch.zeros(1, 1, 1, 4, 8), 3))
    assert stepper.model.seen[0, 0, 0, :2].eq(0).all()
    assert stepper.model.seen[0, 0, 0, 2:].gt(0.1).all() and stepper.model.seen[0, 1].gt(0.1).all()


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_flow_through_every_step(recompute: bool) -> None:
    """A linear model y = (1 + s k) x: dy_n/dk is known in closed form."""

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k = nn.Parameter(torch.tensor(0.7))

        def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.k * x_BCTHW[:, :2], x_BCTHW[:, :1] * 0], dim=1)

    model = Gain()
    stepper = build_stepper(model, residual=True)
    history = torch.ones(1, 2, 1, 4, 8)
    outputs = list(stepper.rollout(history, lambda _: torch.zeros(1, 1, 1, 4, 8), 3, recompute=recompute))
    outputs[-1][0, 1, 0, 0].backward()
    share = 2.0 / 4.0  # tendency over state deviation of b
    assert model.k.grad.item() == pytest.approx(3 * share * (1 + share * 0.7) ** 2, rel=1e-5)


def test_the_state_stays_float32_under_autocast() -> None:
    stepper = Stepper(ZeroChange(), CHANNELS, build_normalizer(), torch.ones(1, 4, 8), True, None, amp=True)
    start = torch.full((1, 2, 1, 4, 8), 1.2345678)
    out = stepper.step(start, torch.zeros(1, 1, 1, 4, 8))
    assert out.dtype == torch.float32
    assert torch.equal(out[:, :2], start[:, :, 0])  # a zero change keeps every bit


class ZeroChange(nn.Module):
    """Network that returns zeros in bfloat16."""

    def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        return (x_BCTHW[:, :3] * 0).bfloat16()


def test_persistence_has_a_loss_of_one() -> None:
    """A network that outputs 0 predicts persistence. Its loss is 1 for changes with the deviation of the tendency."""
    stepper = build_stepper(Constant([0.0, 0.0, 0.0]), residual=True)
    scale = stepper.normalizer.tendency_scale_C.numpy()
    grid = LatLonGrid.equiangular(4, 8, poles=False)
    loss = build_loss(PointwiseSection(weights={"rain": 0.0}), CHANNELS, grid, scale, {})
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(2000, 2, 1, 4, 8, generator=generator)
    change = torch.randn(2000, 2, 4, 8, generator=generator) * torch.from_numpy(scale)[None, :, None, None]
    target = torch.cat([start[:, :, 0] + change, torch.zeros(2000, 1, 4, 8)], dim=1)
    with torch.no_grad():
        out = stepper.step(start, torch.zeros(2000, 1, 1, 4, 8))
    assert loss(out[:, None], target).item() == pytest.approx(1.0, abs=0.03)
