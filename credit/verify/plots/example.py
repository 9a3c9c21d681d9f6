"""Figures of the example case, whose fields are shown: maps, Hovmoeller diagrams and animations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from credit.calendar import Calendar
from credit.drawing.maps import MapBackground
from credit.drawing.style import save_figure
from credit.verify.partial_scores import FieldsByChannelAndLead
from credit.verify.plots.animation import write_animation
from credit.verify.plots.hovmoeller import plot_hovmoeller, plot_latitude_time
from credit.verify.plots.maps import plot_maps

if TYPE_CHECKING:
    from credit.data.reader import FieldReader
    from credit.verify.scorer import Verification

# Smallest number of lead times in a diagram over time.
_MIN_LEADS = 2


def draw_example(verification: Verification, reader: FieldReader, folder: Path) -> list[tuple[str, Path]]:
    """Draw the maps, Hovmoeller diagrams and animations of the example case into a folder.

    Args:
        verification: result of the verification, with the fields of the example.
        reader: reader of the data, which contain the land fraction for the coastline.
        folder: folder for the figures; it must exist.

    Returns:
        (caption, path) of each figure.

    Raises:
        CreditError: if a figure cannot be written.
    """
    # For an ensemble, the figures show the ensemble mean.
    forecast_name = verification.table.display_name("model")
    if verification.evolution.is_ensemble:
        forecast_name = f"ensemble mean of {forecast_name}"
    background = MapBackground.build(reader, verification.grid)
    # The grid of animations may be coarser than the grid of the scores.
    frame_background = MapBackground.build(reader, verification.evolution.frame_grid)
    return [
        *_draw_maps(verification, reader.calendar, background, forecast_name, folder),
        *_draw_time_diagrams(verification, reader.calendar, background, forecast_name, folder),
        *_draw_animations(verification, reader.calendar, frame_background, forecast_name, folder),
    ]


def _draw_maps(
    verification: Verification, calendar: Calendar, background: MapBackground, forecast_name: str, folder: Path
) -> list[tuple[str, Path]]:
    """Draw a figure with maps of the example for each figure channel; return (caption, path) of each figure."""
    figures = []
    for name in verification.figure_channels:
        fields = _select_channel_by_lead(verification.maps, name)
        path = save_figure(
            folder / f"maps_{name}.png", plot_maps, name, verification.table.units(name), fields,
            verification.example_time, calendar, background, forecast_name,
        )  # fmt: skip
        caption = (
            f"{name}: truth, forecast, error and, for an ensemble, spread of one initial time. Each error has a "
            "separate colour scale."
        )
        figures.append((caption, path))
    return figures


def _draw_time_diagrams(
    verification: Verification, calendar: Calendar, background: MapBackground, forecast_name: str, folder: Path
) -> list[tuple[str, Path]]:
    """Draw longitude-time and latitude-time diagrams for each figure channel; return (caption, path) of each."""
    evolution = verification.evolution
    south, north = evolution.band
    figures = []
    for name in verification.figure_channels:
        units = verification.table.units(name)
        band_means = _select_channel_by_lead(evolution.band_means, name)
        if _can_be_drawn(band_means):
            path = save_figure(
                folder / f"hovmoeller_{name}.png", plot_hovmoeller, name, units, band_means, evolution.band,
                forecast_name, verification.example_time, calendar, background,
            )  # fmt: skip
            caption = (
                f"{name}: Hovmoeller diagram of the same forecast, mean over {south:g} to {north:g} degrees north. "
                "Moving waves appear as slanted lines; if the lines of forecast and truth have the same slope, the "
                "speed of the waves is correct."
            )
            figures.append((caption, path))
        zonal_means = _select_channel_by_lead(evolution.zonal_means, name)
        if _can_be_drawn(zonal_means):
            path = save_figure(
                folder / f"hovmoeller_latitude_{name}.png", plot_latitude_time, name, units, zonal_means, forecast_name,
                verification.example_time, calendar, verification.grid,
            )  # fmt: skip
            caption = (
                f"{name}: zonal mean of the same forecast by lead time and latitude. An error that grows steadily "
                "with lead time is a drift at these latitudes; waves cancel in a zonal mean."
            )
            figures.append((caption, path))
    return figures


def _draw_animations(
    verification: Verification, calendar: Calendar, background: MapBackground, forecast_name: str, folder: Path
) -> list[tuple[str, Path]]:
    """Write an animation of the example for each animated channel; return (caption, path) of each."""
    all_frames = verification.evolution.animation_frames
    figures = []
    # Each animated channel appears once, in the order of the frames.
    animated_channels = dict.fromkeys(channel for channel, _ in all_frames)
    for name in animated_channels:
        frames = _select_channel_by_lead(all_frames, name)
        path = write_animation(
            folder / f"animation_{name}.gif", name, verification.table.units(name), frames, forecast_name,
            verification.example_time, calendar, background,
        )  # fmt: skip
        figures.append((f"{name}: the same forecast and the truth at successive lead times.", path))
    return figures


def _can_be_drawn(fields: dict[int, tuple[np.ndarray, ...]]) -> bool:
    """Return True if fields have at least two lead times and a value that is not NaN, as a diagram over time needs.

    Args:
        fields: lead time in minutes -> (truth, forecast).
    """
    return len(fields) >= _MIN_LEADS and bool(np.isfinite(list(fields.values())).any())


def _select_channel_by_lead(fields: FieldsByChannelAndLead, name: str) -> dict[int, tuple[np.ndarray, ...]]:
    """Return lead time in minutes -> fields of one channel, in increasing order of the lead times.

    Args:
        fields: (channel name, lead time in minutes) -> fields.
        name: name of the channel.
    """
    leads = sorted(lead for channel, lead in fields if channel == name)
    return {lead: fields[name, lead] for lead in leads}
