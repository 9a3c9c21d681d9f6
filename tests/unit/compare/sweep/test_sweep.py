"""Tests of sweeps, in which a function replaces the trainings: executed trials, repetitions and results."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from credit.cli.main import main
from credit.config import load_config
from credit.train.monitor.metrics_log import write_status
from credit.train.monitor.run_overview import find_runs
from credit.utils.file_lock import file_lock
from tests.unit.compare.configs import QUICKSTART
from tests.unit.compare.finished_process import FinishedProcess

# Skill of a training with the seed 1000 as a function of its learning rate; it grows by 0.01 from seed to seed.
SKILL = {1e-4: 0.9, 3e-4: 0.5, 1e-3: 0.7}
GRID = ("--grid", "trainer.learning_rate=1e-4,3e-4,1e-3")


@pytest.fixture
def trained_trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the trained trials. A function replaces their processes; trials with the rate 3e-4 fail at first."""
    names: list[str] = []

    def train(words: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> FinishedProcess:
        config = load_config(words[words.index("train") + 1])
        folder = Path(config.save_loc)
        names.append(folder.name)
        assert config.experiment == f"quickstart_{folder.name}"
        folder.mkdir(exist_ok=True)
        rate = config.trainer.learning_rate
        if rate == 3e-4 and names.count(folder.name) == 1:
            log_path.write_text("credit train: step 7: the loss is not finite\n")
            write_status(folder, "failed", 7, "the loss is not finite", "")
            return FinishedProcess(1)
        (folder / "config.yml").write_text("trainer: {monitor: skill}\n")
        skill = SKILL[rate] + (config.seed - 1000) * 1e-5
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 20, "valid": {"skill": skill}}) + "\n")
        (folder / "summary.json").write_text("{}")
        write_status(folder, "done", 20, "", "")
        return FinishedProcess(0)

    monkeypatch.setattr("credit.compare.execution.start_process", train)
    return names


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., int]:
    """Function that calls ``credit sweep`` on the quickstart, with the folder ``sweep``."""

    def call(*arguments: str) -> int:
        return main(["sweep", str(QUICKSTART), "-o", str(tmp_path / "sweep"), *arguments])

    return call


def test_a_failed_trial_is_named_and_the_same_command_repeats_only_it(
    tmp_path: Path, trained_trials: list[str], sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(*GRID) == 1
    assert trained_trials == ["trial_0001", "trial_0002", "trial_0003"]
    output = capsys.readouterr().out
    assert "train trial_0002 failed: credit train: step 7: the loss is not finite (log " in output
    # The best first, the failed one last.
    names = [line.split()[0] for line in output.splitlines() if line.startswith("trial_")]
    assert names == ["trial_0003", "trial_0001", "trial_0002"]

    assert sweep(*GRID) == 0
    assert trained_trials[3:] == ["trial_0002"]
    capsys.readouterr()
    assert sweep(*GRID, "--json") == 0 and len(trained_trials) == 4
    results = json.loads(capsys.readouterr().out)
    assert [(row["trial"], row["best"], row["values"]) for row in results] == [
        ("trial_0002", 0.5, {"trainer.learning_rate": "3e-4"}),
        ("trial_0003", 0.7, {"trainer.learning_rate": "1e-3"}),
        ("trial_0001", 0.9, {"trainer.learning_rate": "1e-4"}),
    ]
    with (tmp_path / "sweep" / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["trial"], row["skill"], row["state"]) for row in rows] == [
        ("trial_0002", "0.5", "done"),
        ("trial_0003", "0.7", "done"),
        ("trial_0001", "0.9", "done"),
    ]


def test_trials_that_differ_only_in_their_seed_are_averaged(
    tmp_path: Path, trained_trials: list[str], sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Trials with the learning rate 3e-4 fail at first, so their average is incomplete and comes last."""
    grid = (*GRID, "seed=1000,2000,3000")
    assert sweep(*grid) == 1
    table = capsys.readouterr().out.split("\n\n")[1]
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["trainer.learning_rate", "mean", "skill", "std", "seeds"]
    assert rows[1:4] == [
        ["1e-3", "0.71", "0.01", "3", "of", "3"],
        ["1e-4", "0.91", "0.01", "3", "of", "3"],
        ["3e-4", "-", "-", "0", "of", "3"],
    ]
    assert sweep(*grid) == 0
    with (tmp_path / "sweep" / "seeds.csv").open(newline="") as file:
        best, *others = csv.DictReader(file)
    assert best["trainer.learning_rate"] == "3e-4" and len(others) == 2
    assert float(best["mean_skill"]) == pytest.approx(0.51)
    # The sample standard deviation of 0.50, 0.51 and 0.52.
    assert float(best["std_skill"]) == pytest.approx(0.01)
    assert (best["num_done"], best["num_trials"]) == ("3", "3")


def test_averages_over_fewer_seeds_come_last(
    trained_trials: list[str], sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A trial that does not set the seed is left out, and the smaller mean of a single seed does not come first."""
    assert sweep("--grid", "trainer.learning_rate=1e-3") == 0
    assert sweep("--grid", "trainer.learning_rate=1e-3", "seed=1000") == 0
    capsys.readouterr()
    assert sweep("--grid", "trainer.learning_rate=1e-4", "seed=1000,2000") == 0
    rows = [line.split() for line in capsys.readouterr().out.split("\n\n")[1].splitlines()]
    assert rows[1:3] == [["1e-4", "0.905", "0.007071", "2", "of", "2"], ["1e-3", "0.7", "-", "1", "of", "1"]]


def test_seeds_are_not_averaged_without_trials_of_several_seeds(
    tmp_path: Path, trained_trials: list[str], sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--grid", "trainer.learning_rate=1e-4,1e-3", "seed=1000") == 0
    assert "mean" not in capsys.readouterr().out and not (tmp_path / "sweep" / "seeds.csv").exists()


def test_values_may_be_added_and_the_config_may_not_change(
    tmp_path: Path, trained_trials: list[str], sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--grid", "trainer.learning_rate=1e-3") == 0
    # Another order of the values does not rename a trial that exists.
    assert sweep("--grid", "trainer.learning_rate=1e-4,1e-3") == 0
    assert trained_trials == ["trial_0001", "trial_0002"]
    record = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["trials"]
    assert [(row["name"], row["overrides"]) for row in record] == [
        ("trial_0001", ["trainer.learning_rate=1e-3"]),
        ("trial_0002", ["trainer.learning_rate=1e-4"]),
    ]
    capsys.readouterr()
    assert sweep("trainer.weight_decay=0.5", "--grid", "trainer.learning_rate=1e-3") == 2
    assert "trainer.weight_decay was 0.01 and is now 0.5" in capsys.readouterr().err
    # Settings of forecasts, scores and jobs do not concern the trainings.
    assert sweep("inference.lead_time=24h", "slurm.account=A1", "--grid", "trainer.learning_rate=1e-3") == 0
    assert len(trained_trials) == 2


def test_a_wrong_value_is_refused_before_anything_runs(
    tmp_path: Path, trained_trials: list[str], sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--grid", "trainer.learning_rate=1e-4,-1") == 2
    message = capsys.readouterr().err
    assert "trial_0002 (trainer.learning_rate=-1)" in message and "greater than 0" in message
    assert sweep("--grid", "trainer.learning_rat=1e-4") == 2
    assert trained_trials == [] and not (tmp_path / "sweep" / "sweep.json").exists()
    for arguments in (
        [],
        [*GRID, "--random", "2"],
        ["--random", "2"],
        [*GRID, "--jobs", "0"],
        [*GRID, "--cluster=pbs"],
    ):
        assert sweep(*arguments) == 2


def test_a_second_sweep_in_the_same_folder_is_refused(
    tmp_path: Path, trained_trials: list[str], sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    # Locks of one process do not exclude each other, so another process must hold the lock.
    import multiprocessing

    context = multiprocessing.get_context("fork")
    parent, child = context.Pipe()
    holder = context.Process(target=hold_lock, args=(tmp_path / "sweep" / ".lock", child))
    holder.start()
    assert parent.recv() == "held"
    assert sweep(*GRID) == 1
    parent.send("release")
    holder.join()
    assert "another credit sweep works in this folder" in capsys.readouterr().err and trained_trials == []


def hold_lock(path: Path, connection: object) -> None:
    """Hold a lock until a message arrives."""
    with file_lock(path):
        connection.send("held")
        connection.recv()


def test_credit_runs_lists_the_trials_of_a_submitted_sweep_and_not_the_sweep(
    tmp_path: Path, trained_trials: list[str], sweep: Callable[..., int]
) -> None:
    assert sweep("--random", "2", "--range", "trainer.learning_rate=choice:1e-4,1e-3", "--search-seed", "1") == 0
    (tmp_path / "sweep" / "jobs.json").write_text("{}")
    assert {path.name for path in find_runs(tmp_path)} == set(trained_trials)
