"""The wheel holds everything it needs and runs in an empty folder outside the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def run(command: list[str | Path], folder: Path, **environment: str) -> str:
    """Run a command and return what it printed; a failure shows both streams."""
    result = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what is under version control, so that nothing is left in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], repository)
    for name in filter(None, listed.split("\0")):
        if (repository / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(repository / name, copy / name, follow_symlinks=False)
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", copy / "dist"], copy)
    return next((copy / "dist").glob("credit_weather-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel alone; requirements come from the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("installed")
    run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, wheel], folder)
    return folder


def test_it_holds_every_file_of_the_package(wheel: Path, repository: Path) -> None:
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "credit"], repository)
    expected = {name for name in listed.split("\0") if name and (repository / name).exists()}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("credit/")}
    assert held == expected
    kinds = {Path(name).suffix for name in held}
    assert {".py", ".yml", ".nc", ".j2", ".js"} <= kinds
    assert wheel.stat().st_size < 25e6


def test_it_runs_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    print_location = "import credit, pathlib; print(pathlib.Path(credit.__file__).parents[1])"
    assert Path(run([sys.executable, "-c", print_location], tmp_path, **environment).strip()) == installed
    credit = installed / "bin" / "credit"
    assert "preprocess" in run([credit, "--help"], tmp_path, **environment)
    (tmp_path / "config.yml").write_text(run([credit, "init", "quickstart"], tmp_path, **environment))
    small = (
        "save_loc=run",
        'data.splits.train=["2000-01-01", "2000-01-20"]',
        "model.dim=[16, 32, 64, 128]",
        "trainer.max_steps=2",
        "trainer.train_batch_size=2",
        "trainer.valid_samples=2",
    )
    run([credit, "train", "config.yml", *small], tmp_path, **environment)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert json.loads((tmp_path / "run" / "STATUS").read_text())["status"] == "done"
    assert {path.name for path in tmp_path.iterdir()} == {"config.yml", "run"}
