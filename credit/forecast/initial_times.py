"""Which initial times a run forecasts from."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from credit.config.schema_data import DataConfig
from credit.config.schema_forecast import EnsembleConfig, InferenceConfig, InitialTimesConfig
from credit.data.splits import Split, initial_times
from credit.errors import ConfigError, DataError
from credit.forecast.ensemble import cycle_minutes, lag_minutes
from credit.times import Clock, format_duration, parse_duration

T = TypeVar("T")


def choose_initial_times(
    conf: InferenceConfig, data: DataConfig, times: np.ndarray, clock: Clock, test: Split
) -> list[int]:
    """Return the initial times of ``inference.initial_times`` as minutes, increasing.

    A range without a given end keeps only those whose truth at every lead lies in the test period, so that all lead
    times are scored on one set of cases, and whose ensemble's earlier analyses are in the data. A time that is asked
    for by name needs only its input frames, those analyses, and forcing that the config says is observed.

    Raises:
        ConfigError: if a time is named twice or none is, or a distance is no multiple of the step.
        DataError: if the data lack what a named time needs, or no time is left.
    """
    have, step = set(times.tolist()), data.step_minutes
    frames = [before + k * step for before in analyses_before(conf.ensemble) for k in range(data.history_len)]
    if conf.initial_times == "latest":
        ready = [minutes for minutes in have if all(minutes - before in have for before in frames)]
        if not ready:
            raise DataError(
                f"inference.initial_times: latest: no time of the data has what a forecast needs: fields of the last "
                f"{format_duration(max(frames))} at data.timestep {format_duration(step)}"
            )
        chosen = [max(ready)]
    elif isinstance(conf.initial_times, InitialTimesConfig):
        chosen = _in_range(conf, conf.initial_times, data, times, clock, test, frames)
    else:
        chosen = _named(conf.initial_times, clock)
    _require_frames(chosen, have, clock, frames)
    _require_observed(chosen, have, clock, data, choose_leads(conf, step)[-1])
    return chosen


def _named(wanted: Sequence[str], clock: Clock) -> list[int]:
    """Return the times of a list, each once."""
    key = "inference.initial_times"
    if not wanted:
        raise ConfigError(f"{key}: [] has no time; name some, or leave the key out for those of the test period")
    chosen = sorted(clock.parse(text, key) for text in wanted)
    for minutes, after in itertools.pairwise(chosen):
        if minutes == after:
            raise ConfigError(f"{key}: {clock.format(minutes)} is named twice; name each time once")
    return chosen


def _in_range(
    conf: InferenceConfig, wanted: InitialTimesConfig, data: DataConfig, times: np.ndarray, clock: Clock, test: Split,
    frames: Sequence[int],
) -> list[int]:  # fmt: skip
    """Return the times of a range; without an end those that have truth and `frames`, minutes before them."""
    step = data.step_minutes
    every = every_minutes(wanted, step)
    first = test.first if wanted.start is None else clock.parse(wanted.start, "inference.initial_times.start")
    if wanted.end is None:
        have, steps = set(times.tolist()), parse_duration(conf.lead_time) // step
        whole = set(initial_times(times, test, step, data.history_len, steps).tolist())
        whole = {minutes for minutes in whole if all(minutes - before in have for before in frames)}
        chosen = [minutes for minutes in range(first, test.last + 1, every) if minutes in whole]
        if not chosen:
            raise DataError(
                f"{test.describe(clock)}: no initial time has {data.history_len} input frames and truth for "
                f"inference.lead_time {conf.lead_time} in this period, and {format_duration(max(frames))} of data "
                "before it; shorten the lead time or name the times"
            )
        return chosen
    last = clock.parse(wanted.end, "inference.initial_times.end")
    chosen = list(range(first, last + 1, every))
    if not chosen:
        raise ConfigError(f"inference.initial_times: end {wanted.end} is before start {clock.format(first)}")
    return chosen


def every_minutes(wanted: InitialTimesConfig, step: int) -> int:
    """Return the distance of the initial times of a range.

    Raises:
        ConfigError: if it is no multiple of the step.
    """
    every = parse_duration(wanted.every)
    if every % step:
        raise ConfigError(
            f"inference.initial_times.every: {wanted.every} is not a multiple of data.timestep {format_duration(step)}"
        )
    return every


def analyses_before(conf: EnsembleConfig | None) -> list[int]:
    """Return how long before an initial time, in minutes, its ensemble's analyses lie."""
    if conf is None:
        return [0]
    lag, cycle = lag_minutes(conf), cycle_minutes(conf)
    cycles = range(conf.perturbation.cycles + 1 if cycle else 1)
    return sorted({member * lag + number * cycle for member in range(conf.members) for number in cycles})


def group(chosen: Sequence[int], members: int, batch_size: int) -> list[list[int]]:
    """Return groups of initial times of which each fills a batch of starts, or is one time with several batches.

    Groups are what ranks and jobs share, so that batches, and with them the rounding of every forecast, do not depend
    on how many there are.
    """
    size = max(1, batch_size // members)
    return [list(chosen[first : first + size]) for first in range(0, len(chosen), size)]


def take_part(chosen: Sequence[T], part: str) -> list[T]:
    """Return the I-th of N parts, written ``I/N``; the N parts are exactly `chosen`, and none is longer by two.

    Raises:
        ConfigError: if `part` is no such thing.
    """
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", part)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f'--part: "{part}": write I/N with I from 1 to N, for example 2/8')
    return deal(chosen, int(match[1]) - 1, int(match[2]))


def deal(chosen: Sequence[T], rank: int, ranks: int) -> list[T]:
    """Return what falls to `rank`: each to exactly one of the ranks, to none two more than to another."""
    return list(chosen[rank::ranks])


def choose_leads(conf: InferenceConfig, step: int) -> list[int]:
    """Return the lead times in minutes that are written.

    They are ``inference.lead_times``, or every ``output_every`` up to ``lead_time``.

    Raises:
        ConfigError: if they are no multiples of `step`, in minutes, or none is left.
    """
    if conf.lead_times is not None:
        return [parse_duration(lead) for lead in conf.lead_times]
    every = step if conf.output_every is None else parse_duration(conf.output_every)
    if every % step:
        raise ConfigError(
            f"inference.output_every: {conf.output_every} is not a multiple of data.timestep {format_duration(step)}"
        )
    leads = list(range(every, parse_duration(conf.lead_time) + 1, every))
    if not leads:
        raise ConfigError(
            f"inference.output_every: no multiple of {format_duration(every)} is within lead_time {conf.lead_time}"
        )
    return leads


def _require_frames(chosen: Sequence[int], have: set[int], clock: Clock, frames: Sequence[int]) -> None:
    for initial in chosen:
        for before in frames:
            if initial - before not in have:
                raise DataError(
                    f"inference.initial_times: {clock.format(initial)} needs the fields of "
                    f"{clock.format(initial - before)}, which the data do not have; name other times"
                )


def _require_observed(chosen: Sequence[int], have: set[int], clock: Clock, data: DataConfig, longest: int) -> None:
    """A forecast with observed forcing needs data up to its last step, or a step more where its window is the next."""
    for channel in data.channel_map().group("dynamic_forcing"):
        field = data.field(channel.variable)
        if channel.source != "data" or field.in_forecast != "observed":
            continue
        shift = data.step_minutes if field.temporal != "instant" and field.window == "next" else 0
        for initial, lead in itertools.product(chosen, range(shift, longest + shift, data.step_minutes)):
            if initial + lead not in have:
                raise DataError(
                    f"inference.initial_times: the forecast from {clock.format(initial)} needs {channel.variable} "
                    f"(in_forecast: observed) at {clock.format(initial + lead)}, which the data do not have; shorten "
                    f"inference.lead_time, name other times, or set data.fields.{channel.variable}.in_forecast: persist"
                )
