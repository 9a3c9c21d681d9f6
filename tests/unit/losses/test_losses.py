"""Tests of the losses: scaling, weights, masks, members, and losses from plugins."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from credit.channels import ChannelMap
from credit.config.registry import LOSSES
from credit.config.sections.loss import LossSection
from credit.errors import ConfigError
from credit.grid import LatLonGrid
from credit.losses import register_loss
from credit.losses.base import Loss, LossContext, PointwiseLoss
from credit.losses.build import build_loss
from tests.registries import isolate

GRID = LatLonGrid.from_coords(np.linspace(90, -90, 13), np.arange(24) * 15.0)[0]
CHANNELS = ChannelMap.build({"prognostic": {"vars_3D": ["q"], "vars_2D": ["t"]}}, [850, 250])


def build_test_loss(conf: dict, scale: list[float] | None = None, masks: dict | None = None):
    """Return a function of prediction and target (B, C, H, W), with the prediction as the only member."""
    section = LOSSES.find_section(conf.get("kind", "mse")).model_validate({"kind": "mse", **conf})
    loss = build_loss(section, CHANNELS, GRID, np.array(scale or [1.0, 1.0, 1.0]), masks or {})
    return lambda prediction_BCHW, target_BCHW: loss(prediction_BCHW[:, None], target_BCHW)


def expand_values(values: list[float], batch: int = 2) -> torch.Tensor:
    return torch.tensor(values)[None, :, None, None].expand(batch, 3, *GRID.shape)


def test_persistence_scores_one_with_tendency_scaling() -> None:
    scale = [0.5, 0.1, 0.02]
    generator = torch.Generator().manual_seed(0)
    change = torch.randn(400, 3, *GRID.shape, generator=generator) * torch.tensor(scale)[None, :, None, None]
    loss = build_test_loss({"scaling": "tendency"}, scale)(torch.zeros_like(change), change)
    assert loss.item() == pytest.approx(1.0, abs=0.02)


def test_cells_have_area_weights() -> None:
    """A field of sin^2(latitude) has the mean 1/3 on the sphere (exact on bands only in the limit)."""
    field = torch.from_numpy(np.sin(np.deg2rad(GRID.lat))).float()[None, None, :, None].expand(1, 3, *GRID.shape)
    zero = torch.zeros_like(field)
    assert build_test_loss({"scaling": "state"})(field, zero).item() == pytest.approx(1 / 3, abs=0.02)
    unweighted = build_test_loss({"scaling": "state", "latitude_weights": False})(field, zero).item()
    assert unweighted == pytest.approx(float((np.sin(np.deg2rad(GRID.lat)) ** 2).mean()), rel=1e-6)


@pytest.mark.parametrize(("kind", "expected"), [("mse", 4.0), ("mae", 2.0), ("huber", 1.5)])
def test_pointwise_losses_of_a_constant_error(kind: str, expected: float) -> None:
    loss = build_test_loss({"kind": kind, "scaling": "state"})(
        expand_values([2.0, 2.0, 2.0]), expand_values([0.0, 0.0, 0.0])
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_weights_by_variable_channel_and_pressure() -> None:
    error, zero = expand_values([1.0, 0.0, 0.0]), expand_values([0.0, 0.0, 0.0])
    assert build_test_loss({"scaling": "state"})(error, zero).item() == pytest.approx(1 / 3, rel=1e-6)
    assert build_test_loss({"scaling": "state", "weights": {"t": 2}})(error, zero).item() == pytest.approx(
        1 / 4, rel=1e-6
    )
    assert build_test_loss({"scaling": "state", "weights": {"q850": 4}})(error, zero).item() == pytest.approx(
        4 / 6, rel=1e-6
    )
    by_pressure = build_test_loss({"scaling": "state", "level_weights": "pressure"})(error, zero).item()
    assert by_pressure == pytest.approx(850 / 550 / 3, rel=1e-6)
    with pytest.raises(ConfigError, match='"qq" is not an output'):
        build_test_loss({"weights": {"qq": 1}})


def test_global_mean_term_is_added() -> None:
    """A wave with the mean 0 adds nothing. A uniform error e adds weight x e^2."""
    wave = torch.cos(torch.deg2rad(torch.from_numpy(GRID.lon))).float()[None, None, None].expand(1, 3, *GRID.shape)
    zero = torch.zeros_like(wave)
    loss_without_term, loss_with_term = (
        build_test_loss({"scaling": "state"}),
        build_test_loss({"scaling": "state", "global_mean": 50}),
    )
    assert loss_with_term(wave, zero).item() == pytest.approx(loss_without_term(wave, zero).item(), rel=1e-5)
    uniform = expand_values([0.1, 0.0, 0.0])
    term = loss_with_term(uniform, torch.zeros_like(uniform)) - loss_without_term(uniform, torch.zeros_like(uniform))
    assert term.item() == pytest.approx(50 * 0.01 / 3, rel=1e-5)


def test_masked_cells_do_not_count() -> None:
    mask = np.zeros(GRID.shape, dtype=bool)
    mask[:6] = True
    error = torch.where(torch.from_numpy(mask), 100.0, 1.0).float()[None, None].expand(1, 3, *GRID.shape)
    loss = build_test_loss({"scaling": "state"}, masks={"q": mask, "t": mask})(error, torch.zeros_like(error))
    assert loss.item() == pytest.approx(1.0, rel=1e-6)


def test_members_have_equal_weight() -> None:
    """The loss of an ensemble is the mean of its members' losses."""
    section = LOSSES.find_section("mse").model_validate({"kind": "mse", "global_mean": 3.0})
    loss = build_loss(section, CHANNELS, GRID, np.array([0.5, 1.0, 2.0]), {})
    generator = torch.Generator().manual_seed(4)
    members = torch.randn(2, 3, 3, *GRID.shape, generator=generator)
    target = torch.randn(2, 3, *GRID.shape, generator=generator)
    single = [loss(members[:, number : number + 1], target).item() for number in range(3)]
    assert loss(members, target).item() == pytest.approx(np.mean(single), rel=1e-6)
    assert len(set(single)) == 3


class LogCoshSection(LossSection):
    sharpness: float = 1.0


def test_loss_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's loss has the common weights, a config key and a gradient. Its name cannot be registered again."""
    isolate(monkeypatch)

    @register_loss("log_cosh", LogCoshSection)
    class LogCosh(PointwiseLoss):
        def __init__(self, context: LossContext, section: LogCoshSection) -> None:
            super().__init__(context, section)
            self._sharpness = section.sharpness

        def cost(self, error_BMCHW: torch.Tensor) -> torch.Tensor:
            return (self._sharpness * error_BMCHW).cosh().log()

    prediction = expand_values([0.5, -1.0, 2.0]).clone().requires_grad_()
    conf = {"kind": "log_cosh", "scaling": "state", "weights": {"t": 3.0}, "sharpness": 2.0}
    loss = build_test_loss(conf)(prediction, expand_values([0.0, 0.0, 0.0]))
    # The weights add up to 5.
    weight = {"t": 3.0, "q850": 1.0, "q250": 1.0}
    channel_names = [channel.name for channel in CHANNELS.output]
    value = dict(zip(channel_names, [0.5, -1.0, 2.0], strict=True))
    expected = sum(weight[name] * math.log(math.cosh(2 * value[name])) for name in weight) / 5
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    gradient = prediction.grad[:, channel_names.index("t")].sum().item()
    assert gradient == pytest.approx(3 / 5 * 2 * math.tanh(2 * value["t"]), rel=1e-5), (
        "the derivative of log cosh is tanh"
    )

    class OtherLoss(PointwiseLoss):
        pass

    for name in ("log_cosh", "mse", "huber"):
        with pytest.raises(ConfigError, match="is taken"):
            register_loss(name, LogCoshSection)(OtherLoss)
    with pytest.raises(ConfigError, match="must derive from credit.losses.base.Loss"):
        register_loss("function", LogCoshSection)(lambda error: error)


def test_a_plugin_may_be_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)

    def register_power(power: int) -> type[Loss]:
        @register_loss("power", LossSection)
        class Power(PointwiseLoss):
            def cost(self, error_BMCHW: torch.Tensor) -> torch.Tensor:
                return error_BMCHW.abs() ** power

        return Power

    register_power(3)
    assert register_power(4) is LOSSES.find_class("power"), "the newest class replaces the old one"


def test_trainable_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)

    @register_loss("learned", LossSection)
    class Learned(PointwiseLoss):
        def __init__(self, context: LossContext, section: LossSection) -> None:
            super().__init__(context, section)
            self.temperature = torch.nn.Parameter(torch.ones(()))

    with pytest.raises(ConfigError, match=r"loss.kind: learned has trainable parameters \(temperature\)"):
        build_test_loss({"kind": "learned"})
