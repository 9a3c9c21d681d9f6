"""Selection of the times of a file that a source uses, by period, interval, and the dates of final values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from credit.calendar import Calendar, parse_duration
from credit.config.sections.source import SourceConfig
from credit.errors import ConfigError

logger = logging.getLogger(__name__)

# Global attributes with the first and the last date of final values. The stores of ARCO-ERA5 have a time axis from 1900
# to 2050 and these attributes; the values at all other times are missing or preliminary.
_FIRST_VALID = "valid_time_start"
_LAST_VALID = "valid_time_stop"


def find_used_times(
    times: np.ndarray, source: SourceConfig, key: str, attributes: Mapping[str, Any], calendar: Calendar, origin: str
) -> np.ndarray:
    """Return (N,) bool, True at the times of a file that its source uses.

    Args:
        times: (N,) times of the file in minutes since 1900.
        source: section of the source in the config.
        key: config key of the source, such as ``data.sources.0``.
        attributes: global attributes of the file.
        calendar: calendar of the times.
        origin: name of the file, for error messages.

    Raises:
        ConfigError: if the end of ``period`` is before its beginning, or a date in the config is wrong.
    """
    is_used = np.ones(len(times), dtype=bool)
    if source.period is not None:
        first = calendar.parse(source.period[0], f"{key}.period")
        last = calendar.parse_period_end(source.period[1], f"{key}.period")
        if last < first:
            raise ConfigError(f"{key}.period: {source.period[1]} is before {source.period[0]}; write [first, last]")
        is_used &= (times >= first) & (times <= last)
    if source.every is not None:
        # Minutes start at a midnight, so multiples of 6 h are 00, 06, 12 and 18 UTC.
        is_used &= times % parse_duration(source.every, f"{key}.every") == 0
    first_valid = _parse_attribute(_FIRST_VALID, attributes, calendar.parse, origin)
    if first_valid is not None:
        is_used &= times >= first_valid
    last_valid = _parse_attribute(_LAST_VALID, attributes, calendar.parse_period_end, origin)
    if last_valid is not None:
        is_used &= times <= last_valid
    return is_used


def _parse_attribute(name: str, attributes: Mapping[str, Any], parse: Callable[[str], int], origin: str) -> int | None:
    """Return the date in an attribute in minutes since 1900; None if it is missing or is not an ISO date.

    Other programs may use these attribute names for other purposes, so a value that is not a date is not an error.
    """
    if name not in attributes:
        return None
    text = str(attributes[name])
    try:
        return parse(text)
    except ConfigError:
        _warn_of_attribute(name, text, origin)
        return None


@cache
def _warn_of_attribute(name: str, text: str, origin: str) -> None:
    """Log a warning about an attribute that is not a date, once for each file and not for each variable."""
    logger.warning('%s: the attribute %s is ignored, because "%s" is not a date such as 2000-01-01', origin, name, text)


def require_instantaneous(every: str | None, name: str, temporal: str, key: str) -> None:
    """Raise ConfigError if a variable of a source with ``every`` is not instantaneous.

    For means and sums, the spacing of the times may determine the length of the intervals, and shorter intervals are
    combined. Therefore all times of the file are needed.

    Args:
        every: ``data.sources.N.every``; None if all times are used.
        name: name of the variable.
        temporal: ``data.variable_options.NAME.temporal``.
        key: key of the source, such as ``data.sources.0``.

    Raises:
        ConfigError: if ``every`` is set and the variable is not instantaneous.
    """
    if every is not None and temporal != "instant":
        raise ConfigError(
            f"{key}.every: {name} has temporal: {temporal} and needs all times of the files; list the same path a "
            f"second time without every, with variables: [{name}], and leave {name} out of variables here"
        )
