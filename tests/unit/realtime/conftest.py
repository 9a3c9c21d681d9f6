"""Fixtures: a trained quickstart run, a server of analyses, and functions that run ``credit realtime``."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from credit.cli.main import main
from credit.cli.realtime import command as realtime_command
from credit.config import Config
from credit.realtime import clock, workflow
from tests.conftest import REPOSITORY
from tests.unit.realtime.faulty_server import FaultyServer, serve
from tests.unit.realtime.grib_files import GribFile

# The training period has the same season as the served fields, which are from February 2001.
_OVERRIDES = (
    "trainer.max_steps=2", "trainer.validate_every=2", "trainer.valid_samples=2", "trainer.train_batch_size=2",
    "data.valid_forecast_len=1", "trainer.device=cpu", "data.splits.train=['2000-01-01', '2000-02-20']",
)  # fmt: skip
CYCLE = datetime(2026, 11, 27, 0)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a trained run. Tests must not change it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    config = REPOSITORY / "config" / "quickstart.yml"
    assert main(["train", str(config), f"save_loc={folder}", "--quiet", *_OVERRIDES]) == 0
    return folder


@pytest.fixture(scope="session")
def running_server() -> Iterator[FaultyServer]:
    """Server that runs for the session; it keeps files and faults of earlier tests."""
    with serve() as server:
        yield server


@pytest.fixture
def server(running_server: FaultyServer) -> FaultyServer:
    """Server without files."""
    running_server.reset()
    return running_server


def publish(server: FaultyServer, file: GribFile, index: str | None = None, name: str = "anl") -> None:
    """Put a file and its GFS index on the server."""
    path = f"gfs.{file.time:%Y%m%d}/{file.time:%H}/{name}"
    server.files[path] = file.content()
    server.files[f"{path}.idx"] = (file.gfs_index() if index is None else index).encode()


def write_config(run: Path, trained_run: Path, server: FaultyServer, **realtime: object) -> Path:
    """Write the config of a run with the checkpoints of the trained one, and return its path."""
    run.mkdir(parents=True, exist_ok=True)
    if not (run / "checkpoints").exists():
        (run / "checkpoints").symlink_to(trained_run / "checkpoints")
    document = yaml.safe_load((trained_run / "config.yml").read_text())
    document["save_loc"] = str(run)
    document["inference"] = {"lead_time": "12h"}
    document["realtime"] = {
        "format": "gfs_idx",
        "url": f"{server.url}/gfs.{{date}}/{{cycle}}/anl",
        "fields": {"sst": {"param": "TMP", "level": "surface"}},
        "retries": 1,
        **realtime,
    }
    path = run / "realtime.yml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def config_path(tmp_path: Path, trained_run: Path, server: FaultyServer) -> Path:
    """Config of a new run with the checkpoints of the trained run."""
    return write_config(tmp_path / "run", trained_run, server)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each wait of the command. A wait returns at once and advances the clock of the command."""
    waits: list[float] = []
    start = clock.time.time()
    monkeypatch.setattr(clock.Clock, "sleep", lambda self, seconds: waits.append(seconds))
    monkeypatch.setattr(clock.Clock, "seconds", lambda self: start + sum(waits))
    return waits


@pytest.fixture
def forecasts(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Configs of the forecasts that the command requests. Computing and scoring of forecasts are replaced."""
    configs: list[Config] = []
    monkeypatch.setattr(realtime_command, "_make_forecasts", configs.append)
    monkeypatch.setattr(workflow, "score_earlier_forecasts", lambda *arguments: 0)
    monkeypatch.setattr(workflow, "has_forecast", lambda *arguments: True)
    return configs


@pytest.fixture
def realtime(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, sleeps: list[float]
) -> Callable[..., subprocess.CompletedProcess]:
    """Function that runs ``credit realtime`` in this process without waiting; log messages are in stderr."""
    caplog.set_level(logging.INFO)

    def run(*arguments: object) -> subprocess.CompletedProcess:
        caplog.clear()
        capsys.readouterr()
        status = main(["realtime", *(str(argument) for argument in arguments)])
        output, errors = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, output, caplog.text + errors)

    return run


@pytest.fixture
def run_cycle(realtime: Callable, config_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Function that runs ``credit realtime`` for the cycle of the tests."""
    return lambda *arguments: realtime(config_path, "--cycle", f"{CYCLE:%Y-%m-%dT%H:%M}", *arguments)


def read_status(config_path: Path) -> dict[str, str]:
    """Return the lines of STATUS by key."""
    lines = (config_path.parent / "realtime" / "STATUS").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines)
