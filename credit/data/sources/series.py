"""A variable along time over several files."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from credit.calendar import Calendar
from credit.data.formats.files import OpenFiles, file_key
from credit.data.formats.select import listing
from credit.data.formats.units import is_convertible, is_same_unit
from credit.data.sources.source_index import FileVariable
from credit.errors import CreditError, DataError

logger = logging.getLogger(__name__)

# ECMWF's netCDF files have this where CF has no name
_NO_STANDARD_NAME = "unknown"
# of the times that two files share, so many are compared
_MOST_COMPARED = 8


class SourceOverlap(DataError):
    """Error for a time that two sources have, mostly of many variables at once.

    Attributes:
        names: the variables.
        rest: of the message.
    """

    def __init__(self, names: list[str], rest: str) -> None:
        super().__init__(f"{listing(names)} {'is' if len(names) == 1 else 'are'} {rest}")
        self.names, self.rest = names, rest


@dataclass(frozen=True)
class VariableSeries:
    """One variable along time, over all its files.

    Attributes:
        pieces: its files.
        times: (N,) int64 minutes, increasing.
        piece: (N,) the file of each time.
        position: (N,) the place in that file.
    """

    pieces: list[FileVariable]
    times: np.ndarray
    piece: np.ndarray
    position: np.ndarray

    def comes_from(self, keys: Collection[str]) -> np.ndarray:
        """Return for each time whether one of some files gives it, (N,) bool.

        Args:
            keys: of the files, see `credit.data.formats.files.file_key`.
        """
        return np.array([file_key(piece.path) in keys for piece in self.pieces], dtype=bool)[self.piece]

    def read(self, files: OpenFiles, places: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the fields of each of `places`, increasing, (levels or 1, H, W), on the run's grid."""
        return self._each(files, places, raw=False)

    def read_raw(self, files: OpenFiles, places: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the fields of each of `places`, increasing, (levels or 1, h, w) on the file's grid, for formulas."""
        return self._each(files, places, raw=True)

    def _each(self, files: OpenFiles, places: np.ndarray, raw: bool) -> Iterator[np.ndarray]:
        """Yield the fields of each place.

        Neighbours are read at once, and what lies in one chunk of a file, with what lies between: it is unpacked whole.
        """
        piece, position = self.piece[places], self.position[places]
        chunk = position // np.array([one.layout.chunk_times for one in self.pieces])[piece]
        together = (np.diff(piece) == 0) & ((np.diff(position) == 1) | (np.diff(chunk) == 0))
        for run in np.split(np.arange(len(places)), np.flatnonzero(~together) + 1):
            # A file may have its times in descending order.
            first, last = int(position[run].min()), int(position[run].max())
            fields = read_piece(files, self.pieces[piece[run[0]]], slice(first, last + 1), raw)
            yield from (fields[number - first] for number in position[run])


@dataclass(frozen=True)
class JoinedSeries(VariableSeries):
    """One variable that several sources give, each at times of its own.

    Attributes:
        parts: the series of each source.
        part_index: (N,) the series of each time.
        index_in_part: (N,) the index of each time in that series.
    """

    parts: list[VariableSeries]
    part_index: np.ndarray
    index_in_part: np.ndarray

    def comes_from(self, keys: Collection[str]) -> np.ndarray:
        """Return for each time whether one of some files gives it; see `VariableSeries.comes_from`."""
        is_touched = np.zeros(len(self.times), dtype=bool)
        for number, series in enumerate(self.parts):
            is_here = self.part_index == number
            is_touched[is_here] = series.comes_from(keys)[self.index_in_part[is_here]]
        return is_touched

    def _each(self, files: OpenFiles, places: np.ndarray, raw: bool) -> Iterator[np.ndarray]:
        part_index = self.part_index[places]
        index_in_part = self.index_in_part[places]
        # Neighbouring times of one series are read together.
        for run in np.split(np.arange(len(places)), np.flatnonzero(np.diff(part_index)) + 1):
            if len(run):
                series = self.parts[part_index[run[0]]]
                read = series.read_raw if raw else series.read
                yield from read(files, index_in_part[run])


def by_source(pieces: list[FileVariable]) -> list[list[FileVariable]]:
    """Return the files of each source, in the order of the config."""
    numbers = sorted({piece.source for piece in pieces})
    return [[piece for piece in pieces if piece.source == number] for number in numbers]


def join_series(name: str, parts: list[VariableSeries], calendar: Calendar) -> VariableSeries:
    """Let the series of a variable from several sources follow each other in time; one alone is returned as it is.

    Args:
        name: the variable.
        parts: its series, one of each source.
        calendar: the calendar.

    Raises:
        SourceOverlap: for a time that two sources have.
    """
    if len(parts) == 1:
        return parts[0]
    times = np.concatenate([series.times for series in parts])
    order = np.argsort(times, kind="stable")
    part_index = np.concatenate([np.full(len(series.times), number) for number, series in enumerate(parts)])[order]
    index_in_part = np.concatenate([np.arange(len(series.times)) for series in parts])[order]
    times = times[order]
    again = np.flatnonzero(np.diff(times) == 0)
    if len(again):
        raise _overlap(name, parts[part_index[again[0]]], parts[part_index[again[0] + 1]], calendar)
    first_piece = np.cumsum([0, *(len(series.pieces) for series in parts)])
    pieces = [piece for series in parts for piece in series.pieces]
    piece = np.concatenate([series.piece + first for series, first in zip(parts, first_piece, strict=False)])[order]
    position = np.concatenate([series.position for series in parts])[order]
    return JoinedSeries(pieces, times, piece, position, parts, part_index, index_in_part)


def _overlap(
    name: str, first_series: VariableSeries, second_series: VariableSeries, calendar: Calendar
) -> SourceOverlap:
    """Return the error for two sources that have a time in common, with the period that would cut them apart."""
    shared_times = np.intersect1d(first_series.times, second_series.times)
    early, late = sorted((first_series, second_series), key=lambda series: int(series.times[-1]))
    early_number, late_number = early.pieces[0].source, late.pieces[0].source
    way_out = "say with data.sources.N.variables which of them gives it"
    rest = late.times[late.times > early.times[-1]]
    if len(rest):
        first, last = calendar.format(rest[0]), calendar.format(rest[-1])
        period = f'data.sources.{late_number}.period: ["{first}", "{last}"]'
        way_out = f"begin one where the other ends ({period}), or {way_out}"
    return SourceOverlap(
        [name],
        f"in data.sources {early_number} and {late_number} at the same {len(shared_times)} times, from "
        f"{calendar.format(shared_times[0])} to {calendar.format(shared_times[-1])}; sources may follow each other in "
        f"time, but each time must come from one of them: {way_out}",
    )


def read_piece(files: OpenFiles, piece: FileVariable, position: int | slice, raw: bool = False) -> np.ndarray:
    """Return the fields of one variable and file, (levels or 1, H, W) at one time, (T, levels or 1, H, W) at several.

    Args:
        files: opens the file.
        piece: the variable in its file.
        position: of the time in it, or of several.
        raw: (..., h, w) on the file's grid, for formulas.

    Raises:
        DataError: if the file cannot be read there.
    """
    try:
        dataset = files.get(piece.path, piece.source)
        return piece.layout.read_raw(dataset, position) if raw else piece.layout.read(dataset, position)
    except CreditError:
        raise
    except Exception as error:
        # netCDF, HDF5 and zarr raise a dozen kinds for damaged data
        where = f"{position.start} to {position.stop - 1}" if isinstance(position, slice) else position
        raise DataError(
            f"{piece.path}: {piece.layout.name} cannot be read at position {where} in time ({error}); the file is "
            "damaged or truncated: copy it again"
        ) from error


def read_constant(files: OpenFiles, name: str, piece: FileVariable, raw: bool = False) -> np.ndarray:
    """Return the fields (levels or 1, H, W) of a static variable; first, middle and last time must be equal."""
    length = len(piece.layout.times) if "time" in piece.layout.dims else 1
    values = read_piece(files, piece, 0, raw)
    for position in sorted({length // 2, length - 1} - {0}):
        if not np.array_equal(values, read_piece(files, piece, position, raw), equal_nan=True):
            raise DataError(
                f"{piece.path}: {name} is listed as static but varies in time (positions 0 and {position} differ); "
                "list it under dynamic_forcing"
            )
    return values


def build_series(
    name: str, pieces: list[FileVariable], files: OpenFiles, calendar: Calendar, raw: bool = False
) -> VariableSeries:
    """Put the files of a variable in one source in order of time; a time in two files must have equal fields in both.

    Args:
        name: the variable.
        pieces: its files.
        files: opens them.
        calendar: the calendar.
        raw: compare fields as they are in the files.

    Raises:
        DataError: for files without time, a time twice in a file, or fields that differ.
    """
    for piece in pieces:
        if piece.layout.times is None:
            raise DataError(f"{piece.path}: {name} has no time axis there; add one, or list it as static")
    times = np.concatenate([piece.times for piece in pieces])
    if not len(times):
        raise DataError(
            f"data.sources.{pieces[0].source}.period: {name} has no time in it; {_span_of(pieces, calendar)}"
        )
    which = np.concatenate([np.full(len(piece.times), n) for n, piece in enumerate(pieces)])
    position = np.concatenate([piece.positions for piece in pieces])
    order = np.argsort(times, kind="stable")
    whole = VariableSeries(pieces, times[order], which[order], position[order])
    again = np.flatnonzero(np.diff(whole.times) == 0) + 1
    _check_overlap(name, whole, again, files, calendar, raw)
    kept = np.setdiff1d(np.arange(len(times)), again)
    return VariableSeries(pieces, whole.times[kept], whole.piece[kept], whole.position[kept])


def _span_of(pieces: list[FileVariable], calendar: Calendar) -> str:
    times = np.concatenate([piece.layout.times for piece in pieces])
    return f"its files have {calendar.format(times.min())} to {calendar.format(times.max())}"


def _check_overlap(
    name: str, whole: VariableSeries, again: np.ndarray, files: OpenFiles, calendar: Calendar, raw: bool
) -> None:
    """Stop where a time is twice in a file, or two files give other fields for it; a few such times are compared."""
    if len(again) == 0:
        return
    for index in again:
        if whole.piece[index] == whole.piece[index - 1]:
            path = whole.pieces[whole.piece[index]].path
            raise DataError(f"{path}: {calendar.format(whole.times[index])} is there twice ({name}); remove one")
    for index in again[np.unique(np.linspace(0, len(again) - 1, _MOST_COMPARED).astype(int))]:
        one, other = (whole.pieces[whole.piece[place]] for place in (index - 1, index))
        first = read_piece(files, one, int(whole.position[index - 1]), raw)
        second = read_piece(files, other, int(whole.position[index]), raw)
        if not np.array_equal(first, second, equal_nan=True):
            raise DataError(
                f"{name} at {calendar.format(whole.times[index])} differs between {one.path} and {other.path}; name "
                "only one of them in data.sources"
            )
    logger.info("%s: %d times are in two files with equal fields; the first is used", name, len(again))


def shared_attributes(name: str, pieces: list[FileVariable], temporal: str) -> dict[str, str]:
    """Return units, standard_name, long_name and, unless instantaneous, temporal; all files must have one unit.

    Raises:
        DataError: naming two files whose units differ.
    """
    first = pieces[0].layout.attributes
    for piece in pieces[1:]:
        units, first_units = (attributes.get("units", "") for attributes in (piece.layout.attributes, first))
        if not is_same_unit(units, first_units):
            way_out = f"set data.variable_options.{name}.units to what all are to be converted to"
            if not is_convertible(units, first_units):
                way_out = (
                    "these are no units of one quantity: name the variable with this quantity (data.sources.N.rename), "
                    f"leave {name} out of one source (data.sources.N.variables), or correct the units in the file"
                )
            raise DataError(
                f'{name} is in "{first_units}" in {pieces[0].path} and in "{units}" in {piece.path}; {way_out}'
            )
    _warn_of_other_quantity(name, pieces)
    kept = {key: value for key, value in first.items() if key != "cell_methods"}
    if temporal == "instant":
        return kept
    return {**kept, "temporal": "accumulate" if temporal == "deaccumulate" else temporal}


def _warn_of_other_quantity(name: str, pieces: list[FileVariable]) -> None:
    """Warn where two files call a variable by standard names that differ: one of them may be another variable."""
    of_name: dict[str, FileVariable] = {}
    for piece in pieces:
        standard_name = piece.layout.attributes.get("standard_name", _NO_STANDARD_NAME)
        if standard_name not in ("", _NO_STANDARD_NAME):
            of_name.setdefault(standard_name, piece)
    if len(of_name) > 1:
        described = " and ".join(f"{standard} in {piece.path}" for standard, piece in list(of_name.items())[:2])
        logger.warning("%s is called %s; is it one variable? (data.sources.N.rename)", name, described)
