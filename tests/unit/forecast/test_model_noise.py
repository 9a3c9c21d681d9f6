"""Noise inside the network in forecasts: members differ, the control has no noise, and batches have no effect."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from credit.config import build_config, load_config
from credit.config.sections.inference import EnsembleConfig
from credit.errors import ConfigError
from credit.forecast.ensemble.model_noise import build_model_noise
from credit.forecast.rollout import ForecastStart
from credit.models.base import ModelSpec
from credit.models.wxformer.section import WXFormerSection

SPEC = ModelSpec.from_sizes(image_height=8, image_width=16, in_channels=3, out_channels=3)
SECTION = WXFormerSection.model_validate(
    {
        "type": "wxformer",
        "noise": [{"kind": "global", "memory": ["0h", "forecast"]}, "cell", "spherical", "dropout"],
    }
)
STARTS = [ForecastStart(minutes, member, minutes) for minutes in (0, 1440) for member in range(3)]
CPU = torch.device("cpu")


def draw_noise(starts: list[ForecastStart], control: bool, pairs: bool = False, amplitude: float = 1.0) -> torch.Tensor:
    """Return the noise of three steps, (steps, B, K): global noise, one cell of cell and spherical noise, and seeds."""
    noise_use = {"pairs": pairs, "amplitude": amplitude}
    conf = EnsembleConfig(members=3, control=control, seed=5, model_noise=noise_use)
    conditions = build_model_noise(conf, SPEC, SECTION)(starts, CPU)
    steps = []
    for condition in itertools.islice(conditions, 3):
        assert condition["dropout"].dtype == torch.int64
        kinds = (condition["global"], condition["cell"][..., 2, 5], condition["spherical"][..., 2, 5])
        steps.append(torch.cat([*kinds, condition["dropout"]], dim=1))
    return torch.stack(steps)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("control", [False, True])
def test_members_differ_and_the_control_has_no_noise(control: bool, pairs: bool) -> None:
    noise_SBK = draw_noise(STARTS, control, pairs)
    for first, second in itertools.combinations(range(len(STARTS)), 2):
        both_controls = control and STARTS[first].member == STARTS[second].member == 0
        assert torch.equal(noise_SBK[:, first], noise_SBK[:, second]) == both_controls
    for index, start in enumerate(STARTS):
        assert noise_SBK[:, index].any() == (not control or start.member > 0)


@pytest.mark.parametrize("control", [False, True])
def test_members_of_a_pair_have_opposite_noise(control: bool) -> None:
    """The noise of dropout, the last column here, is a seed, which has no opposite."""
    members = range(5) if control else range(4)
    starts = [ForecastStart(1440, member, 1440) for member in members]
    noise_SBK = draw_noise(starts, control, pairs=True)[:, int(control) :]
    scaled_SBK = noise_SBK[..., :-1]
    assert torch.equal(scaled_SBK[:, 0], -scaled_SBK[:, 1]) and torch.equal(scaled_SBK[:, 2], -scaled_SBK[:, 3])
    assert not torch.equal(scaled_SBK[:, 0].abs(), scaled_SBK[:, 2].abs())
    assert len(set(noise_SBK[0, :, -1].tolist())) == 4
    assert torch.equal(draw_noise(starts, control)[:, int(control)], noise_SBK[:, 0]), (
        "the first of a pair is as without pairs"
    )


def test_amplitude_multiplies_all_noise_but_that_of_dropout() -> None:
    noise_SBK, doubled_SBK = draw_noise(STARTS, control=False), draw_noise(STARTS, control=False, amplitude=2.0)
    assert torch.equal(doubled_SBK[..., :-1], 2 * noise_SBK[..., :-1])
    assert torch.equal(doubled_SBK[..., -1], noise_SBK[..., -1])


@pytest.mark.parametrize("pairs", [False, True])
def test_noise_does_not_depend_on_the_batch(pairs: bool) -> None:
    batch_noise = draw_noise(STARTS, control=True, pairs=pairs)
    for index, start in enumerate(STARTS):
        assert torch.equal(draw_noise([start], control=True, pairs=pairs)[:, 0], batch_noise[:, index])


def test_single_forecasts_and_plain_networks_have_no_noise() -> None:
    assert build_model_noise(None, SPEC, SECTION) is None
    plain = WXFormerSection.model_validate({"type": "wxformer"})
    assert build_model_noise(EnsembleConfig(members=2), SPEC, plain) is None


def test_an_ensemble_of_a_network_without_noise() -> None:
    network = "runs/a, which was trained without model.noise"
    equal_members = EnsembleConfig(members=2).describe_lack_of_noise(network)
    assert equal_members.startswith(f"inference.ensemble: the members would be equal with {network}; give perturbation")
    perturbed = {"members": 2, "perturbation": {"kind": "bred"}}
    assert EnsembleConfig.model_validate(perturbed).describe_lack_of_noise(network) is None
    amplified = EnsembleConfig.model_validate({**perturbed, "model_noise": {"amplitude": 2.0}})
    expected = f"inference.ensemble.model_noise has no effect with {network}; remove it"
    assert amplified.describe_lack_of_noise(network) == expected


def test_config_of_an_ensemble(repository: Path) -> None:
    """Noise in the network suffices for an ensemble of forecasts. By default, this ensemble has no control."""
    config = load_config(str(repository / "config" / "quickstart.yml"))
    raw = config.model_dump(mode="json", exclude_unset=True)
    raw["inference"] = {**raw.get("inference", {}), "ensemble": {"members": 4}}
    with pytest.raises(ConfigError, match="the members would be equal with a network without model.noise; give"):
        build_config(raw)
    without_noise = {"members": 4, "perturbation": {"kind": "bred"}, "model_noise": {"amplitude": 2.0}}
    with pytest.raises(ConfigError, match="model_noise has no effect with a network without model.noise"):
        build_config({**raw, "inference": {"ensemble": without_noise}})
    raw["model"] = {**raw["model"], "noise": "global"}
    raw["trainer"] = {**raw["trainer"], "members": 2}
    with pytest.raises(ConfigError, match="loss.kind mse would train all members to be equal"):
        build_config(raw)
    raw["loss"] = {"kind": "crps"}
    config = build_config(raw)
    assert config.inference.ensemble.control is False
    assert config.trainer.objective.kind == "ensemble" and config.trainer.metrics == ["rmse", "crps"]
    assert build_config(config.model_dump(mode="json")) == config
    with pytest.raises(ConfigError, match="inference.ensemble.dropout has no effect on a network with model.noise"):
        ensemble = {"members": 4, "dropout": True}
        build_config({**raw, "model": {**raw["model"], "noise": "dropout"}, "inference": {"ensemble": ensemble}})
    raw["inference"]["ensemble"]["control"] = True
    assert build_config(raw).inference.ensemble.control is True
    raw["trainer"]["members"] = 1
    with pytest.raises(ConfigError, match="model.noise has no effect with trainer.members: 1"):
        build_config(raw)
    raw["model"]["noise"] = []
    raw["inference"] = {}
    for loss in ({"kind": "crps"}, {"kind": "sum", "terms": [{"kind": "mse"}, {"kind": "crps"}]}):
        raw["loss"] = loss
        with pytest.raises(ConfigError, match="compares the members of an ensemble; set trainer.members"):
            build_config(raw)
    raw["trainer"]["members"] = 2
    with pytest.raises(ConfigError, match="members would all be equal"):
        build_config(raw)
