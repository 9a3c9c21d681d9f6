"""Test that runs the examples of docs/python.md one after another, on a short training of the quickstart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from credit.cli import main

REPOSITORY = Path(__file__).parents[3]


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [str(REPOSITORY / "config" / "quickstart.yml"), "trainer.max_steps=2", "trainer.valid_samples=2"]
    assert main._run_command("train", arguments, "credit train") == 0
    text = (REPOSITORY / "docs" / "python.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "docs/python.md", "exec"), names)
    assert names["ensemble"].sizes["member"] == 4 and len(names["means"]) == 40
    assert (names["spread"] > 0).any() and names["state"]["time"].values[0] == names["forecast"]["time"].values[3]
    assert {path.name for path in tmp_path.glob("*.png")} == {"z500.png", "scores.png", "loss.png"}
