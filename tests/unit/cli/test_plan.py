"""``credit plan`` of a model that a plugin registers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from credit.cli import main
from tests.unit.cli.check.faults import SEEDED
from tests.unit.cli.world import write_model_plugin


def test_plugin_model_without_blocks_is_planned(world: Path, plugins: None, capsys: pytest.CaptureFixture[str]) -> None:
    write_model_plugin()(world)
    assert main._run_command("plan", ["config.yml", "--world-size", "2", "--json", *SEEDED], "credit plan") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recommended"]["works"]
    assert list(document["checkpointing"]) == ["false"]
    assert set(document["recommended"]["estimate"]) >= {"step_seconds", "hours", "megawatt_hours"}
