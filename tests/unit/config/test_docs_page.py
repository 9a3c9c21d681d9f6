"""docs/config.md is generated from the schema."""

from __future__ import annotations

from pathlib import Path

from credit.config.docs_page import render_config_reference


def test_the_page_is_current(repository: Path) -> None:
    page = (repository / "docs" / "config.md").read_text()
    assert page == render_config_reference(), "run: python -m credit.config.docs_page > docs/config.md"
