"""Indexes of GRIB files on a server: ``.idx`` of NCEP and ``.index`` of ECMWF."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from credit.calendar import Calendar
from credit.errors import ConfigError, DataError
from credit.realtime.fetch.records import RecordRequest

# Step of an analysis in an index.
_ANALYSIS_STEPS = ("anl", "0")
# Values of `type` in an index of ECMWF for a state of the atmosphere: analysis, forecast and control forecast.
# Others are perturbed members (pf), and statistics of the ensemble such as mean (em) and standard deviation (es).
_STATE_TYPES = ("an", "fc", "cf")


@dataclass(frozen=True)
class IndexEntry:
    """Record of a GRIB file, as its index describes it.

    Attributes:
        param: name of the parameter.
        level: level as text, such as ``500 mb`` (NCEP), ``500 hPa`` or ``sfc`` (ECMWF).
        minutes: time of the analysis in minutes since 1900.
        step: step as text; ``anl`` or ``0`` for an analysis.
        offset: position of the first byte in the file.
        length: number of bytes; None for the last record of an index that does not tell it.
    """

    param: str
    level: str
    minutes: int
    step: str
    offset: int
    length: int | None


def parse_index(text: str, index_format: str) -> list[IndexEntry]:
    """Return the records of an index, in the order of the file.

    Args:
        text: contents of the index.
        index_format: ``gfs_idx`` or ``ecmwf_index``.

    Raises:
        DataError: if a line is not of this format; the message has no name of a file.
    """
    parse = {"gfs_idx": _parse_gfs, "ecmwf_index": _parse_ecmwf}[index_format]
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError("the index is empty")
    return parse(lines)


def find_entries(entries: Sequence[IndexEntry], request: RecordRequest, minutes: int) -> list[IndexEntry]:
    """Return the different records of an index that match a request; several if the index has duplicates.

    Args:
        entries: all records of the index.
        request: requested record.
        minutes: time of the analysis in minutes since 1900.
    """
    matches = {}
    for entry in entries:
        is_requested = entry.param == request.param and entry.level == request.index_level
        if is_requested and entry.minutes == minutes and entry.step in _ANALYSIS_STEPS:
            # A line that is repeated describes the same bytes.
            matches.setdefault(entry.offset, entry)
    return list(matches.values())


def _parse_gfs(lines: Sequence[str]) -> list[IndexEntry]:
    """Parse lines such as ``7:4719:d=2026112700:HGT:500 mb:anl:``; a record ends where the next one begins."""
    rows = []
    for number, line in enumerate(lines, start=1):
        words = line.split(":")
        try:
            offset = int(words[1])
            minutes = _parse_time(words[2].removeprefix("d="))
            rows.append((offset, minutes, words[3], words[4], words[5]))
        except (IndexError, ValueError) as error:
            raise DataError(f'line {number} of the index, "{line[:80]}", is not of the format gfs_idx') from error
    # The fields of one message have the same offset, so the next different offset ends a record.
    offsets = sorted({row[0] for row in rows})
    end_of = dict(zip(offsets, [*offsets[1:], None], strict=True))
    entries = []
    for offset, minutes, param, level, step in rows:
        end = end_of[offset]
        entries.append(IndexEntry(param, level, minutes, step, offset, None if end is None else end - offset))
    return entries


def _parse_ecmwf(lines: Sequence[str]) -> list[IndexEntry]:
    """Parse JSON lines with ``_offset`` and ``_length``; members and statistics of an ensemble are left out."""
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
        ValueError: if the text is not such a time.
    """
    if len(text) != 10 or not text.isdigit():
        raise ValueError(f"{text} is not YYYYMMDDHH")
    try:
        return Calendar().parse(f"{text[:4]}-{text[4:6]}-{text[6:8]}T{text[8:]}:00")
    except ConfigError as error:
        raise ValueError(f"{text} is not a time") from error
