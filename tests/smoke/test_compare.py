"""`credit compare` continues after being killed, and its page and files agree with the scores of `credit verify`."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from credit.cli.main import main
from tests.unit.compare.finished_process import FinishedProcess

COMMAND = ("--equal", "steps", "20", "--seeds", "1,2", "--long-run", "3d")


def write_configs(folder: Path) -> list[str]:
    """Write two configs, one with a wider network, and return their paths."""
    document = yaml.safe_load((folder / "config.yml").read_text())
    paths = []
    for name, dims in (("narrow", [8, 16, 32, 64]), ("wide", [16, 32, 64, 128])):
        document["experiment"] = name
        document["model"]["dim"] = dims
        path = folder / f"{name}.yml"
        path.write_text(yaml.safe_dump(document))
        paths.append(str(path))
    return paths


def kill_during_first_training(arguments: Sequence[str], run_folder: Path) -> None:
    """Start the comparison in processes of its own, and kill them after some steps of the first training."""
    process = subprocess.Popen(
        [sys.executable, "-m", "credit.cli.main", "compare", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics = run_folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and '"step": 5,' in metrics.read_text():
            break
        time.sleep(0.02)
    # The training belongs to the same group of processes.
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert json.loads((run_folder / "STATUS").read_text())["status"] == "running"


def run_here(words: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> FinishedProcess:
    """Run the command of a part in this process, because a new process takes 5 s to start."""
    with log_path.open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        log.write(f"$ {' '.join(words)}\n")
        return FinishedProcess(main(words[words.index("credit.cli.main") + 1 :]))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def scores_file(folder: Path, name: str, seed: str) -> Path:
    """Return the path of the scores of a run with a seed. The first run is the model of the verification."""
    scores = folder / "scores" / f"seed_{seed}"
    if name != "narrow":
        scores = scores / "pairs" / name
    return scores / "scores.csv"


@pytest.mark.slow
def test_comparison_continues_after_kill(
    small_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_run / "comparison"
    arguments = [*write_configs(small_run), "-o", str(folder), *COMMAND]
    run_folder = folder / "narrow" / "seed_1"
    kill_during_first_training(arguments, run_folder)
    rows_before = (run_folder / "metrics.jsonl").read_text().splitlines()[:4]

    monkeypatch.setattr("credit.compare.execution.start_process", run_here)
    assert main(["compare", *arguments]) == 0
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 21))
    # The training continued from its checkpoint of step 4: the first rows are those of the killed process.
    assert [line for line in lines if '"loss"' in line and '"valid"' not in line][:4] == rows_before
    require_agreement(folder)
    require_refusals(arguments, capsys)

    # Another call repeats only the part whose result is missing; its failure is named, and all other results stay.
    document = json.loads((folder / "compare.json").read_text())
    monkeypatch.setattr("credit.compare.execution.start_process", lambda *arguments: FinishedProcess(1))
    (folder / "scores" / "seed_2" / "scores.nc").unlink()
    assert main(["compare", *arguments]) == 1
    changed_document = json.loads((folder / "compare.json").read_text())
    assert [failure.partition(" failed")[0] for failure in changed_document["failures"]] == ["score seed 2"]
    assert "Missing: score seed 2 failed" in (folder / "compare.html").read_text()
    for name in ("narrow", "wide"):
        seeds = document["results"][0]["rmse"][name]["seeds"]
        assert changed_document["results"][0]["rmse"][name]["seeds"] == {"1": seeds["1"]}


def require_agreement(folder: Path) -> None:
    """Assert that the files of the comparison have the scores of credit verify, and their means over the seeds."""
    rows = {}
    for row in read_rows(folder / "compare.csv"):
        key = row["run"], row["seed"], row["variable"], row["level"], row["region"], row["lead_hours"], row["metric"]
        rows[key] = row["value"]
    document = json.loads((folder / "compare.json").read_text())
    page = (folder / "compare.html").read_text()
    for name in ("narrow", "wide"):
        values = {}
        for seed in ("1", "2"):
            for row in read_rows(scores_file(folder, name, seed)):
                if row["forecast"] != "model" or row["season"] != "all":
                    continue
                key = row["variable"], row["level"], row["region"], row["lead_hours"], row["metric"]
                assert rows[name, seed, *key] == row["value"]
                if key == ("z", "500", "global", "24", "rmse"):
                    values[seed] = float(row["value"])
        result = next(row for row in document["results"] if (row["channel"], row["lead_hours"]) == ("z500", 24))
        assert result["rmse"][name]["seeds"] == pytest.approx(values, rel=1e-7)
        mean = sum(values.values()) / 2
        assert float(rows[name, "mean", "z", "500", "global", "24", "rmse"]) == pytest.approx(mean, rel=1e-7)
        assert result["rmse"][name]["mean"] == pytest.approx(mean, rel=1e-7)
        persistence = float(rows["persistence", "", "z", "500", "global", "24", "rmse"])
        assert f">{mean / persistence:.3f}<" in page
    # The other run has the same scores alone as in the verification together with the first run.
    second_run_rows = [row for row in read_rows(scores_file(folder, "narrow", "1")) if row["forecast"] == "wide"]
    alone_rows = [row for row in read_rows(scores_file(folder, "wide", "1")) if row["forecast"] == "model"]
    assert [row["value"] for row in second_run_rows] == [row["value"] for row in alone_rows]
    trials = {run["name"]: run["trials"] for run in document["runs"]}
    assert trials["narrow"]["1"]["steps"] == trials["wide"]["2"]["steps"] == 20
    assert trials["narrow"]["1"]["parameters"] < trials["wide"]["1"]["parameters"]
    assert {curve["days"][-1] for curve in document["stability"]} == {3.0}
    assert document["differences"] == {"model.dim": ["[8, 16, 32, 64]", "[16, 32, 64, 128]"]}


def require_refusals(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that another budget or a changed config is refused in the same folder."""
    budget = [text.replace("20", "30") if text == "20" else text for text in arguments]
    for changed, message in (
        (budget, "--equal steps 20, but this call has --equal steps 30"),
        ([*arguments, "trainer.learning_rate=0.5"], "trainer.learning_rate was 0.002 and is now 0.5"),
        (["missing.yml", *arguments[1:]], "missing.yml"),
    ):
        capsys.readouterr()
        assert main(["compare", *changed]) == 2
        assert message in capsys.readouterr().err
