"""Self-contained HTML pages: templates of this folder, figures inside, replaced whole."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from credit.verify.whole import write_whole


def render(template: str, **values: Any) -> str:
    """Return a page from a template of this folder; values are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("credit.verify", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**values)


def embed(figures: Sequence[tuple[str, Path]]) -> list[tuple[str, str]]:
    """Return (caption, base64 of the PNG) of figures given as (caption, path)."""
    return [(caption, base64.b64encode(path.read_bytes()).decode()) for caption, path in figures]


def write_page(path: Path, text: str) -> Path:
    """Write a page, replaced whole.

    Raises:
        CreditError: if it cannot be written.
    """
    return write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))
