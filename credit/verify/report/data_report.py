"""Page on a training store with a map and a histogram of each channel, which make wrong units visible at once."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np

from credit import __version__
from credit.channels import Channel
from credit.config.sections.data import DataConfig
from credit.data.climatology.stored import describe_stored
from credit.data.formats.unit_checks import find_implausible_units
from credit.data.store.store_reader import StoreReader, open_configured_store, read_description
from credit.verify.plots.maps import MapBackground, plot_map_and_histogram
from credit.verify.plots.style import save_figure
from credit.verify.report.html import embed_figures, render_template, write_page

# Number of times whose values are counted, and about how many values of a channel.
_SAMPLED_TIMES = 12
_SAMPLED_VALUES = 400_000


def write_data_report(conf: DataConfig) -> Path:
    """Write ``NAME.report.html`` next to the store of a config and return its path.

    Raises:
        CreditError: if it cannot be written.
        DataError: if the store is missing, incomplete or of another config.
    """
    reader = open_configured_store(conf)
    path = Path(conf.store)
    meta = read_description(path)
    time_index = np.unique(np.linspace(0, len(reader.times) - 1, _SAMPLED_TIMES).astype(int))
    map_index = int(time_index[len(time_index) // 2])
    map_time = reader.calendar.format(reader.times[map_index])
    field_CHW = reader.read(map_index)
    num_values = len(time_index) * math.prod(reader.grid.shape)
    every = max(1, round(math.sqrt(num_values / _SAMPLED_VALUES)))
    values_TCHW = np.stack([reader.read(int(index))[:, ::every, ::every] for index in time_index])
    notices = [f"{when} was left out: {text}" for when, text in meta.get("bad_times", {}).items()]
    notices += find_implausible_units(field_CHW, reader, conf, map_time)
    text = render_template(
        "data_report.html.j2",
        title=path.name,
        version=__version__,
        notices=notices,
        facts=_facts(reader, meta, path),
        rows=_rows(reader, conf),
        figures=_figures(reader, field_CHW, values_TCHW, map_time),
        sampled=len(time_index),
        every=every,
    )
    return write_page(path.with_name(f"{path.name}.report.html"), text)


def _facts(reader: StoreReader, meta: dict, path: Path) -> list[tuple[str, str]]:
    calendar = reader.calendar
    times = reader.times
    height, width = reader.grid.shape
    gaps = [f"{start} to {end}" for start, end in meta.get("gaps", [])]
    gap_text = "; ".join(gaps[:20]) or "none"
    if len(gaps) > 20:
        gap_text += f" and {len(gaps) - 20} more"
    return [
        ("store", f"{path}, format {meta['format']}"),
        (
            "times",
            f"{len(times)}, {calendar.format(times[0])} to {calendar.format(times[-1])}, calendar {calendar.name}",
        ),
        ("gaps", gap_text),
        ("grid", f"{height} x {width}, {reader.grid.lat[0]:g} to {reader.grid.lat[-1]:g} north"),
        ("source files", f"{len(meta['sources'])}, the first is {next(iter(meta['sources']), 'unknown')}"),
        ("climatology", describe_stored(path)),
        ("content", meta.get("content", "unknown (made by an older version)")),
        ("written by", ", ".join(f"{name} {number}" for name, number in meta.get("versions", {}).items())),
    ]


def _rows(reader: StoreReader, conf: DataConfig) -> list[list[str]]:
    statistics = reader.statistics
    rows = []
    channels = {channel.name: channel for channel in (*reader.channels.stored, *reader.channels.static_stored)}
    for index, name in enumerate(statistics.names):
        channel = channels[name]
        transform = conf.transforms.get(channel.variable)
        columns = (statistics.mean, statistics.std, statistics.tendency_std, statistics.minimum, statistics.maximum)
        rows.append(
            [
                name,
                _units(reader, channel),
                "" if transform is None else f"{transform.kind}, unit {transform.unit:g}",
                *(f"{values[index]:.4g}" for values in columns),
            ]
        )
    return rows


def _figures(
    reader: StoreReader, field_CHW: np.ndarray, values_TCHW: np.ndarray, map_time: str
) -> list[tuple[str, str, int]]:
    """Return the embedded figures, see `credit.verify.report.html.embed_figures`."""
    background = MapBackground.build(reader)
    # Channel, mapped field, counted values, time of the map.
    panels = []
    for row, channel in enumerate(reader.channels.stored):
        panels.append((channel, field_CHW[row], values_TCHW[:, row], map_time))
    for channel, field in zip(reader.channels.static_stored, reader.static(), strict=True):
        panels.append((channel, field, field, "constant"))
    with tempfile.TemporaryDirectory() as folder:
        figures = []
        for number, (channel, field, values, time) in enumerate(panels):
            path = Path(folder) / f"{number}.png"
            save_figure(path, plot_map_and_histogram, field, values, background, _units(reader, channel))
            figures.append((f"{channel.name}, {time}", path))
        return embed_figures(figures)


def _units(reader: StoreReader, channel: Channel) -> str:
    return reader.attributes.get(channel.variable, {}).get("units", "")
