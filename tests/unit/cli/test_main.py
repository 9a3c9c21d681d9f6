"""The entry point: options that contradict each other, and a pipe that nobody reads."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xarray as xr

from credit.cli import main
from tests.unit.data.files_on_the_fly import random_fields, write_file

COMMANDS = [
    ["init", "quickstart"],
    ["check", "config.yml"],
    # a network of few operations, because the plan runs each of them
    ["plan", "config.yml", "--world-size", "2", "model={type: sfno, dim: 8, depth: 1}"],
    ["check", "--help"],
    ["--help"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stderr too"])
def test_a_closed_pipe_ends_a_command_quietly(world: Path, arguments: list[str], both: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "credit.cli.main", *arguments]
    # argparse says nothing of a pipe that it could not write to, which it finds where nothing waits in a buffer
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    stderr = writing if both else subprocess.PIPE
    ended = subprocess.run(command, cwd=world, env=environment, stdout=writing, stderr=stderr, text=True, check=False)
    os.close(writing)
    assert ended.returncode == 141  # 128 and the number of SIGPIPE
    assert both or "Traceback" not in ended.stderr and "Broken" not in ended.stderr


def test_a_command_without_a_terminal_or_a_file_to_print_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As daemons start them."""
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert ended.value.code == 0


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That of a worker or a socket, while what is printed is read."""

    def broken() -> int:
        raise BrokenPipeError

    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with pytest.raises(BrokenPipeError):
            main._run_tolerating_closed_pipe(broken)


@pytest.mark.parametrize("given", ["inference.initial_times.every=24h", "inference.initial_times=[2000-01-08]"])
def test_latest_and_other_initial_times(world: Path, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main._run_command("rollout", ["config.yml", "--latest", given], "credit rollout") == 2
    assert f"--latest: cannot be combined with {given}" in capsys.readouterr().err


def test_an_analysis_on_another_grid(
    tmp_path: Path,
    worlds: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As docs/forecasts.md advises: `data.grid` is the grid of the run, and `data.regrid` chooses the method."""
    shutil.copytree(worlds("run"), tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    fields = {
        "t": random_fields(2, 2, 32, 64),
        "t2m": random_fields(2, 32, 64, seed=1),
        "sst": random_fields(2, 32, 64, seed=2),
        "ground": random_fields(32, 64, seed=3),
    }
    write_file(tmp_path / "analysis.nc", fields, hours=[240, 246], levels=[500, 850])
    arguments = ["config.yml", "--latest", "data.sources=[{path: analysis.nc}]"]
    assert main._run_command("rollout", arguments, "credit rollout") == 2
    assert "16 x 32 cells against 32 x 64; set data.grid to the grid of the run" in capsys.readouterr().err
    arguments += ["data.grid={like: data_1.nc}", "data.regrid=conservative"]
    assert main._run_command("rollout", arguments, "credit rollout") == 0
    with xr.open_dataset(tmp_path / "run" / "forecasts" / "forecast_2000-01-11T06.nc") as forecast:
        assert forecast["t2m"].shape[-2:] == (16, 32)


def test_a_checkpoint_that_is_misspelt(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong config ends with 2, as elsewhere; a run that has no checkpoint yet with 1."""
    expected = {"bset": (2, "inference.checkpoint: bset: no such checkpoint"), "best": (1, "train first")}
    for name, (status, message) in expected.items():
        assert main._run_command("rollout", ["config.yml", f"inference.checkpoint={name}"], "credit rollout") == status
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", main.COMMANDS)
def test_every_path_may_begin_at_home(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell expands ``~`` neither in quotes nor behind ``--option=``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    parser = argparse.ArgumentParser()
    importlib.import_module(f"credit.cli.{command}").add_arguments(parser)
    paths = [
        action
        for action in parser._actions
        if action.metavar in ("CONFIG", "FILE", "FOLDER", "RUN", "SAVE_LOC")
        or str(action.metavar).endswith(", section.key=value")
        or action.dest in ("cluster", "checkpoint")
    ]
    numbers = {
        "init": 0,
        "completion": 0,
        "verify": 3,
        "submit": 3,
        "sweep": 3,
        "convert": 9,
        "doctor": 2,
        "compare": 2,
    }
    assert len(paths) == numbers.get(command, 1)
    for action in paths:
        assert str(action.type("~/x.yml")) == f"{tmp_path}/x.yml"
        with pytest.raises(argparse.ArgumentTypeError, match="the home folder of ~no_such_user is not known"):
            action.type("~no_such_user/x.yml")


def test_no_folder_is_called_tilde(world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(world)
    monkeypatch.setenv("HOME", str(world / "home"))
    (world / "home").mkdir()
    (world / "config.yml").rename(world / "home" / "config.yml")
    (world / "home" / "data").mkdir()
    for path in world.glob("data_*.nc"):
        path.rename(world / "home" / "data" / path.name)
    keys = ["data.sources.0.path=~/data/data_*.nc", "data.store=~/store.zarr", "save_loc=~/run"]
    for arguments in (
        ["preprocess", "~/config.yml", *keys],
        ["train", "~/config.yml", *keys],
        ["checkpoint", "list", "~/run"],
        ["convert", "~/config.yml", *keys, "--export=~/weights.safetensors", "--checkpoint=~/run/checkpoints/latest"],
        ["train", "~/config.yml", *keys, "save_loc=~/tuned", "trainer.resume=~/weights.safetensors"],
        ["rollout", "~/config.yml", *keys, "inference.checkpoint=~/tuned/checkpoints/latest"],
        ["verify", "~/config.yml", *keys, "verification.other_forecasts.theirs=~/run/forecasts"],
        ["doctor", "~/config.yml", *keys, "--output=~/doctor.txt"],
    ):
        assert main.main(arguments) == 0, capsys.readouterr().err
    written = {path.name for path in (world / "home").iterdir()}
    assert {"store.zarr", "run", "tuned", "weights.safetensors", "doctor.txt"} <= written
    assert not list(world.rglob("~*"))


def test_ctrl_c_ends_a_command_with_130(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("credit.cli.check.run_command", interrupt)
    assert main.main(["check", "config.yml"]) == 130
    assert capsys.readouterr().err == "credit check: interrupted\n"
