"""Test that `credit train --profile` on two ranks names the slow rank, and counts the wait for it as communication."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.commands.test_train_command import train_on_ranks
from tests.smoke.test_profile import read_trace

pytestmark = pytest.mark.slow


def test_profile_names_the_slow_rank(small_run: Path) -> None:
    overrides = ("trainer.max_steps=13", "trainer.validate_every=13", "trainer.checkpoint_every=13")
    plugin = "plugins=[tests.parallel.commands.slow_rank1]"
    folder = small_run / "run"
    options = ("--profile", "4:9", "--profile-rank", "1")
    output = train_on_ranks(small_run, 2, *overrides, plugin, f"save_loc={folder}", *options)
    content = json.loads((folder / "profile" / "table.json").read_text())
    assert content["ranks"] == 2 and content["slowest_rank"] == 1
    assert "The slowest rank is rank 1" in output
    lines = {(line["kind"], line["name"]): line for line in content["lines"]}
    assert content["accounted_share"] >= 0.98
    # Rank 0 waits in a collective for as long as rank 1 sleeps.
    communication = lines["phase", "communication"]
    assert communication["max_seconds"] - communication["min_seconds"] > 0.3
    forward = lines["phase", "forward"]
    assert forward["seconds"] == forward["max_seconds"] > 0.5
    assert communication["bytes"] > 0 and communication["peak_share"] > 0
    assert set(content["communication_within"]) >= {"forward", "backward", "optimizer"}
    # The timeline is that of the chosen rank alone.
    assert [path.name for path in (folder / "profile").glob("*.gz")] == ["trace_rank00001.json.gz"]
    names = [event["name"] for event in read_trace(folder, 1)]
    assert {"step 10", "step 11", "forward", "communication", "gloo:all_reduce"} <= set(names)
