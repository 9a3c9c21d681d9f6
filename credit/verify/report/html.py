"""Self-contained HTML pages: templates of this folder, figures inside, replaced whole."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from credit.utils.atomic import atomic_write

# CSS pixels a pixel of a figure; at 150 dpi letters of 9.5 points are 10 pixels high
_LEAST_SCALE = 0.5


def render(template: str, **values: Any) -> str:
    """Return a page from a template of this folder; values are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("credit.verify.report", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**values)


def embed(figures: Sequence[tuple[str, Path]]) -> list[tuple[str, str, int]]:
    """Return (caption, base64 of the file, least width to be read at, CSS pixels) of (caption, path)."""
    return [(caption, base64.b64encode(path.read_bytes()).decode(), _least_width(path)) for caption, path in figures]


def _least_width(path: Path) -> int:
    with Image.open(path) as image:
        return round(_LEAST_SCALE * image.width)


def write_page(path: Path, text: str) -> Path:
    """Write a page, replaced whole.

    Raises:
        CreditError: if it cannot be written.
    """
    return atomic_write(path, lambda beside: beside.write_text(text, encoding="utf-8"))
