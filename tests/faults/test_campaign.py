"""A short form of the campaign; `python -m tests.faults.campaign` is the long one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.campaign import campaign
from tests.smoke.conftest import world


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kills"), [(1, 5), (2, 3)])
def test_nothing_is_lost(tmp_path: Path, ranks: int, kills: int) -> None:
    found = campaign(world(tmp_path), kills, ranks, steps=12, draw=random.Random(7))
    assert not found.lost
    assert sum(found.kills.values()) == kills
