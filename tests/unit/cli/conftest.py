"""Fixtures of folders with a small data set, for the tests of commands."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from credit.cli import main
from credit.config import load_config
from credit.data.store.preprocess import write_training_store
from tests.registries import isolate
from tests.unit.cli.world import write_world


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function that returns a folder without faults; its argument is a value of `Fault.needs`.

    Each folder is created once. Tests that change files must copy it.
    """
    folders: dict[str, Path] = {}

    def build_world(needs: str) -> Path:
        if needs in folders:
            return folders[needs]
        folder = tmp_path_factory.mktemp("world")
        folders[needs] = folder
        write_world(folder)
        with chdir(folder):
            if needs == "store":
                write_training_store(load_config("config.yml", ["data.store=store.zarr"]).data, progress=False)
            elif needs == "run":
                assert main._run_command("train", ["config.yml", "trainer.checkpoint_every=1"], "credit_train") == 0
        return folder

    return build_world


@pytest.fixture
def world(tmp_path: Path, worlds: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy of a folder without faults, which is the current folder of the test."""
    shutil.copytree(worlds(""), tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make plugins of the current folder importable, and remove what they register after the test."""
    isolate(monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("seeded_model", "seeded_postprocess", "seeded_objective"):
        sys.modules.pop(name, None)
