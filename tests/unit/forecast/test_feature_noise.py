"""Noise on hidden fields: its size, its dependence on seed, time and member, and outputs without noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from credit.config.sections.inference import EnsembleConfig, FeatureNoiseConfig
from credit.errors import ConfigError
from credit.forecast.ensemble.feature_noise import build_feature_noise, find_blocks
from credit.forecast.ensemble.perturbations import build_perturbation
from credit.forecast.ensemble.section import GaussianOrBredSection
from credit.forecast.rollout import ForecastInputs, ForecastStart, build_starts, forecast_batch
from credit.models.wxformer import WXFormer
from tests.unit.forecast.test_perturbations import GRID, SMALL, STEP, ConstantFrames, make_stepper

INPUTS = ForecastInputs(ConstantFrames(), STEP, 1)
BLOCKS = [*(f"stages.{n}.layers.0" for n in range(4)), *(f"decoder.blocks.{n}" for n in range(3))]


class Block(nn.Module):
    """Block that multiplies each channel by its number, counted from 1."""

    _fsdp2_shard = True

    def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        number = torch.arange(1.0, 4.0, dtype=x_BCTHW.dtype)
        return x_BCTHW[:, :3, -1:] * number[:, None, None, None]


class TwoBlocks(nn.Module):
    """Two blocks in sequence. `seen` stores the input of the second, so that a test can read the noise of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        self.seen = self.first(x_BCTHW)
        return 0.1 * self.second(self.seen)


def build_test_noise(model: nn.Module, control: bool = True, seed: int = 0, **options: object):
    conf = EnsembleConfig(members=50, feature_noise=FeatureNoiseConfig(**options), control=control, seed=seed)
    return build_feature_noise(conf, model)


def build_small_wxformer() -> nn.Module:
    torch.manual_seed(0)
    return WXFormer.from_kwargs(**SMALL).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_noise_is_gaussian_with_the_configured_size(dtype: torch.dtype) -> None:
    model, x = TwoBlocks(), torch.randn(3, 3, 1, 40, 80).to(dtype)
    x[2] *= 100
    model(x)
    plain = model.seen.double().numpy()
    with build_test_noise(model, std=0.2, blocks=["first"])(build_starts([0], 3))():
        model(x)
    assert model.seen.dtype == dtype
    added = model.seen.double().numpy() - plain
    assert not added[0].any(), "the control"
    for member in (1, 2):
        # The noise is scaled by the deviation over all channels of the same member.
        scaled = added[member] / plain[member].std() / 0.2
        assert stats.kstest(scaled[0].ravel(), "norm").pvalue > 0.01
        np.testing.assert_allclose(scaled.std(axis=(1, 2, 3)), 1, atol=4 / np.sqrt(2 * 3200))
        assert abs(np.corrcoef(scaled.reshape(3, -1)) - np.eye(3)).max() < 4 / np.sqrt(3200)
        assert abs(np.corrcoef(scaled[:, 0, :, 1:].ravel(), scaled[:, 0, :, :-1].ravel())[0, 1]) < 4 / np.sqrt(9480)


def test_noise_is_added_only_within_steps_of_a_forecast() -> None:
    model, x = build_small_wxformer(), torch.randn(2, 4, 1, 16, 32)
    with torch.no_grad():
        before = model(x)
        apply_noise = build_test_noise(model, control=False)(build_starts([0], 2))
        assert torch.equal(model(x), before)
        with apply_noise():
            assert (model(x) - before).std() > 0.05 * before.std()
        with pytest.raises(ZeroDivisionError), apply_noise():
            raise ZeroDivisionError
        assert torch.equal(model(x), before)


def run_forecasts(
    starts: list[ForecastStart], model: nn.Module, perturbed: bool = False, **options: object
) -> np.ndarray:
    """Return three steps of forecasts, (steps, B, C, H, W)."""
    stepper = make_stepper(model)
    conf = EnsembleConfig(members=3, perturbation=GaussianOrBredSection(kind="bred", cycles=2))
    perturb = build_perturbation(conf, stepper, INPUTS, GRID) if perturbed else None
    noise = build_test_noise(model, **options) if options else None
    return np.stack(list(forecast_batch(stepper, INPUTS, starts, 3, perturb, build_noise_context=noise)))


def test_a_member_does_not_depend_on_its_batch() -> None:
    """Differences are limited to rounding errors, which depend on the batch size in the network itself."""
    starts = build_starts([0, 1440], 3)
    batch_forecasts = run_forecasts(starts, build_small_wxformer(), std=0.3)
    single_forecasts = [run_forecasts([start], build_small_wxformer(), std=0.3) for start in reversed(starts)]
    separate = np.concatenate(single_forecasts, axis=1)[:, ::-1]
    spread = batch_forecasts.std(axis=1).mean(axis=(0, 2, 3))
    assert (np.abs(batch_forecasts - separate).max(axis=(0, 1, 3, 4)) < 1e-4 * spread).all()
    assert len({row.tobytes() for row in batch_forecasts[0]}) == 6 - 1, "all but the two controls, which start alike"
    other_seed_forecasts = run_forecasts(starts, build_small_wxformer(), std=0.3, seed=1)
    assert (np.abs(other_seed_forecasts[:, 1:3] - batch_forecasts[:, 1:3]).mean(axis=(0, 1, 3, 4)) > 0.1 * spread).all()
    np.testing.assert_array_equal(run_forecasts(starts, build_small_wxformer())[:, [0, 3]], batch_forecasts[:, [0, 3]])


def test_interleaved_forecasts_are_independent() -> None:
    """Online scoring interleaves the batches of an ensemble in this way."""
    model, starts = build_small_wxformer(), build_starts([0], 4)
    stepper, noise = make_stepper(model), build_test_noise(model)
    batches = (starts[:2], starts[2:])
    forecasts = [forecast_batch(stepper, INPUTS, batch, 3, build_noise_context=noise) for batch in batches]
    interleaved = np.stack([np.concatenate(fields) for fields in zip(*forecasts, strict=True)])
    consecutive = [run_forecasts(batch, build_small_wxformer(), std=0.5) for batch in batches]
    np.testing.assert_array_equal(interleaved, np.concatenate(consecutive, axis=1))


def test_bred_vectors_have_no_noise() -> None:
    """The control and the bred perturbations of the other members equal those of an ensemble without feature noise."""
    starts = build_starts([0], 3)
    plain, with_noise = (
        run_forecasts(starts, build_small_wxformer(), True),
        run_forecasts(starts, build_small_wxformer(), True, std=1e-6),
    )
    np.testing.assert_array_equal(with_noise[:, 0], plain[:, 0])
    np.testing.assert_allclose(with_noise, plain, atol=1e-3)
    assert np.abs(with_noise[:, 1:] - plain[:, 1:]).max() > 0
    assert np.abs(plain[0, 1] - plain[0, 2]).max() > 0.1


def test_blocks_are_found_by_name() -> None:
    model = build_small_wxformer()
    assert list(find_blocks(model, None)) == BLOCKS
    assert list(find_blocks(model, ["decoder"])) == BLOCKS[4:]
    assert list(find_blocks(model, ["decoder.blocks.1", "stages.3", "decoder.blocks"])) == [
        "decoder.blocks.1", BLOCKS[3], "decoder.blocks.0", "decoder.blocks.2",
    ]  # fmt: skip
    for prefix in ("stage", "stages.3.layers.0.norm", "decoders", ""):
        with pytest.raises(
            ConfigError, match=rf'ensemble.feature_noise.blocks: no block of WXFormer matches "{prefix}"'
        ):
            find_blocks(model, ["decoder", prefix])
    with pytest.raises(ConfigError, match=r"Linear has no block with .* _fsdp2_shard.*inference.ensemble.stochastic"):
        find_blocks(nn.Linear(1, 1), None)


class Pair(Block):
    """Block that returns two tensors."""

    def forward(self, x_BCTHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x_BCTHW, x_BCTHW


class Folded(Block):
    """Block that returns a tensor whose first dimension is not the batch of forecasts."""

    def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        return x_BCTHW.transpose(0, 3)


@pytest.mark.parametrize(("block", "output"), [(Pair(), "a tuple"), (Folded(), r"a tensor \(16, 3, 1, 2, 32\)")])
def test_unsuitable_block_outputs_are_refused(block: nn.Module, output: str) -> None:
    model = nn.Sequential(block)
    apply_noise = build_test_noise(model)(build_starts([0], 2))
    message = rf"noise: 0 \(\w+\) returns {output} for a batch of 2.*noise.blocks"
    with apply_noise(), pytest.raises(ConfigError, match=message):
        model(torch.zeros(2, 3, 1, 16, 32))


def test_wrong_options_are_refused() -> None:
    for options in ({"std": 0}, {"blocks": []}, {"blokcs": ["decoder"]}):
        with pytest.raises(ValueError, match=next(iter(options))):
            EnsembleConfig(members=3, feature_noise=options)
    assert build_feature_noise(None, nn.Linear(1, 1)) is None
    for options in [{}, *({"blocks": [name]} for name in BLOCKS)]:
        conf = EnsembleConfig(members=2, lagged="6h", feature_noise=options)
        assert build_feature_noise(conf, build_small_wxformer()) is not None
