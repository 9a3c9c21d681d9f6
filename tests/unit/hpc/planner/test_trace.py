"""Traced training steps compared with executed steps: memory, operations, and kernels computed by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from credit.cli.plan import load_config_without_paths
from credit.hpc.planner.trace import Kernel, Trace, extrapolate_trace, trace_step
from credit.parallel.process_info import fake_process_group
from tests.parallel.torchrun import REPOSITORY
from tests.unit.hpc.measured import counted_flops, measure_peak_bytes, small_config, traced

CHECKPOINT_AND_AMP = [*itertools.product(("false", "selective", "true"), ("false", "true"))]


def require_bfloat16_instructions(amp: str) -> None:
    """Skip the test if the processor has no bfloat16 instructions: its kernels then allocate additional memory."""
    if amp == "true" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no instructions for bfloat16")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # The warning comes from torch 2.11.
@pytest.mark.parametrize(("way", "amp"), CHECKPOINT_AND_AMP)
def test_activations_equal_those_of_the_allocator(way: str, amp: str) -> None:
    require_bfloat16_instructions(amp)
    config = small_config(f"trainer.activation_checkpoint={way}", f"trainer.amp={amp}")
    assert traced(config).activations == pytest.approx(measure_peak_bytes(config), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "amp"), [("false", "true"), ("selective", "false"), ("true", "true")])
def test_activations_of_the_starter_model(way: str, amp: str) -> None:
    require_bfloat16_instructions(amp)
    changes = ["trainer.train_batch_size=1", f"trainer.activation_checkpoint={way}", f"trainer.amp={amp}"]
    config = load_config_without_paths(REPOSITORY / "config" / "wxformer_1deg.yml", changes)
    assert traced(config, grid="181x360").activations == pytest.approx(
        measure_peak_bytes(config, grid="181x360"), rel=0.01
    )


def test_activations_of_a_rollout() -> None:
    config = small_config("trainer.recompute_steps=true", "model.use_spectral_norm=false")
    assert traced(config, rollout=2).activations == pytest.approx(measure_peak_bytes(config, rollout=2), rel=0.1)


@pytest.mark.parametrize("recompute", ["true", "false"])
def test_long_rollouts_follow_from_short_ones(recompute: str) -> None:
    config = small_config(f"trainer.recompute_steps={recompute}", "model.use_spectral_norm=false")
    trace_of_two, trace_of_three, trace_of_four = (traced(config, rollout=n) for n in (2, 3, 4))
    extrapolated = extrapolate_trace(trace_of_two, trace_of_three, 1)
    assert extrapolated.activations == pytest.approx(trace_of_four.activations, rel=0.02)
    assert extrapolated.flops == trace_of_four.flops
    assert sum(extrapolated.kernels.values()) == sum(trace_of_four.kernels.values())
    moved_bytes = [
        sum(kernel.bytes * count for kernel, count in trace.kernels.items()) for trace in (extrapolated, trace_of_four)
    ]
    assert moved_bytes[0] == pytest.approx(moved_bytes[1], rel=0.01)


@pytest.mark.parametrize("way", ["false", "true"])
def test_operations_equal_those_of_torch(way: str) -> None:
    config = small_config(f"trainer.activation_checkpoint={way}")
    assert traced(config).flops == counted_flops(config)


class TwoLayers(nn.Module):
    """Two matrix products and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x))


class BiasedAttention(nn.Module):
    """Attention with a bias that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.bias.sum()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.bias)


def trace_network(network: type[nn.Module], shape: tuple[int, ...], **options: Any) -> Trace:
    with torch.device("meta"):
        model = network()

    def start(micro_steps: int):
        optimizer = torch.optim.AdamW(model.parameters())

        def step(begin: Callable[[], None]) -> None:
            for _ in range(micro_steps):
                begin()
                model(torch.zeros(shape)).sum().backward()
            optimizer.step()

        return optimizer, step

    return trace_step(model, start, **{"gpu": False, **options})


@pytest.mark.parametrize(("tf32", "rate"), [(True, "tf32"), (False, "float32")])
def test_kernels_by_hand(tf32: bool, rate: str) -> None:
    trace = trace_network(TwoLayers, (100, 8), tf32=tf32)
    product = 2 * 100 * 8 * 32
    # The forward pass has two products. The backward pass has three: the gradients of both weights, and that of the
    # input of the second layer.
    assert trace.flops == 5 * product
    wide, narrow, weight = 4 * 100 * 32, 4 * 100 * 8, 4 * 8 * 32
    assert trace.kernels[Kernel(rate, product, narrow + weight + wide)] >= 2
    assert trace.kernels[Kernel(rate, 0, 3 * narrow)] == 1, "the sum reads two fields and writes one"
    assert trace.norm_collective is None and not trace.pass_collectives


def test_micro_steps_add_up() -> None:
    trace_of_one, trace_of_five = (trace_network(TwoLayers, (100, 8), micro_steps=n) for n in (1, 5))
    assert trace_of_five.flops == 5 * trace_of_one.flops
    # The first micro-step assigns the gradients of the two weights; each of the other four adds to them.
    assert sum(trace_of_five.kernels.values()) == 5 * sum(trace_of_one.kernels.values()) + 4 * 2
    assert trace_of_five.activations == trace_of_one.activations


def test_mixed_precision_of_fsdp2() -> None:
    trace = trace_network(TwoLayers, (100, 8), dtypes=(torch.bfloat16, torch.float32))
    rates = {kernel.rate for kernel in trace.kernels if kernel.flops}
    assert rates == {"bfloat16"}


def test_attention_of_a_gpu_keeps_no_probabilities() -> None:
    original, shape = F.scaled_dot_product_attention, (6, 2, 64, 8)
    on_gpu, on_cpu = (trace_network(BiasedAttention, shape, gpu=gpu) for gpu in (True, False))
    probabilities = 4 * 6 * 2 * 64 * 64
    fields = 4 * 6 * 2 * 64 * 8
    # Both compute the gradient of the bias for each head and window once.
    assert probabilities < on_gpu.activations < probabilities + 12 * fields
    assert on_cpu.activations > 2 * probabilities
    assert F.scaled_dot_product_attention is original


def test_fake_ranks_leave_no_process_group() -> None:
    with fake_process_group(4096):
        assert torch.distributed.get_world_size() == 4096
    assert not torch.distributed.is_initialized()
