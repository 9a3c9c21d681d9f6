"""Fields derived from the channels of each member: wind speed, thickness, sums over time.

Shape suffixes: N members (1 for a single forecast), H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from credit.calendar import format_duration, parse_duration
from credit.data.formats.cf import PRESSURE_IN_HPA
from credit.data.formats.units import is_convertible, is_same_unit, normalise_units
from credit.errors import ConfigError
from credit.forecast.io.schema import MEMBER
from credit.physics.thermodynamics import GRAVITY
from credit.physics.wind_profile import interpolate_log_law, interpolate_power_law
from credit.products.base import FieldProduct, FieldReader, ProductContext, derive_info, register_product
from credit.products.description import FieldInfo
from credit.products.section import (
    AccumulationSection,
    ThicknessSection,
    WindSpeedAtHeightSection,
    WindSpeedSection,
)

# Units of geopotential or geopotential height -> metres of geopotential height per unit.
_METRES_PER_UNIT = {"m2 s-2": 1.0 / GRAVITY, "m": 1.0, "dam": 10.0}


def find_wind_components(context: ProductContext, names: Sequence[str], key: str) -> tuple[FieldInfo, FieldInfo]:
    """Return the descriptions of an eastward and a northward wind component.

    Args:
        context: the forecasts and the earlier products.
        names: name of the eastward component and of the northward component.
        key: key of the section that contains `names`, for messages.

    Raises:
        ConfigError: if a component is missing or its units are not a speed, if the standard names show that the
            components are in the wrong order, or if the two components differ in units or level.
    """
    eastward, northward = (context.find_field(name, key) for name in names)
    for info, wrong in ((eastward, "northward"), (northward, "eastward")):
        if wrong in info.standard_name:
            raise ConfigError(
                f"{context.key}.{key}: {info.name} is the {wrong} component; name the eastward component first"
            )
        if not info.units or not is_convertible(info.units, "m s-1"):
            raise ConfigError(
                f'{context.key}.{key}: {info.name} is in "{info.units}", which is not a speed; name wind components'
            )
    if not is_same_unit(eastward.units, northward.units):
        raise ConfigError(
            f'{context.key}.{key}: {eastward.name} is in "{eastward.units}" and {northward.name} in '
            f'"{northward.units}"; the components need the same units'
        )
    require_same_members(context, [eastward, northward], key)
    if eastward.level != northward.level:
        raise ConfigError(
            f"{context.key}.{key}: {eastward.name} and {northward.name} are on different levels; name components of "
            "one level"
        )
    return eastward, northward


def require_same_members(context: ProductContext, infos: Sequence[FieldInfo], key: str) -> None:
    """Raise ConfigError unless the fields have the same members, have the same quantiles, or are all single fields.

    Args:
        context: description of the forecasts and the earlier products.
        infos: descriptions of the fields.
        key: key of the section that names the fields, for messages.

    Raises:
        ConfigError: if the first dimensions differ.
    """
    for info in infos[1:]:
        if (info.dim, info.coordinate) != (infos[0].dim, infos[0].coordinate):
            raise ConfigError(
                f"{context.key}.{key}: {infos[0].name} has the dimension {infos[0].dim or 'none'}, {info.name} "
                f"{info.dim or 'none'}; name fields of the same members"
            )


@register_product("wind_speed", WindSpeedSection)
class WindSpeed(FieldProduct):
    """Wind speed: the square root of the sum of the squared components."""

    def __init__(self, section: WindSpeedSection, context: ProductContext) -> None:
        super().__init__(section, context)
        self.inputs = tuple(section.of)
        eastward, _ = find_wind_components(context, section.of, "of")
        self.info = derive_info(
            eastward, section.name, standard_name="wind_speed", long_name=f"wind speed of {', '.join(section.of)}"
        )

    def compute(self, fields: FieldReader, lead_index: int) -> np.ndarray:
        """Return wind speed in the units of the components, (N, H, W)."""
        eastward, northward = self.inputs
        return np.hypot(fields.read(eastward, lead_index), fields.read(northward, lead_index))


@register_product("wind_speed_at_height", WindSpeedAtHeightSection)
class WindSpeedAtHeight(FieldProduct):
    """Wind speed at a height between two given heights; `credit.physics.wind_profile` contains the formulas."""

    def __init__(self, section: WindSpeedAtHeightSection, context: ProductContext) -> None:
        super().__init__(section, context)
        lower, upper = sorted(section.of)
        self._lower_pair = section.of[lower]
        self._upper_pair = section.of[upper]
        self.inputs = (*self._lower_pair, *self._upper_pair)
        lower_info, _ = find_wind_components(context, self._lower_pair, f"of.{lower:g}")
        upper_info, _ = find_wind_components(context, self._upper_pair, f"of.{upper:g}")
        require_same_members(context, [lower_info, upper_info], "of")
        for height, info in ((lower, lower_info), (upper, upper_info)):
            # In forecasts without the wind at 10 m, u10 is the wind at 10 hPa.
            if is_on_pressure_level(context, info):
                raise ConfigError(
                    f"{context.key}.of.{height:g}: {info.name} is the wind at {info.level:g} "
                    f"{context.forecasts.level_units}, not at {height:g} m; name the wind at a height above ground"
                )
        if not is_same_unit(lower_info.units, upper_info.units):
            raise ConfigError(
                f'{context.key}.of: {lower_info.name} is in "{lower_info.units}" and {upper_info.name} in '
                f'"{upper_info.units}"; the winds at both heights need the same units'
            )
        self._heights = (section.height, lower, upper)
        self._interpolate = interpolate_power_law if section.profile == "power" else interpolate_log_law
        self.info = derive_info(
            lower_info,
            section.name,
            standard_name="wind_speed",
            long_name=f"wind speed at {section.height:g} m ({section.profile} law)",
            level=None,
            height=section.height,
        )

    def compute(self, fields: FieldReader, lead_index: int) -> np.ndarray:
        """Return wind speed in the units of the components, (N, H, W)."""
        speeds = []
        for eastward, northward in (self._lower_pair, self._upper_pair):
            speeds.append(np.hypot(fields.read(eastward, lead_index), fields.read(northward, lead_index)))
        return self._interpolate(speeds[0], speeds[1], self._heights)


def is_on_pressure_level(context: ProductContext, info: FieldInfo) -> bool:
    """Return True if a field is on a pressure level."""
    return info.level is not None and context.forecasts.level_units.lower() in PRESSURE_IN_HPA


def find_layer_geopotential(context: ProductContext, names: Sequence[str], key: str) -> tuple[FieldInfo, float]:
    """Return the description of the geopotential at the lower level of a layer, and the factor from its units to m.

    Args:
        context: the forecasts and the earlier products.
        names: name of the geopotential, or geopotential height, at the lower level and at the upper level.
        key: key of the section that contains `names`, for messages.

    Raises:
        ConfigError: if a field is missing, is not on a pressure level or has unsuitable units, or if the first level is
            not below the second level.
    """
    lower, upper = (context.find_field(name, key) for name in names)
    for info in (lower, upper):
        if not is_on_pressure_level(context, info):
            raise ConfigError(f"{context.key}.{key}: {info.name} is not on a pressure level; name geopotentials on two")
        if normalise_units(info.units) not in _METRES_PER_UNIT:
            raise ConfigError(
                f'{context.key}.{key}: {info.name} is in "{info.units}"; a thickness needs geopotential or '
                f"geopotential height in {', '.join(_METRES_PER_UNIT)}"
            )
    if normalise_units(lower.units) != normalise_units(upper.units):
        raise ConfigError(
            f'{context.key}.{key}: {lower.name} is in "{lower.units}" and {upper.name} in "{upper.units}"; name fields '
            "with the same units"
        )
    if lower.level <= upper.level:
        raise ConfigError(
            f"{context.key}.{key}: {lower.name} is not below {upper.name}; name the level of higher pressure first"
        )
    require_same_members(context, [lower, upper], key)
    return lower, _METRES_PER_UNIT[normalise_units(lower.units)]


@register_product("thickness", ThicknessSection)
class Thickness(FieldProduct):
    """Thickness of the layer between two pressure levels: the difference of their geopotential heights."""

    def __init__(self, section: ThicknessSection, context: ProductContext) -> None:
        super().__init__(section, context)
        self.inputs = tuple(section.of)
        lower, self._factor = find_layer_geopotential(context, section.of, "of")
        self.info = derive_info(
            lower,
            section.name,
            units="m",
            standard_name="",
            long_name=f"thickness of the layer from {section.of[0]} to {section.of[1]}",
            level=None,
        )

    def compute(self, fields: FieldReader, lead_index: int) -> np.ndarray:
        """Return thickness in m, (N, H, W)."""
        lower, upper = (fields.read(name, lead_index).astype(np.float64) for name in self.inputs)
        return self._factor * (upper - lower)


@register_product("accumulation", AccumulationSection)
class Accumulation(FieldProduct):
    """Sum of a variable over a window. The forecasts contain its sums over each step, or since the initial time."""

    def __init__(self, section: AccumulationSection, context: ProductContext) -> None:
        super().__init__(section, context)
        self.inputs = (section.of,)
        info = context.find_field(section.of)
        key = f"{context.key}.of"
        leads = context.forecasts.lead_minutes.tolist()
        windows = info.windows
        if info.is_probability or info.dim not in (None, MEMBER) or info.statistic not in ("", "mean"):
            raise ConfigError(
                f"{key}: {info.name} is a probability or another statistic of the members, which cannot be summed over "
                "hours; sum the variable first, then compute the statistic of the sum"
            )
        if section.window is not None:
            window = parse_duration(section.window)
            _require_consistent_window(info, window, f"{context.key}.window")
            windows = dict.fromkeys(leads, window)
        elif info.temporal != "sum":
            raise ConfigError(
                f"{key}: {info.name} is not a sum over the step (cell_methods time: sum), so it cannot be summed over "
                "hours; name an accumulated variable, or give window if the files lack this attribute"
            )
        elif not windows:
            raise ConfigError(
                f"{key}: the times of {info.name} have no bounds, so the hours of its sums are unknown; set window"
            )
        # For each lead time, the terms (index, sign) of the sum; None if the window starts before the initial time.
        over = None if section.over is None else parse_duration(section.over)
        self._terms: list[list[tuple[int, int]] | None] = []
        sum_windows = {}
        for lead in leads:
            length = lead if over is None else over
            sum_windows[lead] = length
            terms = None
            if length <= lead:
                terms = find_sum_terms(leads, windows, lead, lead - length)
                if terms is None:
                    raise ConfigError(
                        f"{key}: the sums of {info.name} in the forecasts do not add up to the {length / 60:g} h "
                        f"before {format_duration(lead)}; write every step (inference.output_every), or choose "
                        "a different over"
                    )
            self._terms.append(terms)
        text = "since the initial time" if over is None else f"over {format_duration(over)}"
        self.info = derive_info(
            info, section.name, long_name=f"{info.title} {text}", temporal="sum", windows=sum_windows
        )

    def compute(self, fields: FieldReader, lead_index: int) -> np.ndarray:
        """Return the sum over the window that ends at a lead time, (N, H, W); NaN if no such window exists."""
        (name,) = self.inputs
        terms = self._terms[lead_index]
        if terms is None:
            return np.full_like(fields.read(name, lead_index), np.nan)
        # At lead time 0 there are no terms, so the sum since the initial time is 0.
        total_NHW = np.zeros(fields.read(name, lead_index).shape)
        for index, sign in terms:
            total_NHW += sign * fields.read(name, index).astype(np.float64)
        return total_NHW


def _require_consistent_window(info: FieldInfo, window: int, key: str) -> None:
    """Raise ConfigError if the configured window contradicts the attributes of a variable.

    Args:
        info: description of the variable.
        window: length of the variable's sums in minutes according to the config.
        key: config key of the window, for messages.

    Raises:
        ConfigError: if the variable is a mean over time, or if its time bounds have a different length.
    """
    if info.temporal == "mean":
        raise ConfigError(f"{key}: {info.name} is a mean (cell_methods time: mean); name a variable that is a sum")
    for lead, length in info.windows.items():
        if lead > 0 and length != window:
            raise ConfigError(
                f"{key}: is {format_duration(window)}, but the bounds of the times of {info.name} give "
                f"{length / 60:g} h at {format_duration(lead)}; remove window"
            )


def find_sum_terms(
    leads: Sequence[int], windows: Mapping[int, int], end: int, begin: int
) -> list[tuple[int, int]] | None:
    """Return the stored sums of a forecast that together give the sum from lead time `begin` to lead time `end`.

    Args:
        leads: lead times in minutes.
        windows: lead time in minutes -> length in minutes of the window of the stored sum that ends at this lead time.
            For a sum since the initial time, the length equals the lead time.
        end: lead time in minutes at which the sum ends.
        begin: lead time in minutes at which the sum begins.

    Returns:
        Pairs (index of a lead time, sign): sign 1 adds the stored sum at this lead time, sign -1 subtracts it. None if
        no combination of stored sums gives the requested sum.
    """
    terms = []
    while end > begin:
        if windows.get(end, 0) <= 0:
            return None
        window_begin = end - windows[end]
        terms.append((leads.index(end), 1))
        if window_begin < begin:
            # The window starts before `begin`. Subtract the sum over the same start up to `begin`.
            if begin not in windows or begin - windows[begin] != window_begin:
                return None
            terms.append((leads.index(begin), -1))
            return terms
        end = window_begin
    return terms
