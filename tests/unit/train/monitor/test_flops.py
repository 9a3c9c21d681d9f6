"""Tests of the counted operations: by hand, against torch's counter on a real step, and against the planner."""

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


class SmallNetwork(nn.Module):
    """A convolution and a linear layer."""

    def __init__(self, channels: int, frozen: bool = False) -> None:
        super().__init__()
        self.wide, self.out = nn.Conv2d(channels, WIDE, 3, padding=1), nn.Linear(WIDE, OUT)
        self.wide.requires_grad_(not frozen)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        return self.out(self.wide(x_BCTHW[:, :, 0]).movedim(1, -1)).movedim(-1, 1)[:, :, None]


@pytest.mark.parametrize("frozen", [False, True])
def test_operations_by_hand(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "build_network", lambda config, channels, *_: SmallNetwork(len(channels.input), frozen))
    config = small_config(f"trainer.train_batch_size={BATCH}")
    channels = len(config.data.channel_map().input)
    convolution = 2 * BATCH * CELLS * 9 * channels * WIDE
    product = 2 * BATCH * CELLS * WIDE * OUT
    # Forward, weight gradient unless frozen, and input gradient from the second step of a rollout on.
    first_factor, later_factor = (1, 2) if frozen else (2, 3)
    # Linear layer: forward, weight gradient, and input gradient if anything before the layer needs it.
    linear_factors = (2, 3) if frozen else (3, 3)
    counts = count_operations(config)
    assert counts.count_operations_by_precision(1) == {"tf32": first_factor * convolution + linear_factors[0] * product}
    assert counts.count_operations_by_precision(3) == {
        "tf32": (first_factor + 2 * later_factor) * convolution + (linear_factors[0] + 2 * linear_factors[1]) * product
    }


@pytest.mark.parametrize(
    ("overrides", "sharded", "rate"),
    [
        ((), True, "tf32"),
        (("trainer.tf32=false",), False, "float32"),
        (("trainer.amp=true",), False, "bfloat16"),
        (("trainer.amp=true",), True, "bfloat16"),
        # On one process, autocast determines the precision and the policy is ignored.
        (("trainer.amp=true", "trainer.fsdp2_mp_policy.param_dtype=float32"), False, "bfloat16"),
        (("trainer.amp=true", "trainer.fsdp2_mp_policy.param_dtype=float32"), True, "tf32"),
    ],
)
def test_the_peak_is_that_of_the_compute_precision(
    overrides: tuple[str, ...], sharded: bool, rate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flops, "build_network", lambda config, channels, *_: SmallNetwork(len(channels.input)))
    config = small_config(*overrides)
    assets = build_placeholder_assets(config, build_grid(GRID), {})
    assert FlopCounter(config, assets, sharded).count_operations_by_precision(1).keys() == {rate}


def test_counted_operations_equal_those_of_a_real_step() -> None:
    config = small_config()
    with force_gpu_path():  # Recomputation on a CPU is not an operation of the network.
        assert sum(count_operations(config).count_operations_by_precision(1).values()) == counted_flops(config)


@pytest.mark.parametrize("steps", [1, 3])
def test_counted_operations_equal_those_of_the_plan_without_checkpointing(steps: int) -> None:
    with force_gpu_path():
        expected = traced(small_config("trainer.recompute_steps=false"), rollout=steps).flops
    config = small_config("trainer.activation_checkpoint=true", f"data.forecast_len={steps}")
    assert sum(count_operations(config).count_operations_by_precision(steps).values()) == expected
    if steps == 1:
        assert traced(config).flops > 1.1 * expected, "what is computed again is not counted"


def test_adapters_leave_out_the_gradients_of_frozen_weights() -> None:
    all_operations = sum(count_operations(small_config()).count_operations_by_precision(1).values())
    lora = "trainer.lora={rank: 2, targets: ['*.to_qkv', '*.to_out']}"
    adapter_operations = sum(count_operations(small_config(lora)).count_operations_by_precision(1).values())
    assert 0.4 * all_operations < adapter_operations < 0.9 * all_operations


def test_counting_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    count_operations(small_config("model.attn_dropout=0.1")).count_operations_by_precision(1)
    assert torch.equal(torch.get_rng_state(), before)


class ValueDependentNetwork(SmallNetwork):
    """Network whose forward pass depends on a value of the input."""

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        return super().forward(x_BCTHW) * (1.0 if x_BCTHW.sum().item() > 0 else 2.0)


def test_a_network_that_needs_values_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flops, "build_network", lambda config, channels, *_: ValueDependentNetwork(len(channels.input)))
    caplog.set_level(logging.INFO)
    assert count_operations(small_config()).count_operations_by_precision(1) is None
    assert "operations are not counted" in caplog.text
