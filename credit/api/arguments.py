"""Conversion of arguments of the Python interface: devices, durations, times and overrides."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import timedelta

import numpy as np
import torch
import xarray as xr

from credit.calendar import Calendar, parse_duration
from credit.config.renamed_keys import rename_dotted_key
from credit.errors import ConfigError, DataError
from credit.train.build.model import choose_device

Duration = str | np.timedelta64 | timedelta

# Keys that a user may change after training. The weights depend on the other keys, or they do not affect forecasts.
_CHANGEABLE_KEYS = re.compile(
    r"inference\.[^=]+|data\.variable_options\.[^.=]+\.(units|valid_range|in_forecast|minimum|maximum)"
)


def find_device(name: str) -> torch.device:
    """Return the torch device of a name: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for the GPU if there is one.

    Args:
        name: name of the device.

    Raises:
        ConfigError: if the name has a different form, or the host does not have this GPU.
    """
    match = re.fullmatch(r"(auto|cpu|cuda)(?::(\d+))?", str(name))
    if match is None or (match[2] and match[1] != "cuda"):
        raise ConfigError(f'device: "{name}" is not a device; write auto, cpu, cuda or cuda:N')
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(match[2] or 0)
    if match[1] == "cuda" and number >= num_gpus:
        raise ConfigError(f'device: "{name}", but torch finds {num_gpus} GPUs on this host; write auto or cpu')
    return choose_device(match[1], number)


def convert_to_minutes(duration: Duration, key: str) -> int:
    """Convert a duration to minutes.

    Args:
        duration: string such as ``"10d"``, or a timedelta of numpy, pandas or Python.
        key: name of the argument, for the message.

    Raises:
        ConfigError: if the duration is not a positive whole number of minutes.
    """
    if not isinstance(duration, np.timedelta64 | timedelta):
        return parse_duration(duration, key)
    # NaT is not equal to itself.
    minutes = np.timedelta64(duration) / np.timedelta64(1, "m")
    if not minutes > 0 or minutes != round(minutes):
        raise ConfigError(f"{key}: {duration} must be a positive whole number of minutes")
    return round(minutes)


def convert_to_calendar_minutes(time: object, calendar: Calendar, key: str) -> int:
    """Convert a time to minutes since the epoch of a calendar.

    Args:
        time: string such as ``"2001-04-01T06"``, a date of numpy, pandas, Python or cftime, or an array with one date.
        calendar: calendar of the data.
        key: name of the argument, for the message.

    Raises:
        DataError: if `time` is not a time of the calendar, or has seconds.
    """
    if isinstance(time, xr.DataArray | np.ndarray):
        if np.size(time) != 1:
            raise DataError(f"{key}: give one time; these are {np.size(time)}")
        time = np.asarray(time).reshape(-1)[0]
    if isinstance(time, np.datetime64):
        if np.isnat(time):
            raise DataError(f"{key}: NaT is not a time; give a date")
        time = np.datetime_as_string(time, "s")
    text = time if isinstance(time, str) else str(time).split("+")[0].split(".")[0]
    return calendar.parse(text.strip(), key)


def check_overrides(overrides: Iterable[str]) -> list[str]:
    """Check that a trained model allows these overrides of its config, and return the overrides.

    In the result, former names of keys are replaced by the current names.

    Args:
        overrides: overrides such as ``"inference.amp=true"``.

    Raises:
        ConfigError: if the setting of a key must be the same as in training, or does not affect forecasts.
    """
    if isinstance(overrides, str):
        raise ConfigError(f'overrides: give a list of strings, ["{overrides}"]')
    checked = []
    for text in overrides:
        key, equals, value = text.partition("=")
        text = f"{rename_dotted_key(key)}{equals}{value}"
        if not _CHANGEABLE_KEYS.fullmatch(text.partition("=")[0]):
            raise ConfigError(
                f'overrides: "{text}": the model was trained with this setting, or it has no effect on forecasts; '
                "change only keys of inference, and units, valid_range, in_forecast, minimum and maximum of "
                "data.variable_options"
            )
        checked.append(text)
    return checked
