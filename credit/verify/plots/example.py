"""Pictures of the example forecast: maps, Hovmoeller diagrams, animations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from credit.verify.plots.animation import animate
from credit.verify.plots.hovmoeller import hovmoeller, latitude_time
from credit.verify.plots.maps import Background, maps
from credit.verify.plots.style import draw
from credit.verify.statistics.partial_scores import Pairs

if TYPE_CHECKING:
    from credit.data.reader import FieldReader
    from credit.verify.scorer import Verification

_LEAST_LEADS = 2  # one time is no diagram over time


def draw_example(found: Verification, reader: FieldReader, figures: Path) -> list[tuple[str, Path]]:
    """Draw what `found` has kept of its example into a folder; return (caption, path).

    Raises:
        CreditError: if a figure cannot be written.
    """
    background, course = Background.of(reader, found.grid), found.course
    at = found.example, reader.calendar
    forecast_name = "Ensemble mean" if course.is_ensemble else "Forecast"
    drawn = []
    for name in found.figure_channels:
        what = name, found.table.units(name), _fields(found.maps, name), *at, background
        path = draw(figures / f"maps_{name}.png", maps, *what)
        caption = (
            f"{name}: truth, forecast, error and, of an ensemble, spread; one initial time. Each error has its own "
            "scale."
        )
        drawn.append((caption, path))
    south, north = course.band
    for name in found.figure_channels:
        strips, zonal = _fields(course.strips, name), _fields(course.zonal, name)
        if _can_be_drawn(strips):
            what = name, found.table.units(name), strips, course.band, forecast_name, *at, background
            caption = (
                f"{name}: Hovmoeller diagram of the same forecast, mean over {south:g} to {north:g} degrees north. "
                "What travels is slanted; where forecast and truth slant alike, waves move at the right speed."
            )
            drawn.append((caption, draw(figures / f"hovmoeller_{name}.png", hovmoeller, *what)))
        if _can_be_drawn(zonal):
            what = name, found.table.units(name), zonal, forecast_name, *at, found.grid
            caption = (
                f"{name}: zonal mean of the same forecast by lead time and latitude. An error that stays "
                "and grows to the right is a drift of these latitudes; waves cancel in a zonal mean."
            )
            drawn.append((caption, draw(figures / f"hovmoeller_latitude_{name}.png", latitude_time, *what)))
    background = Background.of(reader, course.frame_grid)
    for name in dict.fromkeys(name for name, _ in course.frames):
        what = name, found.table.units(name), _fields(course.frames, name), forecast_name, *at, background
        caption = f"{name}: the same forecast and its truth from lead time to lead time."
        drawn.append((caption, animate(figures / f"animation_{name}.gif", *what)))
    return drawn


def _can_be_drawn(pairs: dict[int, tuple[np.ndarray, ...]]) -> bool:
    """Whether there are times enough, and something that is not masked."""
    return len(pairs) >= _LEAST_LEADS and bool(np.isfinite(list(pairs.values())).any())


def _fields(pairs: Pairs, name: str) -> dict[int, tuple[np.ndarray, ...]]:
    """Return lead time, increasing -> a channel's fields."""
    return {lead: pairs[name, lead] for lead in sorted(lead for channel, lead in pairs if channel == name)}
