"""credit_train: continues exactly, stops in time, and says what is wrong with its input."""

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

KEPT = ("step", "epoch", "loss", "grad_norm", "lr")


def rows(folder: Path) -> list[tuple]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [tuple(row[key] for key in KEPT) for row in lines if "loss" in row]


def start(folder: Path, *overrides: str) -> subprocess.Popen:
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
def test_killed_and_continued_is_the_same_run(small_run: Path, command, extra: tuple[str, ...]) -> None:
    done = command("train", small_run / "config.yml", f"save_loc={small_run}/one", *extra)
    assert done.returncode == 0, done.stderr
    process = start(small_run, f"save_loc={small_run}/two", *extra)
    wait_for_row(small_run / "two", 25, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert (small_run / "two" / "checkpoints" / "step_00000020").is_dir()
    done = command("train", small_run / "config.yml", f"save_loc={small_run}/two", *extra)
    assert done.returncode == 0, done.stderr
    uninterrupted, continued = rows(small_run / "one"), rows(small_run / "two")
    assert [row[0] for row in uninterrupted] == list(range(1, 41))
    assert continued == uninterrupted
    assert uninterrupted[-1][2] < uninterrupted[0][2]
    assert json.loads((small_run / "two" / "STATUS").read_text())["status"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["signal", "file"])
def test_stops_in_time_and_goes_on(small_run: Path, command, how: str) -> None:
    process = start(small_run, "trainer.max_steps=4000", "trainer.validate_every=4000", "trainer.checkpoint_every=4000")
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
    done = command("train", small_run / "config.yml", f"trainer.max_steps={step + 3}")
    assert done.returncode == 0, done.stderr
    assert [row[0] for row in rows(small_run / "run")] == list(range(1, step + 4))


@pytest.mark.slow
def test_continuing_as_another_run_is_refused(small_run: Path, command) -> None:
    config = small_run / "config.yml"
    short = ("trainer.max_steps=2", "trainer.validate_every=2")
    assert command("train", config, *short).returncode == 0
    for override, says in (
        ("model.dim=[16,32,64,128]", "model.dim: [8, 16, 32, 64] in the checkpoint"),
        ("model.residual=false", "model.residual: True in the checkpoint"),
        ("data.levels=[850]", "channels that differ"),
        ("trainer.resume=never", "would be lost"),
    ):
        done = command("train", config, "trainer.max_steps=4", override)
        assert done.returncode in (1, 2) and says in done.stderr, (override, done.stderr)
        assert "Traceback" not in done.stderr
    assert [row[0] for row in rows(small_run / "run")] == [1, 2]
    # Another batch of a rank is no other run: the samples of a step stay those of the checkpoint.
    done = command("train", config, "trainer.max_steps=4", "trainer.train_batch_size=3")
    assert done.returncode == 0 and "4 samples per step" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_start_with_a_wrong_config_ends_a_requeued_run(small_run: Path, command) -> None:
    """Else a script that submits itself while STATUS says requeue would do so for ever."""
    config, path = small_run / "config.yml", small_run / "run" / "STATUS"
    assert command("train", config, "trainer.max_steps=2", "trainer.validate_every=2").returncode == 0
    done = json.loads(path.read_text())
    wrong = ("trainer.max_steps=4", "trainer.monitor=nothing")
    assert command("train", config, *wrong).returncode == 2
    assert json.loads(path.read_text()) == done, "a wrong start takes nothing from a run that is done"
    for state in ("requeue", "running"):
        path.write_text(json.dumps({**done, "status": state}))
        assert command("train", config, *wrong).returncode == 2
        status = json.loads(path.read_text())
        assert (status["status"], status["step"]) == ("failed", 2) and "trainer.monitor" in status["reason"], status
    path.write_text(json.dumps({**done, "status": "requeue"}))
    for expected in ("requeue", "failed"):
        # an error of checkpoints may pass, but not one that repeats
        assert command("train", config, "trainer.max_steps=4", "model.residual=false").returncode == 1
        status = json.loads(path.read_text())
        assert (status["status"], status["step"]) == (expected, 2) and "model.residual" in status["reason"], status


@pytest.mark.slow
def test_the_model_learns_something_and_forecasts(small_run: Path, command) -> None:
    """Train, forecast, score; the waves travel, so the model must beat persistence."""
    config = small_run / "config.yml"
    for name, extra in (("check", ()), ("train", ("trainer.max_steps=150",)), ("rollout", ()), ("verify", ())):
        done = command(name, config, *extra)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
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
    again = command("rollout", config)
    assert "0 forecasts written" in again.stdout


def nan_at(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array[30, 4, 7] = np.nan
    return array


def bad_value(world: Path) -> None:
    import xarray as xr

    with xr.open_dataset(world, decode_times=False) as data:
        t2m = nan_at(data.t2m.values)
    write_world(world, t2m=(("time", "latitude", "longitude"), t2m, {"units": "K"}))


BAD_INPUT = {
    "unknown key": (["trainer.max_step=3"], None, 'did you mean "max_steps"'),
    "wrong type": (["trainer.amp=maybe"], None, "trainer.amp: 'maybe'"),
    "window": (["model.local_window_size=[3,2,1,1]"], None, "model.padding"),
    "missing file": (["data.sources.0.path=nowhere.nc"], None, "nowhere.nc"),
    "missing variable": (["data.variables.prognostic.vars_2D=[t2n]"], None, 'did you mean "t2m"'),
    "missing level": (["data.levels=[850,700]"], None, "700"),
    "no truth": (["data.splits.test=[2001-01-01,2001-02-01]"], None, "data.splits.test"),
    "gap": (["data.timestep=3h"], None, "gap"),
    "nan": ([], bad_value, "t2m"),
    "truncated": ([], lambda world: world.write_bytes(world.read_bytes()[:5000]), "data.nc"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_has_one_clear_message(small_run: Path, command, case: str) -> None:
    overrides, damage, says = BAD_INPUT[case]
    if damage:
        damage(small_run / "data.nc")
    # the test period matters to rollout alone
    name = "rollout" if case == "no truth" else "train"
    if name == "rollout":
        assert command("train", small_run / "config.yml", "trainer.max_steps=1").returncode == 0
    done = command(name, small_run / "config.yml", *overrides)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr, done.stderr
    if name == "train":
        assert not list(small_run.glob("run/checkpoints/*"))


@pytest.mark.slow
@pytest.mark.parametrize("calendar", ["noleap", "360_day"])
def test_other_calendars(small_run: Path, command, calendar: str) -> None:
    write_world(small_run / "data.nc", calendar=calendar)
    for name, extra in (("train", ("trainer.max_steps=2",)), ("rollout", ()), ("verify", ())):
        done = command(name, small_run / "config.yml", *extra)
        assert done.returncode == 0, f"{name}: {done.stderr}"


@pytest.mark.slow
def test_store_and_sources_train_alike(small_run: Path, command) -> None:
    config, store = small_run / "config.yml", f"data.store={small_run}/store.zarr"
    missing = command("train", config, store, "trainer.max_steps=3")
    assert missing.returncode == 2 and "credit preprocess" in missing.stderr
    assert command("preprocess", config, store).returncode == 0
    for name, extra in (("stored", (store,)), ("direct", ())):
        done = command("train", config, "trainer.max_steps=3", f"save_loc={small_run}/{name}", *extra)
        assert done.returncode == 0, done.stderr
    assert rows(small_run / "stored") == rows(small_run / "direct")


def test_read_only_save_loc(small_run: Path, command) -> None:
    (small_run / "file").write_text("")
    done = command("train", small_run / "config.yml", f"save_loc={small_run}/file/run")
    assert done.returncode == 2 and "save_loc" in done.stderr, done.stderr


def test_init_and_help(command) -> None:
    listed = command("init")
    assert "quickstart" in listed.stdout
    written = command("init", "quickstart")
    assert yaml.safe_load(written.stdout)["experiment"] == "quickstart"
    assert 'did you mean "quickstart"' in command("init", "quickstar").stderr
    for name in ("init", "check", "preprocess", "train", "rollout", "verify", "convert"):
        done = command(name, "--help")
        assert done.returncode == 0 and f"credit {name}" in done.stdout
