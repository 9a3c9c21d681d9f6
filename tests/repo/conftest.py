"""Fixtures of the files that belong to the repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def files(repository: Path) -> list[Path]:
    """All files that are under version control, or new and not ignored."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=repository,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")
    return [repository / name for name in names if name and (repository / name).exists()]


@pytest.fixture(scope="session")
def python_files(files: list[Path]) -> list[Path]:
    """All Python files of the repository."""
    return [path for path in files if path.suffix == ".py"]
