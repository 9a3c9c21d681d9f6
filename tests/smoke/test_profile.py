"""`credit train --profile` writes a table and a timeline, and does not change the training steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from credit.utils.profiling import phases
from tests.smoke.test_train import rows

# Rollouts of two steps and two micro-batches a step. The measured steps contain a validation and a checkpoint.
SETTINGS = (
    "trainer.max_steps=16", "trainer.validate_every=8", "trainer.checkpoint_every=8", "trainer.log_every=3",
    "trainer.grad_accum_every=2", "trainer.train_batch_size=2", "data.forecast_len=2",
)  # fmt: skip


def read_trace(folder: Path, rank: int = 0) -> list[dict]:
    with gzip.open(folder / "profile" / f"trace_rank{rank:05d}.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def test_table_and_timeline_of_a_run(small_run: Path, command) -> None:
    config, folder = small_run / "config.yml", small_run / "run"
    process = command("train", config, *SETTINGS, "--profile", "6:12")
    assert process.returncode == 0, process.stderr
    content = json.loads((folder / "profile" / "table.json").read_text())
    assert (folder / "profile" / "table.txt").read_text() in process.stderr
    assert (content["first"], content["last"], content["ranks"], content["clock"]) == (6, 12, 1, "host")

    # The phases and the unaccounted rest add up to the time of a step.
    lines = {(line["kind"], line["name"]): line for line in content["lines"]}
    step = lines["step", "step"]
    assert 0.98 <= content["accounted_share"] <= 1
    part_seconds = [line["seconds"] for line in content["lines"] if line["kind"] in ("phase", "rest")]
    assert sum(part_seconds) == pytest.approx(step["seconds"])
    phases_with_time = {name for (kind, name), line in lines.items() if kind == "phase" and line["seconds"]}
    assert phases_with_time == {"forward", "backward", "spectral norm", "optimizer", "loader", "copy to device",
                                "logging", "checkpoint", "validation"}  # fmt: skip
    assert lines["hidden", "checkpoint"]["seconds"] > 0
    summary = json.loads((folder / "summary.json").read_text())
    assert step["tflop"] == pytest.approx(summary["tflop_per_step"])
    assert 0 < lines["phase", "backward"]["peak_share"] < 1
    assert 0 < lines["phase", "optimizer"]["bytes"] < 1e9 and lines["phase", "optimizer"]["peak_share"] > 0
    assert lines["phase", "forward"]["tflop"] + lines["phase", "backward"]["tflop"] == pytest.approx(step["tflop"])
    # 4 samples of 16 x 32 cells: 3 prognostic channels, 2 forcings of two steps, 4 outputs at two steps.
    assert lines["phase", "loader"]["bytes"] == 4 * 4 * 16 * 32 * (3 + 2 * 2 + 4 * 2)

    # The timeline has the phases of the two steps after the measured steps.
    events = [event for event in read_trace(folder) if event.get("cat") == "user_annotation"]
    names = [event["name"] for event in events]
    assert names.count("step 13") == names.count("step 14") == 1
    assert names.count("forward") == names.count("backward") == 4 and names.count("optimizer") == 2

    # Profiling is switched off after the run: all phases share one context that does nothing. The steps are unchanged.
    assert phases.phase(phases.Phase.FORWARD) is phases.phase(phases.Phase.BACKWARD)
    assert command("train", config, *SETTINGS, f"save_loc={small_run}/plain").returncode == 0
    assert [row[:4] for row in rows(folder)] == [row[:4] for row in rows(small_run / "plain")]


def test_run_that_stops_early_writes_table_of_its_steps(small_run: Path, command, monkeypatch) -> None:
    from credit.train.monitor.stop_signal import StopSignal

    num_calls = 0

    def stop_after_ten_steps(signal: StopSignal, seconds: float) -> str | None:
        nonlocal num_calls
        num_calls += 1
        return "asked by the test" if num_calls > 10 else None

    monkeypatch.setattr(StopSignal, "find_reason", stop_after_ten_steps)
    process = command("train", small_run / "config.yml", "trainer.max_steps=40", "--profile", "20")
    assert process.returncode == 85, process.stderr
    folder = small_run / "run" / "profile"
    content = json.loads((folder / "table.json").read_text())
    assert content["first"] == 6 and 6 <= content["last"] < 25 and content["trace"] is None
    assert not list(folder.glob("*.gz"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profile", "0"], "a profile measures 1 to 1000 steps"),
        (["--profile", "trainer.max_steps=9"], "write overrides before --profile"),
        (["--profile", "30"], "the run ends at step 16"),
        (["--profile-rank", "0"], "needs --profile"),
        (["--profile", "3", "--profile-rank", "1"], "the number of ranks is 1; choose at most 0"),
    ],
)
def test_invalid_profile_options_are_refused(small_run: Path, command, options: list[str], message: str) -> None:
    process = command("train", small_run / "config.yml", *SETTINGS, *options)
    assert process.returncode == 2 and message in " ".join(process.stderr.split())
    assert not (small_run / "run" / "profile").exists() and not (small_run / "run" / "metrics.jsonl").exists()
