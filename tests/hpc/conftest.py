"""A PBS and a launcher that stand in for real ones, and the small world of the smoke tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hpc.standin_pbs import StandInPbs
from tests.smoke.conftest import command, small_run  # noqa: F401


@pytest.fixture
def pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInPbs:
    """A PBS whose commands are on PATH."""
    return StandInPbs(tmp_path / "pbs", monkeypatch)
