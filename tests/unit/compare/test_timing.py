"""Tests of the measurement of step times: order, medians, growing rollouts, and runs that are added later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from credit.compare import timing
from credit.compare.budget import StepCost
from credit.compare.execution import ComparisonPart, Executor
from credit.compare.timing import (
    TimingPlan,
    build_timing_overrides,
    compute_session_costs,
    measure_step_costs,
    read_step_cost,
    rotate_order,
)
from credit.config import load_config
from tests.unit.compare.configs import QUICKSTART, make_run
from tests.unit.compare.finished_process import FinishedProcess


def write_training(folder: Path, seconds: list[float], tflop: float | None = 0.5) -> None:
    """Write the logs of a training with 8 samples a step on 2 processes.

    Args:
        folder: folder of the training.
        seconds: duration of a step in each measurement of three steps.
        tflop: operations of a step over both processes in 10^12.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for step in range(1, 3 * len(seconds) + 1):
        duration = seconds[(step - 1) // 3]
        row = {"step": step, "loss": 1.0, "samples_per_s": 8 / duration}
        if tflop is not None:
            row["tflops"] = tflop / 2 / duration
        rows.append(json.dumps(row))
    (folder / "metrics.jsonl").write_text("\n".join(rows))
    steps = 3 * len(seconds)
    (folder / "summary.json").write_text(json.dumps({"steps": steps, "samples": 8 * steps, "processes": 2}))


def test_every_run_is_timed_first_and_last_in_turn() -> None:
    assert [rotate_order(["a", "b", "c"], number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_the_median_leaves_out_the_first_measurement(tmp_path: Path) -> None:
    write_training(tmp_path, [9.0, 2.0, 5.0, 3.0])
    cost = read_step_cost(tmp_path, None)
    assert cost.seconds == pytest.approx(3.0)
    assert cost.operations == pytest.approx(0.5e12)
    write_training(tmp_path, [9.0, 2.0], tflop=None)
    assert read_step_cost(tmp_path, None) == StepCost(2.0, None)
    assert read_step_cost(tmp_path / "nowhere", None) is None


def test_stages_of_growing_rollouts_count_by_their_share_of_the_run(tmp_path: Path) -> None:
    # Steps 1 to 18 have one forecast step, 19 to 30 have two; each stage begins with a slow measurement.
    write_training(tmp_path, [9.0, 1.0, 1.0, 1.2, 1.0, 1.0, 7.0, 2.0, 2.0, 2.0])
    assert read_step_cost(tmp_path, {0: 1, 0.6: 2}).seconds == pytest.approx(0.6 * 1.0 + 0.4 * 2.0)


def test_the_short_training_has_no_preview_and_one_validation(tmp_path: Path) -> None:
    run = make_run("a", "trainer.preview={}", "trainer.patience=2")
    overrides = build_timing_overrides(run, 30, tmp_path)
    trainer = load_config(QUICKSTART, ["trainer.preview={}", *overrides]).trainer
    assert trainer.preview is None and trainer.patience is None and trainer.walltime is None
    assert trainer.max_steps == trainer.validate_every == trainer.checkpoint_every == 30


def test_a_run_that_is_added_later_is_timed_relative_to_an_earlier_run() -> None:
    session = [
        # In the second round the machine is twice as slow.
        {"name": "a", "round": 0, "seconds": 1.0, "operations": 5.0},
        {"name": "b", "round": 0, "seconds": 3.0, "operations": 7.0},
        {"name": "a", "round": 1, "seconds": 2.0, "operations": 5.0},
        {"name": "b", "round": 1, "seconds": 6.0, "operations": 7.0},
    ]
    assert compute_session_costs(session, None, {})["b"] == StepCost(4.5, 7.0)
    earlier = {"a": StepCost(0.5, 5.0)}
    assert compute_session_costs(session, "a", earlier)["b"] == StepCost(1.5, 7.0)


def test_timings_are_kept_and_a_failing_run_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"a": [1.0, 5.0, 2.0], "b": [3.0, 4.0, 8.0]}
    timed_folders = []

    def train(words: list[str], log_path: Path, environment: dict[str, str]) -> FinishedProcess:
        folder = Path(next(word for word in words if word.startswith("save_loc=")).removeprefix("save_loc="))
        name, _, number = folder.name.partition("_round_")
        timed_folders.append(folder.name)
        if name == "broken":
            log_path.write_text("credit train: no memory\n")
            return FinishedProcess(1)
        write_training(folder, [9.0, seconds[name][int(number)]])
        return FinishedProcess(0)

    monkeypatch.setattr("credit.compare.execution.start_process", train)
    runs = [make_run("a"), make_run("broken"), make_run("b")]
    paths = {run.name: tmp_path / f"{run.name}.yml" for run in runs}
    executor = Executor(tmp_path)
    costs = measure_step_costs(runs, paths, TimingPlan(6, 3, 1), executor, tmp_path)
    assert {name: cost.seconds for name, cost in costs.items()} == {"a": 2.0, "b": 4.0}
    assert timed_folders == [
        "a_round_0", "broken_round_0", "b_round_0", "b_round_1", "a_round_1", "a_round_2", "b_round_2",
    ]  # fmt: skip
    assert executor.list_failures() == [
        f"time broken, round 1 failed: credit train: no memory (log {tmp_path}/logs/time_broken_round_1.log)"
    ]
    # The second call measures nothing but the run that failed, with the first run.
    timed_folders.clear()
    repeated_costs = measure_step_costs(runs[::2], paths, TimingPlan(6, 3, 1), Executor(tmp_path), tmp_path)
    assert repeated_costs == costs and timed_folders == []
    assert not (tmp_path / "timing").exists()
    assert ComparisonPart("p", "train", tmp_path, (), tmp_path, ranks=2).command_line()[1:5] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
    ]  # fmt: skip
    assert timing.rotate_order(["a"], 5) == ["a"]
