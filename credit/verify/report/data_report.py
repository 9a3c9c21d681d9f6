"""A page on a training store, a map and a histogram a channel, so that a person sees a wrong unit at once."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np

from credit import __version__
from credit.channels import Channel
from credit.config.schema_data import DataConfig
from credit.data.climatology.stored import describe_stored
from credit.data.formats.unit_checks import find_implausible_units
from credit.data.store.store_reader import StoreReader, open_configured_store, read_description
from credit.verify.plots.maps import Background, portrait
from credit.verify.plots.style import draw
from credit.verify.report.html import embed, render, write_page

# times whose values are counted, spread over the store, and about how many cells of them a channel
_SAMPLED, _COUNTED = 12, 400_000


def write_data_report(conf: DataConfig) -> Path:
    """Write ``NAME.report.html`` beside the store of a config and return its path.

    Raises:
        CreditError: if it cannot be written.
        DataError: if the store is not there, not complete or of another config.
    """
    reader = open_configured_store(conf)
    path = Path(conf.store)
    meta = read_description(path)
    chosen = np.unique(np.linspace(0, len(reader.times) - 1, _SAMPLED).astype(int))
    middle = int(chosen[len(chosen) // 2])
    field_CHW, shown = reader.read(middle), reader.calendar.format(reader.times[middle])
    every = max(1, round(math.sqrt(len(chosen) * math.prod(reader.grid.shape) / _COUNTED)))
    values_TCHW = np.stack([reader.read(int(index))[:, ::every, ::every] for index in chosen])
    notices = [f"{when} was left out: {text}" for when, text in meta.get("bad_times", {}).items()]
    notices += find_implausible_units(field_CHW, reader, conf, shown)
    text = render(
        "data_report.html.j2",
        title=path.name,
        version=__version__,
        notices=notices,
        facts=_facts(reader, meta, path),
        rows=_rows(reader, conf),
        figures=_figures(reader, field_CHW, values_TCHW, shown),
        sampled=len(chosen),
        every=every,
    )
    return write_page(path.with_name(f"{path.name}.report.html"), text)


def _facts(reader: StoreReader, meta: dict, path: Path) -> list[tuple[str, str]]:
    calendar, times, (height, width) = reader.calendar, reader.times, reader.grid.shape
    gaps = [f"{begin} to {end}" for begin, end in meta.get("gaps", [])]
    return [
        ("store", f"{path}, format {meta['format']}"),
        (
            "times",
            f"{len(times)}, {calendar.format(times[0])} to {calendar.format(times[-1])}, calendar {calendar.name}",
        ),
        ("gaps", "; ".join(gaps[:20]) + (f" and {len(gaps) - 20} more" if len(gaps) > 20 else "") or "none"),
        ("grid", f"{height} x {width}, {reader.grid.lat[0]:g} to {reader.grid.lat[-1]:g} north"),
        ("source files", f"{len(meta['sources'])}, the first is {next(iter(meta['sources']), 'unknown')}"),
        ("climatology", describe_stored(path)),
        ("content", meta.get("content", "unknown (made by an older version)")),
        ("written by", ", ".join(f"{name} {number}" for name, number in meta.get("versions", {}).items())),
    ]


def _rows(reader: StoreReader, conf: DataConfig) -> list[list[str]]:
    statistics = reader.statistics
    rows = []
    for place, name in enumerate(statistics.names):
        channel = next(c for c in (*reader.channels.stored, *reader.channels.static_stored) if c.name == name)
        transform = conf.transforms.get(channel.variable)
        told = (statistics.mean, statistics.std, statistics.tendency_std, statistics.minimum, statistics.maximum)
        rows.append(
            [
                name,
                _units(reader, channel),
                "" if transform is None else f"{transform.kind}, unit {transform.unit:g}",
                *(f"{values[place]:.4g}" for values in told),
            ]
        )
    return rows


def _figures(reader: StoreReader, field_CHW: np.ndarray, values_TCHW: np.ndarray, shown: str) -> list[tuple[str, str]]:
    background = Background.of(reader)
    every = [
        (channel, field_CHW[row], values_TCHW[:, row], shown) for row, channel in enumerate(reader.channels.stored)
    ]
    static = zip(reader.channels.static_stored, reader.static(), strict=True)
    every += [(channel, field, field, "constant") for channel, field in static]
    with tempfile.TemporaryDirectory() as folder:
        made = []
        for number, (channel, field, values, when) in enumerate(every):
            file = Path(folder) / f"{number}.png"
            draw(file, portrait, field, values, background, _units(reader, channel))
            made.append((f"{channel.name}, {when}", file))
        return embed(made)


def _units(reader: StoreReader, channel: Channel) -> str:
    return reader.attributes.get(channel.variable, {}).get("units", "")
