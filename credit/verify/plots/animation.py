"""Animated GIF files that show truth and forecast next to each other at successive lead times.

Shapes: H x W cells of the grid of the frames.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from PIL import Image

from credit.calendar import Calendar
from credit.drawing.maps import (
    FIELD_COLORMAP,
    MISSING_COLOR,
    WIDE_COLORBAR,
    MapBackground,
    compute_robust_range,
    create_map_axes,
    draw_map,
)
from credit.drawing.style import STYLE, add_title, create_figure, find_display_units
from credit.utils.atomic import atomic_write

# Pixels per inch of the frames.
_DPI = 110
# Duration of a frame. The last frame is shown longer, so that the viewer notices the end of the animation.
_FRAME_MILLISECONDS = 250
_LAST_FRAME_MILLISECONDS = 1500
# Numbers of colours for the field, and of greys for lines and letters. With one colour for missing cells, there are 128
# colours, which need only 7 bits per pixel.
_FIELD_COLORS = 96
_GREYS = 31


def write_animation(
    path: Path, channel: str, units: str, frames: Mapping[int, Sequence[np.ndarray]], forecast_name: str,
    initial_time: int, calendar: Calendar, background: MapBackground,
) -> Path:  # fmt: skip
    """Write an animated GIF with a frame for each lead time, and return its path.

    All frames have the same colour scale.

    Args:
        path: path of the file.
        channel: name of the channel.
        units: units of the fields.
        frames: lead time in minutes -> (truth, forecast), each (H, W), in increasing order of the lead times.
        forecast_name: name of the forecast for the title.
        initial_time: initial time in minutes.
        calendar: calendar of the times.
        background: grid and coastline of the maps.

    Raises:
        CreditError: if the file cannot be written.
    """
    with rc_context(STYLE):
        first_image, *other_images = _draw_frames(
            channel, units, frames, forecast_name, initial_time, calendar, background
        )
    # The last frame is shown longer before the animation starts again.
    durations = [_FRAME_MILLISECONDS] * len(other_images) + [_LAST_FRAME_MILLISECONDS]

    def save(temporary: Path) -> None:
        first_image.save(
            temporary,
            format="GIF",
            save_all=True,
            append_images=other_images,
            duration=durations,
            loop=0,
            optimize=False,
        )

    return atomic_write(path, save)


def _draw_frames(
    channel: str, units: str, frames: Mapping[int, Sequence[np.ndarray]], forecast_name: str, initial_time: int,
    calendar: Calendar, background: MapBackground,
) -> Iterator[Image.Image]:  # fmt: skip
    """Yield the images of the frames; `write_animation` describes the arguments.

    All frames have the same palette, so that the colour of a value does not change from frame to frame.
    """
    # The colour scale of all frames is in the units of figures.
    factor, units = find_display_units(units)
    scaled_frames = {}
    for lead, fields in frames.items():
        scaled_frames[lead] = [factor * field for field in fields]
    low, high = compute_robust_range(list(itertools.chain.from_iterable(scaled_frames.values())))
    # The maps are drawn once; only their values and titles change from frame to frame.
    figure = create_figure(8.6, 3.4)
    figure.set_dpi(_DPI)
    canvas = FigureCanvasAgg(figure)
    axes = create_map_axes(figure, 1, 2)[0]
    first_truth = next(iter(scaled_frames.values()))[0]
    meshes = [draw_map(axis, first_truth, background, FIELD_COLORMAP, low, high) for axis in axes]
    figure.colorbar(meshes[0], ax=axes, label=f"{channel} ({units})", **WIDE_COLORBAR)
    add_title(figure, f"{channel}: {forecast_name} from {calendar.format(initial_time).replace('T', ' ')} UTC")
    palette = _build_palette()
    for number, (lead, fields) in enumerate(scaled_frames.items()):
        axes[0].set_title(f"Truth, {calendar.format(initial_time + lead).replace('T', ' ')} UTC")
        axes[1].set_title(f"Forecast at {lead / 60:g} h")
        for mesh, field in zip(meshes, fields, strict=True):
            mesh.set_array(field[:, background.column_order])
        canvas.draw()
        if number == 0:
            # Later titles of a different length must not move the maps.
            figure.set_layout_engine("none")
        yield _quantize(np.asarray(canvas.buffer_rgba())[..., :3], palette)


def _quantize(pixels: np.ndarray, palette: np.ndarray) -> Image.Image:
    """Return a palette image in which each pixel has the nearest colour of the palette.

    The pixels have few different colours, so distances are computed once for each different colour.

    Args:
        pixels: (height, width, 3) uint8 red, green and blue.
        palette: (128, 3) uint8 red, green and blue.
    """
    # Each colour is converted to one number (8 bits each for red, green and blue), to find equal colours fast.
    codes = pixels.astype(np.int32) @ np.array([65536, 256, 1], dtype=np.int32)
    unique_codes, inverse = np.unique(codes, return_inverse=True)
    red = unique_codes >> 16
    green = unique_codes >> 8 & 255
    blue = unique_codes & 255
    colors = np.stack([red, green, blue], axis=1)
    difference = colors[:, None] - palette[None].astype(np.int32)
    squared_distance = (difference**2).sum(axis=-1)
    palette_index = squared_distance.argmin(axis=1).astype(np.uint8)
    image = Image.fromarray(palette_index[inverse.reshape(codes.shape)])
    image.putpalette(palette.ravel().tolist())
    return image


def _build_palette() -> np.ndarray:
    """Return the 128 colours of the animation, (128, 3) uint8: field colours, greys, then the missing-cell colour."""
    field = colormaps[FIELD_COLORMAP](np.linspace(0, 1, _FIELD_COLORS))[:, :3]
    greys = np.repeat(np.linspace(0, 1, _GREYS)[:, None], 3, axis=1)
    missing = [to_rgb(MISSING_COLOR)]
    return np.rint(255 * np.concatenate([field, greys, missing])).astype(np.uint8)
