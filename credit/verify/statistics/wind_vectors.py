"""Find the channels that are the two components of a horizontal wind vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from credit.channels import Channel

# Usual names of components in files of ECMWF, in GRIB and in WeatherBench 2, whose files of 10 m winds have no
# standard_name.
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

    A component is recognised by its ``standard_name`` or, without one, by a usual name such as u10, 10u or
    10m_u_component_of_wind. Two components belong together if they have the same level and mask, and names that differ
    in one letter only. In the name of the vector ``wind`` replaces this letter: u10 and v10 make wind10.

    Args:
        channels: the channels.
        attributes: variable -> its attributes, of which ``standard_name`` is used.
        masks: variable -> mask of its cells, (rows, columns) bool, True where the variable is always missing. Variables
            without missing values have no entry.
    """
    # Index of each northward component by the name and level of its vector.
    northward_index = {}
    for index, channel in enumerate(channels):
        if _find_component(channel, attributes) == "v":
            for name in _list_vector_names(channel.variable):
                northward_index[name, channel.level] = index
    pairs = []
    for index, channel in enumerate(channels):
        if _find_component(channel, attributes) != "u":
            continue
        # Both components have the name of their vector in common, in which their differing letter is replaced.
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
    """Return the names of all vectors to which a component may belong.

    In each of them ``wind`` replaces one letter of the variable name. For u10 they are wind10, uwind0 and u1wind.
    """
    names = []
    for letter in range(len(variable)):
        names.append(f"{variable[:letter]}wind{variable[letter + 1 :]}")
    return names
