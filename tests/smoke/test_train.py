"""`credit train` continues a run exactly, stops on request, and explains invalid input."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.smoke.conftest import write_world

COMPARED_KEYS = ("step", "epoch", "loss", "grad_norm", "lr")


def rows(folder: Path) -> list[tuple]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [tuple(row[key] for key in COMPARED_KEYS) for row in lines if "loss" in row]


def start_training(folder: Path, *overrides: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "credit.cli.main", "train", str(folder / "config.yml"), *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_row(folder: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        path = folder / "metrics.jsonl"
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.communicate()[0]}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra", [(), ("data.forecast_len=2", "trainer.grad_accum_every=2", "trainer.train_batch_size=2")]
)
def test_run_that_is_killed_and_continued_has_same_steps(small_run: Path, command, extra: tuple[str, ...]) -> None:
    result = command("train", small_run / "config.yml", f"save_loc={small_run}/one", *extra)
    assert result.returncode == 0, result.stderr
    process = start_training(small_run, f"save_loc={small_run}/two", *extra)
    wait_for_row(small_run / "two", 25, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert (small_run / "two" / "checkpoints" / "step_00000020").is_dir()
    result = command("train", small_run / "config.yml", f"save_loc={small_run}/two", *extra)
    assert result.returncode == 0, result.stderr
    uninterrupted, continued = rows(small_run / "one"), rows(small_run / "two")
    assert [row[0] for row in uninterrupted] == list(range(1, 41))
    assert continued == uninterrupted
    assert uninterrupted[-1][2] < uninterrupted[0][2]
    assert json.loads((small_run / "two" / "STATUS").read_text())["status"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["signal", "file"])
def test_run_stops_on_request_and_continues(small_run: Path, command, how: str) -> None:
    process = start_training(
        small_run, "trainer.max_steps=4000", "trainer.validate_every=4000", "trainer.checkpoint_every=4000"
    )
    wait_for_row(small_run / "run", 10, process)
    if how == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        (small_run / "run" / "STOP").touch()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 85, output
    status = json.loads((small_run / "run" / "STATUS").read_text())
    assert status["status"] == "requeue" and how in status["reason"]
    step = status["step"]
    result = command("train", small_run / "config.yml", f"trainer.max_steps={step + 3}")
    assert result.returncode == 0, result.stderr
    assert [row[0] for row in rows(small_run / "run")] == list(range(1, step + 4))


@pytest.mark.slow
def test_continuing_with_a_different_model_or_data_is_refused(small_run: Path, command) -> None:
    config = small_run / "config.yml"
    short_run = ("trainer.max_steps=2", "trainer.validate_every=2")
    assert command("train", config, *short_run).returncode == 0
    for override, message in (
        ("model.dim=[16,32,64,128]", "model.dim: [8, 16, 32, 64] in the checkpoint"),
        ("model.residual=false", "model.residual: True in the checkpoint"),
        ("data.levels=[850]", "channels that differ"),
        ("trainer.resume=never", "would be lost"),
    ):
        result = command("train", config, "trainer.max_steps=4", override)
        assert result.returncode in (1, 2) and message in result.stderr, (override, result.stderr)
        assert "Traceback" not in result.stderr
    assert [row[0] for row in rows(small_run / "run")] == [1, 2]
    # A different batch size of a rank is allowed: the number of samples per step stays that of the checkpoint.
    result = command("train", config, "trainer.max_steps=4", "trainer.train_batch_size=3")
    assert result.returncode == 0 and "4 samples per step" in result.stderr, result.stderr


@pytest.mark.slow
def test_start_with_wrong_config_ends_requeued_run(small_run: Path, command) -> None:
    """A job script submits itself again while STATUS is requeue, so a start that cannot succeed must end that."""
    config, path = small_run / "config.yml", small_run / "run" / "STATUS"
    assert command("train", config, "trainer.max_steps=2", "trainer.validate_every=2").returncode == 0
    done_status = json.loads(path.read_text())
    wrong_overrides = ("trainer.max_steps=4", "trainer.monitor=nothing")
    assert command("train", config, *wrong_overrides).returncode == 2
    assert json.loads(path.read_text()) == done_status, "a wrong start takes nothing from a run that is done"
    for state in ("requeue", "running"):
        path.write_text(json.dumps({**done_status, "status": state}))
        assert command("train", config, *wrong_overrides).returncode == 2
        status = json.loads(path.read_text())
        assert (status["status"], status["step"]) == ("failed", 2) and "trainer.monitor" in status["reason"], status
    path.write_text(json.dumps({**done_status, "status": "requeue"}))
    for expected in ("requeue", "failed"):
        # A checkpoint error may be temporary, so the run fails only when the same error repeats.
        assert command("train", config, "trainer.max_steps=4", "model.residual=false").returncode == 1
        status = json.loads(path.read_text())
        assert (status["status"], status["step"]) == (expected, 2) and "model.residual" in status["reason"], status


@pytest.mark.slow
def test_trained_model_beats_persistence(small_run: Path, command) -> None:
    """The waves travel, so a trained model must have a smaller error than persistence."""
    config = small_run / "config.yml"
    for name, overrides in (("check", ()), ("train", ("trainer.max_steps=150",)), ("rollout", ()), ("verify", ())):
        result = command(name, config, *overrides)
        assert result.returncode == 0, f"{name}: {result.stdout}{result.stderr}"
    with open(small_run / "run" / "scores.csv", newline="") as handle:
        table = list(csv.DictReader(handle))
    header = ["forecast", "variable", "level", "level_units", "region", "season"]
    header += ["lead_hours", "metric", "value", "units", "n_cases"]
    assert list(table[0])[: len(header)] == header

    def rmse(forecast: str) -> float:
        row_key = {"forecast": forecast, "variable": "t2m", "metric": "rmse", "region": "global", "season": "all"}
        matching_rows = [
            r for r in table if all(r[k] == v for k, v in row_key.items()) and float(r["lead_hours"]) == 24
        ]
        assert len(matching_rows) == 1
        return float(matching_rows[0]["value"])

    assert rmse("model") < rmse("persistence")
    assert (small_run / "run" / "report.html").stat().st_size > 50_000
    second_rollout = command("rollout", config)
    assert "0 forecasts written" in second_rollout.stdout


def copy_with_nan(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array[30, 4, 7] = np.nan
    return array


def write_data_with_nan(world: Path) -> None:
    import xarray as xr

    with xr.open_dataset(world, decode_times=False) as data:
        t2m = copy_with_nan(data.t2m.values)
    write_world(world, t2m=(("time", "latitude", "longitude"), t2m, {"units": "K"}))


INVALID_INPUTS = {
    "unknown key": (["trainer.max_step=3"], None, 'did you mean "max_steps"'),
    "wrong type": (["trainer.amp=maybe"], None, "trainer.amp: 'maybe'"),
    "window": (["model.local_window_size=[3,2,1,1]"], None, "model.padding"),
    "missing file": (["data.sources.0.path=nowhere.nc"], None, "nowhere.nc"),
    "missing variable": (["data.variables.prognostic.vars_2D=[t2n]"], None, 'did you mean "t2m"'),
    "missing level": (["data.levels=[850,700]"], None, "700"),
    "no truth": (["data.splits.test=[2001-01-01,2001-02-01]"], None, "data.splits.test"),
    "gap": (["data.timestep=3h"], None, "no two differ by 3h"),
    "nan": ([], write_data_with_nan, "t2m"),
    "truncated": ([], lambda world: world.write_bytes(world.read_bytes()[:5000]), "data.nc"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", INVALID_INPUTS)
def test_bad_input_has_one_clear_message(small_run: Path, command, case: str) -> None:
    overrides, damage, message = INVALID_INPUTS[case]
    if damage:
        damage(small_run / "data.nc")
    # Only rollout reads the test period.
    name = "rollout" if case == "no truth" else "train"
    if name == "rollout":
        assert command("train", small_run / "config.yml", "trainer.max_steps=1").returncode == 0
    result = command(name, small_run / "config.yml", *overrides)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr and "Traceback" not in result.stderr, result.stderr
    if name == "train":
        assert not list(small_run.glob("run/checkpoints/*"))


@pytest.mark.slow
@pytest.mark.parametrize("calendar", ["noleap", "360_day"])
def test_other_calendars(small_run: Path, command, calendar: str) -> None:
    write_world(small_run / "data.nc", calendar=calendar)
    for name, extra in (("train", ("trainer.max_steps=2",)), ("rollout", ()), ("verify", ())):
        result = command(name, small_run / "config.yml", *extra)
        assert result.returncode == 0, f"{name}: {result.stderr}"


@pytest.mark.slow
def test_store_and_sources_train_alike(small_run: Path, command) -> None:
    config, store = small_run / "config.yml", f"data.store={small_run}/store.zarr"
    missing = command("train", config, store, "trainer.max_steps=3")
    assert missing.returncode == 2 and "credit preprocess" in missing.stderr
    assert command("preprocess", config, store).returncode == 0
    for name, extra in (("stored", (store,)), ("direct", ())):
        result = command("train", config, "trainer.max_steps=3", f"save_loc={small_run}/{name}", *extra)
        assert result.returncode == 0, result.stderr
    assert rows(small_run / "stored") == rows(small_run / "direct")


def test_read_only_save_loc(small_run: Path, command) -> None:
    (small_run / "file").write_text("")
    result = command("train", small_run / "config.yml", f"save_loc={small_run}/file/run")
    assert result.returncode == 2 and "save_loc" in result.stderr, result.stderr


def test_init_and_help(command) -> None:
    listed = command("init")
    assert "quickstart" in listed.stdout
    written = command("init", "quickstart")
    assert yaml.safe_load(written.stdout)["experiment"] == "quickstart"
    assert 'did you mean "quickstart"' in command("init", "quickstar").stderr
    for name in ("init", "check", "preprocess", "train", "rollout", "verify", "convert"):
        result = command(name, "--help")
        assert result.returncode == 0 and f"credit {name}" in result.stdout
