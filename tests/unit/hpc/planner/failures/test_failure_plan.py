"""Failures of a planned run: numbers computed by hand, the table, and invalid options."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from credit.cli.planning.failure_options import add_failure_arguments, read_failure_assumptions
from credit.errors import ConfigError
from credit.hpc.planner.failures.failure_plan import (
    MTBF_HOURS_PER_GPU,
    FailureAssumptions,
    FailurePlan,
    failures_to_dict,
    format_failures,
    plan_failures,
)
from credit.hpc.planner.gpus import find_gpu
from credit.hpc.planner.plan import make_plan
from tests.unit.hpc.planner.test_plan import build_planned_run

HOUR = 3600.0
# 1,024 GPUs with a failure every 50 hours, a checkpoint of 1 TB that is copied in 8 s and written in 100 s.
PLAN = FailurePlan(
    FailureAssumptions(mtbf_hours_per_gpu=51_200.0), world=1024, mtbf=50 * HOUR, checkpoint_bytes=1e12,
    stall_seconds=8.0, write_seconds=100.0, read_seconds=100.0, work_seconds=300 * HOUR, step_seconds=2.0,
    configured_steps=36_000,
)  # fmt: skip


def test_default_failure_rate_is_that_of_llama_3() -> None:
    """Llama 3 had 419 unexpected interruptions in 54 days on 16,384 GPUs."""
    assert pytest.approx(16_384 * 54 * 24 / 419, rel=0.02) == MTBF_HOURS_PER_GPU


def test_plan_equals_numbers_by_hand() -> None:
    # Young's interval is sqrt(2 x 8 s x 180,000 s) = 1697 s, Daly's 4 s shorter; 844 steps of 2 s.
    assert PLAN.best_steps == pytest.approx(844, abs=3)
    assert PLAN.restart == 35 + 60 + 100
    # A loss of 8 s in 1697 s, and of 195 s + 100 s + half an interval in 50 h.
    assert PLAN.lost_share(PLAN.best_steps) == pytest.approx(8 / 1697 + (295 + 848) / (50 * HOUR), rel=0.02)
    # With an interval of 20 h, each failure in 50 h loses at least 10 h on average.
    assert PLAN.lost_share(PLAN.configured_steps) == pytest.approx(0.19, abs=0.01)
    text = format_failures(PLAN)
    assert "one failure every 50 h on 1024 GPUs" not in text and "one failure every 2.083 days on 1024 GPUs" in text
    assert "| 36000 | 20 h |" in text and "| config |" in text
    document = failures_to_dict(PLAN)
    assert document["best"]["lost_share"] < document["configured"]["lost_share"]
    assert document["restart_seconds"] == 195


def test_a_checkpoint_is_written_before_the_next_one() -> None:
    slow_plan = replace(PLAN, write_seconds=4000.0)
    assert slow_plan.best_steps == round((4000.0 - 8.0) / 2)
    # A shorter interval waits for the previous write, so the stall is longer.
    assert slow_plan.expected_time(500) > slow_plan.work_seconds * 4000 / 1000
    # An interval is at most as long as the run.
    assert replace(PLAN, work_seconds=600.0).best_steps == 300
    hopeless_plan = failures_to_dict(replace(PLAN, mtbf=1.0))
    assert hopeless_plan["configured"]["run_seconds"] is None and "never" in format_failures(replace(PLAN, mtbf=1.0))


def test_checkpoint_size_of_planned_run() -> None:
    """A checkpoint has the size of the weights, the averaged weights and the two moments of AdamW."""
    run = build_planned_run("trainer.checkpoint_every=7")
    plan = make_plan(run, 1, find_gpu("h100"))
    failures = plan_failures(plan, run, FailureAssumptions(mtbf_hours_per_gpu=1.0, file_system_gbs=2.0))
    assert failures.mtbf == HOUR and failures.configured_steps == 7
    assert failures.checkpoint_bytes == pytest.approx(16 * plan.parameters, rel=1e-3)
    assert failures.write_seconds == pytest.approx(failures.checkpoint_bytes / 2e9)
    assert failures.work_seconds == pytest.approx(plan.best.steps * failures.step_seconds)


def parse_options(*options: str) -> FailureAssumptions:
    parser = argparse.ArgumentParser()
    add_failure_arguments(parser)
    return read_failure_assumptions(parser.parse_args(options))


def test_options() -> None:
    assert parse_options() == FailureAssumptions()
    assumptions = parse_options("--mtbf-per-gpu", "1200h", "--file-system", "3", "--startup", "20", "--stall", "1.5")
    assert assumptions == FailureAssumptions(1200.0, 3.0, 20.0, 1.5)
    with pytest.raises(ConfigError, match="--mtbf-per-gpu: 50000 needs a unit"):
        parse_options("--mtbf-per-gpu", "50000")
    with pytest.raises(ConfigError, match="--mtbf-per-gpu: .*often"):
        parse_options("--mtbf-per-gpu", "often")
    with pytest.raises(ConfigError, match="--stall: 0 must be more than 0"):
        parse_options("--stall", "0")
