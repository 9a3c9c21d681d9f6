"""Fixture of the shell script linter."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shellcheck() -> str:
    """Path of the program shellcheck."""
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("shellcheck is not installed; the extra test brings it")
    return program
