"""Pictures of the example forecast: maps, Hovmoeller diagrams, animations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from credit.verify.plots import draw
from credit.verify.plots_animation import animate
from credit.verify.plots_hovmoeller import hovmoeller
from credit.verify.plots_maps import Background, maps
from credit.verify.share import Pairs

if TYPE_CHECKING:
    from credit.data.reader import FieldReader
    from credit.verify.scoring import Verification

_LEAST_LEADS = 2  # one time is no diagram over time


def draw_example(found: Verification, reader: FieldReader, figures: Path) -> list[tuple[str, Path]]:
    """Draw what `found` has kept of its example into a folder; return (caption, path).

    Raises:
        CreditError: if a figure cannot be written.
    """
    background, course = Background.of(reader, found.grid), found.course
    at = found.example, reader.clock
    forecast_name = "Ensemble mean" if course.is_ensemble else "Forecast"
    drawn = []
    for name, fields in _by_channel(found.maps).items():
        path = draw(figures / f"maps_{name}.png", maps, name, found.table.units(name), fields, *at, background)
        drawn.append((f"{name}: truth, forecast, error and, of an ensemble, spread; one initial time.", path))
    south, north = course.band
    for name, strips in _by_channel(course.strips).items():
        if len(strips) < _LEAST_LEADS:
            continue
        what = name, found.table.units(name), strips, course.band, forecast_name, *at, background
        caption = (
            f"{name}: Hovmoeller diagram of the same forecast, mean over {south:g} to {north:g} degrees north. What "
            "travels is slanted; where forecast and truth slant alike, waves move at the right speed."
        )
        drawn.append((caption, draw(figures / f"hovmoeller_{name}.png", hovmoeller, *what)))
    background = Background.of(reader, course.frame_grid)
    for name, frames in _by_channel(course.frames).items():
        what = name, found.table.units(name), frames, forecast_name, *at, background
        caption = f"{name}: the same forecast and its truth from lead time to lead time."
        drawn.append((caption, animate(figures / f"animation_{name}.gif", *what)))
    return drawn


def _by_channel(pairs: Pairs) -> dict[str, dict[int, tuple]]:
    """Return channel -> lead time, increasing -> fields."""
    found: dict[str, dict[int, tuple]] = {}
    for (name, lead), fields in sorted(pairs.items(), key=lambda item: item[0][1]):
        found.setdefault(name, {})[lead] = fields
    return found
