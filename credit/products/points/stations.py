"""Reader of a list of stations from a CSV file."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from credit.data.error_collector import ErrorCollector
from credit.errors import DataError, did_you_mean

_COLUMNS = ("name", "latitude", "longitude")
_ELEVATION = "elevation"
# Range of plausible elevations in m; the shore of the Dead Sea is at -430 m, Mount Everest at 8849 m.
_ELEVATION_RANGE = (-500.0, 9000.0)


@dataclass(frozen=True)
class Station:
    """Name and coordinates of a station.

    Attributes:
        name: name of the station, unique in the list.
        latitude: degrees north.
        longitude: degrees east, from -180 to below 180.
        elevation: height above sea level in m; None if it is not needed.
    """

    name: str
    latitude: float
    longitude: float
    elevation: float | None = None


def load_stations(path: Path, key: str, with_elevation: bool = False) -> list[Station]:
    """Return the stations of a CSV file with the columns ``name``, ``latitude`` and ``longitude``.

    Other columns are ignored.

    Args:
        path: path of the CSV file.
        key: config key that contains the path, for messages.
        with_elevation: True to read the column ``elevation`` as well.

    Raises:
        DataError: if the file cannot be read, lacks a column, has no station, repeats a name, or has coordinates that
            are not numbers in their range; the message lists all wrong rows.
    """
    try:
        # This encoding skips the byte order mark that spreadsheet programs write at the beginning of a file.
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            columns = [str(name).strip().lower() for name in rows.fieldnames or ()]
            rows.fieldnames = columns
            needed_columns = (*_COLUMNS, _ELEVATION) if with_elevation else _COLUMNS
            for name in needed_columns:
                if name not in columns:
                    raise DataError(
                        f"{key}: {path} has no column {name}{did_you_mean(name, columns)}; its first line must name "
                        f"the columns {', '.join(needed_columns)}"
                    )
            stations = []
            collector = ErrorCollector()
            for row in rows:
                with collector.collect():
                    stations.append(_parse_station(row, f"{key}: {path}, line {rows.line_num}", with_elevation))
            collector.raise_any()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{key}: {path} cannot be read ({reason}); name a CSV file of stations") from error
    if not stations:
        raise DataError(f"{key}: {path} has no stations; write one station per line")
    names = [station.name for station in stations]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f'{key}: {path}: the station "{name}" is listed twice; give each station a different name')
    return stations


def _parse_station(row: dict[str, str | None], origin: str, with_elevation: bool) -> Station:
    """Return the station of a row of the CSV file; `origin` identifies the row in messages."""
    name = (row["name"] or "").strip()
    if not name:
        raise DataError(f"{origin}: the station has no name; write one")
    ranges = {"latitude": (-90.0, 90.0), "longitude": (-360.0, 360.0)}
    if with_elevation:
        ranges[_ELEVATION] = _ELEVATION_RANGE
    numbers: dict[str, float] = {}
    for column, (low, high) in ranges.items():
        units = "m" if column == _ELEVATION else "degrees"
        text = (row[column] or "").strip()
        try:
            numbers[column] = float(text)
        except ValueError as error:
            raise DataError(
                f'{origin}: {column} "{text}" of {name} is not a number; write it in {units}, such as 47.5'
            ) from error
        if not low <= numbers[column] <= high:
            raise DataError(f"{origin}: {column} {text} of {name} is outside {low:g}..{high:g} {units}; correct it")
    longitude = (numbers["longitude"] + 180.0) % 360.0 - 180.0
    return Station(name, numbers["latitude"], longitude, numbers.get(_ELEVATION))
