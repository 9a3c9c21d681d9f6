"""Values that no field can have: fill values that nothing declares, and values outside the range of their units.

Every value that is read from a source passes `ValueRules.apply` once, in the units of its file and before anything is
computed from it. Whoever reads through `credit.data.sources.source_reader` is therefore protected: check, preprocess,
training, initial states of forecasts and the truth of scores. The limits are physical bounds that also hold in the
stratosphere, in the soil and in the ocean; they recognise wrong units and fill values, and do not judge the weather.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from credit.config.schema_data import DataConfig
from credit.data.formats.units import Conversion, plain
from credit.errors import DataError

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

# quantity -> unit -> least and greatest value
_QUANTITY_LIMITS = {
    "temperature": {"K": (80.0, 400.0), "degC": (-193.0, 127.0)},
    "pressure at the surface or at sea level": {"Pa": (2e4, 1.2e5), "hPa": (200.0, 1200.0)},
    "specific humidity": {"kg kg-1": (-0.05, 0.2), "g kg-1": (-50.0, 200.0)},
    "wind": {"m s-1": (-500.0, 500.0)},
    "geopotential": {"m2 s-2": (-1e5, 5e6)},
    "geopotential height": {"m": (-1e4, 5e5)},
}
# Per cent that call themselves a fraction are told by these; other units are not required to be them.
_FRACTION_LIMITS = {"area fraction": {"1": (-0.01, 1.01), "%": (-1.0, 101.0)}}
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
    "area fraction": ("land_area_fraction", "land_binary_mask", "sea_area_fraction", "sea_ice_area_fraction"),
}  # fmt: skip
_QUANTITY_OF = {name: quantity for quantity, names in _QUANTITIES.items() for name in names}
_UNITS_OF_QUANTITIES = {unit for units in _QUANTITY_LIMITS.values() for unit in units}
# Of any quantity in these units. K holds differences and potential temperature at 100 km (2e5 K), m2 s-2 energies a
# mass such as CAPE, kg kg-1 water in peat, Pa pressure in the deep ocean and stress, J m-2 sums over months.
_UNIT_LIMITS = {
    "K": (-1e6, 1e6),
    "degC": (-1e6, 1e6),
    "Pa": (-1e9, 1e9),
    "hPa": (-1e7, 1e7),
    "Pa s-1": (-1e4, 1e4),
    "kg kg-1": (-1.0, 100.0),
    "g kg-1": (-1e3, 1e5),
    "m s-1": (-1e4, 1e4),
    "m": (-2e4, 1e7),
    "mm": (-1e6, 1e7),
    "%": (-1e4, 1e5),
    "m2 s-2": (-1e6, 1e8),
    "s-1": (-1e3, 1e3),
    "W m-2": (-1e5, 1e5),
    "J m-2": (-1e14, 1e14),
    "kg m-2": (-1e7, 1e8),
    "kg m-2 s-1": (-1e3, 1e3),
    "m3 m-3": (-10.0, 10.0),
}
# of these on levels that may lie in the thermosphere, which begins at this pressure
_THERMOSPHERE_LIMITS = {
    "temperature": {"K": (80.0, 3000.0), "degC": (-193.0, 2700.0)},
    "wind": {"m s-1": (-2000.0, 2000.0)},
}
_THERMOSPHERE_HPA = 1e-3
# Below this pressure a height above sea level is far from 0 and known within a factor of 2, above it within so many m.
_LOWEST_HPA = 700.0
_HEIGHT_TOLERANCE = 2000.0
# No quantity is so large; netCDF's own fill value of real numbers, 9.96921e36, is.
_GREATEST = 1e30
# What files are filled with besides: usual choices of programs and archives, and netCDF's fill values of integers.
_FILL_VALUES = (
    -99.0, -99.9, -99.99, -999.0, -999.9, -999.99, -9999.0, -9999.9, -99999.0, -999999.0, -9.99e8, -32767.0, -32768.0,
    -2147483647.0, -2147483648.0, -9223372036854775806.0, -1e20, 1e15, 1e20, 9.99e20, 9.999e20,
)  # fmt: skip
# As packed integers. 32767 is not among them: it is where usual recipes of packing put the greatest value of a file.
_PACKED_FILL_VALUES = (-32768.0, -32767.0, -9999.0, -999.0)


@dataclass(frozen=True)
class Implausible:
    """Values of one field that cannot be right.

    Attributes:
        index: of the field, in the dimensions before its level.
        row: its level, among all of the variable.
        cells: (h, w) bool, True where they are.
        value: the first of them.
        is_fill: whether this is a fill value; else it is outside of the limits.
    """

    index: tuple[int, ...]
    row: int
    cells: np.ndarray
    value: float
    is_fill: bool


@dataclass(frozen=True)
class ValueRules:
    """Rules for the values of one variable in one file.

    Attributes:
        levels: (L,) of the run, or None alone.
        limits: (L, 2) least and greatest value on each of these levels, or (1, 2) on any.
        about: what has these limits, in words.
        fill_values: (F,) values that are not data where they stand apart from all others.
        tolerances: (F,) how exactly a value must be one of them.
        num_unpacked: how many of `fill_values`, the first ones, a whole field may consist of; those of packed integers
            must stand apart from values that differ.
        valid_range: least and greatest value that the config declares, in the units of the file; then all within is
            accepted, and all outside is missing.
        name: the variable, where the config can have options for it in ``data.variable_options``; else empty.
    """

    levels: tuple[float | None, ...]
    limits: np.ndarray
    about: str
    fill_values: np.ndarray
    tolerances: np.ndarray
    num_unpacked: int
    valid_range: tuple[float, float] | None
    name: str

    def apply(self, values: np.ndarray, levels: slice = slice(None)) -> tuple[np.ndarray, Implausible | None]:
        """Return the values, NaN where `valid_range` makes them missing, and the first field that cannot be right.

        Args:
            values: (..., L, h, w) in the units of the file; not written to.
            levels: which of the variable's levels they are on.
        """
        lowest, highest = _extremes(values)
        if self.valid_range is not None:
            least, greatest = self.valid_range
            with np.errstate(invalid="ignore"):
                if (lowest < least).any() or (highest > greatest).any():
                    values = np.where((values < least) | (values > greatest), np.nan, values)
            return values, None
        limits = self.limits if len(self.limits) == 1 else self.limits[levels]
        with np.errstate(invalid="ignore"):
            suspects = (lowest < limits[:, 0]) | (highest > limits[:, 1])
            for extreme in (lowest, highest):
                suspects |= (np.abs(extreme) >= _GREATEST) | self._match_fill(extreme).any(axis=-1)
        for index in np.argwhere(suspects):
            field_index = tuple(int(number) for number in index)
            cells, is_fill = self._judge(values[field_index], limits[field_index[-1] % len(limits)])
            if cells.any():
                row = field_index[-1] + (levels.start or 0)
                return values, Implausible(field_index[:-1], row, cells, float(values[field_index][cells][0]), is_fill)
        return values, None

    def describe(self, implausible: Implausible, place: str = "") -> str:
        """Return what is wrong with the values of a field, and what to do; `place` is where the first one lies."""
        value, place = f"{implausible.value:.6g}", place and f" at {place}"
        count = f"{int(implausible.cells.sum())} of {implausible.cells.size} values are"
        key = f"data.variable_options.{self.name}"
        if implausible.is_fill:
            problem = f"{count} {value}, the first{place}: a fill value that the file does not declare as missing"
            advice = "declare it there (attribute _FillValue)"
            if self.name:
                advice += (
                    f", or set {key}.valid_range: [least, greatest], outside of which values are missing; "
                    f"{key}.missing and data.on_bad_time say what becomes of missing values"
                )
        else:
            limits = self.limits[implausible.row % len(self.limits)]
            problem = f"{count} no {self.about} ({limits[0]:g} to {limits[1]:g}), the first is {value}{place}"
            advice = "correct the values or their units in the file"
            if self.name:
                advice += (
                    f"; if they are fill values, or right as they are, set {key}.valid_range: [least, greatest]: what "
                    "is outside is missing, what is within is accepted"
                )
        return f"{problem}; {advice}"

    def _match_fill(self, values: np.ndarray) -> np.ndarray:
        """Return which of the fill values each value is, (..., F) bool."""
        distance = np.abs(np.asarray(values, dtype=np.float64)[..., None] - self.fill_values)
        return distance <= self.tolerances

    def _judge(self, field: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return the cells (h, w) of a field that cannot be right, and whether they hold a fill value."""
        # infinite values have a message of their own
        finite = np.isfinite(field)
        huge = finite & (np.abs(field) >= _GREATEST)
        filled = huge if huge.any() else self._standing_apart(field, finite)
        if filled.any():
            return filled, True
        return finite & ((field < limits[0]) | (field > limits[1])), False

    def _standing_apart(self, field: np.ndarray, finite: np.ndarray) -> np.ndarray:
        """Return the cells of the smallest or greatest value where that is a fill value and stands apart.

        It stands apart where it is farther from all other values than these are from each other. A wind of -99 m/s or
        a height of -999 m among values like it is data.
        """
        nothing = np.zeros(field.shape, dtype=bool)
        if not finite.any():
            return nothing
        for extreme in (field[finite].min(), field[finite].max()):
            cells = finite & (field == extreme)
            others = field[finite & ~cells].astype(np.float64)
            matches = self._match_fill(extreme)
            if not matches.any():
                continue
            if not matches[: self.num_unpacked].any() and (not others.size or np.ptp(others) == 0.0):
                continue
            if not others.size or np.abs(others - extreme).min() > np.ptp(others):
                return cells
        return nothing


def build_rules(
    name: str,
    attributes: Mapping[str, str],
    *,
    levels: Sequence[float | None] = (None,),
    level_units: str = "hPa",
    packing: tuple[float, float] | None = None,
    file_range: tuple[float, float] | None = None,
    valid_range: Sequence[float] | None = None,
    conversion: Conversion | None = None,
    has_options: bool = True,
) -> ValueRules:
    """Return the rules for the values of a variable.

    Args:
        name: the variable.
        attributes: its units and standard_name, in the file.
        levels: of the values; None where they have none, or lie on other levels than the run's.
        level_units: of the levels.
        packing: scale and offset of packed integers in a file that declares no fill value; else None.
        file_range: from `read_file_range`.
        valid_range: ``data.variable_options.NAME.valid_range``, in the units of the run.
        conversion: from the units of the file to those of the run.
        has_options: whether the variable can have options in ``data.variable_options``.
    """
    units = plain(attributes.get("units", ""))
    quantity = _quantity_of(name, attributes)
    has_limits = units in (_QUANTITY_LIMITS | _FRACTION_LIMITS).get(quantity, {})
    limits = np.array([_limits(quantity, units, _in_hpa(level, level_units)) for level in levels])
    about = f"{quantity} in {units}" if has_limits else f"value in {units}"
    if file_range is not None:
        limits = np.stack([np.maximum(limits[:, 0], file_range[0]), np.minimum(limits[:, 1], file_range[1])], axis=1)
        about += " within the valid range that the file declares"
    fill_values = [np.array(_FILL_VALUES)]
    tolerances = [np.abs(fill_values[0]) * 1e-6]
    if packing is not None:
        scale, offset = packing
        unpacked = np.array(_PACKED_FILL_VALUES) * scale + offset
        # Recipes of packing put the least value of a file at -32767 or -32768. Where that is 0, as that of rain and of
        # snow, it is data, however rare other values are.
        unpacked = unpacked[np.abs(unpacked) > 1.5 * abs(scale)]
        fill_values.append(unpacked)
        tolerances.append(np.full(len(unpacked), 0.25 * abs(scale)))
    if valid_range is not None and conversion is not None:
        valid_range = sorted((value - conversion.offset) / conversion.scale for value in valid_range)
    return ValueRules(
        levels=tuple(levels),
        limits=limits,
        about=about,
        fill_values=np.concatenate(fill_values),
        tolerances=np.concatenate(tolerances),
        num_unpacked=len(_FILL_VALUES),
        valid_range=tuple(valid_range) if valid_range is not None else None,
        name=name if has_options else "",
    )


def read_file_range(
    attributes: Mapping[str, object], packing: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Return the range of values that a file declares (CF: valid_range, or valid_min and valid_max), None for none.

    Integers of a packed variable are packed as well, so the netCDF User Guide; real numbers are values. With the
    attribute _Unsigned the bounds are signed numbers that stand for unsigned ones, and are not used.
    """
    if "_Unsigned" in attributes:
        return None
    ends = np.atleast_1d(
        attributes.get("valid_range", [attributes.get(f"valid_{end}", np.nan) for end in ("min", "max")])
    )
    if ends.shape != (2,) or ends.dtype.kind not in "iuf" or np.isnan(ends.astype(np.float64)).all():
        return None
    values = ends.astype(np.float64)
    if packing is not None and ends.dtype.kind in "iu":
        values = np.sort(values * packing[0] + packing[1])
    # limits are often rounded to the precision of the values
    slack = 1e-6 * np.nanmax(np.abs(values))
    return float(np.nan_to_num(values[0] - slack, nan=-np.inf)), float(np.nan_to_num(values[1] + slack, nan=np.inf))


def require_units(name: str, attributes: Mapping[str, str], origin: str) -> None:
    """Stop where a variable has the units of another quantity.

    Raises:
        DataError: naming the units that it can have.
    """
    message = _describe_units(name, attributes)
    if message is not None:
        raise DataError(f"{origin}: {message}")


def find_implausible_units(fields_CHW: np.ndarray, reader: FieldReader, conf: DataConfig, when: str) -> list[str]:
    """Return a message for each variable of a store whose units or values cannot be right.

    Args:
        fields_CHW: the stored fields of one time, missing values as NaN.
        reader: of the store.
        conf: the data section.
        when: the time, for messages.
    """
    messages: dict[str, str] = {}
    for field, channel in zip(fields_CHW, reader.channels.stored, strict=True):
        if channel.variable in messages:
            continue
        attributes = reader.attributes.get(channel.variable, {})
        valid_range = conf.field(channel.variable).valid_range
        message = _describe_units(channel.variable, attributes) if valid_range is None else None
        if message is None:
            rules = build_rules(
                channel.variable,
                attributes,
                levels=[channel.level],
                level_units=conf.level_units,
                valid_range=valid_range,
            )
            implausible = rules.apply(field[None])[1]
            if implausible is not None:
                message = f"{channel.name} at {when}: {rules.describe(implausible)}"
        if message is not None:
            messages[channel.variable] = message
    return list(messages.values())


def _quantity_of(name: str, attributes: Mapping[str, str]) -> str:
    return _QUANTITY_OF.get(attributes.get("standard_name") or name, "")


def _describe_units(name: str, attributes: Mapping[str, str]) -> str | None:
    """Return what is wrong with units that measure another quantity; None for right ones and such as are not known."""
    quantity, units = _quantity_of(name, attributes), plain(attributes.get("units", ""))
    if quantity not in _QUANTITY_LIMITS or units not in _UNITS_OF_QUANTITIES or units in _QUANTITY_LIMITS[quantity]:
        return None
    quantity_name = attributes.get("standard_name") or name
    return (
        f'{name}: its units are "{attributes["units"]}", but {quantity_name} is a {quantity} '
        f"({' or '.join(_QUANTITY_LIMITS[quantity])}); correct units or standard_name in the files, or "
        f"data.sources.N.rename; or set data.variable_options.{name}.valid_range: [least, greatest] to read it as it is"
    )


def _in_hpa(level: float | None, level_units: str) -> float | None:
    """Return the pressure of a level; NaN for model levels, of which it is not known, None without a level."""
    if level is None:
        return None
    return {"hPa": level, "Pa": level / 100.0}.get(level_units, np.nan)


def _limits(quantity: str, units: str, pressure: float | None) -> tuple[float, float]:
    """Return least and greatest value of a quantity in these units, at a pressure in hPa where there is one.

    A height is taken to be near to 7.5 km times ln(1013 hPa / p).
    """
    if pressure is not None and units in _THERMOSPHERE_LIMITS.get(quantity, {}) and not pressure > _THERMOSPHERE_HPA:
        return _THERMOSPHERE_LIMITS[quantity][units]
    gravity = {"m2 s-2": 9.80665, "m": 1.0}.get(units)
    on_pressure_level = pressure is not None and np.isfinite(pressure)
    if quantity.startswith("geopotential") and on_pressure_level and gravity is not None:
        height = 7500.0 * np.log(1013.0 / pressure)
        if pressure <= _LOWEST_HPA:
            return 0.5 * height * gravity, 2.0 * height * gravity
        return (height - _HEIGHT_TOLERANCE) * gravity, (height + _HEIGHT_TOLERANCE) * gravity
    limits = (_QUANTITY_LIMITS | _FRACTION_LIMITS).get(quantity, {}).get(units)
    return limits or _UNIT_LIMITS.get(units) or (-np.inf, np.inf)


def _extremes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the greatest value of each field (..., h, w), NaN where all are missing."""
    lowest, highest = values.min(axis=(-2, -1)), values.max(axis=(-2, -1))
    if np.isnan(lowest).any():
        # these two pass over missing values, but are slower
        lowest = np.fmin.reduce(np.fmin.reduce(values, axis=-1), axis=-1)
        highest = np.fmax.reduce(np.fmax.reduce(values, axis=-1), axis=-1)
    return lowest, highest
