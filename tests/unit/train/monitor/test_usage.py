"""Tests of the usage of a run: rates by hand, sums over restarts, and the final summary."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from credit.cli.plan import build_grid
from credit.hpc.planner.gpus import find_peak_rates, list_gpu_names
from credit.parallel.mesh import DeviceGrid, ParallelDims
from credit.train.build.dry_run import build_placeholder_assets
from credit.train.checkpoint.train_state import TrainState
from credit.train.monitor.summary import build_summary, format_summary
from credit.train.monitor.usage import UsageMeter, build_usage_meter
from tests.unit.hpc.measured import GRID, small_config

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PEAKS = {"bfloat16": 1000.0, "tf32": 500.0, "float32": 50.0}


class FakeFlopCounter:
    """A network with 2e12 operations of convolutions and 1e12 of products for a micro-batch and step."""

    def count_operations_by_precision(self, steps: int) -> dict[str, int] | None:
        return {"tf32": steps * 2 * 10**12, "float32": steps * 10**12}


class UnknownFlopCounter:
    """A network whose operations cannot be counted."""

    def count_operations_by_precision(self, steps: int) -> None:
        return None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake_time = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(time, "perf_counter", lambda: fake_time.seconds)
    return fake_time


def build_meter(device: torch.device = GPU, peaks: dict[str, float] | None = None, cost: Any = None) -> UsageMeter:
    """Return the meter of 8 processes, 2 of which share a sample; a step is 3 micro-batches."""
    return UsageMeter(device, 8, cost or FakeFlopCounter(), 3 / 2, 24, PEAKS if peaks is None else peaks, None, 1000.0)


def test_rates_by_hand(clock: SimpleNamespace) -> None:
    meter = build_meter()
    clock.seconds += 3600
    meter.add_energy(7.2e6)
    row = meter.add_steps([1, 1, 4], seconds=10.0, wait=1.0)
    # The 6 forecast steps have 3e12 operations a micro-batch, and two ranks share 3 micro-batches.
    assert row["tflops"] == pytest.approx(6 * 3 * 1.5 / 10)
    # At the peak, 2e12 operations of convolutions take 4 ms, and 1e12 of products take 20 ms.
    assert row["mfu"] == pytest.approx(6 * 1.5 * 0.024 / 10)
    assert row["samples_per_s"] == 7.2 and row["data_wait_frac"] == 0.1
    assert row["wall_hours"] == 1.0 and row["gpu_hours"] == 8.0 and row["energy_kwh"] == 2.0
    assert meter.count_step_tflop(4) == pytest.approx(4 * 3 * 1.5 * 8)


def test_unknown_quantities_are_omitted(clock: SimpleNamespace) -> None:
    meter = build_meter(CPU, peaks={})
    clock.seconds += 36
    meter.add_energy(math.nan)
    row = meter.add_steps([1], seconds=1.0, wait=0.0)
    assert row.keys() == {"samples_per_s", "data_wait_frac", "tflops", "wall_hours", "process_hours"}
    assert row["process_hours"] == pytest.approx(0.08)
    meter.add_energy(1.0)
    assert "energy_kwh" not in meter.add_steps([1], seconds=1.0, wait=0.0), "a part of it is not all of it"
    assert "tflops" not in build_meter(cost=UnknownFlopCounter()).add_steps([1], seconds=1.0, wait=0.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_counts_operations(rank: int) -> None:
    config = small_config()
    assets = build_placeholder_assets(config, build_grid(GRID), {})
    mesh = DeviceGrid(ParallelDims(replicate=2), rank)
    meter = build_usage_meter(config, assets, CPU, mesh, 4, {}, time.perf_counter())
    assert ("tflops" in meter.add_steps([1], seconds=1.0, wait=0.0)) == (rank == 0)


def test_usage_is_summed_over_the_parts_of_a_run(clock: SimpleNamespace) -> None:
    first = build_meter()
    clock.seconds += 3600
    first.add_energy(3.6e6)
    first.add_steps([1], 10.0, 0.0)
    stored = first.to_dict()
    clock.seconds += 3600
    first.add_energy(3.6e6)
    lost_row = first.add_steps([1], 10.0, 0.0)
    # The run is killed, and the next part continues from the checkpoint.
    second = UsageMeter(GPU, 4, FakeFlopCounter(), 3, 24, PEAKS, None, clock.seconds)
    second.resume(1, stored, [{"step": 1, "wall_hours": 1.0}, lost_row, {"step": 2, "valid": {}}])
    clock.seconds += 1800
    second.add_energy(1.8e6)
    row = second.add_steps([1], 30.0, 0.0)
    # The last entry is a summary, which may have larger sums than the last row.
    third = build_meter()
    third.resume(1, stored, [lost_row, {"wall_hours": 2.5, "gpu_hours": 20.0, "samples": 48}])
    assert (third.spent.wall_hours, third.spent.gpu_hours, third.spent.energy_kwh) == (2.5, 20.0, 2.0)
    assert (row["wall_hours"], row["gpu_hours"], row["energy_kwh"]) == (2.5, 18.0, 2.5)
    assert (second.spent.samples, second.spent.step_s, second.spent.since) == (48, 40.0, 0)


def test_usage_is_counted_from_a_checkpoint_of_an_older_version(clock: SimpleNamespace) -> None:
    train_state = TrainState()
    train_state.restore({"step": 500})
    meter = build_meter()
    meter.resume(train_state.step, train_state.usage, [{"step": 500, "samples_per_s": 3.0}])
    clock.seconds += 3600
    meter.add_energy(3.6e6)
    meter.add_steps([1], 10.0, 0.0)
    meter.to_dict()
    train_state.step = 501
    summary = build_summary(set_cpu_device(meter), train_state, "skill", 1, [2.4], 1.0)
    assert summary["counted_since_step"] == 500 and summary["kwh_per_1000_samples"] == pytest.approx(1000 / 24)
    assert "since step 500" in format_summary(summary, Path("run"), 501)


def test_a_run_without_steps_has_no_energy_per_sample(clock: SimpleNamespace) -> None:
    meter = build_meter()
    # An earlier part was killed before its first checkpoint.
    meter.resume(0, {}, [{"wall_hours": 1.0, "gpu_hours": 8.0, "energy_kwh": 2.0}])
    clock.seconds += 36
    meter.to_dict()
    summary = build_summary(set_cpu_device(meter), TrainState(), "skill", 1, [], 1.0)
    assert summary["energy_kwh"] == 2.0 and "kwh_per_1000_samples" not in summary
    assert "2 kWh" in format_summary(summary, Path("run"), 20)


def set_cpu_device(meter: UsageMeter) -> UsageMeter:
    """Set the device of a GPU meter to the CPU, because a summary reads the name of the device."""
    meter.device = CPU
    return meter


def test_the_summary_by_hand(clock: SimpleNamespace) -> None:
    meter = build_meter()
    with meter.timed("validation_s"):
        clock.seconds += 20
    with meter.timed("save_s"):
        clock.seconds += 10
    clock.seconds += 70
    meter.add_energy(3.6e5)
    meter.add_steps([1] * 10, seconds=50.0, wait=5.0)
    train_state = TrainState(step=10, best=0.25, best_step=8)
    summary = build_summary(set_cpu_device(meter), train_state, "skill", 1, [4.0, 5.0, 9.0], 2.5)
    shares = {"steps": 0.5, "data_wait": 0.05, "validation": 0.2, "checkpoints": 0.1, "other": 0.2}
    assert summary["time_shares"] == pytest.approx(shares)
    assert (summary["samples"], summary["samples_per_s_mean"], summary["samples_per_s_median"]) == (240, 4.8, 5.0)
    assert summary["kwh_per_1000_samples"] == pytest.approx(0.1 / 240 * 1000)
    assert summary["tflop_per_step"] == pytest.approx(3 * 1.5 * 8)
    assert summary["best"] == {"metric": "skill", "value": 0.25, "step": 8}
    text = format_summary(summary, Path("run"), 20)
    for line in ("10 of 20, 240 samples", "waiting for data 5%", "4.8 samples/s, median 5", "MFU 0.7%", "0.1 kWh"):
        assert line in text, text


def test_the_summary_names_the_best_checkpoint_that_exists(clock: SimpleNamespace, tmp_path: Path) -> None:
    """A full disk may have prevented the save of the best checkpoint, or of all checkpoints."""
    meter = build_meter()
    clock.seconds += 60
    meter.to_dict()
    summary = build_summary(set_cpu_device(meter), TrainState(10, 0.25, 8), "skill", 1, [], 1.0)
    folder = tmp_path / "checkpoints"
    assert (
        "best      skill 0.2500 at step 8, whose checkpoint could not be saved\n"
        in format_summary(summary, tmp_path, 20) + "\n"
    )
    for step in (6, 8):
        (folder / f"step_{step:08d}").mkdir(parents=True)
    (folder / "best").symlink_to("step_00000006")
    assert f"{folder}/best is step_00000006, of an earlier validation" in format_summary(summary, tmp_path, 20)
    (folder / "best").unlink()
    (folder / "best").symlink_to("step_00000008")
    assert format_summary(summary, tmp_path, 20).endswith(f"at step 8, {folder}/best")


@pytest.mark.parametrize(("skill", "warns"), [(0.99, False), (1.0, True), (4.8e6, True)])
def test_a_best_skill_not_better_than_persistence_is_a_warning(
    clock: SimpleNamespace, skill: float, warns: bool
) -> None:
    meter = build_meter()
    clock.seconds += 60
    meter.to_dict()
    summary = build_summary(set_cpu_device(meter), TrainState(10, skill, 8), "skill", 1, [], 1.0)
    assert ("no validation was better than persistence" in format_summary(summary, Path("run"), 20)) == warns
    # Other monitored quantities have no such limit.
    summary = build_summary(set_cpu_device(meter), TrainState(10, skill, 8), "loss", 1, [], 1.0)
    assert "warning" not in format_summary(summary, Path("run"), 20)


def test_peak_rates_are_found_by_the_name_of_the_gpu() -> None:
    assert find_peak_rates("NVIDIA A100-SXM4-80GB") == {"bfloat16": 312, "tf32": 156, "float32": 19.5}
    assert find_peak_rates("NVIDIA H100 80GB HBM3")["bfloat16"] == 989
    for other in ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090", ""):
        assert find_peak_rates(other) == {}
    assert len(list_gpu_names()) == 5
