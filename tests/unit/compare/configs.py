"""Configs for tests of comparisons."""

from __future__ import annotations

from pathlib import Path

from credit.compare.runs import ComparedRun
from credit.config import load_config

QUICKSTART = Path(__file__).parents[3] / "config" / "quickstart.yml"


def make_run(name: str, *overrides: str) -> ComparedRun:
    """Return a run of the quickstart with another name and replaced keys."""
    return ComparedRun(name, f"{name}.yml", load_config(QUICKSTART, [f"experiment={name}", *overrides]))
