"""What the rules look at: the files that belong to the repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def files(repository: Path) -> list[Path]:
    """Every file that is under version control or would be added to it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=repository,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")
    return [repository / name for name in listed if name and (repository / name).exists()]


@pytest.fixture(scope="session")
def python_files(files: list[Path]) -> list[Path]:
    """The Python files among them."""
    return [path for path in files if path.suffix == ".py"]
