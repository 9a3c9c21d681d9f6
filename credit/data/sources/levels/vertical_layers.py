"""Layers of air around the levels of a run, over which budgets are summed; the layers must fill complete columns.

On model levels with ``data.coefficients``, a layer extends from one half level to the next, and a column from the
uppermost half level to the surface. On pressure levels, a layer extends half way to the neighbouring levels, and a
column from pressure 0 to the surface. The part of a layer below the surface is ignored. K is the number of levels and
layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from credit.config.sections.data import DataConfig
from credit.data.sources.levels.hybrid_coefficients import MEAN_SURFACE_PA, PA_PER_LEVEL_UNIT, load_coefficients
from credit.errors import ConfigError

# Tolerance for rounding: absolute for coefficients, relative for levels.
_ROUNDING = 1e-6
# Pressure levels represent complete columns if at most a tenth of the air is above the uppermost level, the lowest
# level is near the surface, and adjacent levels are not far from each other.
_MAX_UPPERMOST_PA = 1e4
_MIN_LOWEST_PA = 1e5
_MAX_DISTANCE_PA = 2e4
# Largest number of levels that a message lists completely.
_MAX_SHOWN_LEVELS = 8
_ADVICE = "remove budgets from model.postprocess but keep clamp, or use data on levels of the complete column"


@dataclass(frozen=True, eq=False)
class VerticalLayers:
    """Vertical layers whose edges are at the pressure a + b * surface pressure.

    Attributes:
        levels: (K,) levels of the run, in the order and units of the config.
        a: (K, 2) float64, coefficient a at the upper and the lower edge of each layer, in Pa.
        b: (K, 2) float64, coefficient b at the upper and the lower edge of each layer, without unit.
        cut_by_ground: True if an edge may be below the surface (pressure levels); the layer then ends at the surface.
    """

    levels: tuple[float, ...]
    a: np.ndarray
    b: np.ndarray
    cut_by_ground: bool

    def to_dict(self) -> dict[str, object]:
        """Return the attributes as a JSON-serialisable dictionary, for checkpoints."""
        return {
            "levels": list(self.levels),
            "a": self.a.tolist(),
            "b": self.b.tolist(),
            "cut_by_ground": self.cut_by_ground,
        }

    @classmethod
    def from_dict(cls, data: Mapping) -> VerticalLayers:
        """Build the layers from a dictionary that `to_dict` returned."""
        a = np.asarray(data["a"], dtype=np.float64)
        b = np.asarray(data["b"], dtype=np.float64)
        return cls(tuple(data["levels"]), a, b, data["cut_by_ground"])


def build_layers(conf: DataConfig) -> VerticalLayers:
    """Return the layers around the levels of the run.

    Raises:
        ConfigError: if the layers do not fill complete columns, or if the layers are not known because
            ``data.coefficients`` is not set or has no half levels.
        DataError: if the file with coefficients cannot be read.
    """
    if conf.level_units == "model_level":
        return _build_layers_of_model_levels(conf)
    return _build_layers_of_pressure_levels(conf.levels, PA_PER_LEVEL_UNIT[conf.level_units], conf.level_units)


def _build_layers_of_model_levels(conf: DataConfig) -> VerticalLayers:
    """Return the layers between the half levels of ``data.coefficients``; for errors see `build_layers`."""
    if conf.coefficients is None:
        raise ConfigError(
            "model.postprocess: budgets are sums over complete columns, but the pressure of data.levels, which are "
            "model levels, is not known; set data.coefficients to a file with the coefficients of the half levels "
            "(netCDF, GRIB, or CSV with columns a and b)"
        )
    table = load_coefficients(Path(conf.coefficients), "data.coefficients")
    if table.a_bounds is None:
        raise ConfigError(
            f"data.coefficients: {conf.coefficients} has no half levels, which the budgets of model.postprocess need; "
            "name a file with hyai and hybi, or CSV with columns a and b of the half levels"
        )
    # From the top down, each layer must begin where the previous layer ends; the last layer must end at the surface.
    table = table.select(np.argsort(table.pressure(np.array(MEAN_SURFACE_PA)), kind="stable"))
    edges = np.stack([table.a_bounds / MEAN_SURFACE_PA, table.b_bounds])
    is_contiguous = np.allclose(edges[:, 1:, 0], edges[:, :-1, 1], rtol=0.0, atol=_ROUNDING)
    reaches_ground = np.allclose(edges[:, -1, 1], (0.0, 1.0), rtol=0.0, atol=_ROUNDING)
    if not is_contiguous or not reaches_ground:
        raise ConfigError(
            f"data.coefficients: the half levels of {conf.coefficients} have gaps or do not reach the ground (a = 0, "
            "b = 1), but the budgets of model.postprocess are sums over complete columns; name a file with all half "
            "levels"
        )
    # Table with the levels of the file (rows) and the levels of the run (columns), True where they are equal.
    levels = np.asarray(conf.levels)
    is_same_level = np.abs(table.values[:, None] - levels) <= _ROUNDING * levels
    # Every level of the file must be a level of the run, and every level of the run must be a level of the file.
    if not is_same_level.any(axis=1).all() or not is_same_level.any(axis=0).all():
        raise ConfigError(
            f"data.levels: {len(conf.levels)} levels, {_format_levels(conf.levels)}, are not the {len(table)} levels "
            f"of data.coefficients, {_format_levels(table.values)}, so the budgets of model.postprocess would miss a "
            f"part of the column; list all levels, name a file with the half levels between your levels, or {_ADVICE}"
        )
    rows = is_same_level.argmax(axis=0)
    return VerticalLayers(tuple(conf.levels), table.a_bounds[rows], table.b_bounds[rows], cut_by_ground=False)


def _build_layers_of_pressure_levels(levels: Sequence[float], pascals_per_unit: float, units: str) -> VerticalLayers:
    """Return the layers of pressure levels, whose edges are half way between neighbours.

    Args:
        levels: (K,) pressures of the levels, in any order.
        pascals_per_unit: number of Pa in a unit of `levels`.
        units: name of the unit, for error messages.

    Raises:
        ConfigError: if the levels are too few or too far apart to represent complete columns.
    """
    pressure = np.asarray(levels, dtype=np.float64) * pascals_per_unit
    order = np.argsort(pressure)
    downward_pressure = pressure[order]
    max_distance = np.inf
    if len(levels) > 1:
        max_distance = np.diff(downward_pressure).max()
    is_whole_column = (
        downward_pressure[0] <= _MAX_UPPERMOST_PA
        and downward_pressure[-1] >= _MIN_LOWEST_PA
        and max_distance <= _MAX_DISTANCE_PA
    )
    if not is_whole_column:
        raise ConfigError(
            f"data.levels: {_format_levels(levels)} {units} do not represent complete columns, over which the budgets "
            f"of model.postprocess are summed: the uppermost level must be at most "
            f"{_MAX_UPPERMOST_PA / pascals_per_unit:g} {units}, the lowest level at least "
            f"{_MIN_LOWEST_PA / pascals_per_unit:g}, and the distance between adjacent levels "
            f"at most {_MAX_DISTANCE_PA / pascals_per_unit:g}; {_ADVICE}"
        )
    # Column 0 has the upper edges, column 1 the lower edges. The uppermost edge is 0, the top of the atmosphere.
    middle = 0.5 * (downward_pressure[1:] + downward_pressure[:-1])
    a = np.zeros((len(levels), 2))
    a[1:, 0] = middle
    a[:-1, 1] = middle
    # The lower edge of the lowest layer is the surface.
    b = np.zeros((len(levels), 2))
    b[-1, 1] = 1.0
    # The layers are sorted into the order of the levels in the config.
    original_order = np.argsort(order)
    return VerticalLayers(tuple(levels), a[original_order], b[original_order], cut_by_ground=True)


def _format_levels(values: Sequence[float] | np.ndarray) -> str:
    """Return the levels as a string; if there are more than 8, only the first three and the last level are shown."""
    texts = [f"{value:g}" for value in values]
    if len(texts) <= _MAX_SHOWN_LEVELS:
        return ", ".join(texts)
    return f"{', '.join(texts[:3])} ... {texts[-1]}"
