"""Channels of a model's input and output. Only this module defines their order.

A channel is a variable on one level, or a 2-D variable. Each channel belongs to one of four groups:

- ``prognostic``: input and output; in a rollout, the output is the input of the next step.
- ``diagnostic``: output only.
- ``dynamic_forcing``: input only, varies in time, read from data or computed.
- ``static``: input only, constant in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from credit.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import numpy as np

GROUPS = ("prognostic", "diagnostic", "dynamic_forcing", "static")
INPUT_GROUPS = ("prognostic", "dynamic_forcing", "static")
# Variables that `credit.data.samples.forcing` computes from time and location; they are not read from data.
COMPUTED_DYNAMIC = ("toa_incident_solar_radiation", "sin_year", "cos_year", "sin_day", "cos_day")
COMPUTED_STATIC = ("sin_latitude", "sin_longitude", "cos_longitude")
# Derived quantity -> input quantity -> default name of the variable that contains the input quantity.
DERIVED_VARIABLE_INPUTS = {
    "geopotential": {"temperature": "t", "specific_humidity": "q"},
    "mean_sea_level_pressure": {"temperature": "t"},
    "relative_humidity": {"temperature": "t", "specific_humidity": "q"},
    "relative_humidity_water": {"temperature": "t", "specific_humidity": "q"},
    "wind_speed": {"eastward_wind": "u", "northward_wind": "v"},
}
# A variable with declared missing values adds a static channel with its name and this suffix.
MASK_SUFFIX = "_mask"
# Channels that figures show by default if the run has them.
_DEFAULT_FIGURE_CHANNELS = ("z500", "t850", "t2m", "msl", "u850", "u10", "q700", "u250", "v10", "tp")
_MAX_FIGURE_CHANNELS = 4


@dataclass(frozen=True)
class Channel:
    """A variable on one level, or a 2-D variable.

    Attributes:
        name: unique short name, for example ``z500`` or ``t2m``.
        variable: the variable's name in the data.
        level: value of the level in the level units of the config; None for 2-D variables.
        group: one of `GROUPS`.
        source: ``data`` (read), ``computed`` (from time and place) or ``mask`` (1 where `variable` is missing).
    """

    name: str
    variable: str
    level: float | None
    group: str
    source: str = "data"


class ChannelMap:
    """Ordered channels of a model's input and output, with the slice of each group.

    Args:
        channels: all channels; the order within each group is kept.
        input_order: order of the groups in the input.

    Attributes:
        input: channels of the model's input, group by group in `input_order`.
        output: channels of the model's output: prognostic, then diagnostic.
        input_order: the order of the groups in the input.

    Raises:
        ConfigError: if two channels have the same name.
    """

    def __init__(self, channels: Iterable[Channel], input_order: Sequence[str] = INPUT_GROUPS) -> None:
        channels = tuple(channels)
        counts = Counter(channel.name for channel in channels)
        repeated_names = [name for name, count in counts.items() if count > 1]
        if repeated_names:
            raise ConfigError(
                f"data.variables: {', '.join(repeated_names)} listed twice; every channel belongs to one group"
            )
        self._by_group: dict[str, tuple[Channel, ...]] = {}
        for group in GROUPS:
            self._by_group[group] = tuple(channel for channel in channels if channel.group == group)
        self.input_order = tuple(input_order)
        self.input: tuple[Channel, ...] = ()
        for group in self.input_order:
            self.input += self._by_group[group]
        self.output = self._by_group["prognostic"] + self._by_group["diagnostic"]

    @classmethod
    def build(
        cls,
        variables: Mapping[str, Mapping[str, Sequence[str]]],
        levels: Sequence[float],
        levels_by_variable: Mapping[str, Sequence[float]] | None = None,
        masked_variables: Iterable[str] = (),
        input_order: Sequence[str] = INPUT_GROUPS,
        level_units: str = "hPa",
    ) -> ChannelMap:
        """Build the channels of a config.

        Args:
            variables: group -> names of its variables: ``{"vars_3D": [...], "vars_2D": [...]}``.
            levels: level values of the 3-D variables, in `level_units`.
            levels_by_variable: variable -> its levels, for 3-D variables with levels that differ from `levels`.
            masked_variables: variables with declared missing values; each adds a static channel ``NAME_mask``.
            input_order: the order of the groups in the input.
            level_units: units of the levels. They are part of a channel's name only if the name without them would be
                the name of a 2-D variable, for example ``t2hPa`` if there is a variable ``t2``.

        Raises:
            ConfigError: if two channels have the same name.
        """
        levels_by_variable = levels_by_variable or {}
        names_2d = set()
        for members in variables.values():
            names_2d.update(members["vars_2D"])
        channels = []
        # The channels of a 3-D variable are consecutive, level by level. In each group, 3-D variables come first.
        for group in GROUPS:
            members = variables.get(group, {"vars_3D": (), "vars_2D": ()})
            for variable in members["vars_3D"]:
                for level in levels_by_variable.get(variable, levels):
                    name = f"{variable}{level:g}"
                    if name in names_2d:
                        # An example are the 3-D variable t at level 2 and the 2-D variable t2.
                        name += level_units
                    channels.append(Channel(name, variable, float(level), group))
            computed_variables = COMPUTED_STATIC if group == "static" else COMPUTED_DYNAMIC
            for variable in members["vars_2D"]:
                source = "computed" if variable in computed_variables else "data"
                channels.append(Channel(variable, variable, None, group, source))
        for variable in masked_variables:
            channels.append(Channel(variable + MASK_SUFFIX, variable, None, "static", "mask"))
        return cls(channels, input_order)

    def group(self, group: str) -> tuple[Channel, ...]:
        """Return the channels of one group in order.

        Raises:
            KeyError: if `group` is not one of `GROUPS`.
        """
        return self._by_group[group]

    def input_slice(self, group: str) -> slice:
        """Return the slice of a group in the input channels.

        Raises:
            KeyError: for ``diagnostic``, which is not an input, and for unknown groups.
        """
        # The input contains the groups in `input_order`.
        start = 0
        for name in self.input_order:
            length = len(self._by_group[name])
            if name == group:
                return slice(start, start + length)
            start += length
        raise KeyError(f"{group} is not an input group")

    def output_slice(self, group: str) -> slice:
        """Return the slice of ``prognostic`` or ``diagnostic`` in the output channels.

        Raises:
            KeyError: for any other group.
        """
        num_prognostic = len(self._by_group["prognostic"])
        slices = {"prognostic": slice(0, num_prognostic), "diagnostic": slice(num_prognostic, len(self.output))}
        return slices[group]

    def select_output(self, channels: slice) -> ChannelMap:
        """Return a map with the selected output channels and all channels that are only inputs.

        Args:
            channels: slice of the selected output channels.
        """
        selected = self.output[channels]
        input_only = self._by_group["dynamic_forcing"] + self._by_group["static"]
        return ChannelMap(selected + input_only, self.input_order)

    @property
    def time_varying_stored(self) -> tuple[Channel, ...]:
        """Time-varying channels that are read from data, in the order prognostic, diagnostic, dynamic forcing."""
        return self.output + self._read_from_data("dynamic_forcing")

    @property
    def static_stored(self) -> tuple[Channel, ...]:
        """Static channels that are read from data."""
        return self._read_from_data("static")

    def _read_from_data(self, group: str) -> tuple[Channel, ...]:
        """Return the channels of a group that are neither computed nor masks."""
        return tuple(channel for channel in self._by_group[group] if channel.source == "data")

    def to_dict(self) -> dict[str, object]:
        """Return the map as a dict that can be written as JSON, for checkpoints and stores.

        ``channels`` is a list with the attributes of each `Channel`, and ``input_order`` is a list of groups.
        """
        channels = []
        for group in GROUPS:
            channels += [asdict(channel) for channel in self._by_group[group]]
        return {"channels": channels, "input_order": list(self.input_order)}

    @classmethod
    def from_dict(cls, data: Mapping) -> ChannelMap:
        """Build a map from a dict that `to_dict` returned."""
        channels = [Channel(**attributes) for attributes in data["channels"]]
        return cls(channels, data["input_order"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChannelMap) and self.to_dict() == other.to_dict()

    def describe_mismatch(self, other: ChannelMap) -> str | None:
        """Describe how `other` differs from this map; None if both maps are equal."""
        if self == other:
            return None
        mismatches = []
        for group in GROUPS:
            names = [channel.name for channel in self.group(group)]
            other_names = [channel.name for channel in other.group(group)]
            removed = ", ".join(name for name in names if name not in other_names)
            added = ", ".join(name for name in other_names if name not in names)
            if removed or added:
                mismatches.append(f"{group}: without {removed or 'none'}, with {added or 'none'}")
            elif names != other_names:
                mismatches.append(f"{group}: in a different order ({', '.join(other_names)})")
        # If all groups are equal, the maps differ in the order of the groups.
        if not mismatches:
            return f"input order {list(other.input_order)} against {list(self.input_order)}"
        return "; ".join(mismatches)


def select_figure_channels(requested: Sequence[str] | None, channels: Sequence[Channel], key: str) -> list[str]:
    """Return the names of the channels that figures show.

    Args:
        requested: names from the config. None selects at most four channels: well-known channels such as ``z500`` if
            at least one of them is scored, otherwise the first channels.
        channels: scored channels.
        key: config key of `requested`, for the error.

    Raises:
        ConfigError: if a requested channel is not scored.
    """
    names = [channel.name for channel in channels]
    if requested is None:
        default_names = [name for name in _DEFAULT_FIGURE_CHANNELS if name in names]
        return (default_names or names)[:_MAX_FIGURE_CHANNELS]
    for name in requested:
        if name not in names:
            raise ConfigError(f'{key}: "{name}" is not scored{did_you_mean(name, names)}')
    return list(requested)


def select_channels(fields: np.ndarray, channels: list[int]) -> np.ndarray:
    """Select channels of fields.

    Args:
        fields: (..., C, H, W) with C channels, H rows and W columns; or a `LazyWeightedSum` of fields (C, H, W).
        channels: indices of K channels, at least one.

    Returns:
        The K channels, (..., K, H, W). The result for an array is a view if the channels are adjacent and ascending,
        otherwise a copy. The result for a `LazyWeightedSum` is a `LazyWeightedSum`.
    """
    first = channels[0]
    stop = channels[-1] + 1
    # Indexing with a slice gives a view; indexing with a list gives a copy.
    are_adjacent = channels == list(range(first, stop))
    index = slice(first, stop) if are_adjacent else channels
    if fields.ndim == 3:
        # `LazyWeightedSum` supports only an index of channels.
        return fields[index]
    return fields[..., index, :, :]
