"""Cost of a training step of the 1 degree starter config, compared with recorded figures.

The test traces the trainer's own step, up to the optimizer, on tensors without memory, as `credit plan` does.
Therefore the figures are the same on any machine. The test also fails if a step costs less, so that the recorded
figures are updated.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from credit.cli.plan import load_config_without_paths
from credit.hpc.planner.trace import Trace
from tests.unit.hpc.measured import traced

MAX_RATIO, MIN_RATIO = 1.01, 0.97


class Cost(NamedTuple):
    """GFLOP of matrix products and convolutions, peak MB besides weights and gradients, GB moved, number of kernels."""

    gflop: float
    peak_mb: float
    moved_gb: float
    kernels: float


# Overrides, True for the GPU path, and the recorded cost. If a step needs less, record its new figures here.
CASES = {
    "float32": (("trainer.amp=false",), False, Cost(172.2, 533.9, 9.983, 6783)),
    "bfloat16": ((), False, Cost(166.6, 487.1, 7.119, 6585)),
    "bfloat16, GPU": ((), True, Cost(166.9, 501.5, 7.142, 4336)),
    "checkpointing": (
        ("trainer.amp=false", "trainer.activation_checkpoint=true"),
        False,
        Cost(192.8, 252.8, 11.23, 7740),
    ),
    "two steps, GPU": (("data.forecast_len=2",), True, Cost(397.7, 592.2, 16.50, 10601)),
}


def compute_cost(trace: Trace) -> Cost:
    moved_bytes = sum(kernel.bytes * count for kernel, count in trace.kernels.items())
    return Cost(trace.flops / 1e9, trace.activations / 1e6, moved_bytes / 1e9, sum(trace.kernels.values()))


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the figures are those of torch 2.13")
@pytest.mark.parametrize("case", CASES)
def test_training_step_costs_as_much_as_recorded(case: str, repository: Path) -> None:
    overrides, gpu, recorded_cost = CASES[case]
    config = load_config_without_paths(str(repository / "config" / "wxformer_1deg.yml"), overrides)
    measured_cost = compute_cost(traced(config, config.data.forecast_len, gpu, "181x360"))
    for quantity, recorded, measured in zip(Cost._fields, recorded_cost, measured_cost, strict=True):
        assert measured <= MAX_RATIO * recorded, f"{quantity}: {recorded} before, {measured} now; {measured_cost}"
        assert measured >= MIN_RATIO * recorded, (
            f"{quantity}: less than before; put the new figures here, so that they stay: {measured_cost}"
        )
