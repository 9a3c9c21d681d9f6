"""``credit runs`` lists the state of runs, which it reads from their folders."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from credit.cli import main
from credit.train.monitor.run_overview import find_runs, read_overview


def write_run(
    folder: Path, status: str = "running", silent_minutes: float = 0.0, has_heartbeat: bool = True, **changes: object
) -> Path:
    """Write the files of a run with 20 of 100 steps, 36 s per step, and two validations."""
    folder.mkdir(parents=True)
    state = {"status": status, "step": 10, "reason": "the disk is full", "job_id": "77", **changes}
    (folder / "STATUS").write_text(json.dumps(state))
    config = {"trainer": {"max_steps": 100, "monitor": "loss"}}
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    rows = []
    for step in range(1, 21):
        rows.append({"step": step, "loss": 1 / step, "wall_hours": 0.01 * step, "samples_per_s": 8.0})
        if step % 10 == 0:
            rows.append({"step": step, "valid": {"loss": 3 - step / 10, "skill": None}})
    lines = [json.dumps(row) for row in rows]
    # A run that is writing leaves an incomplete last line.
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 2')
    if has_heartbeat:
        time = datetime.now(UTC) - timedelta(minutes=silent_minutes)
        beat = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ"), "doing": "step 21"}
        (folder / "heartbeat.json").write_text(json.dumps(beat))
    return folder


def run_runs(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    status = main._run_command("runs", list(arguments), "credit runs")
    return status, "".join(capsys.readouterr())


def test_a_running_run(tmp_path: Path) -> None:
    overview = read_overview(write_run(tmp_path / "a"))
    assert (overview.state, overview.step, overview.total_steps) == ("running", 20, 100)
    assert (overview.monitor, overview.best, overview.best_step) == ("loss", 1.0, 20)
    assert overview.loss == 0.05 and overview.samples_per_s == 8.0
    assert overview.hours_left == pytest.approx(0.8) and overview.activity == "step 21"


def test_states_of_runs(tmp_path: Path) -> None:
    assert read_overview(write_run(tmp_path / "lost", silent_minutes=6)).state == "lost"
    failed = read_overview(write_run(tmp_path / "failed", "failed", has_heartbeat=False))
    assert (failed.state, failed.activity, failed.job_id) == ("failed", "the disk is full", "77")
    assert failed.hours_left is None
    finished = write_run(tmp_path / "done", "done", has_heartbeat=False, reason="")
    (finished / "summary.json").write_text('{"steps": 20}')
    assert read_overview(finished).total_steps == 20
    submitted = tmp_path / "submitted"
    submitted.mkdir()
    (submitted / "jobs.json").write_text("[]")
    overview = read_overview(submitted)
    assert overview.state == "submitted" and overview.step is None and overview.best is None


def test_runs_at_any_depth(tmp_path: Path) -> None:
    write_run(tmp_path / "b" / "seed_1")
    write_run(tmp_path / "a")
    # Neither checkpoints nor hidden folders are searched.
    write_run(tmp_path / "a" / "checkpoints" / "no_run")
    write_run(tmp_path / ".hidden")
    # The state of `credit realtime` in a run is not another run, but a run may have this name.
    (tmp_path / "a" / "realtime").mkdir()
    (tmp_path / "a" / "realtime" / "STATUS").write_text("{}")
    write_run(tmp_path / "realtime")
    found = [path.relative_to(tmp_path) for path in find_runs(tmp_path)]
    assert found == [Path("a"), Path("b/seed_1"), Path("realtime")]


def test_table_has_one_line_per_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", "failed", has_heartbeat=False, reason="x" * 100)
    status, text = run_runs(capsys)
    lines = text.splitlines()
    assert status == 0 and len(lines) == 3 and lines[0].split()[:3] == ["run", "state", "step"]
    assert lines[1].split()[:3] == ["runs/a", "running", "20/100"]
    assert "loss 1 at 20" in lines[1] and "48 min" in lines[1] and lines[1].endswith("step 21")
    assert lines[2].split()[1] == "failed" and lines[2].endswith("x" * 57 + "...")
    # A run that two of the folders contain is listed once.
    assert len(run_runs(capsys, "runs", "runs/a")[1].splitlines()) == 3


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a")
    status, text = run_runs(capsys, str(tmp_path), "--json")
    (document,) = json.loads(text)
    assert status == 0 and document["folder"] == str(tmp_path / "a") and document["hours_left"] == pytest.approx(0.8)
    datetime.fromisoformat(document["last_sign"])


def test_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_runs(capsys, str(tmp_path)) == (1, f"no runs in {tmp_path}\n")
    assert run_runs(capsys, str(tmp_path), "--json") == (1, "[]\n")


def test_watch(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "a")
    pauses = []

    def interrupt_second_pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("credit.cli.runs.command.time.sleep", interrupt_second_pause)
    status, text = run_runs(capsys, str(tmp_path), "--watch", "30")
    assert status == 130 and pauses == [30.0, 30.0]
    assert text.count("\033[2J\033[H") == 2 and text.count("20/100") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing: is not a folder; give folders with runs"),
        (["--watch", "0"], "--watch 0: the number of seconds between two lists must be at least 1"),
        (["--watch", "5", "--json"], "--watch and --json: cannot be combined"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, text = run_runs(capsys, *arguments)
    assert status == 2 and message in text
