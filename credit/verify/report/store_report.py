"""HTML page about a training store, with a map and a histogram of each channel that make wrong units visible.

Shapes: T times, C time-varying channels of the store, H x W cells.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np

from credit import __version__
from credit.channels import Channel
from credit.config.sections.data import DataConfig
from credit.data.climatology.stored import describe_stored
from credit.data.formats.unit_checks import describe_implausible_variables
from credit.data.store.store_reader import StoreReader, open_configured_store, read_description
from credit.drawing.maps import MapBackground
from credit.drawing.style import save_figure
from credit.utils.atomic import atomic_write_text
from credit.verify.plots.maps import plot_map_and_histogram
from credit.verify.report.html import embed_figures, render_template

# Number of times in the histograms, and approximate number of values of each channel in its histogram.
_SAMPLED_TIMES = 12
_SAMPLED_VALUES = 400_000


def write_data_report(config: DataConfig) -> Path:
    """Write a page about the training store of a config to ``NAME.report.html`` next to the store; return its path.

    Args:
        config: config section `data`, with the path of the store.

    Raises:
        CreditError: if the page cannot be written.
        DataError: if the store is missing or incomplete, or was written for a different config.
    """
    # Maps show one time; histograms contain the values of several times at equal intervals.
    reader = open_configured_store(config)
    path = Path(config.store)
    description = read_description(path)
    time_index = np.unique(np.linspace(0, len(reader.times) - 1, _SAMPLED_TIMES).astype(int))
    # The maps show the middle one of these times.
    map_index = int(time_index[len(time_index) // 2])
    map_time = reader.calendar.format(reader.times[map_index])
    field_CHW = reader.read(map_index)
    # On a large grid, the histograms use only every second, third, ... row and column. The number of values is
    # inversely proportional to the square of the stride.
    num_values = len(time_index) * math.prod(reader.grid.shape)
    stride = max(1, round(math.sqrt(num_values / _SAMPLED_VALUES)))
    values_TCHW = np.stack([reader.read(int(index))[:, ::stride, ::stride] for index in time_index])
    # The notices name times that were left out and values that are implausible in their units.
    notices = [f"{when} was left out: {text}" for when, text in description.get("bad_times", {}).items()]
    notices += describe_implausible_variables(field_CHW, reader, config, map_time)
    text = render_template(
        "data_report.html.j2",
        title=path.name,
        version=__version__,
        notices=notices,
        facts=_list_metadata(reader, description, path),
        rows=_tabulate_statistics(reader, config),
        figures=_draw_figures(reader, field_CHW, values_TCHW, map_time),
        sampled=len(time_index),
        every=stride,
    )
    return atomic_write_text(path.with_name(f"{path.name}.report.html"), text)


def _list_metadata(reader: StoreReader, description: dict, path: Path) -> list[tuple[str, str]]:
    """Return (name, value) of each entry in the list of metadata of a store.

    Args:
        reader: reader of the store.
        description: description of the store, see `credit.data.store.store_reader.read_description`.
        path: path of the store.
    """
    # Only the first twenty gaps are listed.
    calendar = reader.calendar
    times = reader.times
    height, width = reader.grid.shape
    gaps = [f"{start} to {end}" for start, end in description.get("gaps", [])]
    gap_text = "; ".join(gaps[:20]) or "none"
    if len(gaps) > 20:
        gap_text += f" and {len(gaps) - 20} more"
    versions = [f"{name} {number}" for name, number in description.get("versions", {}).items()]
    return [
        ("store", f"{path}, format {description['format']}"),
        (
            "times",
            f"{len(times)}, {calendar.format(times[0])} to {calendar.format(times[-1])}, calendar {calendar.name}",
        ),
        ("gaps", gap_text),
        ("grid", f"{height} x {width}, {reader.grid.lat[0]:g} to {reader.grid.lat[-1]:g} north"),
        (
            "source files",
            f"{len(description['sources'])}, the first is {next(iter(description['sources']), 'unknown')}",
        ),
        ("climatology", describe_stored(path)),
        ("content", description.get("content", "unknown (made by an older version)")),
        ("written by", ", ".join(versions)),
    ]


def _tabulate_statistics(reader: StoreReader, config: DataConfig) -> list[list[str]]:
    """Return the rows of the table of statistics, one for each channel.

    The cells of a row are strings: name, units, transform, mean, standard deviation, standard deviation of the
    tendency, minimum and maximum.
    """
    statistics = reader.statistics
    rows = []
    stored_channels = reader.channels.time_varying_stored + reader.channels.static_stored
    channels = {channel.name: channel for channel in stored_channels}
    for index, name in enumerate(statistics.names):
        channel = channels[name]
        transform_text = ""
        transform = config.transforms.get(channel.variable)
        if transform is not None:
            transform_text = f"{transform.kind}, unit {transform.unit:g}"
        columns = (statistics.mean, statistics.std, statistics.tendency_std, statistics.minimum, statistics.maximum)
        numbers = [f"{values[index]:.4g}" for values in columns]
        rows.append([name, _find_units(reader, channel), transform_text, *numbers])
    return rows


def _draw_figures(
    reader: StoreReader, field_CHW: np.ndarray, values_TCHW: np.ndarray, map_time: str
) -> list[tuple[str, str, int]]:
    """Draw a map and a histogram of each channel, and encode the figures with `embed_figures`.

    Args:
        reader: reader of the store.
        field_CHW: time-varying channels at the time of the maps, (C, H, W) in physical units.
        values_TCHW: the same channels at T times, for the histograms; they may have fewer rows and columns.
        map_time: time of the maps as a string.

    Returns:
        (caption, base64 string of the figure, smallest readable width in CSS pixels) of each channel.
    """
    background = MapBackground.build(reader)
    # Each panel consists of a channel, the field of the map, the values of the histogram and the time of the map.
    panels = []
    for row, channel in enumerate(reader.channels.time_varying_stored):
        panels.append((channel, field_CHW[row], values_TCHW[:, row], map_time))
    for channel, field in zip(reader.channels.static_stored, reader.static(), strict=True):
        panels.append((channel, field, field, "constant"))
    with tempfile.TemporaryDirectory() as folder:
        figures = []
        for number, (channel, field, values, time) in enumerate(panels):
            path = Path(folder) / f"{number}.png"
            save_figure(path, plot_map_and_histogram, field, values, background, _find_units(reader, channel))
            figures.append((f"{channel.name}, {time}", path))
        return embed_figures(figures)


def _find_units(reader: StoreReader, channel: Channel) -> str:
    """Return the units of a channel, "" if the store does not contain units."""
    return reader.attributes.get(channel.variable, {}).get("units", "")
