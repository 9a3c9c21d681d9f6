"""Times as whole minutes since 1900-01-01 00:00 UTC in a CF calendar, and durations in minutes.

With integer minutes, every comparison of times is exact in any calendar. Only `Calendar` converts between minutes, text
and calendar dates. In this package, a time in minutes always means minutes since 1900-01-01 00:00 UTC.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import cftime
import numpy as np

from credit.errors import ConfigError, DataError, did_you_mean

# CF units of all times in this package.
TIME_UNITS = "minutes since 1900-01-01 00:00:00"
CALENDARS = ("standard", "proleptic_gregorian", "noleap", "all_leap", "360_day", "julian")
# Alternative CF name -> name in CALENDARS of the same calendar.
_ALIASES = {"gregorian": "standard", "365_day": "noleap", "366_day": "all_leap"}
_DAY_MINUTES = 1440
_UNIT_MINUTES = {"min": 1, "h": 60, "d": _DAY_MINUTES}
_MINUTES_PER_JULIAN_YEAR = 525_960  # 365.25 days
# Year, month and day, optionally followed by hour, minute and second.
_ISO_8601 = re.compile(r"^(\d{4})-(\d{2})-(\d{2})(?:[T ](\d{2})(?::?(\d{2})(?::?(\d{2}))?)?Z?)?$")


def parse_duration(text: str | int | float, key: str = "duration") -> int:
    """Return the length in minutes of a duration such as ``"6h"``, ``"30min"`` or ``"10d"``; a bare number means hours.

    Args:
        text: the duration.
        key: config key of the duration, for the message.

    Raises:
        ConfigError: if the text is not a duration, or not a positive whole number of minutes.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(min|h|d)?\s*", str(text))
    if match is None:
        raise ConfigError(f'{key}: "{text}" is not a duration; write for example 6h, 30min or 10d')
    # Decimal numbers are exact: 4.1 h are 246 minutes, but 4.1 * 60 is not 246 with floating-point numbers.
    minutes = Fraction(match[1]) * _UNIT_MINUTES[match[2] or "h"]
    if minutes <= 0 or minutes.denominator != 1:
        raise ConfigError(f'{key}: "{text}" must be a positive whole number of minutes')
    return int(minutes)


def format_duration(minutes: int) -> str:
    """Return a duration in minutes as text: ``"6h"`` if it is a whole number of hours, ``"90min"`` otherwise."""
    if minutes % 60 == 0:
        return f"{minutes // 60}h"
    return f"{minutes}min"


@dataclass(frozen=True)
class Calendar:
    """CF calendar. It converts between minutes, text and calendar dates.

    Attributes:
        name: CF name of the calendar, one of `CALENDARS`. The other CF names ``gregorian``, ``365_day`` and ``366_day``
            are accepted and replaced.

    Raises:
        DataError: if the name is not the name of a CF calendar.
    """

    name: str = "standard"

    def __post_init__(self) -> None:
        name = _ALIASES.get(self.name.lower(), self.name.lower())
        if name not in CALENDARS:
            raise DataError(f'calendar "{self.name}" is not a CF calendar{did_you_mean(name, (*CALENDARS, *_ALIASES))}')
        # A frozen dataclass allows no assignment to its attributes, so use `object.__setattr__`.
        object.__setattr__(self, "name", name)

    def parse(self, text: str, key: str = "time") -> int:
        """Convert an ISO 8601 date, or date and time, in UTC to minutes since 1900-01-01 00:00 UTC.

        Args:
            text: the time, for example ``2000-01-01`` or ``2000-01-01T06:00``.
            key: config key of the time, for the message.

        Raises:
            ConfigError: if the text is not a date of this calendar, or has seconds.
        """
        minutes, seconds = self._parse_seconds(text, key)
        if seconds:
            raise ConfigError(f'{key}: "{text}" is not a whole minute; write it without the {seconds} seconds')
        return minutes

    def _parse_seconds(self, text: str, key: str) -> tuple[int, int]:
        """Convert a date and time to whole minutes since 1900-01-01 00:00 UTC and the remaining seconds.

        Arguments and errors are the same as for `parse`.
        """
        match = _ISO_8601.match(str(text).strip())
        if match is None:
            raise ConfigError(f'{key}: "{text}" is not a time; write 2000-01-01 or 2000-01-01T06:00 (UTC)')
        # Year, month, day, hour, minute and second. Missing parts of the time of day are 0.
        *numbers, seconds = [int(number or 0) for number in match.groups()]
        try:
            date = cftime.datetime(*numbers, seconds, calendar=self.name)
        except ValueError as error:
            raise ConfigError(f'{key}: "{text}" is not a date of the calendar {self.name}') from error
        return int(cftime.date2num(date.replace(second=0), TIME_UNITS, self.name)), seconds

    def parse_period_end(self, text: str, key: str = "time") -> int:
        """Convert the end of a period to minutes; a date without a time of day means the last minute of that day.

        Seconds are dropped, so a period that ends at 23:59:59 is equal to a period that ends at 23:59.

        Args:
            text: the time, for example ``2000-12-31`` or ``2000-12-31T18:00``.
            key: config key of the time, for the error message.

        Raises:
            ConfigError: if the text is not a date of this calendar.
        """
        minutes, _ = self._parse_seconds(text, key)
        # The date and the time of day are separated by a T or a space.
        has_time_of_day = "T" in str(text) or " " in str(text).strip()
        if has_time_of_day:
            return minutes
        return minutes + _DAY_MINUTES - 1

    def datetime(self, minutes: int) -> cftime.datetime:
        """Return the calendar date and time of `minutes` since 1900-01-01 00:00 UTC."""
        return cftime.num2date(int(minutes), TIME_UNITS, self.name)

    def format(self, minutes: int) -> str:
        """Return the time `minutes` since 1900-01-01 00:00 UTC as a string ``YYYY-MM-DDTHH:MM``."""
        return self.datetime(minutes).strftime("%Y-%m-%dT%H:%M")

    def minutes_from_cf(self, values: np.ndarray, units: str) -> np.ndarray:
        """Convert CF-encoded times to int64 minutes since 1900-01-01 00:00 UTC, rounded to whole minutes.

        Args:
            values: times of any shape, in `units` of this calendar.
            units: CF units, for example ``hours since 2000-01-01``.

        Raises:
            DataError: if the units cannot be decoded.
        """
        values = np.asarray(values)
        # In every calendar, elapsed time is a linear function of the encoded value, so decoding the first and the last
        # time is sufficient. Decoding a million times singly would take a minute.
        encoded_ends = np.array([values.min(), values.max()])
        try:
            dates = cftime.num2date(encoded_ends, units, self.name)
            decoded_ends = np.asarray(cftime.date2num(dates, TIME_UNITS, self.name), dtype=np.float64)
        except (ValueError, OverflowError) as error:
            raise DataError(f'time units "{units}" of calendar {self.name} cannot be decoded: {error}') from error
        # Fractions of a day or an hour are inexact in floating-point numbers, so round to whole minutes.
        distance = values.astype(np.float64) - float(encoded_ends[0])
        length = float(encoded_ends[1]) - float(encoded_ends[0])
        minutes_per_unit = np.diff(decoded_ends)[0] / length if length else 0.0
        return np.rint(decoded_ends[0] + distance * minutes_per_unit).astype(np.int64)

    def year_fraction(self, minutes: np.ndarray) -> np.ndarray:
        """Return the elapsed fraction of the calendar year at `minutes`, in [0, 1), float64, of the same shape."""
        # The length of each year depends on the calendar, because leap years are longer.
        flat = np.atleast_1d(minutes).ravel()
        years = [_find_year(self.name, int(value)) for value in flat]
        begin = np.array([_first_minute_of_year(self.name, year) for year in years], dtype=np.float64)
        end = np.array([_first_minute_of_year(self.name, year + 1) for year in years], dtype=np.float64)
        return ((flat - begin) / (end - begin)).reshape(np.shape(minutes))

    @property
    def days_per_year(self) -> int:
        """Number of days in a year that is not a leap year; 366 in ``all_leap``, in which every year is a leap year."""
        # 2001 is a leap year only in the calendar all_leap.
        return (_first_minute_of_year(self.name, 2002) - _first_minute_of_year(self.name, 2001)) // _DAY_MINUTES

    def day_fraction(self, minutes: np.ndarray) -> np.ndarray:
        """Return the elapsed fraction of the UTC day at `minutes`, in [0, 1), float64, of the same shape."""
        # Minute 0 is a midnight, so the remainder is the time since the last midnight.
        return np.mod(np.asarray(minutes, dtype=np.float64), _DAY_MINUTES) / _DAY_MINUTES


@lru_cache(maxsize=1024)
def _first_minute_of_year(calendar: str, year: int) -> int:
    """Return the first minute of a year of a CF calendar, in minutes since 1900-01-01 00:00 UTC."""
    return int(cftime.date2num(cftime.datetime(year, 1, 1, calendar=calendar), TIME_UNITS, calendar))


def _find_year(calendar: str, minutes: int) -> int:
    """Return the calendar year of a time in minutes since 1900-01-01 00:00 UTC.

    This function is 100 times as fast as a conversion with cftime, because `_first_minute_of_year` is cached.
    """
    # The estimate may be wrong by about one year, so it is corrected in steps of one year.
    year = 1900 + minutes // _MINUTES_PER_JULIAN_YEAR
    while _first_minute_of_year(calendar, year + 1) <= minutes:
        year += 1
    while _first_minute_of_year(calendar, year) > minutes:
        year -= 1
    return year
