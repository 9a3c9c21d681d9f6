"""Operations of the network: by hand, against torch's counter on a step that is taken, and against the plan."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from credit.cli.plan import build_grid
from credit.config import Config
from credit.models.kernels.dispatch import force_gpu_path
from credit.train.build.dry_run import build_placeholder_assets
from credit.train.monitor import flops
from credit.train.monitor.flops import FlopCounter
from tests.unit.hpc.measured import GRID, counted_flops, small_config, traced

BATCH, CELLS, WIDE, OUT = 2, 48 * 96, 32, 6


def count_operations(config: Config) -> FlopCounter:
    return FlopCounter(config, build_placeholder_assets(config, build_grid(GRID), {}))


class Small(nn.Module):
    """A convolution and a linear layer."""

    def __init__(self, channels: int, frozen: bool = False) -> None:
        super().__init__()
        self.wide, self.out = nn.Conv2d(channels, WIDE, 3, padding=1), nn.Linear(WIDE, OUT)
        self.wide.requires_grad_(not frozen)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        return self.out(self.wide(x_BCTHW[:, :, 0]).movedim(1, -1)).movedim(-1, 1)[:, :, None]


@pytest.mark.parametrize("frozen", [False, True])
def test_by_hand(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "build_network", lambda config, channels, *_: Small(len(channels.input), frozen))
    config = small_config(f"trainer.train_batch_size={BATCH}")
    channels = len(config.data.channel_map().input)
    convolution = 2 * BATCH * CELLS * 9 * channels * WIDE
    product = 2 * BATCH * CELLS * WIDE * OUT
    # forward, and the gradient of the weights where they train; the input's from the second step of a rollout on
    first, further = (1, 2) if frozen else (2, 3)
    # the linear layer: forward, gradient of its weights, and of its input where anything before it wants it
    linear = (2, 3) if frozen else (3, 3)
    counts = count_operations(config)
    assert counts.count_operations_by_precision(1) == {"tf32": first * convolution + linear[0] * product}
    assert counts.count_operations_by_precision(3) == {
        "tf32": (first + 2 * further) * convolution + (linear[0] + 2 * linear[1]) * product
    }


@pytest.mark.parametrize(
    ("overrides", "sharded", "rate"),
    [
        ((), True, "tf32"),
        (("trainer.tf32=false",), False, "float32"),
        (("trainer.amp=true",), False, "bfloat16"),
        (("trainer.amp=true",), True, "bfloat16"),
        # on one process it is autocast that decides, and the policy is not looked at
        (("trainer.amp=true", "trainer.fsdp2_mp_policy.param_dtype=float32"), False, "bfloat16"),
        (("trainer.amp=true", "trainer.fsdp2_mp_policy.param_dtype=float32"), True, "tf32"),
    ],
)
def test_the_peak_is_that_of_what_the_network_computes_in(
    overrides: tuple[str, ...], sharded: bool, rate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flops, "build_network", lambda config, channels, *_: Small(len(channels.input)))
    config = small_config(*overrides)
    assets = build_placeholder_assets(config, build_grid(GRID), {})
    assert FlopCounter(config, assets, sharded).count_operations_by_precision(1).keys() == {rate}


def test_one_step_is_what_a_real_one_computes() -> None:
    config = small_config()
    with force_gpu_path():  # what a CPU computes again is no operation of the network
        assert sum(count_operations(config).count_operations_by_precision(1).values()) == counted_flops(config)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_plan_traces_as_many_without_checkpointing(steps: int) -> None:
    with force_gpu_path():
        wanted = traced(small_config("trainer.recompute_steps=false"), rollout=steps).flops
    config = small_config("trainer.activation_checkpoint=true", f"data.forecast_len={steps}")
    assert sum(count_operations(config).count_operations_by_precision(steps).values()) == wanted
    if steps == 1:
        assert traced(config).flops > 1.1 * wanted, "what is computed again is not counted"


def test_adapters_leave_out_the_gradients_of_frozen_weights() -> None:
    whole = sum(count_operations(small_config()).count_operations_by_precision(1).values())
    lora = "trainer.lora={rank: 2, targets: ['*.to_qkv', '*.to_out']}"
    adapted = sum(count_operations(small_config(lora)).count_operations_by_precision(1).values())
    assert 0.4 * whole < adapted < 0.9 * whole


def test_counting_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    count_operations(small_config("model.attn_dropout=0.1")).count_operations_by_precision(1)
    assert torch.equal(torch.get_rng_state(), before)


class Peeks(Small):
    """Asks for a value."""

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        return super().forward(x_BCTHW) * (1.0 if x_BCTHW.sum().item() > 0 else 2.0)


def test_a_network_that_needs_values_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flops, "build_network", lambda config, channels, *_: Peeks(len(channels.input)))
    caplog.set_level(logging.INFO)
    assert count_operations(small_config()).count_operations_by_precision(1) is None
    assert "operations are not counted" in caplog.text
