"""Clock for the current time, deadlines and waiting; tests replace it with a clock that does not wait."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

from credit.calendar import Calendar, parse_duration
from credit.errors import ConfigError

_TIME_OF_DAY = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_MINUTES_PER_DAY = 1440


class Clock:
    """Clock of the system in UTC.

    Attributes:
        deadline: time in seconds since 1970 at which all waiting ends; None if there is no deadline.
    """

    def __init__(self) -> None:
        self.deadline: float | None = None

    def seconds(self) -> float:
        """Return the current time in seconds since 1970."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds."""
        time.sleep(seconds)

    def minutes(self) -> int:
        """Return the current time in whole minutes since 1900-01-01 00:00 UTC."""
        now = datetime.fromtimestamp(self.seconds(), UTC)
        return Calendar().parse(now.strftime("%Y-%m-%dT%H:%M"))

    def set_deadline(self, text: str) -> None:
        """Set the deadline of ``--until``.

        Args:
            text: time of day HH:MM in UTC, or a duration from now such as 90min. The deadline is the occurrence of the
                time of day that is nearest to now, at most 12 hours before or after now. If this occurrence is in the
                past, the job does not wait, because a job that starts too late must not wait until the next day.

        Raises:
            ConfigError: if `text` is not a time of day or a duration.
        """
        match = _TIME_OF_DAY.fullmatch(text.strip())
        if match is None:
            try:
                self.deadline = self.seconds() + 60 * parse_duration(text, "--until")
            except ConfigError as error:
                raise ConfigError(f'--until: "{text}": write a time in UTC such as 05:30, or a duration') from error
            return
        now = datetime.fromtimestamp(self.seconds(), UTC)
        minutes = 60 * int(match[1]) + int(match[2]) - (60 * now.hour + now.minute)
        # The nearest occurrence of this time of day is at most 12 hours before or after now.
        minutes = (minutes + _MINUTES_PER_DAY // 2) % _MINUTES_PER_DAY - _MINUTES_PER_DAY // 2
        self.deadline = self.seconds() - now.second + 60 * minutes

    def can_wait(self, seconds: float) -> bool:
        """Return True if a wait of `seconds` ends before the deadline, or if there is no deadline."""
        return self.deadline is None or self.seconds() + seconds <= self.deadline
