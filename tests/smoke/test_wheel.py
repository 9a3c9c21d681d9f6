"""The wheel contains all files of the package and runs in an empty folder outside the repository."""

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
    """Run a command and return its stdout. The assertion message of a failed command has both streams."""
    result = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel built from a copy of the files under version control, so that the build leaves no files in the checkout."""
    source_copy = tmp_path_factory.mktemp("source")
    git_output = run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], repository)
    for name in filter(None, git_output.split("\0")):
        if (repository / name).exists():
            (source_copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(repository / name, source_copy / name, follow_symlinks=False)
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source_copy / "dist"], source_copy)
    return next((source_copy / "dist").glob("credit_weather-*.whl"))


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with only the installed wheel. Its requirements come from the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("installed")
    run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, wheel], folder)
    return folder


def test_wheel_contains_every_file_of_the_package(wheel: Path, repository: Path) -> None:
    git_output = run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "credit"], repository)
    expected = {name for name in git_output.split("\0") if name and (repository / name).exists()}
    wheel_files = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("credit/")}
    assert wheel_files == expected
    suffixes = {Path(name).suffix for name in wheel_files}
    assert {".py", ".yml", ".nc", ".j2", ".js"} <= suffixes
    assert wheel.stat().st_size < 25e6


def test_wheel_runs_outside_the_repository(installation: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(installation), "OMP_NUM_THREADS": "1"}
    print_location = "import credit, pathlib; print(pathlib.Path(credit.__file__).parents[1])"
    assert Path(run([sys.executable, "-c", print_location], tmp_path, **environment).strip()) == installation
    credit = installation / "bin" / "credit"
    assert "preprocess" in run([credit, "--help"], tmp_path, **environment)
    (tmp_path / "config.yml").write_text(run([credit, "init", "quickstart"], tmp_path, **environment))
    small_overrides = (
        "save_loc=run",
        'data.splits.train=["2000-01-01", "2000-01-20"]',
        "model.dim=[16, 32, 64, 128]",
        "trainer.max_steps=2",
        "trainer.train_batch_size=2",
        "trainer.valid_samples=2",
    )
    run([credit, "train", "config.yml", *small_overrides], tmp_path, **environment)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert json.loads((tmp_path / "run" / "STATUS").read_text())["status"] == "done"
    assert {path.name for path in tmp_path.iterdir()} == {"config.yml", "run"}
