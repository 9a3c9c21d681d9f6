"""SourceReader: fields straight from netCDF files and zarr stores, on the times that all variables have."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from credit.channels import Channel, ChannelMap
from credit.config.schema_data import DataConfig
from credit.data.files import OpenFiles
from credit.data.missing import check_values, find_masks
from credit.data.problems import Problems
from credit.data.scan import Piece, Scan, scan_sources
from credit.errors import CreditError, DataError
from credit.grid import LatLonGrid
from credit.times import Clock, format_duration

logger = logging.getLogger(__name__)

_MOST_COMPARED = 8


@dataclass(frozen=True)
class Series:
    """One variable along time, over all its files.

    Attributes:
        pieces: its files.
        times: (N,) int64 minutes, increasing.
        piece: (N,) the file of each time.
        position: (N,) the place in that file.
    """

    pieces: list[Piece]
    times: np.ndarray
    piece: np.ndarray
    position: np.ndarray


class SourceReader:
    """Reads fields from source files; see `credit.data.reader.FieldReader`.

    Args:
        channels: the channels.
        scan: what the files hold.
        series: variable -> its times and files, for every time-varying variable.
        times: (N,) int64 minutes that all of them have.
        files: opens the files.
        declared: variables whose missing values are declared.

    Attributes:
        packing_steps: variable -> step of its packed integers, where it is packed.
        paths: every source file.

    Raises:
        DataError: for missing values in the first fields or in the static fields.
    """

    def __init__(
        self,
        channels: ChannelMap,
        scan: Scan,
        series: dict[str, Series],
        times: np.ndarray,
        files: OpenFiles,
        attributes: dict[str, dict],
        declared: list[str],
    ) -> None:
        self.grid: LatLonGrid = scan.grid
        self.clock: Clock = scan.clock
        self.channels = channels
        self.times = times
        self.attributes = attributes
        self.paths = scan.paths
        pieces = {name: parts for name, parts in scan.pieces.items() if parts}
        steps = {name: max(part.layout.packing_step for part in parts) for name, parts in pieces.items()}
        self.packing_steps = {name: step for name, step in steps.items() if step > 0}
        self._files = files
        self._series = series
        self._static_pieces = {channel.variable: scan.pieces[channel.variable] for channel in channels.static_stored}
        # where each variable's times lie among those that all have
        self._places = {name: np.searchsorted(one.times, times) for name, one in series.items()}
        self.masks: dict[str, np.ndarray] = {}
        self._static = self._read_static(declared)
        self.masks |= find_masks(self._assemble(0), channels.stored, declared)

    def read(self, index: int) -> np.ndarray:
        """Return the fields of one time, (C, H, W) float32 in the order of ``channels.stored``; NaN where masked.

        Raises:
            DataError: for a value that is missing where it must not be, infinite, or cannot be read.
        """
        fields = self._assemble(index)
        check_values(fields, self.channels.stored, self.masks, self.grid, self.clock.format(self.times[index]))
        return fields

    def static(self) -> np.ndarray:
        """Return the static fields, (C, H, W) float32 in the order of ``channels.static_stored``."""
        return self._static.copy()

    def index_of(self, minutes: int) -> int | None:
        """Return the place of a time in `times`, None where it is not there."""
        index = int(np.searchsorted(self.times, minutes))
        return index if index < len(self.times) and self.times[index] == minutes else None

    def _assemble(self, index: int) -> np.ndarray:
        out = np.empty((len(self.channels.stored), *self.grid.shape), dtype=np.float32)
        row = 0
        for name, one in self._series.items():
            place = self._places[name][index]
            piece = one.pieces[one.piece[place]]
            values = read_piece(self._files, piece, int(one.position[place]))
            out[row : row + len(values)] = values
            row += len(values)
        assert row == len(out), "series are in the order of the stored channels"
        return out

    def _read_static(self, declared: list[str]) -> np.ndarray:
        channels = self.channels.static_stored
        out = np.empty((len(channels), *self.grid.shape), dtype=np.float32)
        row = 0
        for name, pieces in self._static_pieces.items():
            values = read_constant(self._files, name, pieces[0])
            out[row : row + len(values)] = values
            row += len(values)
        self.masks |= find_masks(out, channels, declared)
        check_values(out, channels, self.masks, self.grid, "static fields")
        return out


def open_sources(conf: DataConfig) -> SourceReader:
    """Open the sources of a config.

    Raises:
        DataError: naming every problem that was found: files, variables, levels, grids, units, calendars, times.
    """
    problems = Problems()
    files = OpenFiles()
    scan = scan_sources(conf, files, problems)
    if scan is None:
        problems.raise_any()
    channels = conf.channel_map()
    varying = list(dict.fromkeys(channel.variable for channel in channels.stored))
    attributes = {}
    for name, parts in scan.pieces.items():
        with problems.collect():
            attributes[name] = _shared_attributes(name, parts, conf)
    series: dict[str, Series] = {}
    for name in varying:
        if scan.pieces[name]:
            with problems.collect():
                series[name] = build_series(name, scan.pieces[name], files, scan.clock)
                check_interval(name, series[name], conf, scan.clock)
    problems.raise_any()
    times = common_times(series, scan.clock)
    declared = [name for name, field in conf.fields.items() if field.missing == "fill_mean"]
    return SourceReader(channels, scan, series, times, files, attributes, declared)


def read_piece(files: OpenFiles, piece: Piece, position: int) -> np.ndarray:
    """Return the fields of one variable, file and time, (levels or 1, H, W).

    Raises:
        DataError: if the file cannot be read there.
    """
    try:
        return piece.layout.read(files.get(piece.path, piece.file_format), position)
    except CreditError:
        raise
    except Exception as error:
        # netCDF, HDF5 and zarr raise a dozen kinds for damaged data
        raise DataError(
            f"{piece.path}: {piece.layout.name} cannot be read at position {position} in time ({error}); the file is "
            "damaged or truncated: copy it again"
        ) from error


def read_constant(files: OpenFiles, name: str, piece: Piece) -> np.ndarray:
    """Return the fields (levels or 1, H, W) of a static variable; first, middle and last time must be equal."""
    length = len(piece.layout.times) if "time" in piece.layout.dims else 1
    values = read_piece(files, piece, 0)
    for position in sorted({length // 2, length - 1} - {0}):
        if not np.array_equal(values, read_piece(files, piece, position), equal_nan=True):
            raise DataError(
                f"{piece.path}: {name} is listed as static but varies in time (positions 0 and {position} differ); "
                "list it under dynamic_forcing"
            )
    return values


def build_series(name: str, pieces: list[Piece], files: OpenFiles, clock: Clock) -> Series:
    """Put the files of a variable in order of time; a time in two files must have equal fields in both.

    Raises:
        DataError: for files without time, a time twice in one file, two sources for one variable, or fields that differ.
    """
    if len({piece.source for piece in pieces}) > 1:
        raise DataError(
            f"{name} is in sources {' and '.join(sorted({str(piece.source) for piece in pieces}))}; say which with "
            "data.sources.N.variables, or list the files as one source"
        )
    for piece in pieces:
        if piece.layout.times is None:
            raise DataError(f"{piece.path}: {name} varies in time but has no time axis there; add one, or list it as static")
    times = np.concatenate([piece.layout.times for piece in pieces])
    which = np.concatenate([np.full(len(piece.layout.times), n) for n, piece in enumerate(pieces)])
    position = np.concatenate([np.arange(len(piece.layout.times)) for piece in pieces])
    order = np.argsort(times, kind="stable")
    times, which, position = times[order], which[order], position[order]
    again = np.flatnonzero(np.diff(times) == 0) + 1
    for index in again:
        if which[index] == which[index - 1]:
            raise DataError(
                f"{pieces[which[index]].path}: {clock.format(times[index])} is there twice ({name}); remove one"
            )
    for index in again[np.unique(np.linspace(0, len(again) - 1, _MOST_COMPARED).astype(int))] if len(again) else ():
        one, other = pieces[which[index - 1]], pieces[which[index]]
        first = read_piece(files, one, int(position[index - 1]))
        second = read_piece(files, other, int(position[index]))
        if not np.array_equal(first, second, equal_nan=True):
            raise DataError(
                f"{name} at {clock.format(times[index])} differs between {one.path} and {other.path}; name only one of "
                "them in data.sources"
            )
    if len(again):
        logger.info("%s: %d times are in two files with equal fields; the first is used", name, len(again))
    kept = np.setdiff1d(np.arange(len(times)), again)
    return Series(pieces, times[kept], which[kept], position[kept])


def common_times(series: dict[str, Series], clock: Clock) -> np.ndarray:
    """Return the times that every variable has; what is dropped is logged.

    Raises:
        DataError: if there is none.
    """
    every = list(series.values())
    common = every[0].times
    for one in every[1:]:
        common = np.intersect1d(common, one.times, assume_unique=True)
    if len(common) == 0:
        spans = (
            f"{name} {clock.format(one.times[0])}..{clock.format(one.times[-1])} ({len(one.times)} times)"
            for name, one in series.items()
        )
        raise DataError(f"data.sources: the variables have no time in common: {'; '.join(spans)}")
    total = len(np.unique(np.concatenate([one.times for one in every])))
    if total > len(common):
        short = [name for name, one in series.items() if len(one.times) < total]
        logger.warning(
            "%d of %d times are left out: not every variable has them (lacking in %s)",
            total - len(common),
            total,
            ", ".join(short),
        )
    return common


def check_interval(name: str, series: Series, conf: DataConfig, clock: Clock) -> None:
    """Stop where a mean or an accumulation is not over one time step that ends at its label.

    Raises:
        DataError: naming the interval that the files have.
    """
    temporal = conf.field(name).temporal
    methods = series.pieces[0].layout.attributes.get("cell_methods", "")
    if temporal == "instant":
        if "time: mean" in methods or "time: sum" in methods:
            logger.warning('%s is taken as instantaneous, but its cell_methods say "%s"; see data.fields', name, methods)
        return
    rule = f"data.fields.{name}.temporal is {temporal}, so every value must cover one data.timestep {conf.timestep}"
    spacing = int(np.diff(series.times).min()) if len(series.times) > 1 else conf.step_minutes
    if spacing != conf.step_minutes:
        raise DataError(
            f"{name}: {rule}, but its times are {format_duration(spacing)} apart "
            f"({series.pieces[0].path}); sum or average it to the step first"
        )
    for piece in series.pieces:
        bounds, times = piece.layout.window_bounds, piece.layout.times
        if bounds is None:
            continue
        wrong = np.flatnonzero((bounds[:, 1] - bounds[:, 0] != conf.step_minutes) | (bounds[:, 1] != times))
        if len(wrong):
            first = wrong[0]
            raise DataError(
                f"{piece.path}: {rule} and end at its label, but the value at {clock.format(times[first])} covers "
                f"{clock.format(bounds[first, 0])} to {clock.format(bounds[first, 1])}; rewrite it to the step first"
            )


def _shared_attributes(name: str, pieces: list[Piece], conf: DataConfig) -> dict[str, str]:
    """Return the variable's attributes, from its first file; units must be the same in all.

    Raises:
        DataError: naming two files whose units differ.
    """
    if not pieces:
        return {}
    first = pieces[0].layout.attributes
    for piece in pieces[1:]:
        units = piece.layout.attributes.get("units")
        if units != first.get("units"):
            raise DataError(
                f'{name} is in "{first.get("units")}" in {pieces[0].path} and in "{units}" in {piece.path}; bring all '
                "files to one unit"
            )
    temporal = conf.field(name).temporal
    kept = {key: value for key, value in first.items() if key != "cell_methods"}
    return kept if temporal == "instant" else {**kept, "temporal": temporal}


