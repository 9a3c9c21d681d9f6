"""Reading of the coefficients of hybrid levels from source files and from tables.

On hybrid levels, pressure is a + b * surface pressure. A full level represents a layer; half levels are the edges of
the layers. K is the number of full levels. The supported formats, and the variables that are read from them:

| format | full levels | half levels |
|---|---|---|
| CF, ``atmosphere_hybrid_sigma_pressure_coordinate`` | ``formula_terms``: ap, b or a, b, p0 | from the bounds |
| CAM, ECMWF in netCDF | ``hyam``, ``hybm`` (and ``P0`` if hyam is not a pressure) | ``hyai``, ``hybi`` |
| GRIB, ECMWF's tables as CSV | means of the half levels | ``pv``; columns ``a`` (Pa) and ``b`` |
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import xarray as xr

from credit.config.sections.source import SourceConfig
from credit.data.formats.cf import PRESSURE_IN_HPA
from credit.data.formats.files import open_file
from credit.errors import DataError
from credit.physics.vertical import HybridLevels

_STANDARD_NAME = "atmosphere_hybrid_sigma_pressure_coordinate"
_PA_PER_HPA = 100.0
# Number of Pa in each unit that `data.level_units` can have.
PA_PER_LEVEL_UNIT = {"hPa": _PA_PER_HPA, "Pa": 1.0}
# Surface pressure of the standard atmosphere in Pa. Levels are sorted and checked by their pressure at this value.
MEAN_SURFACE_PA = 101325.0
# If the coefficients a are fractions of p0, all are below this limit; if they are in Pa, the largest exceeds the limit.
_LARGEST_FRACTION = 1.5
# Relative tolerance for the difference between the value of a level in a file and its value in the table.
_LEVEL_TOLERANCE = 1e-5


def read_levels(dataset: xr.Dataset, coordinate: str, table: HybridLevels | None, origin: str) -> HybridLevels:
    """Return the hybrid or pressure levels of a file, in the order of its level coordinate.

    Args:
        dataset: the open file.
        coordinate: name of the level coordinate in the file.
        table: all levels of the model, from ``data.sources.N.vertical.coefficients``; None to use the coefficients in
            the file itself.
        origin: name of the file, for error messages.

    Raises:
        DataError: if the file has no coefficients, or the coefficients do not match the coordinate.
    """
    variable = dataset.variables[coordinate]
    values = np.atleast_1d(np.asarray(variable.values, dtype=np.float64))
    hpa_per_unit = PRESSURE_IN_HPA.get(_read_units(variable))
    is_row_by_row = False
    if table is None:
        # The level coordinate of CAM is in hPa (the pressure over a surface at p0), but the levels are hybrid levels.
        has_hyam = "hyam" in dataset.variables and dataset.variables["hyam"].dims == variable.dims
        is_hybrid = variable.attrs.get("standard_name") == _STANDARD_NAME or has_hyam
        if hpa_per_unit and not is_hybrid:
            return HybridLevels.from_pressures(values, hpa_per_unit * _PA_PER_HPA)
        table, is_row_by_row = _find_hybrid_levels(dataset, coordinate, origin)
    if table is None:
        raise DataError(
            f"{origin}: the coefficients of its hybrid levels ({coordinate}) are missing: the file has neither "
            "formula_terms nor hyam and hybm (in GRIB: pv); name a file with the coefficients: "
            "data.sources.N.vertical.coefficients"
        )
    if is_row_by_row:
        return table
    return table.select(_match_levels_to_table(table, values, coordinate, origin))


def load_coefficients(path: Path, key: str) -> HybridLevels:
    """Return all hybrid levels of a model from a netCDF, GRIB or CSV file, in the order of the file.

    Args:
        path: the file with the coefficients.
        key: config key that names the file, for error messages.

    Raises:
        DataError: if the file cannot be read, or has no coefficients.
    """
    if not path.exists():
        raise DataError(f"{key}: {path} does not exist; correct the path")
    if path.suffix.lower() == ".csv":
        return _read_csv(path, key)
    with open_file(path, SourceConfig(path=str(path))) as dataset:
        coordinate = None
        for name, variable in dataset.variables.items():
            if "formula_terms" in variable.attrs and variable.ndim == 1:
                coordinate = str(name)
                break
        table, _ = _find_hybrid_levels(dataset, coordinate, str(path))
    if table is None:
        raise DataError(
            f"{key}: {path} has no coefficients: neither formula_terms nor hyam and hybm or hyai and hybi; name a file "
            "with coefficients"
        )
    return table


def _read_csv(path: Path, key: str) -> HybridLevels:
    """Read a CSV table of half levels, and return the full levels between the half levels, from the top down.

    The table has columns named a (in Pa) and b. The name may be followed by other words, as in "a [Pa]". All other
    columns are ignored.

    Raises:
        DataError: if a column is missing, a row has no numbers, or the half levels do not reach the surface.
    """
    rule = f"{key}: {path} must have columns a (Pa) and b, with a number in every row"
    rows = []
    try:
        # Spreadsheet programs begin a file with a byte order mark, which utf-8-sig removes.
        with open(path, newline="", encoding="utf-8-sig") as file:
            for row in csv.reader(file):
                if row:
                    rows.append([cell.strip().lower() for cell in row])
        if not rows:
            raise DataError(f"{rule}; the file is empty")
        # ECMWF's tables have headers such as "a [Pa]".
        header = [name.split(" ")[0] for name in rows[0]]
        if not {"a", "b"} <= set(header):
            raise DataError(f"{rule}; its columns are {', '.join(rows[0])}")
        a_column = header.index("a")
        b_column = header.index("b")
        a = np.array([float(row[a_column]) for row in rows[1:]])
        b = np.array([float(row[b_column]) for row in rows[1:]])
    except (ValueError, IndexError, csv.Error) as error:
        raise DataError(f"{rule} ({error})") from error
    return _build_from_half_levels(a, b, f"{key}: {path}")


def _find_hybrid_levels(dataset: xr.Dataset, coordinate: str | None, origin: str) -> tuple[HybridLevels | None, bool]:
    """Return the hybrid levels that the coefficients in a file describe.

    Args:
        dataset: the open file.
        coordinate: name of the level coordinate in the file; None if it has none.
        origin: name of the file, for error messages.

    Returns:
        The levels, None if the file has no coefficients; and a bool. The bool is True if the levels are in the order of
        the coordinate, and False if the levels must be matched with the coordinate by their values.

    Raises:
        DataError: if the pressure that the coefficients define is not monotonic, or their reference pressure is
            missing.
    """
    # The names of the coefficients are read from formula_terms; otherwise the names of CAM are used.
    level = None
    terms: dict[str, str] = {}
    if coordinate is not None:
        level = dataset.variables[coordinate]
        terms = _read_formula_terms(level)
    a_name = terms.get("ap", terms.get("a", "hyam"))
    b_name = terms.get("b", "hybm")
    half_levels = _read_half_levels(dataset, origin)
    if not {a_name, b_name} <= set(dataset.variables):
        return half_levels, False
    # Coefficients of full levels.
    a = dataset.variables[a_name]
    b = dataset.variables[b_name]
    is_row_by_row = level is not None and a.dims == level.dims
    values = np.arange(1.0, a.size + 1)
    if is_row_by_row:
        values = np.atleast_1d(level.values).astype(np.float64)
    p0 = None
    # By CF's definition ap is a pressure, and a is a fraction of p0.
    if "ap" not in terms:
        p0 = _find_reference_pressure(dataset, a, b, terms.get("p0", "P0"), values, origin)
    pa_per_unit = _find_pascals_per_unit(a) if p0 is None else p0
    # Edges of the layers, from CF bounds or from half levels.
    bounds = _read_bounds(dataset, level, a, b, p0)
    if bounds is None and half_levels is not None:
        bounds = (half_levels.a_bounds, half_levels.b_bounds)
    # If the number of layers differs from the number of full levels, the half levels do not belong to the full levels.
    if bounds is None or len(bounds[0]) != a.size:
        bounds = (None, None)
    levels = HybridLevels(values, _read_float64_values(a) * pa_per_unit, _read_float64_values(b), *bounds)
    _require_monotonic_pressure(levels, origin)
    return levels, is_row_by_row


def _read_formula_terms(variable: xr.Variable) -> dict[str, str]:
    """Return the CF attribute formula_terms, such as "ap: ap b: b ps: ps", as a mapping from term to variable name."""
    words = str(variable.attrs.get("formula_terms", "")).replace(":", " ").split()
    return dict(zip(words[::2], words[1::2], strict=False))


def _read_float64_values(variable: xr.Variable) -> np.ndarray:
    """Return the values of a variable as float64 with at least one dimension."""
    return np.atleast_1d(np.asarray(variable.values, dtype=np.float64))


def _read_units(variable: xr.Variable) -> str:
    """Return the attribute units of a variable in lower case, empty if it has none."""
    return str(variable.attrs.get("units", "")).strip().lower()


def _find_pascals_per_unit(variable: xr.Variable) -> float:
    """Return the number of Pa in the unit of a variable, 1 if the variable has no unit of pressure."""
    units = _read_units(variable)
    if units not in PRESSURE_IN_HPA:
        return 1.0
    return PRESSURE_IN_HPA[units] * _PA_PER_HPA


def _find_reference_pressure(
    dataset: xr.Dataset, a: xr.Variable, b: xr.Variable, name: str, values: np.ndarray | None, origin: str
) -> float | None:
    """Return the reference pressure p0 in Pa if the coefficients a are fractions of p0, None if a is a pressure.

    Args:
        dataset: the open file.
        a: coefficients a of full levels.
        b: coefficients b of full levels.
        name: name of the variable with p0; the file may lack it.
        values: (K,) values of the level coordinate; None if the values are not known.
        origin: name of the file, for error messages.

    Raises:
        DataError: if the coefficients are fractions, and p0 is not known.
    """
    has_pressure_units = _read_units(a) in PRESSURE_IN_HPA
    if has_pressure_units or np.abs(_read_float64_values(a)).max() > _LARGEST_FRACTION:
        return None
    if name in dataset.variables:
        return float(dataset.variables[name].values) * _find_pascals_per_unit(dataset.variables[name])
    # The value of a level is usually its pressure in hPa over a surface at p0 = 1000 hPa.
    sums = _read_float64_values(a) + _read_float64_values(b)
    if values is not None and np.allclose(values, 1000.0 * sums, rtol=1e-4):
        return 1e5
    raise DataError(
        f"{origin}: the coefficients of its levels are fractions of a reference pressure, but the variable {name} with "
        f"this pressure is missing; add {name} to the file"
    )


def _read_half_levels(dataset: xr.Dataset, origin: str) -> HybridLevels | None:
    """Return the full levels between the half levels ``hyai``, ``hybi`` of a file.

    The result is None if the file has no half levels, or if the half levels do not extend to the surface.
    """
    if not {"hyai", "hybi"} <= set(dataset.variables):
        return None
    a = dataset.variables["hyai"]
    b = dataset.variables["hybi"]
    if a.size < 2 or not _reaches_surface(_read_float64_values(a), _read_float64_values(b)):
        return None
    a_middle = _average_neighbours(a)
    b_middle = _average_neighbours(b)
    values = None
    if "lev" in dataset.variables and dataset.variables["lev"].size == a.size - 1:
        values = np.atleast_1d(dataset.variables["lev"].values)
    p0 = _find_reference_pressure(dataset, a_middle, b_middle, "P0", values, origin)
    pa_per_unit = _find_pascals_per_unit(a) if p0 is None else p0
    return _build_from_half_levels(_read_float64_values(a) * pa_per_unit, _read_float64_values(b), origin)


def _average_neighbours(variable: xr.Variable) -> xr.Variable:
    """Return the means of adjacent half levels, with the attributes of `variable`."""
    values = _read_float64_values(variable)
    return xr.Variable(variable.dims, 0.5 * (values[1:] + values[:-1]), variable.attrs)


def _reaches_surface(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if the last half level is the surface, where a is 0 and b is 1."""
    return a[-1] == 0.0 and b[-1] == 1.0


def _build_from_half_levels(a: np.ndarray, b: np.ndarray, origin: str) -> HybridLevels:
    """Build K full levels, numbered from 1 at the top, each at the mean pressure of its two half levels.

    Args:
        a: (K + 1,) coefficients a of the half levels in Pa, from the top down.
        b: (K + 1,) coefficients b of the half levels, without unit.
        origin: config key and name of the file, for error messages.

    Raises:
        DataError: if the half levels do not extend to the surface, or their pressure is not monotonic.
    """
    if len(a) < 2 or not _reaches_surface(a, b):
        raise DataError(
            f"{origin}: coefficients of half levels must extend from the top to the ground, where a is 0 and b is 1"
        )
    a_bounds = np.stack([a[:-1], a[1:]], axis=1)
    b_bounds = np.stack([b[:-1], b[1:]], axis=1)
    numbers = np.arange(1.0, len(a))
    levels = HybridLevels(numbers, a_bounds.mean(axis=1), b_bounds.mean(axis=1), a_bounds, b_bounds)
    _require_monotonic_pressure(levels, origin)
    return levels


def _read_bounds(
    dataset: xr.Dataset, level: xr.Variable | None, a: xr.Variable, b: xr.Variable, p0: float | None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the coefficients at the edges of the layers, which are read from the CF bounds in a file.

    Args:
        dataset: the open file.
        level: level coordinate; None if the file has none.
        a: coefficients a of the full levels.
        b: coefficients b of the full levels.
        p0: reference pressure in Pa if a is a fraction of p0; None if a is a pressure.

    Returns:
        The coefficients a in Pa and b at the edges, (K, 2) float64 each, the upper edge first; None if the file has no
        CF bounds.
    """
    # Attributes of the bounds of the level coordinate, or of the coefficients, name the bounds of the coefficients.
    terms: dict[str, str] = {}
    bounds_name = None
    if level is not None:
        bounds_name = level.attrs.get("bounds")
    if bounds_name in dataset.variables:
        terms = _read_formula_terms(dataset.variables[bounds_name])
    a_name = terms.get("ap", terms.get("a", a.attrs.get("bounds")))
    b_name = terms.get("b", b.attrs.get("bounds"))
    if not {a_name, b_name} <= set(dataset.variables):
        return None
    a_bounds = dataset.variables[a_name]
    b_bounds = dataset.variables[b_name]
    if a_bounds.shape != (a.size, 2) or b_bounds.shape != a_bounds.shape:
        return None
    # In CF, bounds without units have the units of the coefficients.
    variable_with_units = a_bounds if "units" in a_bounds.attrs else a
    pa_per_unit = _find_pascals_per_unit(variable_with_units) if p0 is None else p0
    a_values = a_bounds.values.astype(np.float64) * pa_per_unit
    b_values = b_bounds.values.astype(np.float64)
    # Files list the two edges in any order; the upper edge has the lower pressure.
    order = np.argsort(a_values + b_values * MEAN_SURFACE_PA, axis=1)
    return np.take_along_axis(a_values, order, axis=1), np.take_along_axis(b_values, order, axis=1)


def _match_levels_to_table(table: HybridLevels, values: np.ndarray, coordinate: str, origin: str) -> np.ndarray:
    """Return the index of each level of a file in the table of all levels of the model, (levels of the file,) int64.

    Levels are matched by their values. If the values do not match, but the file has the same number of levels as the
    table and their values increase, the levels are assumed to be in the order of the table.

    Args:
        table: all levels of the model.
        values: values of the level coordinate in the file.
        coordinate: name of the level coordinate, for error messages.
        origin: name of the file, for error messages.

    Raises:
        DataError: if the levels do not match.
    """
    # Rows are the levels of the table, columns are the levels of the file.
    distance = np.abs(table.values[:, None] - values)
    if (distance.min(axis=0) <= _LEVEL_TOLERANCE * np.abs(values)).all():
        return distance.argmin(axis=0)
    if len(values) == len(table) and (np.diff(values) > 0).all():
        return np.arange(len(values))
    raise DataError(
        f"{origin}: {coordinate} has {len(values)} levels ({values.min():g} to {values.max():g}), but the coefficients "
        f"are for {len(table)} ({table.values[0]:g} to {table.values[-1]:g}); use coefficients of the same model levels"
    )


def _require_monotonic_pressure(levels: HybridLevels, origin: str) -> None:
    """Raise DataError if the pressures of the levels at mean surface pressure are not monotonic or not plausible."""
    pressure = levels.pressure(np.array(MEAN_SURFACE_PA))
    steps = np.diff(pressure)
    is_monotonic = (steps > 0).all() or (steps < 0).all()
    if not is_monotonic or pressure.min() <= 0.0 or pressure.max() > 1.1e5:
        raise DataError(
            f"{origin}: the coefficients give pressures from {pressure[0] / 100:g} to {pressure[-1] / 100:g} hPa that "
            "are not monotonic or not between 0 and 1100 hPa; check the units and the order of the coefficients"
        )
