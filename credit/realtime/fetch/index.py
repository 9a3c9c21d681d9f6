"""Parsing of the indexes of GRIB files on a server: ``.idx`` files of NCEP and ``.index`` files of ECMWF."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from credit.calendar import Calendar
from credit.errors import ConfigError, DataError
from credit.realtime.fetch.records import RecordRequest

# Values of the step in an index that mean an analysis.
_ANALYSIS_STEPS = ("anl", "0")
# Values of `type` in an index of ECMWF for a state of the atmosphere: analysis, forecast and control forecast.
# Further values are perturbed members (pf), and ensemble statistics such as mean (em) and standard deviation (es).
_STATE_TYPES = ("an", "fc", "cf")


@dataclass(frozen=True)
class IndexEntry:
    """Entry for one record in the index of a GRIB file.

    Attributes:
        param: name of the parameter.
        level: level as a string, such as ``500 mb`` (NCEP), ``500 hPa`` or ``sfc`` (ECMWF).
        minutes: time of the analysis in minutes since 1900.
        step: step as a string; ``anl`` or ``0`` for an analysis.
        offset: position of the first byte of the record in the file.
        length: number of bytes of the record; None for the last record of an index without lengths.
    """

    param: str
    level: str
    minutes: int
    step: str
    offset: int
    length: int | None


def parse_index(text: str, index_format: str) -> list[IndexEntry]:
    """Return the entries of an index, in the order of the file.

    Args:
        text: contents of the index.
        index_format: ``gfs_idx`` or ``ecmwf_index``.

    Raises:
        DataError: if a line does not have this format; the message does not contain the name of the file.
    """
    parse = {"gfs_idx": _parse_gfs, "ecmwf_index": _parse_ecmwf}[index_format]
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError("the index is empty")
    return parse(lines)


def find_entries(entries: Sequence[IndexEntry], request: RecordRequest, minutes: int) -> list[IndexEntry]:
    """Return the entries that match a request, one for each offset.

    There are several entries if the file contains the requested record more than once.

    Args:
        entries: all entries of the index.
        request: requested record.
        minutes: time of the analysis in minutes since 1900.
    """
    matches = {}
    for entry in entries:
        is_requested = entry.param == request.param and entry.level == request.index_level
        if is_requested and entry.minutes == minutes and entry.step in _ANALYSIS_STEPS:
            # A repeated line describes the same bytes.
            matches.setdefault(entry.offset, entry)
    return list(matches.values())


def _parse_gfs(lines: Sequence[str]) -> list[IndexEntry]:
    """Parse lines such as ``7:4719:d=2026112700:HGT:500 mb:anl:``; a record ends where the next record begins."""
    rows = []
    for number, line in enumerate(lines, start=1):
        words = line.split(":")
        try:
            offset = int(words[1])
            minutes = _parse_time(words[2].removeprefix("d="))
            rows.append((offset, minutes, words[3], words[4], words[5]))
        except (IndexError, ValueError) as error:
            raise DataError(f'line {number} of the index, "{line[:80]}", is not of the format gfs_idx') from error
    # The fields of one message have the same offset, so a record ends at the next larger offset.
    offsets = sorted({row[0] for row in rows})
    end_of = dict(zip(offsets, [*offsets[1:], None], strict=True))
    entries = []
    for offset, minutes, param, level, step in rows:
        end = end_of[offset]
        entries.append(IndexEntry(param, level, minutes, step, offset, None if end is None else end - offset))
    return entries


def _parse_ecmwf(lines: Sequence[str]) -> list[IndexEntry]:
    """Parse JSON lines with ``_offset`` and ``_length``; skip perturbed members and statistics of an ensemble."""
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if row["type"] not in _STATE_TYPES:
                continue
            level = str(row["levtype"])
            if level == "pl":
                level = f"{row['levelist']} hPa"
            elif "levelist" in row:
                level = f"{level} {row['levelist']}"
            minutes = _parse_time(f"{row['date']}{int(row['time']) // 100:02d}")
            offset = int(row["_offset"])
            length = int(row["_length"])
            if offset < 0 or length <= 0:
                raise ValueError(f"no bytes at {offset}, {length}")
            entries.append(IndexEntry(str(row["param"]), level, minutes, str(row["step"]), offset, length))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f'line {number} of the index, "{line[:80]}", is not of the format ecmwf_index') from error
    return entries


def _parse_time(text: str) -> int:
    """Return the minutes since 1900 of a time YYYYMMDDHH.

    Raises:
        ValueError: if `text` does not have this format.
    """
    if len(text) != 10 or not text.isdigit():
        raise ValueError(f"{text} is not YYYYMMDDHH")
    try:
        return Calendar().parse(f"{text[:4]}-{text[4:6]}-{text[6:8]}T{text[8:]}:00")
    except ConfigError as error:
        raise ValueError(f"{text} is not a time") from error
