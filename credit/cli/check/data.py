"""The part of ``credit_check`` that looks at the data: files, variables, levels, units, times, splits, the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.cli.check.report import CheckReport
from credit.cli.check.store import check_store
from credit.config.schema_data import DataConfig
from credit.data.error_collector import ErrorCollector
from credit.data.formats.files import OpenFiles
from credit.data.formats.unit_checks import find_implausible_units
from credit.data.reader import FieldReader
from credit.data.samples.frames import FrameReader
from credit.data.sources.contributions import Contribution, list_contributions
from credit.data.sources.source_index import SourceIndex, scan_sources
from credit.data.sources.source_reader import SourceReader, open_sources
from credit.data.sources.value_check import look_at_values
from credit.data.splits import Split, build_splits, describe_coverage, describe_gaps, require_samples
from credit.data.store.repair import MOST_BAD
from credit.grid import LatLonGrid

_HIGHEST_HPA = 1100.0


@dataclass(frozen=True)
class DataSummary:
    """What the data are, as far as it could be found out; has the attributes of a `FieldReader` that need no reading.

    Attributes:
        channels: of the config.
        grid: of the files or the store.
        clock: their calendar.
        times: (N,) int64 minutes.
        attributes: variable -> units, standard_name, long_name; empty where the sources are not in order.
        masks: variable -> (H, W) bool; empty where the sources are not in order.
        splits: by name; empty where they are not in order.
        samples: split -> (M,) initial times of its samples, of the splits that have some.
        reader: what reads the fields, None where the sources are not in order.
    """

    channels: ChannelMap
    grid: LatLonGrid
    clock: Calendar
    times: np.ndarray
    attributes: dict[str, dict]
    masks: dict[str, np.ndarray]
    splits: dict[str, Split]
    samples: dict[str, np.ndarray]
    reader: FieldReader | None


def inspect_data(conf: DataConfig, findings: CheckReport, deep: bool = False) -> DataSummary | None:
    """Look at everything that the data section describes; None where not even a grid is known.

    Args:
        conf: the data section.
        findings: receives what is wrong.
        deep: read every field of the store and compare checksums.
    """
    _check_level_units(conf, findings)
    reader = _open(conf, findings, deep)
    if reader is not None:
        grid, clock, times = reader.grid, reader.clock, reader.times
    else:
        scan = scan_sources(conf, OpenFiles(conf.sources), ErrorCollector())
        if scan is None:
            _split(conf, Calendar(), findings)
            return None
        grid, clock, times = scan.grid, scan.clock, _times_of(scan)
        _say_contributions(list_contributions(conf, scan), conf, clock, findings)
    splits = _split(conf, clock, findings)
    samples = _count_samples(conf, clock, times, splits, findings) if len(times) else {}
    found = DataSummary(
        conf.channel_map(), grid, clock, times, getattr(reader, "attributes", {}), getattr(reader, "masks", {}),
        splits, samples, reader,
    )  # fmt: skip
    if reader is not None:
        _look_at_values(conf, reader, splits, samples, findings)
    return found


def _check_level_units(conf: DataConfig, findings: CheckReport) -> None:
    """Levels above any pressure in hPa are in Pa; files whose units are wrong, too, would agree with them."""
    channels = conf.channel_map()
    high = [c.level for c in channels.stored + channels.static_stored if (c.level or 0.0) > _HIGHEST_HPA]
    if conf.level_units == "hPa" and high:
        findings.add(
            f"data.levels: {high[0]:g} hPa is more than any pressure on Earth; set data.level_units: Pa, or write hPa"
        )


def _open(conf: DataConfig, findings: CheckReport, deep: bool) -> FieldReader | None:
    """Open the store where there is one that fits, else the sources that it is to be made from."""
    reader: FieldReader | None = None
    if conf.store is not None and Path(conf.store).exists():
        with findings.collect():
            reader = check_store(conf, findings, deep)
    if reader is None:
        with findings.collect():
            reader = open_sources(conf)
    if isinstance(reader, SourceReader):
        _say_contributions(reader.list_contributions(conf), conf, reader.clock, findings)
    if reader is not None:
        without_units = [name for name, attributes in reader.attributes.items() if not attributes.get("units")]
        if without_units:
            findings.say(f"units: the files state none for {', '.join(without_units)}, so no unit limits their values")
        height, width = reader.grid.shape
        names = ", ".join(channel.name for channel in reader.channels.stored + reader.channels.static_stored)
        findings.say(
            f"data: {len(reader.times)} times, calendar {reader.clock.calendar}, {height} x {width} cells; {names}"
        )
    return reader


def _say_contributions(
    contributions: list[Contribution], conf: DataConfig, clock: Calendar, findings: CheckReport
) -> None:
    """Say in a line what each source gives; which files give nothing is a warning of the log."""
    for contribution in contributions:
        findings.say(contribution.describe(conf, clock))


def _times_of(scan: SourceIndex) -> np.ndarray:
    """Return the times of the sources where they are not in order as a whole; none if a file did not tell its own."""
    read = [*scan.pieces.values(), *scan.inputs.values()]
    pieces = [piece for of_variable in read for piece in of_variable]
    timed = {piece.source for piece in pieces if piece.times is not None}
    told = {piece.path for piece in pieces if piece.times is not None or piece.source not in timed}
    told |= {path for _, path in scan.idle}
    if not timed or set(scan.paths) - told:
        return np.empty(0, dtype=np.int64)
    # the variable with the most times is the one without a fault
    every = [
        np.unique(np.concatenate([piece.times for piece in of_variable if piece.times is not None]))
        for of_variable in read
        if any(piece.times is not None for piece in of_variable)
    ]
    return max(every, key=len)


def _split(conf: DataConfig, clock: Calendar, findings: CheckReport) -> dict[str, Split]:
    splits: dict[str, Split] = {}
    with findings.collect():
        splits = build_splits(conf, clock)
    return splits


def _count_samples(
    conf: DataConfig, clock: Calendar, times: np.ndarray, splits: dict[str, Split], findings: CheckReport
) -> dict[str, np.ndarray]:
    """Count the samples of each split and name its gaps; how long forecasts of the test period are is seen later."""
    samples = {}
    lengths = {"train": conf.forecast_len, "valid": conf.valid_forecast_len, "test": 1}
    for name, split in splits.items():
        with findings.collect():
            initial = require_samples(times, split, clock, conf, lengths[name])
            samples[name] = initial
            inside = times[(times >= split.first) & (times <= split.last)]
            gaps = describe_gaps(inside, clock, conf.step_minutes)
            cover = describe_coverage(times, split, clock, conf.step_minutes)
            counted = f"{len(inside)} times, {len(initial)} samples; {gaps}"
            findings.say(f"{split.describe(clock)}: {f'{cover}: ' if cover else ''}{counted}")
    return samples


def _look_at_values(
    conf: DataConfig,
    reader: FieldReader,
    splits: dict[str, Split],
    samples: dict[str, np.ndarray],
    findings: CheckReport,
) -> None:
    """Look at a time of every source file, and at what training and forecasts read first."""
    bad: list[str] = []
    if isinstance(reader, SourceReader) and splits:
        first = min(split.first for split in splits.values())
        last = max(split.last for split in splits.values())
        look = look_at_values(reader, first, last)
        bad = look.bad
        rest = "" if look.looked_at == look.times else ", at least one of each file; preprocessing looks at all"
        findings.say(f"values: {look.looked_at} of {look.times} times looked at{rest}")
        share = f"{len(bad)} of these times are bad"
        # A bad time among a few that were looked at may be the only one of all.
        most_bad = max(MOST_BAD * look.looked_at, min(1.0, MOST_BAD * look.times))
        if bad and conf.bad_times == "skip" and len(bad) <= most_bad:
            findings.say(f"values: {share} and will be left out (data.bad_times: skip); the first: {bad[0]}")
        elif bad:
            findings.add(bad[0] if len(bad) == 1 else f"{bad[0]} ({share}; this is the first)")
    # what is wrong with the values of a file would be said again of each sample
    if not bad:
        _read_samples(conf, reader, samples, findings)


def _read_samples(conf: DataConfig, reader: FieldReader, samples: dict[str, np.ndarray], findings: CheckReport) -> None:
    """Read the first, a middle and the last sample's initial time of each split, and the forcing of the last.

    Without a sample the first time is read, for what is wrong with the values.
    """
    if not samples:
        with findings.collect():
            reader.read(0)
    steps = {"train": conf.forecast_len, "valid": conf.valid_forecast_len, "test": 1}
    ranges: list[tuple[np.ndarray, np.ndarray]] = []
    for name, initial in samples.items():
        with findings.collect():
            for minutes in initial[sorted({0, len(initial) // 2, len(initial) - 1})]:
                fields = reader.read(reader.index_of(int(minutes)))
                if name != "train":
                    continue
                if not ranges and not isinstance(reader, SourceReader):
                    # earlier versions wrote stores without a look at their values
                    for message in find_implausible_units(fields, reader, conf, reader.clock.format(minutes)):
                        findings.add(message)
                ranges.append((np.nanmin(fields, axis=(1, 2)), np.nanmax(fields, axis=(1, 2))))
            last = int(initial[-1]) + (steps[name] - 1) * conf.step_minutes
            # a window that ends after the last input needs a later time than the sample itself
            FrameReader(reader, conf, None).forcing(last)
    if ranges:
        least, most = (np.stack(values) for values in zip(*ranges, strict=True))
        _check_constant(reader.channels, least.min(axis=0), most.max(axis=0), findings)


def _check_constant(channels: ChannelMap, least: np.ndarray, most: np.ndarray, findings: CheckReport) -> None:
    """A run refuses an output that has one value all through the training period."""
    same = [c.name for c, low, high in zip(channels.output, least, most, strict=False) if low == high]
    if same:
        findings.add(
            f"{', '.join(same)}: one value everywhere at the sampled times of data.splits.train; there is nothing to "
            "learn: take it out of data.variables, or look at the files"
        )
