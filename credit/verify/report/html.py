"""Render self-contained HTML pages with embedded figures, from the templates in this folder."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

# Smallest size in CSS pixels at which a pixel of a figure is shown. Letters of 9.5 points in a figure of 150 dpi are
# then 10 CSS pixels high.
_MIN_SCALE = 0.5


def render_template(template: str, **values: Any) -> str:
    """Return a page as a string of HTML.

    Args:
        template: file name of a template in this folder.
        values: variables of the template; they are escaped for HTML.

    Raises:
        jinja2.TemplateNotFound: if the template does not exist.
    """
    # Some values, such as names of forecasts, come from users, so all values are escaped.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("credit.verify.report", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**values)


def embed_figures(figures: Sequence[tuple[str, Path]]) -> list[tuple[str, str, int]]:
    """Encode the files of figures in base64, so that templates can embed them in a page.

    Args:
        figures: (caption, path of a PNG or GIF file) of each figure.

    Returns:
        (caption, base64 string of the file, smallest readable width in CSS pixels) of each figure.
    """
    embedded = []
    for caption, path in figures:
        with Image.open(path) as image:
            min_width = round(_MIN_SCALE * image.width)
        encoded = base64.b64encode(path.read_bytes()).decode()
        embedded.append((caption, encoded, min_width))
    return embedded
