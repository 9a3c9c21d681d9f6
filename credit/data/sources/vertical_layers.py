"""The layers of air about a run's levels, if they make up whole columns: what budgets are summed over.

On model levels with ``data.coefficients`` a layer reaches from half level to half level, and a column from the
uppermost half level to the ground. On pressure levels a layer reaches half way to its neighbours, and a column from 0
to the ground; what lies below the ground does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from credit.config.schema_data import DataConfig
from credit.data.sources.hybrid_coefficients import MEAN_SURFACE_PA, load_coefficients
from credit.errors import ConfigError

_PASCAL = {"hPa": 100.0, "Pa": 1.0}
_ROUNDING = 1e-6
# pressure levels that stand for whole columns: not more than a tenth of the air above the uppermost, the lowest about
# where the ground is, and none too far from the next
_UPPERMOST_PA, _LOWEST_PA, _WIDEST_PA = 1e4, 1e5, 2e4
_WAY_OUT = "take budgets out of model.postprocess, keeping clamp, or use data on levels of the whole column"


@dataclass(frozen=True, eq=False)
class VerticalLayers:
    """Layers whose edges lie at the pressure a + b * surface pressure.

    Attributes:
        levels: (K,) the run's levels, in their order.
        a: (K, 2) Pa, of the upper and the lower edge of each, float64.
        b: (K, 2).
        cut_by_ground: whether edges may lie below the ground, where the layer ends.
    """

    levels: tuple[float, ...]
    a: np.ndarray
    b: np.ndarray
    cut_by_ground: bool

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-ready description, for checkpoints."""
        return {
            "levels": list(self.levels), "a": self.a.tolist(), "b": self.b.tolist(),
            "cut_by_ground": self.cut_by_ground,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping) -> VerticalLayers:
        """Inverse of `to_dict`."""
        a, b = (np.asarray(data[name], dtype=np.float64) for name in ("a", "b"))
        return cls(tuple(data["levels"]), a, b, data["cut_by_ground"])


def build_layers(conf: DataConfig) -> VerticalLayers:
    """Return the layers of the run's levels.

    Raises:
        ConfigError: if they do not make up whole columns, or it is not known whether they do.
    """
    if conf.level_units == "model_level":
        return _of_coefficients(conf)
    return _of_pressures(conf.levels, _PASCAL[conf.level_units], conf.level_units)


def _of_coefficients(conf: DataConfig) -> VerticalLayers:
    if conf.coefficients is None:
        raise ConfigError(
            "model.postprocess: budgets are sums over whole columns, and of data.levels, which are model levels, the "
            "pressure "
            "is not known; set data.coefficients to a file with the coefficients of the half levels (netCDF, GRIB, or "
            "CSV with columns a and b)"
        )
    table = load_coefficients(Path(conf.coefficients), "data.coefficients")
    if table.a_bounds is None:
        raise ConfigError(
            f"data.coefficients: {conf.coefficients} has no half levels, between which the budgets of "
            "model.postprocess are "
            "summed; name a file with hyai and hybi, or CSV with columns a and b of the half levels"
        )
    table = table.take(np.argsort(table.pressure(np.array(MEAN_SURFACE_PA)), kind="stable"))
    edges = np.stack([table.a_bounds / MEAN_SURFACE_PA, table.b_bounds])
    joined = np.allclose(edges[:, 1:, 0], edges[:, :-1, 1], rtol=0.0, atol=_ROUNDING)
    if not joined or not np.allclose(edges[:, -1, 1], (0.0, 1.0), rtol=0.0, atol=_ROUNDING):
        raise ConfigError(
            f"data.coefficients: the half levels of {conf.coefficients} have gaps or do not reach the ground (a 0, b "
            "1), and the budgets of model.postprocess are sums over whole columns; name a file with all half levels"
        )
    near = np.abs(table.values[:, None] - np.asarray(conf.levels)) <= _ROUNDING * np.asarray(conf.levels)
    lacking = table.values[~near.any(axis=1)]
    if len(lacking) or not near.any(axis=0).all():
        raise ConfigError(
            f"data.levels: {len(conf.levels)} levels, {_in_words(conf.levels)}, are not the {len(table)} levels of "
            f"data.coefficients, {_in_words(table.values)}, so the budgets of model.postprocess would miss a part of "
            f"the column; list all, name a file with the half levels between yours, or {_WAY_OUT}"
        )
    rows = near.argmax(axis=0)
    return VerticalLayers(tuple(conf.levels), table.a_bounds[rows], table.b_bounds[rows], cut_by_ground=False)


def _of_pressures(levels: Sequence[float], pascal: float, units: str) -> VerticalLayers:
    pressure = np.asarray(levels, dtype=np.float64) * pascal
    order = np.argsort(pressure)
    down = pressure[order]
    widest = np.diff(down).max() if len(down) > 1 else np.inf
    if down[0] > _UPPERMOST_PA or down[-1] < _LOWEST_PA or widest > _WIDEST_PA:
        raise ConfigError(
            f"data.levels: {_in_words(levels)} {units} do not stand for whole columns, over which the budgets of "
            f"model.postprocess are summed: the uppermost must be at most {_UPPERMOST_PA / pascal:g} {units}, the "
            "lowest at "
            f"least {_LOWEST_PA / pascal:g}, and two neighbours at most {_WIDEST_PA / pascal:g} apart; {_WAY_OUT}"
        )
    middle = 0.5 * (down[1:] + down[:-1])
    a, b = np.zeros((len(down), 2)), np.zeros((len(down), 2))
    a[1:, 0], a[:-1, 1], b[-1, 1] = middle, middle, 1.0
    back = np.argsort(order)
    return VerticalLayers(tuple(levels), a[back], b[back], cut_by_ground=True)


def _in_words(values: Sequence[float] | np.ndarray) -> str:
    """Return levels in words, the first and last of many."""
    shown = [f"{value:g}" for value in values]
    return ", ".join(shown) if len(shown) <= 8 else f"{', '.join(shown[:3])} ... {shown[-1]}"
