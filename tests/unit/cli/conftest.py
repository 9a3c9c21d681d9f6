"""Worlds for the tests of credit_check and credit_doctor."""

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
    """Returns what gives a folder without a fault; its argument is that of `Fault.needs`. Each is made once."""
    made: dict[str, Path] = {}

    def build(needs: str) -> Path:
        if needs in made:
            return made[needs]
        made[needs] = folder = tmp_path_factory.mktemp("world")
        write_world(folder)
        with chdir(folder):
            if needs == "store":
                write_training_store(load_config("config.yml", ["data.store=store.zarr"]).data, progress=False)
            elif needs == "run":
                assert main._run_command("train", ["config.yml", "trainer.checkpoint_every=1"], "credit_train") == 0
        return folder

    return build


@pytest.fixture
def world(tmp_path: Path, worlds: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without a fault, which is the present one."""
    shutil.copytree(worlds(""), tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a plugin registers is forgotten."""
    isolate(monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("seeded_model", "seeded_postprocess", "seeded_objective"):
        sys.modules.pop(name, None)
