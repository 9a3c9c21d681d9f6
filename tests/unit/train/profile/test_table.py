"""Tests of the table of a profile: shares, peaks, the slowest rank, and the encoding of an account."""

from __future__ import annotations

import json

import pytest

from credit.train.profile import table
from credit.train.profile.account import RankAccount, RankSummary
from credit.train.profile.calibration import MachineRates
from credit.train.profile.collectives import compute_sent_bytes
from credit.utils.profiling.phases import Phase


def build_account(forward: float, communication: float, wall: float = 1.0) -> RankAccount:
    return RankAccount(
        wall=wall,
        seconds={Phase.FORWARD: forward, Phase.COMMUNICATION: communication, Phase.OPTIMIZER: 0.1},
        processor_seconds={Phase.FORWARD: 0.9 * forward},
        rates=MachineRates(flops=4e12, memory=20e9, collective=1e9),
        hidden_communication=0.05,
        sent_bytes=1e8,
        updated_bytes=1e9,
    )


def build_steps(**changes: object) -> table.ProfiledSteps:
    values = {
        "first": 6, "last": 7, "step_seconds": [0.9, 1.1], "clock": "host", "device": "CPU", "threads": 2,
        "precision": "float32", "passes": (1.0, 2.0), "communication_within": {"backward": 0.2},
        "trace": "trace.json.gz", "trace_steps": 2,
    }  # fmt: skip
    return table.ProfiledSteps(**{**values, **changes})


SUMMARY = RankSummary([build_account(0.5, 0.38), build_account(0.6, 0.29), build_account(0.4, 0.47)])


def test_account_can_be_encoded_as_values_and_decoded() -> None:
    account = build_account(0.5, 0.4)
    copy = RankAccount.from_values(account.to_values())
    assert {name: seconds for name, seconds in copy.seconds.items() if seconds} == account.seconds
    assert copy.to_values() == account.to_values()
    account_without_bytes = RankAccount(1.0, {}, {}, MachineRates(1.0, 1.0, None))
    copy = RankAccount.from_values(account_without_bytes.to_values())
    assert copy.sent_bytes is None and copy.rates.collective is None


def test_lines_have_shares_and_peaks_of_the_slowest_rank() -> None:
    assert SUMMARY.slowest_rank == 1
    lines = {(line.kind, line.name): line for line in table.build_lines(SUMMARY, build_steps())}
    forward = lines["phase", "forward"]
    assert (forward.min_seconds, forward.median_seconds, forward.max_seconds) == (0.4, 0.5, 0.6)
    assert (forward.seconds, forward.share, forward.processor_seconds) == pytest.approx((0.6, 0.6, 0.54))
    # 1 TFLOP in 0.6 s on a machine of 4 TFLOP/s; 1 GB in 0.1 s of 20 GB/s.
    assert forward.peak_share == pytest.approx(1 / 0.6 / 4)
    assert lines["phase", "optimizer"].peak_share == pytest.approx(0.5)
    # 0.1 GB in 0.29 s exposed and 0.05 s hidden, of 1 GB/s.
    assert lines["phase", "communication"].peak_share == pytest.approx(0.1 / 0.34)
    assert lines["step", "step"].peak_share == pytest.approx(3 / 4)
    assert lines["rest", "outside of all phases"].seconds == pytest.approx(0.01)
    assert ("phase", "idle") not in lines
    phases = [line for line in lines.values() if line.kind in ("phase", "rest")]
    assert sum(line.seconds for line in phases) == pytest.approx(lines["step", "step"].seconds)


def test_idle_time_of_a_device_is_a_phase() -> None:
    account = RankAccount(1.0, {Phase.FORWARD: 0.7}, {}, MachineRates(1e15, 3e12, None), idle=0.29)
    lines = table.build_lines(RankSummary([account]), build_steps(clock="device"))
    assert {line.name: line.seconds for line in lines if line.kind == "phase"}["idle"] == 0.29
    assert account.accounted_seconds == pytest.approx(0.99)


def test_text_names_the_slowest_rank_and_the_peak() -> None:
    steps = build_steps()
    content = table.to_json(SUMMARY, steps, table.build_lines(SUMMARY, steps))
    text = table.render(json.loads(json.dumps(content)))
    assert "Measured peak: 4000 GFLOP/s (float32), memory 20.0 GB/s, all-reduce 1.00 GB/s sent" in text
    assert "The phases explain 99.0% of the step." in text
    assert (
        "The slowest rank is rank 1: without waiting for other ranks, its step takes 710 ms, and a step of the other "
        "ranks 530 to 620 ms" in text
    )
    forward = next(line for line in text.splitlines() if line.startswith("forward"))
    assert forward.split() == ["forward", "600", "60.0%", "540", "1000", "41.7%", "400", "500", "600"]


def test_text_of_one_rank_has_no_columns_of_ranks() -> None:
    account = RankAccount(1.0, {Phase.FORWARD: 1.0}, {}, MachineRates(1e12, 1e10, None))
    steps = build_steps(passes=None, communication_within={}, trace=None)
    summary = RankSummary([account])
    text = table.render(table.to_json(summary, steps, table.build_lines(summary, steps)))
    assert "slowest" not in text and "median" not in text.split("phase")[1] and "At the same time" not in text


@pytest.mark.parametrize(
    ("kind", "input_bytes", "output_bytes", "sent"),
    [
        # One of four ranks sends 2 * 3/4 of an all-reduce, all of a broadcast, and 3/4 of the larger buffer of others.
        ("all_reduce", 100, 100, 150),
        ("_allgather_base", 100, 400, 300),
        ("reduce_scatter_tensor_coalesced", 400, 100, 300),
        ("all_to_all", 100, 100, 75),
        ("alltoall_base", 100, 100, 75),
        ("broadcast", 100, 100, 100),
        ("barrier", 0, 0, 0),
    ],
)
def test_sent_bytes(kind: str, input_bytes: float, output_bytes: float, sent: float) -> None:
    assert compute_sent_bytes(kind, input_bytes, output_bytes, 4) == sent
