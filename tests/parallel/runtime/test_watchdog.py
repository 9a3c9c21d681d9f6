"""Tests of the watchdog, which names the ranks that a step waits for: stopped ranks and late ranks."""

from __future__ import annotations

import pytest

from credit.parallel.watchdog import Watchdog, describe_lag, read_last_collectives
from tests.parallel.forked import launch


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["silent", "late"])
def test_watchdog_names_the_missing_rank(kind: str) -> None:
    output = launch("tests.parallel.runtime.watchdog_worker", 3, kind, timeout=120)
    assert output.count("is through") == 3
    assert "rank 0 has made no progress for" in output and "(step 3)" in output
    assert ("silent, so stopped or dead: rank 1\n" in output) == (kind == "silent"), output
    if "_dump_fr_trace_json" in dir(__import__("torch")._C._distributed_c10d):
        assert "ranks 0, 2 in gloo:all_reduce, number 4; missing: rank 1" in output, output
    assert "dist.all_reduce(torch.ones(3))" in output, "the place in the code"
    assert ("at runtime/watchdog_worker.py" in output) and output.count("waits here") == 3 - (kind == "silent")


def test_describe_lag_lists_silent_and_late_ranks() -> None:
    collectives_of_rank0 = {"0 default_pg": [7, "nccl:all_reduce"], "1 tp": [3, "nccl:all_gather"]}
    collectives_of_rank1 = {"0 default_pg": [6, "nccl:all_reduce"], "1 tp": [3, "nccl:all_gather"]}
    last_statuses = {
        0: {
            "beats": 1,
            "count": 5,
            "activity": "step 5",
            "code_line": "a.py:1 in f",
            "collectives": collectives_of_rank0,
        },
        1: {
            "beats": 1,
            "count": 4,
            "activity": "step 4",
            "code_line": "b.py:2 in g",
            "collectives": collectives_of_rank1,
        },
        2: {"beats": 1, "count": 4, "activity": "step 4", "code_line": None, "collectives": {}},
        3: None,
    }
    statuses = {rank: status and {**status, "beats": 2} for rank, status in last_statuses.items()} | {
        2: last_statuses[2]
    }
    assert describe_lag(last_statuses, statuses) == [
        "silent, so stopped or dead: ranks 2, 3",
        "behind: rank 1 (step 4)",
        "at a.py:1 in f: rank 0",
        "at b.py:2 in g: rank 1",
        "group 0 default_pg: rank 0 in nccl:all_reduce, number 7; missing: ranks 1, 2, 3",
        "group 1 tp: ranks 0, 1 in nccl:all_gather, number 3",
    ]


def test_watchdog_of_one_process_records_no_collectives() -> None:
    last_collectives = read_last_collectives()  # Of groups that earlier tests of this process had.
    with Watchdog(None, 0, 1, patience=1) as watchdog:
        watchdog.record_activity("step 1")
    assert read_last_collectives() == last_collectives


def test_some_ranks_report_a_failure_without_a_store() -> None:
    """If the host of rank 0 is lost, the store is lost with it. Every 128th rank may then report the failure."""
    reporting_ranks = [rank for rank in range(1024) if Watchdog(None, rank, 1024, patience=1).may_report_failure()]
    assert reporting_ranks == list(range(0, 1024, 128))
