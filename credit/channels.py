"""ChannelMap: the ordered channels of a model's input and output. The only place where channels are counted.

A channel is one variable on one level (or a 2-D variable). Four groups: ``prognostic`` (input and output, fed back in
a rollout), ``diagnostic`` (output only), ``dynamic_forcing`` (input only, varies in time, read or computed) and
``static`` (input only, constant).
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
# computed from time and place instead of being read; credit.data.samples.forcing computes each
COMPUTED_DYNAMIC = ("toa_incident_solar_radiation", "sin_year", "cos_year", "sin_day", "cos_day")
COMPUTED_STATIC = ("sin_latitude", "sin_longitude", "cos_longitude")
# what can be derived from other variables -> what it is made of -> the variable that this is by default
DERIVED_FROM = {
    "geopotential": {"temperature": "t", "specific_humidity": "q"},
    "mean_sea_level_pressure": {"temperature": "t"},
    "relative_humidity": {"temperature": "t", "specific_humidity": "q"},
    "relative_humidity_water": {"temperature": "t", "specific_humidity": "q"},
    "wind_speed": {"eastward_wind": "u", "northward_wind": "v"},
}
MASK_SUFFIX = "_mask"
# what figures show by default, as far as it is there
_USUAL = ("z500", "t850", "t2m", "msl", "u850", "u10", "q700", "u250", "v10", "tp")
_MOST_SHOWN = 4


@dataclass(frozen=True)
class Channel:
    """One variable on one level.

    Attributes:
        name: unique short name, for example ``z500`` or ``t2m``.
        variable: the variable's name in the data.
        level: the level's value in the config's level units, None for 2-D variables.
        group: one of `GROUPS`.
        source: ``data`` (read), ``computed`` (from time and place) or ``mask`` (1 where `variable` is missing).
    """

    name: str
    variable: str
    level: float | None
    group: str
    source: str = "data"


class ChannelMap:
    """Ordered channels with slices by group.

    Args:
        channels: all channels; their order within a group is kept.
        input_order: the order of the groups in the input.

    Raises:
        ConfigError: if two channels have the same name.
    """

    def __init__(self, channels: Iterable[Channel], input_order: Sequence[str] = INPUT_GROUPS) -> None:
        everything = tuple(channels)
        twice = [name for name, count in Counter(channel.name for channel in everything).items() if count > 1]
        if twice:
            raise ConfigError(f"data.variables: {', '.join(twice)} listed twice; every channel belongs to one group")
        self._by_group = {group: tuple(c for c in everything if c.group == group) for group in GROUPS}
        self.input_order = tuple(input_order)
        self.input = tuple(c for group in self.input_order for c in self._by_group[group])
        self.output = self._by_group["prognostic"] + self._by_group["diagnostic"]

    @classmethod
    def build(
        cls,
        variables: Mapping[str, Mapping[str, Sequence[str]]],
        levels: Sequence[float],
        levels_of: Mapping[str, Sequence[float]] | None = None,
        masked: Iterable[str] = (),
        input_order: Sequence[str] = INPUT_GROUPS,
        level_units: str = "hPa",
    ) -> ChannelMap:
        """Count the channels of a config.

        Args:
            variables: group -> ``{"vars_3D": [...], "vars_2D": [...]}``.
            levels: level values of the 3-D variables, in `level_units`.
            levels_of: levels of single variables where they differ from `levels`.
            masked: variables with declared missing values; each adds a static channel ``NAME_mask``.
            input_order: the order of the groups in the input.
            level_units: part of a channel's name only where name and level alone collide with a 2-D variable.
        """
        names_2d = {name for group in variables.values() for name in group["vars_2D"]}
        channels = []
        for group in GROUPS:
            members = variables.get(group, {"vars_3D": (), "vars_2D": ()})
            for variable in members["vars_3D"]:
                for level in (levels_of or {}).get(variable, levels):
                    short = f"{variable}{level:g}"
                    name = f"{short}{level_units}" if short in names_2d else short
                    channels.append(Channel(name, variable, float(level), group))
            for variable in members["vars_2D"]:
                computed = variable in (COMPUTED_STATIC if group == "static" else COMPUTED_DYNAMIC)
                channels.append(Channel(variable, variable, None, group, "computed" if computed else "data"))
        channels += [Channel(name + MASK_SUFFIX, name, None, "static", "mask") for name in masked]
        return cls(channels, input_order)

    def group(self, group: str) -> tuple[Channel, ...]:
        """Return the channels of one group in order."""
        return self._by_group[group]

    def input_slice(self, group: str) -> slice:
        """Return where `group` lies among the input channels."""
        start = 0
        for name in self.input_order:
            length = len(self._by_group[name])
            if name == group:
                return slice(start, start + length)
            start += length
        raise KeyError(f"{group} is not an input group")

    def output_slice(self, group: str) -> slice:
        """Return where ``prognostic`` or ``diagnostic`` lies among the output channels."""
        split = len(self._by_group["prognostic"])
        return {"prognostic": slice(0, split), "diagnostic": slice(split, len(self.output))}[group]

    @property
    def stored(self) -> tuple[Channel, ...]:
        """Return the time-varying channels read from data; prognostic, diagnostic, then dynamic forcing."""
        return self.output + tuple(c for c in self._by_group["dynamic_forcing"] if c.source == "data")

    @property
    def static_stored(self) -> tuple[Channel, ...]:
        """Return the static channels read from data."""
        return tuple(c for c in self._by_group["static"] if c.source == "data")

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-ready description, for checkpoints and stores."""
        everything = [c for group in GROUPS for c in self._by_group[group]]
        return {"channels": [asdict(c) for c in everything], "input_order": list(self.input_order)}

    @classmethod
    def from_dict(cls, data: Mapping) -> ChannelMap:
        """Inverse of `to_dict`."""
        return cls([Channel(**c) for c in data["channels"]], data["input_order"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChannelMap) and self.to_dict() == other.to_dict()

    def difference(self, other: ChannelMap) -> str | None:
        """Return in words how `other` differs from this map, None where they are the same."""
        if self == other:
            return None
        parts = []
        for group in GROUPS:
            ours = [c.name for c in self.group(group)]
            theirs = [c.name for c in other.group(group)]
            lost, added = [n for n in ours if n not in theirs], [n for n in theirs if n not in ours]
            if lost or added:
                parts.append(f"{group}: without {', '.join(lost) or 'none'}, with {', '.join(added) or 'none'}")
            elif ours != theirs:
                parts.append(f"{group}: in another order ({', '.join(theirs)})")
        return "; ".join(parts) or f"input order {list(other.input_order)} against {list(self.input_order)}"


def figure_channels(wanted: Sequence[str] | None, channels: Sequence[Channel], key: str) -> list[str]:
    """Return the names of the channels that figures show: those asked for, else the usual ones.

    Args:
        wanted: names, None for the usual ones.
        channels: that are scored.
        key: of the config that `wanted` comes from.

    Raises:
        ConfigError: if one that is asked for is not scored.
    """
    names = [channel.name for channel in channels]
    if wanted is None:
        return ([name for name in _USUAL if name in names] or names)[:_MOST_SHOWN]
    for name in wanted:
        if name not in names:
            raise ConfigError(f'{key}: "{name}" is not scored{did_you_mean(name, names)}')
    return list(wanted)


def pick(fields: np.ndarray, channels: list[int]) -> np.ndarray:
    """Return some channels of (..., C, H, W), without a copy where they follow one another."""
    first, last = channels[0], channels[-1] + 1
    own = slice(first, last) if channels == list(range(first, last)) else channels
    return fields[own] if fields.ndim == 3 else fields[..., own, :, :]
