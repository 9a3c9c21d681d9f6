"""Test of the Python overhead of a training step: the number of calls into the package's code."""

from __future__ import annotations

from benchmarks.step_calls import CallCounter
from credit.models.layers.spectral_norm import find_spectral_norms
from credit.parallel.mesh import DeviceGrid
from tests.parallel.training import cases

# There are about 11 calls with the backward pass that spectral norm implements for a CPU.
CALLS_PER_WEIGHT = 12


def count_step(spectral_norm: bool) -> tuple[int, int]:
    """Return the calls of the second optimizer step, and the number of normalised weights."""
    case = cases.Case(spectral_norm=spectral_norm)
    model, autocast = cases.build(case, DeviceGrid(), "none")
    step, *_ = cases.build_step(case, model, autocast, DeviceGrid())
    source = cases.batches(case, DeviceGrid())
    step(source, 0, 1e-3)
    with CallCounter() as counter:
        step(source, 1, 1e-3)
    return sum(counter.calls.values()), len(find_spectral_norms(model))


def test_spectral_norm_makes_few_calls_per_weight() -> None:
    calls_without, _ = count_step(spectral_norm=False)
    calls, weights = count_step(spectral_norm=True)
    assert weights > 50
    assert 0 < calls - calls_without < CALLS_PER_WEIGHT * weights
