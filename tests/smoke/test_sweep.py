"""`credit sweep` continues after a stop, and each trial equals a training with the same config."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from credit.cli.main import main
from tests.smoke.test_compare import run_here
from tests.smoke.test_train import rows

STEPS = 40


@pytest.mark.slow
def test_sweep_continues_after_stop(
    small_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_run / "sweep"
    config = str(small_run / "config.yml")
    settings = [
        f"trainer.max_steps={STEPS}",
        "trainer.num_epoch=null",
        "trainer.validate_every=20",
        "trainer.log_every=1",
    ]
    arguments = [config, *settings, "-o", str(folder), "--grid", "trainer.learning_rate=1e-3,1e-4", "--jobs", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "credit.cli.main", "sweep", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    metrics = folder / "trial_0001" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and '"step": 3,' in metrics.read_text():
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    status = json.loads((folder / "trial_0001" / "STATUS").read_text())
    assert status["status"] == "requeue" and 0 < status["step"] < STEPS

    # The second call trains in this process, because new processes take seconds to start.
    monkeypatch.setattr("credit.compare.execution.start_process", run_here)
    assert main(["sweep", *arguments, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in results] == ["done", "done"]
    assert results[0]["best"] < results[1]["best"]
    # The interrupted trial is the same as an uninterrupted training.
    reference = small_run / "reference"
    assert main(["train", config, *settings, "trainer.learning_rate=1e-3", f"save_loc={reference}"]) == 0
    assert rows(folder / "trial_0001") == rows(reference) and len(rows(reference)) == STEPS
    assert not list(folder.glob("*/STOP"))
