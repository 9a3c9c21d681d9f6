"""Tests of the account of a GPU, computed from events with known overlaps."""

from __future__ import annotations

from typing import Any

import pytest

from credit.train.profile.device_trace import compute_gpu_phase_times
from credit.utils.profiling.phases import Phase

# Milliseconds in the tables below, microseconds in events.
MS = 1000.0


def phase_event(name: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start * MS, "dur": (end - start) * MS, "tid": 1}


def launch_event(correlation: int, time: float) -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": time * MS, "dur": 5, "args": args}


def kernel_event(name: str, start: float, end: float, correlation: int, **args: Any) -> dict[str, Any]:
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    event_args = {"correlation": correlation, **args}
    return {"ph": "X", "cat": category, "name": name, "ts": start * MS, "dur": (end - start) * MS, "args": event_args}


def test_overlap_is_counted_once() -> None:
    """A step has 100 ms, and the device is behind the host.

    Device times in ms: idle 0-5 (launch), forward 5-25, backward 25-60 with an all-reduce 50-70 beside it, copy 65-72,
    optimizer 72-80, idle 80-90 (loader) and 90-100 (no phase).
    """
    nccl_args = {
        "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float",
        "Group size": 4,
    }  # fmt: skip
    events = [
        phase_event("forward", 0, 20),
        phase_event("backward", 10, 20),
        phase_event("optimizer", 20, 80),
        phase_event("loader", 80, 90),
        launch_event(1, 2), launch_event(2, 12), launch_event(3, 13), launch_event(4, 21), launch_event(5, 14),
        kernel_event("gemm", 5, 25, 1),
        kernel_event("gemm", 25, 60, 2),
        # A second stream of the same phase.
        kernel_event("gemm", 30, 40, 2),
        kernel_event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 70, 3, **nccl_args),
        kernel_event("Memcpy HtoD (Pinned -> Device)", 65, 72, 5),
        kernel_event("adamw", 72, 80, 4),
        # Ranges of the device repeat those of the host and must not count.
        {"ph": "X", "cat": "gpu_user_annotation", "name": "forward", "ts": 0, "dur": 90 * MS},
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    ]  # fmt: skip
    account = compute_gpu_phase_times(events, [(0, 100 * MS)])
    assert account.wall == pytest.approx(0.1)
    assert account.seconds == pytest.approx(
        {
            Phase.FORWARD: 0.020,
            Phase.BACKWARD: 0.035,
            # 50 to 60 runs beside the backward pass.
            Phase.COMMUNICATION: 0.010,
            Phase.COPY: 0.002,
            Phase.OPTIMIZER: 0.008,
            Phase.LOADER: 0.010,
        }
    )
    assert account.hidden_communication == pytest.approx(0.010)
    assert account.hidden_copies == pytest.approx(0.005)
    assert account.idle == pytest.approx(0.005)
    # A ring of 4 ranks sends 2 * 3/4 of the 4000 bytes.
    assert account.sent_bytes == 6000
    # The last 10 ms belong to no phase.
    assert sum(account.seconds.values()) + account.idle == pytest.approx(0.090)


def test_only_time_within_the_steps_is_counted() -> None:
    events = [phase_event("forward", 0, 30), launch_event(1, 0), kernel_event("gemm", 0, 30, 1)]
    account = compute_gpu_phase_times(events, [(10 * MS, 20 * MS)])
    assert account.seconds[Phase.FORWARD] == pytest.approx(0.010)
    assert account.idle == 0
    assert account.sent_bytes == 0


def test_phases_inside_of_a_validation_belong_to_it() -> None:
    events = [
        phase_event("validation", 0, 20),
        phase_event("loader", 5, 10),
        phase_event("forward", 20, 30),
        launch_event(1, 1), launch_event(2, 6), launch_event(3, 21),
        kernel_event("gemm", 1, 3, 1), kernel_event("gemm", 6, 8, 2), kernel_event("gemm", 22, 30, 3),
    ]  # fmt: skip
    account = compute_gpu_phase_times(events, [(0, 30 * MS)])
    assert {name: value for name, value in account.seconds.items() if value} == pytest.approx(
        {Phase.VALIDATION: 0.020, Phase.FORWARD: 0.008}
    )
    assert account.idle == pytest.approx(0.002)


def test_copies_on_the_device_and_to_the_host_belong_to_the_phase_that_launched_them() -> None:
    events = [
        phase_event("forward", 0, 4),
        phase_event("checkpoint", 4, 20),
        launch_event(1, 1), launch_event(2, 5), launch_event(3, 6),
        # A clone in the forward pass, the state of a checkpoint, and a batch.
        kernel_event("Memcpy DtoD (Device -> Device)", 2, 6, 1),
        kernel_event("Memcpy DtoH (Device -> Pinned)", 6, 16, 2),
        kernel_event("Memcpy HtoD (Pinned -> Device)", 15, 18, 3),
    ]  # fmt: skip
    account = compute_gpu_phase_times(events, [(0, 20 * MS)])
    seconds = {name: value for name, value in account.seconds.items() if value}
    # The checkpoint has its copy, and the wait for its end.
    assert seconds == pytest.approx({Phase.FORWARD: 0.004, Phase.CHECKPOINT: 0.012, Phase.COPY: 0.002})
    assert account.hidden_copies == pytest.approx(0.001)
    assert account.idle == pytest.approx(0.002)


def test_bytes_are_unknown_if_a_kernel_does_not_report_them() -> None:
    events = [launch_event(1, 0), kernel_event("ncclKernel_AllReduce", 0, 5, 1)]
    assert compute_gpu_phase_times(events, [(0, 10 * MS)]).sent_bytes is None
