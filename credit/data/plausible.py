"""Units that contradict their variable or their values: Celsius called K, a height called geopotential, hPa called Pa.

Units are kept as the files have them, or converted from what these say; a model learns in any. But scores, figures and
least values are read in the units that the files state, and a file of another unit that joins later would go unnoticed.
The ranges are wide: what falls outside is not unusual weather.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from credit.channels import Channel
from credit.data.units import plain

# quantity -> unit -> range of a field's mean
_RANGES = {
    "temperature": {"K": (100.0, 400.0), "degC": (-120.0, 99.0)},
    "pressure at the surface or at sea level": {"Pa": (2e4, 1.2e5), "hPa": (200.0, 1200.0)},
    "specific humidity": {"kg kg-1": (-0.01, 0.2), "g kg-1": (-10.0, 200.0)},
    "wind": {"m s-1": (-150.0, 150.0)},
    "geopotential": {"m2 s-2": (-1e5, 1e6)},
    "geopotential height": {"m": (-1e4, 1e5)},
}
_UNITS = {unit for units in _RANGES.values() for unit in units}
# by standard_name, and where a file has none by the usual short name
_QUANTITIES = {
    "temperature": ("air_temperature", "surface_temperature", "sea_surface_temperature", "t", "t2m", "sst", "skt"),
    "pressure at the surface or at sea level": (
        "air_pressure_at_mean_sea_level", "air_pressure_at_sea_level", "surface_air_pressure", "msl", "sp",
    ),
    "specific humidity": ("specific_humidity", "q"),
    "wind": ("eastward_wind", "northward_wind", "u", "v", "u10", "v10"),
    "geopotential": ("geopotential", "z"),
    "geopotential height": ("geopotential_height", "gh"),
}  # fmt: skip
_QUANTITY_OF = {name: quantity for quantity, names in _QUANTITIES.items() for name in names}
# below this pressure a height above sea level is far from 0
_LOWEST_HPA = 700.0


def find_contradictions(
    fields_CHW: np.ndarray,
    channels: Sequence[Channel],
    attributes: Mapping[str, Mapping[str, str]],
    level_units: str,
    when: str,
) -> list[str]:
    """Return a message for each variable whose units cannot be right, at most one a variable.

    Args:
        fields_CHW: fields of one time, missing values as NaN.
        channels: the C channels.
        attributes: variable -> units and standard_name.
        level_units: of the channels' levels.
        when: the time, for messages.
    """
    found: dict[str, str] = {}
    for field, channel in zip(fields_CHW, channels, strict=True):
        own = attributes.get(channel.variable, {})
        called = own.get("standard_name") or channel.variable
        quantity, units = _QUANTITY_OF.get(called), plain(own.get("units", ""))
        if quantity is None or units not in _UNITS or channel.variable in found:
            continue
        known = _RANGES[quantity]
        if units not in known:
            found[channel.variable] = (
                f'{channel.variable}: its units are "{own["units"]}", but {called} is a {quantity} '
                f"({' or '.join(known)}); correct units or standard_name in the files, or data.sources.N.rename"
            )
            continue
        low, high = _height_range(channel, level_units, units) or known[units]
        mean = float(np.nanmean(field))
        if not low <= mean <= high:
            found[channel.variable] = (
                f'{channel.name}: its units are "{own["units"]}", but its mean at {when} is {mean:.4g}, which is no '
                f"{quantity} in {units} ({low:g} to {high:g}); correct the units in the files"
            )
    return list(found.values())


def _height_range(channel: Channel, level_units: str, units: str) -> tuple[float, float] | None:
    """Return the range of (geo)potential at a pressure level, within a factor of 2 of 7.5 km times ln(1013 hPa / p)."""
    if channel.level is None or level_units == "model_level" or units not in ("m", "m2 s-2"):
        return None
    pressure = channel.level / (100.0 if level_units == "Pa" else 1.0)
    if pressure > _LOWEST_HPA:
        return None
    height = 7500.0 * np.log(1013.0 / pressure) * (9.80665 if units == "m2 s-2" else 1.0)
    return 0.5 * height, 2.0 * height
