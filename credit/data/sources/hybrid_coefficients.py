"""Finds the coefficients of hybrid levels: in CF's formula_terms, CAM's and ECMWF's variables, GRIB's list, or a file.

| where | full levels | half levels |
|---|---|---|
| CF, ``atmosphere_hybrid_sigma_pressure_coordinate`` | ``formula_terms``: ap, b or a, b, p0 | those of the bounds |
| CAM, ECMWF in netCDF | ``hyam``, ``hybm`` (and ``P0`` where hyam is no pressure) | ``hyai``, ``hybi`` |
| GRIB, ECMWF's tables as CSV | means of the half levels | ``pv``; columns ``a`` (Pa) and ``b`` |
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import xarray as xr

from credit.config.schema_source import SourceConfig
from credit.data.formats.cf import PRESSURE_IN_HPA
from credit.data.formats.files import open_file
from credit.errors import DataError
from credit.physics.vertical import HybridLevels

_STANDARD_NAME = "atmosphere_hybrid_sigma_pressure_coordinate"
_PA_PER_HPA = 100.0
MEAN_SURFACE_PA = 101325.0
# no coefficient that is a fraction of p0 is larger; the largest of one in Pa is
_LARGEST_FRACTION = 1.5
_SAME_LEVEL = 1e-5


def read_levels(dataset: xr.Dataset, coordinate: str, table: HybridLevels | None, where: str) -> HybridLevels:
    """Return the levels of a file, hybrid or of pressure, in the order of its rows.

    Args:
        dataset: the file.
        coordinate: its level coordinate.
        table: all levels of the model, where the config names a file with them.
        where: the file, for messages.

    Raises:
        DataError: where there are no coefficients, or they do not fit the coordinate.
    """
    variable = dataset.variables[coordinate]
    values = np.atleast_1d(np.asarray(variable.values, dtype=np.float64))
    factor = PRESSURE_IN_HPA.get(str(variable.attrs.get("units", "")).strip().lower())
    row_by_row = False
    if table is None:
        # CAM says hPa of its hybrid levels, too, meaning their pressure over a surface at p0
        by_name = "hyam" in dataset.variables and dataset.variables["hyam"].dims == variable.dims
        if factor and variable.attrs.get("standard_name") != _STANDARD_NAME and not by_name:
            return HybridLevels.of_pressures(values, factor * _PA_PER_HPA)
        table, row_by_row = _find_table(dataset, coordinate, where)
    if table is None:
        raise DataError(
            f"{where}: the coefficients of its hybrid levels ({coordinate}) are lacking: neither formula_terms nor "
            "hyam and hybm (in GRIB: pv) are there; name a file with them: data.sources.N.vertical.coefficients"
        )
    if row_by_row:
        return table
    return table.take(_rows_in(table, values, coordinate, where))


def load_coefficients(path: Path, key: str) -> HybridLevels:
    """Return all levels of a model from a netCDF, GRIB or CSV file.

    Raises:
        DataError: if it cannot be read, or holds no coefficients; `key` of the config is named.
    """
    if not path.exists():
        raise DataError(f"{key}: {path} does not exist")
    if path.suffix.lower() == ".csv":
        return _read_csv(path, key)
    with open_file(path, SourceConfig(path=str(path))) as dataset:
        names = [str(name) for name, one in dataset.variables.items() if "formula_terms" in one.attrs and one.ndim == 1]
        table, _ = _find_table(dataset, next(iter(names), None), str(path))
    if table is None:
        raise DataError(f"{key}: {path} has no coefficients: neither formula_terms nor hyam and hybm or hyai and hybi")
    return table


def _read_csv(path: Path, key: str) -> HybridLevels:
    """Read half levels from the top down: columns whose names begin with a and b, others are passed over."""
    rule = f"{key}: {path} must have columns a (Pa) and b, with a number in every row"
    try:
        # spreadsheets begin with a byte order mark
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [[cell.strip().lower() for cell in row] for row in csv.reader(file) if row]
        if not rows:
            raise DataError(f"{rule}; it is empty")
        header = [name.split(" ")[0] for name in rows[0]]
        if not {"a", "b"} <= {*header}:
            raise DataError(f"{rule}; its columns are {', '.join(rows[0])}")
        a, b = (np.array([float(row[header.index(name)]) for row in rows[1:]]) for name in "ab")
    except (ValueError, IndexError, csv.Error) as error:
        raise DataError(f"{rule} ({error})") from error
    return _of_half(a, b, f"{key}: {path}")


def _find_table(dataset: xr.Dataset, coordinate: str | None, where: str) -> tuple[HybridLevels | None, bool]:
    """Return the levels that a file has coefficients of, and whether they are those of the coordinate, row by row."""
    level = None if coordinate is None else dataset.variables[coordinate]
    terms = {} if level is None else _terms(level)
    a_name, b_name = terms.get("ap", terms.get("a", "hyam")), terms.get("b", "hybm")
    half = _half_by_name(dataset, where)
    if not {a_name, b_name} <= set(dataset.variables):
        return half, False
    a, b = dataset.variables[a_name], dataset.variables[b_name]
    same = level is not None and a.dims == level.dims
    values = np.atleast_1d(level.values).astype(np.float64) if same else np.arange(1.0, a.size + 1)
    p0 = None if "ap" in terms else _reference(dataset, a, b, terms.get("p0", "P0"), values, where)
    factor = _pascal(a) if p0 is None else p0
    bounds = _bounds(dataset, level, a, b, p0) or ((half.a_bounds, half.b_bounds) if half else (None, None))
    if bounds[0] is not None and len(bounds[0]) != a.size:
        bounds = (None, None)
    found = HybridLevels(values, _numbers(a) * factor, _numbers(b), *bounds)
    _require_sane(found, where)
    return found, same


def _terms(variable: xr.Variable) -> dict[str, str]:
    """Return term -> variable of CF's formula_terms."""
    words = str(variable.attrs.get("formula_terms", "")).replace(":", " ").split()
    return dict(zip(words[::2], words[1::2], strict=False))


def _numbers(variable: xr.Variable) -> np.ndarray:
    return np.atleast_1d(np.asarray(variable.values, dtype=np.float64))


def _pascal(variable: xr.Variable) -> float:
    """Return how many Pa the unit of a variable is; Pa where it has none."""
    return PRESSURE_IN_HPA.get(str(variable.attrs.get("units", "")).strip().lower(), 1.0 / _PA_PER_HPA) * _PA_PER_HPA


def _reference(
    dataset: xr.Dataset, a: xr.Variable, b: xr.Variable, name: str, values: np.ndarray | None, where: str
) -> float | None:
    """Return p0 in Pa where the coefficients are fractions of it, None where they are pressures."""
    if (
        str(a.attrs.get("units", "")).strip().lower() in PRESSURE_IN_HPA
        or np.abs(_numbers(a)).max() > _LARGEST_FRACTION
    ):
        return None
    if name in dataset.variables:
        return float(dataset.variables[name].values) * _pascal(dataset.variables[name])
    # levels are called by their pressure in hPa over a surface at p0 = 1000 hPa
    if values is not None and np.allclose(values, 1000.0 * (_numbers(a) + _numbers(b)), rtol=1e-4):
        return 1e5
    raise DataError(f"{where}: its levels are in fractions of a pressure, but {name} is not there to say which; add it")


def _half_by_name(dataset: xr.Dataset, where: str) -> HybridLevels | None:
    """Return the levels between half levels; None where there are none of these, or not down to the ground."""
    if not {"hyai", "hybi"} <= set(dataset.variables):
        return None
    a, b = dataset.variables["hyai"], dataset.variables["hybi"]
    if a.size < 2 or not _reaches_ground(_numbers(a), _numbers(b)):
        return None
    values = dataset.variables["lev"].values if "lev" in dataset.variables else None
    middle = [xr.Variable(one.dims, 0.5 * (_numbers(one)[1:] + _numbers(one)[:-1]), one.attrs) for one in (a, b)]
    matches = values is not None and np.size(values) == a.size - 1
    p0 = _reference(dataset, *middle, "P0", np.atleast_1d(values) if matches else None, where)
    return _of_half(_numbers(a) * (_pascal(a) if p0 is None else p0), _numbers(b), where)


def _reaches_ground(a: np.ndarray, b: np.ndarray) -> bool:
    return a[-1] == 0.0 and b[-1] == 1.0


def _of_half(a: np.ndarray, b: np.ndarray, where: str) -> HybridLevels:
    """Return full levels, at the mean pressure of the half levels about them, numbered from 1 at the top."""
    if len(a) < 2 or not _reaches_ground(a, b):
        raise DataError(
            f"{where}: coefficients of half levels must run from the top to the ground, where a is 0 and b is 1"
        )
    bounds = [np.stack([one[:-1], one[1:]], axis=1) for one in (a, b)]
    found = HybridLevels(np.arange(1.0, len(a)), *(one.mean(axis=1) for one in bounds), *bounds)
    _require_sane(found, where)
    return found


def _bounds(
    dataset: xr.Dataset, level: xr.Variable | None, a: xr.Variable, b: xr.Variable, p0: float | None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the coefficients of the layers' edges (K, 2), upper first, where the file has bounds of CF."""
    edges = dataset.variables.get("" if level is None else str(level.attrs.get("bounds", "")))
    terms = {} if edges is None else _terms(edges)
    a_name = terms.get("ap", terms.get("a", a.attrs.get("bounds")))
    b_name = terms.get("b", b.attrs.get("bounds"))
    if not {a_name, b_name} <= set(dataset.variables):
        return None
    a_edges, b_edges = dataset.variables[a_name], dataset.variables[b_name]
    if a_edges.shape != (a.size, 2) or b_edges.shape != a_edges.shape:
        return None
    a_values = a_edges.values.astype(np.float64) * (
        _pascal(a_edges if "units" in a_edges.attrs else a) if p0 is None else p0
    )
    b_values = b_edges.values.astype(np.float64)
    order = np.argsort(a_values + b_values * MEAN_SURFACE_PA, axis=1)
    return np.take_along_axis(a_values, order, axis=1), np.take_along_axis(b_values, order, axis=1)


def _rows_in(table: HybridLevels, values: np.ndarray, coordinate: str, where: str) -> np.ndarray:
    """Return the place of each level of a file in a table: by its number or name, else one by one."""
    gap = np.abs(table.values[:, None] - values)
    if (gap.min(axis=0) <= _SAME_LEVEL * np.abs(values)).all():
        return gap.argmin(axis=0)
    if len(values) == len(table) and (np.diff(values) > 0).all():
        return np.arange(len(values))
    raise DataError(
        f"{where}: {coordinate} has {len(values)} levels ({values.min():g} to {values.max():g}), the coefficients are "
        f"of {len(table)} ({table.values[0]:g} to {table.values[-1]:g}); they do not belong together"
    )


def _require_sane(levels: HybridLevels, where: str) -> None:
    pressure = levels.pressure(np.array(MEAN_SURFACE_PA))
    steps = np.diff(pressure)
    if not ((steps > 0).all() or (steps < 0).all()) or pressure.min() <= 0.0 or pressure.max() > 1.1e5:
        raise DataError(
            f"{where}: the coefficients give pressures of {pressure[0] / 100:g} to {pressure[-1] / 100:g} hPa that do "
            "not rise from level to level; look at their units and order"
        )
