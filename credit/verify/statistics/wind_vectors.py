"""Find the channels that are the two components of a horizontal wind vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from credit.channels import Channel

# Usual names of wind components in files of ECMWF, in GRIB and in WeatherBench 2. The 10 m winds of WeatherBench 2 have
# no standard_name.
_NAME_PATTERNS = (
    "{}", "{}10", "10{}", "{}100", "100{}",
    "{}_component_of_wind", "10m_{}_component_of_wind", "100m_{}_component_of_wind",
)  # fmt: skip
_COMPONENTS = {"eastward_wind": "u", "northward_wind": "v"}
for _pattern in _NAME_PATTERNS:
    _COMPONENTS[_pattern.format("u")] = "u"
    _COMPONENTS[_pattern.format("v")] = "v"
_NO_STANDARD_NAME = ("", "unknown")


def wind_pairs(
    channels: Sequence[Channel], attributes: Mapping[str, Mapping[str, str]], masks: Mapping[str, np.ndarray]
) -> list[tuple[int, int, str]]:
    """Return (index of u, index of v, name of the vector) of each horizontal wind vector among `channels`.

    A component is recognised by its ``standard_name``. Without a ``standard_name``, it is recognised by a usual name
    such as u10, 10u or 10m_u_component_of_wind. Two components form a vector if they have the same level and mask, and
    if their names differ only in one letter. In the name of the vector, ``wind`` replaces this letter: u10 and v10 form
    wind10.

    Args:
        channels: the channels.
        attributes: variable -> attributes of the variable; only ``standard_name`` is used.
        masks: variable -> mask, (rows, columns) bool, True where the variable is always missing. Variables without
            missing values have no entry.
    """
    # (name of the vector, level) -> index of the northward component
    northward_index = {}
    for index, channel in enumerate(channels):
        if _find_component(channel, attributes) == "v":
            for name in _list_vector_names(channel.variable):
                northward_index[name, channel.level] = index
    pairs = []
    for index, channel in enumerate(channels):
        if _find_component(channel, attributes) != "u":
            continue
        # The two components of a vector have one possible vector name in common.
        vector_names = _list_vector_names(channel.variable)
        shared_names = [name for name in vector_names if (name, channel.level) in northward_index]
        if not shared_names:
            continue
        partner = northward_index[shared_names[0], channel.level]
        # A vector needs both components in every cell.
        if np.array_equal(masks.get(channel.variable), masks.get(channels[partner].variable)):
            pairs.append((index, partner, shared_names[0]))
    return pairs


def _find_component(channel: Channel, attributes: Mapping[str, Mapping[str, str]]) -> str:
    """Return "u" or "v" for a channel that is a wind component, and "" for any other channel."""
    name = attributes.get(channel.variable, {}).get("standard_name", "")
    if name in _NO_STANDARD_NAME:
        name = channel.variable
    return _COMPONENTS.get(name, "")


def _list_vector_names(variable: str) -> list[str]:
    """Return the possible names of the wind vector to which a component belongs.

    In each name, ``wind`` replaces one letter of the variable name. The names for u10 are wind10, uwind0 and u1wind.
    """
    names = []
    for letter in range(len(variable)):
        names.append(f"{variable[:letter]}wind{variable[letter + 1 :]}")
    return names
