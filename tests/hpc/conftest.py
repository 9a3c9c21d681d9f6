"""Fixtures of job tests: a stand-in for PBS, and the small run of the smoke tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hpc.standin_pbs import StandInPbs
from tests.smoke.conftest import command, small_run  # noqa: F401


@pytest.fixture
def pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInPbs:
    """Stand-in for PBS whose commands are on PATH."""
    return StandInPbs(tmp_path / "pbs", monkeypatch)
