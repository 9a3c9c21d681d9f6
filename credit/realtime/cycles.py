"""Selection of the analysis cycle: the newest expected cycle, and the earlier cycles that may be used instead."""

from __future__ import annotations

from credit.calendar import Calendar, parse_duration
from credit.config.realtime_section import RealtimeConfig
from credit.errors import ConfigError, CycleError

_MINUTES_PER_DAY = 1440


def list_candidate_cycles(realtime: RealtimeConfig, now: int, deadline: int) -> list[int]:
    """Return the cycles that may be used, in minutes since 1900: the expected cycle first, then earlier cycles.

    The expected cycle is the newest cycle that should be available at the deadline. Earlier cycles are included only
    with ``on_incomplete: previous_cycle``.

    Args:
        realtime: section ``realtime`` of the config.
        now: current time in minutes since 1900.
        deadline: time until which the call waits, in minutes since 1900; `now` if it does not wait.

    Raises:
        CycleError: if the newest cycle is older than ``max_age``.
    """
    newest = deadline - parse_duration(realtime.available_after)
    oldest = now - parse_duration(realtime.max_age)
    candidates = []
    first_day = oldest // _MINUTES_PER_DAY * _MINUTES_PER_DAY
    for day in range(first_day, newest + 1, _MINUTES_PER_DAY):
        candidates += [day + 60 * hour for hour in realtime.cycles]
    candidates = sorted((cycle for cycle in candidates if oldest <= cycle <= newest), reverse=True)
    if not candidates:
        raise CycleError(
            f"realtime: no cycle at {', '.join(f'{hour:02d}' for hour in realtime.cycles)} UTC is at least "
            f"available_after {realtime.available_after} and at most max_age {realtime.max_age} old at "
            f"{Calendar().format(now)}; raise realtime.max_age, or call again later"
        )
    if realtime.on_incomplete == "fail":
        return candidates[:1]
    return candidates


def parse_cycle(text: str, realtime: RealtimeConfig) -> int:
    """Return the cycle of ``--cycle`` in minutes since 1900.

    Raises:
        ConfigError: if `text` is not a time, or its hour is not in ``realtime.cycles``.
    """
    minutes = Calendar().parse(text, "--cycle")
    hour, rest = divmod(minutes % _MINUTES_PER_DAY, 60)
    if rest or hour not in realtime.cycles:
        raise ConfigError(f"--cycle: {text} is not at an hour of realtime.cycles {realtime.cycles}; use one of these")
    return minutes
