"""Self-contained HTML pages from the templates of this folder, with embedded figures."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from credit.utils.atomic import atomic_write

# CSS pixels for a pixel of a figure at least; at 150 dpi letters of 9.5 points are then 10 pixels high.
_MIN_SCALE = 0.5


def render_template(template: str, **values: Any) -> str:
    """Return a page as HTML.

    Args:
        template: name of a template of this folder.
        values: variables of the template, which are escaped.

    Raises:
        jinja2.TemplateNotFound: if there is no such template.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("credit.verify.report", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**values)


def embed_figures(figures: Sequence[tuple[str, Path]]) -> list[tuple[str, str, int]]:
    """Return figures in the form in which templates embed them.

    Args:
        figures: (caption, path of a PNG or GIF) of each figure.

    Returns:
        (caption, base64 of the file, smallest readable width in CSS pixels) of each figure.
    """
    embedded = []
    for caption, path in figures:
        with Image.open(path) as image:
            min_width = round(_MIN_SCALE * image.width)
        embedded.append((caption, base64.b64encode(path.read_bytes()).decode(), min_width))
    return embedded


def write_page(path: Path, text: str) -> Path:
    """Write a page atomically and return its path.

    Raises:
        CreditError: if the file cannot be written.
    """
    return atomic_write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
