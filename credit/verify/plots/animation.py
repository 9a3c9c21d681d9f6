"""Animations: truth and forecast side by side over the lead times, as GIF files, which Pillow writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from credit.calendar import Calendar
from credit.utils.atomic import atomic_write
from credit.verify.plots.maps import FIELD, MISSING, WIDE_BAR, Background, draw_map, limits, map_axes
from credit.verify.plots.style import STYLE, new_figure, pretty_units

_DPI = 110
_MILLISECONDS, _LAST_MILLISECONDS = 250, 1500  # a frame is shown; the last
_COLOURS, _GREYS = 96, 31  # of the field, and of what is written over it; with one for missing 128, 7 bits


def animate(
    path: Path, channel: str, units: str, frames: Mapping[int, Sequence[np.ndarray]], forecast_name: str,
    initial: int, calendar: Calendar, background: Background,
) -> Path:  # fmt: skip
    """Write an animated GIF: a frame a lead time, colours that stay, the time in the titles.

    Args:
        path: the file, replaced whole.
        channel: its name.
        units: its units.
        frames: lead time in minutes -> (truth, forecast), each (H, W).
        forecast_name: what the forecast is, for the title.
        initial: initial time in minutes.
        calendar: of the times.
        background: with the grid of the frames.

    Raises:
        CreditError: if it cannot be written.
    """
    with rc_context(STYLE):
        first, *others = _images(channel, units, frames, forecast_name, initial, calendar, background)
    durations = [_MILLISECONDS] * len(others) + [_LAST_MILLISECONDS]
    options = {"append_images": others, "duration": durations, "loop": 0, "optimize": False}
    return atomic_write(path, lambda beside: first.save(beside, format="GIF", save_all=True, **options))


def _images(
    channel: str, units: str, frames: Mapping[int, Sequence[np.ndarray]], forecast_name: str, initial: int,
    calendar: Calendar, background: Background,
) -> Iterator[Image.Image]:  # fmt: skip
    """Yield the frames, all with one palette, so that no colour changes between them."""
    low, high = limits([field for own in frames.values() for field in own])
    figure = new_figure(8.6, 3.4)
    figure.set_dpi(_DPI)
    canvas = FigureCanvasAgg(figure)
    axes = map_axes(figure, 1, 2)[0]
    meshes = [draw_map(axis, next(iter(frames.values()))[0], background, FIELD, low, high) for axis in axes]
    figure.colorbar(meshes[0], ax=axes, label=f"{channel} ({pretty_units(units)})", **WIDE_BAR)
    figure.suptitle(f"{channel}: forecast from {calendar.format(initial).replace('T', ' ')} UTC")
    palette = _palette()
    for number, (lead, fields) in enumerate(frames.items()):
        axes[0].set_title(f"Truth, {calendar.format(initial + lead).replace('T', ' ')} UTC")
        axes[1].set_title(f"{forecast_name} at {lead / 60:g} h")
        for mesh, field in zip(meshes, fields, strict=True):
            mesh.set_array(field[:, background.order])
        canvas.draw()
        if number == 0:
            figure.set_layout_engine("none")  # nothing moves with the length of a title
        yield _in_palette(np.asarray(canvas.buffer_rgba())[..., :3], palette)


def _in_palette(pixels: np.ndarray, palette: np.ndarray) -> Image.Image:
    """Return an image of pixels (H, W, 3), each in the nearest of the palette's colours (128, 3)."""
    codes = pixels.astype(np.int32) @ np.array([65536, 256, 1], dtype=np.int32)
    known, place = np.unique(codes, return_inverse=True)
    colours = np.stack([known >> 16, known >> 8 & 255, known & 255], axis=1)
    distance = sum((colours[:, None, i] - palette[None, :, i].astype(np.int32)) ** 2 for i in range(3))
    image = Image.fromarray(distance.argmin(axis=1).astype(np.uint8)[place.reshape(codes.shape)])
    image.putpalette(palette.ravel().tolist())
    return image


def _palette() -> np.ndarray:
    """Return the 128 colours of the animation, (128, 3) uint8."""
    field = colormaps[FIELD](np.linspace(0, 1, _COLOURS))[:, :3]
    greys = np.repeat(np.linspace(0, 1, _GREYS)[:, None], 3, axis=1)
    missing = [[int(MISSING[place : place + 2], 16) / 255 for place in (1, 3, 5)]]
    return np.rint(255 * np.concatenate([field, greys, missing])).astype(np.uint8)
