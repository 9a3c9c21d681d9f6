"""SourceReader: fields straight from netCDF, zarr and GRIB, on the times that all variables have."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.schema_data import DataConfig
from credit.data.error_collector import ErrorCollector
from credit.data.formats.cf import VariableLayout
from credit.data.formats.files import OpenFiles, file_key
from credit.data.samples.missing_values import check_values, find_masks
from credit.data.sources.accumulation import TimeAggregation, build_windows
from credit.data.sources.contributions import Contribution, list_contributions, warn_of_idle_files
from credit.data.sources.derived_series import DerivedSeries, build_variable, is_derived
from credit.data.sources.series import (
    JoinedSeries,
    SourceOverlap,
    VariableSeries,
    by_source,
    read_constant,
    shared_attributes,
)
from credit.data.sources.source_index import FileVariable, SourceIndex, scan_sources
from credit.data.sources.time_axis import align_times
from credit.data.store.chunk_reader import scatter_fields
from credit.errors import DataError
from credit.grid import LatLonGrid

logger = logging.getLogger(__name__)

# of the fields that are read at once; a time more or less does not tell beyond it
_BYTES_AT_ONCE = 2**25
# of a variable that there are while it is unpacked and put into the grid's order, about
_COPIES = 3


class SourceReader:
    """Reads fields from source files; see `credit.data.reader.FieldReader`.

    Args:
        channels: the channels.
        scan: what the files hold.
        series: variable -> its times and files, for every time-varying variable in the order of the channels.
        windows: variable -> how its values come from those of its files.
        policies: variable -> when they count, see `credit.data.sources.time_axis`.
        attributes: variable -> its attributes.
        files: opens the files.
        declared: variables whose missing values are declared.

    Attributes:
        packing_steps: variable -> step of its packed integers, where it is packed.
        chunk_times: how many of `times` the longest chunk of any variable spans, at most; 1 without chunks.
        bytes_a_time: that reading several times at once takes for each.

    Raises:
        DataError: for missing values in the static fields, or no time that all variables have.
    """

    is_thread_safe = False

    def __init__(
        self,
        channels: ChannelMap,
        scan: SourceIndex,
        series: dict[str, VariableSeries],
        windows: dict[str, TimeAggregation],
        policies: dict[str, str],
        attributes: dict[str, dict],
        files: OpenFiles,
        declared: list[str],
    ) -> None:
        self._scan = scan
        self.grid: LatLonGrid = scan.grid
        self.calendar: Calendar = scan.calendar
        self.channels = channels
        self.times, self._places = align_times(windows, policies, scan.calendar)
        self.attributes = attributes
        # a table of coefficients decides values, too
        self._paths = scan.paths | dict.fromkeys(scan.tables, 0)
        steps = {name: max(part.layout.packing_step for part in parts) for name, parts in scan.pieces.items()}
        self.packing_steps = {name: step for name, step in steps.items() if step > 0}
        layouts = [part.layout for parts in (*scan.pieces.values(), *scan.inputs.values()) for part in parts]
        self.chunk_times = max((_spanned(layout, self.times) for layout in layouts), default=1)
        self._files = files
        self._series, self._windows = series, windows
        self._static = self._read_static(scan)
        self.masks = find_masks(self._static, channels.static_stored, declared)
        check_values(self._static, channels.static_stored, self.masks, self.grid, "any time")
        # fields that are read at once, of the run and of files
        of_files = (
            _bytes(one) * max(len(windows[name].terms), _between(one, self.times)) for name, one in series.items()
        )
        of_run = len(channels.stored) * math.prod(self.grid.shape) * 4
        self.bytes_a_time = of_run + max(of_files, default=0)
        masked = [channel for channel in channels.stored if channel.variable in declared]
        self.masks |= find_masks(self._assemble([0], declared)[0], masked, declared)

    def read(self, index: int) -> np.ndarray:
        """Return the fields of one time, (C, H, W) float32 in the order of ``channels.stored``; NaN where masked.

        Raises:
            DataError: for a value that is missing where it must not be, infinite, or cannot be read.
        """
        return self._read_variables([index], set(self._series))[0]

    def read_each(self, indices: Sequence[int], held_bytes: int = _BYTES_AT_ONCE) -> Iterator[np.ndarray]:
        """Yield the fields of several times, of which some are read at once; see `read`.

        Args:
            indices: the times.
            held_bytes: may be held to read a chunk of the files at once.
        """
        at_once = self.times_at_once(held_bytes)
        for first in range(0, len(indices), at_once):
            yield from self._read_variables(indices[first : first + at_once], set(self._series))

    def times_at_once(self, held_bytes: int) -> int:
        """Return how many times `read_each` reads at once: a few, or as many of a chunk as it may hold."""
        return max(1, _BYTES_AT_ONCE // self.bytes_a_time, self.chunk_part(held_bytes))

    def chunk_part(self, held_bytes: int) -> int:
        """Return how many of the times of the longest chunk may be held at once."""
        return min(self.chunk_times, held_bytes // self.bytes_a_time)

    def read_into(self, index: int, places: Sequence[np.ndarray | None]) -> None:
        """Bring the fields of one time to their places; see `credit.data.reader.FieldReader`."""
        channels = self.channels.stored
        wanted = {channel.variable for channel, place in zip(channels, places, strict=True) if place is not None}
        own = [place for channel, place in zip(channels, places, strict=True) if channel.variable in wanted]
        scatter_fields(self._read_variables([index], wanted)[0], own)

    def static(self) -> np.ndarray:
        """Return the static fields, (C, H, W) float32 in the order of ``channels.static_stored``."""
        return self._static.copy()

    def index_of(self, minutes: int) -> int | None:
        """Return the place of a time in `times`, None where it is not there."""
        index = int(np.searchsorted(self.times, minutes))
        return index if index < len(self.times) and self.times[index] == minutes else None

    def times_of_files(self) -> np.ndarray:
        """Return places in `times`, increasing, that together read every file of a variable that varies in time."""
        chosen: set[int] = set()
        remaining = list(self._series.values())
        while remaining:
            series = remaining.pop()
            if isinstance(series, JoinedSeries):
                remaining += series.parts
                continue
            remaining += _input_series(series)
            first_times = series.times[np.unique(series.piece, return_index=True)[1]]
            chosen.update(np.minimum(np.searchsorted(self.times, first_times), len(self.times) - 1).tolist())
        return np.array(sorted(chosen))

    def describe_files(self) -> dict[str, list[int]]:
        """Return path -> two numbers that are others when the file is, of every source file."""
        return {file_key(path): self._files.fingerprint(path, number) for path, number in self._paths.items()}

    def gives_static(self, keys: set[str]) -> bool:
        """Return whether a static field comes from one of some files; see `find_times_from`."""
        static = {channel.variable for channel in self.channels.static_stored}
        pieces = [piece for name in static for piece in self._scan.pieces[name]]
        return any(file_key(piece.path) in keys for piece in pieces)

    def find_times_from(self, keys: set[str]) -> np.ndarray:
        """Return those of `times` whose fields come from one of some files, static fields left aside.

        Args:
            keys: of the files, as in `describe_files`.
        """
        if not keys.isdisjoint(map(file_key, self._scan.tables)):
            return self.times
        affected = np.zeros(len(self.times), dtype=bool)
        for name, series in self._series.items():
            touched = series.comes_from(keys)
            windows = self._windows[name]
            of_window = np.zeros(len(windows.times), dtype=bool)
            for weights, places in windows.terms:
                of_window |= (weights != 0) & touched[places]
            affected |= of_window[self._places[name]]
        return self.times[affected]

    def list_contributions(self, conf: DataConfig) -> list[Contribution]:
        """Return what each source gives; `conf` is the data section that the sources were opened with."""
        return list_contributions(conf, self._scan, self._series)

    def _read_variables(self, indices: Sequence[int], names: Collection[str]) -> list[np.ndarray]:
        """Return the stored channels of some variables at some times."""
        channels = [channel for channel in self.channels.stored if channel.variable in names]
        fields = self._assemble(indices, names)
        for index, one in zip(indices, fields, strict=True):
            check_values(one, channels, self.masks, self.grid, self.calendar.format(self.times[index]))
        return fields

    def _assemble(self, indices: Sequence[int], names: Collection[str]) -> list[np.ndarray]:
        rows = sum(channel.variable in names for channel in self.channels.stored)
        fields = [np.empty((rows, *self.grid.shape), dtype=np.float32) for _ in indices]
        row = 0
        for name in filter(names.__contains__, self._series):
            terms = [self._windows[name].at(int(self._places[name][index])) for index in indices]
            places = np.unique([place for _, own in terms for place in own])
            read = dict(zip(places.tolist(), self._series[name].read(self._files, places), strict=True))
            levels = len(next(iter(read.values()), ()))
            for (weights, own), field in zip(terms, fields, strict=True):
                values = [read[place] for place in own]
                if len(values) > 1:
                    values = [np.tensordot(weights, np.asarray(values, dtype=np.float64), axes=1)]
                field[row : row + levels] = values[0]
            row += levels
        return fields

    def _read_static(self, scan: SourceIndex) -> np.ndarray:
        names = dict.fromkeys(channel.variable for channel in self.channels.static_stored)
        if not names:
            return np.zeros((0, *self.grid.shape), dtype=np.float32)
        parts = [self._read_constant(name, scan.pieces[name]) for name in names]
        return np.concatenate(parts, dtype=np.float32, casting="same_kind")

    def _read_constant(self, name: str, pieces: list[FileVariable]) -> np.ndarray:
        """Return a static variable from the first file of each source that has it; all must have the same fields."""
        first, *others = [of_source[0] for of_source in by_source(pieces)]
        fields = read_constant(self._files, name, first)
        for piece in others:
            if not np.array_equal(fields, read_constant(self._files, name, piece), equal_nan=True):
                raise DataError(
                    f"{name} is static and differs between {first.path} (data.sources.{first.source}) and {piece.path} "
                    f"(data.sources.{piece.source}); list with data.sources.N.variables what the other source is to "
                    f"give, without {name}"
                )
        return fields


def _find_policy(name: str, scan: SourceIndex, conf: DataConfig) -> tuple[int, str]:
    """Return the number of the first source of a variable and when the values of all of its sources count.

    Raises:
        DataError: where two sources differ.
    """
    numbers = [pieces[0].source for pieces in by_source(scan.pieces[name])]
    first = numbers[0]
    for number in numbers[1:]:
        if conf.sources[number].times != conf.sources[first].times:
            raise DataError(
                f"{name} is in data.sources {first} and {number}, whose times are {conf.sources[first].times} and "
                f"{conf.sources[number].times}; the sources of a variable must have the same"
            )
    return first, conf.sources[first].times


def _bytes(series: VariableSeries) -> int:
    """Return the memory that a time of a variable takes while it is read: float64, where it is packed."""
    if isinstance(series, JoinedSeries):
        return max(map(_bytes, series.parts))
    # All inputs of a derived variable are held at once, as float32.
    return 8 * _COPIES * _values(series) + 4 * sum(map(_values, _input_series(series)))


def _between(series: VariableSeries, times: np.ndarray) -> int:
    """Return how many times of a file are read for each of `times`, as those of a chunk come with all between them."""
    if isinstance(series, JoinedSeries):
        return max(_between(part, times) for part in series.parts)
    pieces = [piece for each in (series, *_input_series(series)) for piece in each.pieces]
    layouts = [piece.layout for piece in pieces]
    between = 1
    for layout in layouts:
        if layout.chunk_times > 1 and layout.times is not None and min(len(times), len(layout.times)) > 1:
            apart = int(np.diff(times).min()) // int(np.diff(layout.times).min())
            between = max(between, min(apart, layout.chunk_times))
    return between


def _input_series(series: VariableSeries) -> list[VariableSeries]:
    """Return the series that a derived variable is computed from; none for one that is read as it is."""
    return [input_series for input_series, _ in series.inputs.values()] if isinstance(series, DerivedSeries) else []


def _values(series: VariableSeries) -> int:
    layout = series.pieces[0].layout
    return len(layout.level_rows or (0,)) * math.prod(layout.grid.shape)


def open_sources(conf: DataConfig) -> SourceReader:
    """Open the sources of a config.

    Raises:
        DataError: naming every problem that was found: files, variables, levels, grids, units, calendars, times.
    """
    problems = ErrorCollector()
    files = OpenFiles(conf.sources)
    scan = scan_sources(conf, files, problems)
    if problems.messages and scan is not None:
        # a file that gives nothing may be why
        warn_of_idle_files(list_contributions(conf, scan))
    problems.raise_any()
    channels = conf.channel_map()
    attributes: dict[str, dict] = {}
    for name, pieces in scan.pieces.items():
        with problems.collect():
            attributes[name] = shared_attributes(name, pieces, conf.field(name).temporal)
    series: dict[str, VariableSeries] = {}
    windows: dict[str, TimeAggregation] = {}
    policies: dict[str, str] = {}
    overlaps: dict[str, list[str]] = {}
    predicted = {channel.variable for channel in channels.output}
    for name in dict.fromkeys(channel.variable for channel in channels.stored):
        with problems.collect():
            try:
                series[name] = build_variable(name, scan, conf, files)
            except SourceOverlap as error:
                overlaps.setdefault(error.rest, []).extend(error.names)
                continue
            windows[name] = build_windows(name, series[name], conf, scan.calendar)
            number, policies[name] = _find_policy(name, scan, conf)
            if name in predicted and policies[name] != "exact":
                raise DataError(
                    f"data.sources.{number}.times: {policies[name]} is for forcings, but {name} is predicted; set "
                    f"times: exact, or list the others in a source of their own (data.sources.{number}.variables)"
                )
    for name in dict.fromkeys(channel.variable for channel in channels.static_stored):
        if is_derived(name, scan.pieces[name], conf):
            problems.add(
                f"{name} is static and on levels, and its source has vertical: what is interpolated varies in time; "
                "list it under dynamic_forcing"
            )
    for rest, names in overlaps.items():
        problems.add(str(SourceOverlap(names, rest)))
    warn_of_idle_files(list_contributions(conf, scan, None if problems.messages else series))
    problems.raise_any()
    declared = [name for name, field in conf.variable_options.items() if field.missing == "fill_mean"]
    return SourceReader(channels, scan, series, windows, policies, attributes, files, declared)


def _spanned(layout: VariableLayout, times: np.ndarray) -> int:
    """Return how many of `times` a chunk of the layout's file spans at most."""
    if layout.chunk_times == 1 or layout.times is None or len(times) < 2 or len(layout.times) < 2:
        return 1
    ends = np.minimum(np.arange(len(layout.times)) + layout.chunk_times, len(layout.times)) - 1
    spanned = np.searchsorted(times, layout.times[ends], "right") - np.searchsorted(times, layout.times)
    return max(1, int(spanned.max()))
