"""Entry point of the commands: closed pipes, contradicting options, paths with ``~``, and Ctrl-C."""

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
    # The network has few operations, because the plan traces each of them.
    ["plan", "config.yml", "--world-size", "2", "model={type: sfno, dim: 8, depth: 1}"],
    ["check", "--help"],
    ["--help"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stderr too"])
def test_closed_pipe_ends_command_without_message(world: Path, arguments: list[str], both: bool) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "credit.cli.main", *arguments]
    # With unbuffered output, argparse itself meets the closed pipe and ignores the error.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    stderr = write_end if both else subprocess.PIPE
    process = subprocess.run(
        command, cwd=world, env=environment, stdout=write_end, stderr=stderr, text=True, check=False
    )
    os.close(write_end)
    assert process.returncode == 141  # 128 and the number of SIGPIPE
    assert both or "Traceback" not in process.stderr and "Broken" not in process.stderr


def test_command_works_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon may start a command without a standard output."""
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as exit_info:
        main.main(["--version"])
    assert exit_info.value.code == 0


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A broken pipe of a worker process or a socket is an error if the standard output is still open."""

    def raise_broken_pipe() -> int:
        raise BrokenPipeError

    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with pytest.raises(BrokenPipeError):
            main._run_tolerating_closed_pipe(raise_broken_pipe)


@pytest.mark.parametrize("given", ["inference.initial_times.every=24h", "inference.initial_times=[2000-01-08]"])
def test_latest_with_other_initial_times_is_refused(
    world: Path, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main._run_command("rollout", ["config.yml", "--latest", given], "credit rollout") == 2
    assert f"--latest: cannot be combined with {given}" in capsys.readouterr().err


def test_analysis_on_another_grid_needs_regridding(
    tmp_path: Path,
    worlds: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As in docs/forecasts.md, `data.grid` is set to the grid of the run, and `data.regrid` to the method."""
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


def test_misspelt_checkpoint_is_refused(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt name gives exit status 2. A run without checkpoints gives exit status 1."""
    expected = {"bset": (2, "inference.checkpoint: bset: no such checkpoint"), "best": (1, "train first")}
    for name, (status, message) in expected.items():
        assert main._run_command("rollout", ["config.yml", f"inference.checkpoint={name}"], "credit rollout") == status
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", main.COMMANDS)
def test_paths_may_begin_with_tilde(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands expand ``~`` themselves, because the shell does not in quotes or after ``--option=``."""
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
    num_paths = {
        "init": 0,
        "completion": 0,
        "verify": 3,
        "submit": 3,
        "sweep": 3,
        "convert": 9,
        "doctor": 2,
        "compare": 2,
    }
    assert len(paths) == num_paths.get(command, 1)
    for action in paths:
        assert str(action.type("~/x.yml")) == f"{tmp_path}/x.yml"
        with pytest.raises(argparse.ArgumentTypeError, match="the home folder of ~no_such_user is not known"):
            action.type("~no_such_user/x.yml")


def test_commands_expand_tilde_in_paths(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
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
