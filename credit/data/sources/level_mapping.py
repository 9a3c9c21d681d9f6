"""Which levels a run has, and how they are made of those of its sources."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr

from credit.config.schema_data import DataConfig
from credit.data.formats.cf import match_levels
from credit.data.sources.hybrid_coefficients import MEAN_SURFACE_PA, load_coefficients, read_levels
from credit.data.sources.required_variables import VariableRequest
from credit.errors import DataError
from credit.physics.vertical import Column, HybridLevels, interpolation_weights

_PASCAL = {"hPa": 100.0, "Pa": 1.0}
_ROUNDING = 1e-6


class LevelResolver:
    """Which levels a run has, and how they are made of those of its sources.

    Args:
        conf: the data section.

    Attributes:
        paths: the files with coefficients that the config names.

    Raises:
        DataError: if one of them cannot be read.
    """

    def __init__(self, conf: DataConfig) -> None:
        self._conf = conf
        self.paths: list[Path] = []
        self._of_run = self._load(conf.coefficients, "data.coefficients")
        self._of_source = [
            self._load(source.vertical and source.vertical.coefficients, f"data.sources.{number}.vertical.coefficients")
            for number, source in enumerate(conf.sources)
        ]

    def _load(self, path: str | None, key: str) -> HybridLevels | None:
        if path is None:
            return None
        self.paths.append(Path(path))
        return load_coefficients(Path(path), key)

    def find_column(
        self, dataset: xr.Dataset, coordinate: str, request: VariableRequest, number: int, where: str
    ) -> tuple[tuple[int, ...] | None, Column | None]:
        """Return the rows of a file that a variable is made of, and how; None where levels are matched by value.

        Args:
            dataset: the file.
            coordinate: its level coordinate.
            request: the variable.
            number: of the source.
            where: the file, for messages.

        Raises:
            DataError: for levels without coefficients, above the top, or not enough of them for what is derived.
        """
        conf, kind = self._conf, self._conf.field(request.serves).derive
        vertical = conf.sources[number].vertical
        needs_ground = kind in ("geopotential", "mean_sea_level_pressure")
        if needs_ground and (vertical is None or vertical.surface_geopotential is None):
            raise DataError(
                f"data.variable_options.{request.serves}.derive: {kind} is computed on hybrid levels, from surface "
                "pressure and "
                f"the height of the ground; set both in data.sources.{number}.vertical"
            )
        with_pressure = kind in ("relative_humidity", "relative_humidity_water")
        if vertical is None:
            return None, self._plain(request, number) if with_pressure else None
        interpolated = conf.level_units != "model_level" or self._of_run is not None
        if not (interpolated or needs_ground or with_pressure):
            return None, None
        levels = read_levels(dataset, coordinate, self._of_source[number], where)
        order = np.argsort(levels.pressure(np.array(MEAN_SURFACE_PA)), kind="stable")
        if needs_ground:
            require_full_column(levels.take(order), request.serves, request.name, where)
        if request.levels is None:
            return (int(order[-1]),), Column(levels.take(order[-1:]), None)
        levels = levels.take(order)
        rows = tuple(order.tolist())
        if not interpolated:
            return rows, Column(levels, None, match_levels(levels.values, request.levels, request.name, "", where))
        if len(levels) < 2:
            raise DataError(f"{where}: {request.name} has one level, between which nothing can be interpolated")
        wanted = self._wanted(request)
        try:
            interpolation_weights(levels, wanted, np.array(MEAN_SURFACE_PA))
        except DataError as error:
            raise DataError(
                f"{where}: {request.name}: {error}: data.levels or data.variable_options.{request.serves}.levels"
            ) from error
        return rows, Column(levels, wanted)

    def _wanted(self, request: VariableRequest) -> HybridLevels:
        """Return the run's levels of a variable."""
        if self._of_run is None:
            return HybridLevels.of_pressures(request.levels, _PASCAL[self._conf.level_units])
        where = f"data.coefficients: {self._conf.coefficients}"
        return self._of_run.take(match_levels(self._of_run.values, request.levels, request.serves, "", where))

    def _plain(self, request: VariableRequest, number: int) -> Column:
        """Return the run's levels where they are the source's, of pressure."""
        if self._conf.level_units == "model_level":
            raise DataError(
                f"data.variable_options.{request.serves}.derive: on model levels pressure must be known; set "
                f"data.sources.{number}.vertical"
            )
        levels = HybridLevels.of_pressures(request.levels, _PASCAL[self._conf.level_units])
        return Column(levels, None, tuple(range(len(levels))))


def require_full_column(levels: HybridLevels, derived: str, source: str, where: str) -> None:
    """Stop where a column of hybrid levels, of `source`, does not reach the ground without a gap.

    Raises:
        DataError: naming what is `derived` from it.
    """
    complete = levels.a_bounds is not None and abs(levels.b_bounds[-1, 1] - 1.0) < _ROUNDING
    if complete:
        edges = np.stack([levels.a_bounds, levels.b_bounds])
        complete = np.allclose(edges[:, 1:, 0], edges[:, :-1, 1], rtol=1e-5, atol=1e-7)
    if not complete:
        raise DataError(
            f"{where}: {derived} is derived from whole columns, but {source} has {len(levels)} levels "
            f"({levels.values[0]:g} to {levels.values[-1]:g}) without those down to the ground, or without "
            "coefficients of half levels (hyai and hybi, bounds, pv); add what is missing, or name a file with the "
            "coefficients: data.sources.N.vertical.coefficients"
        )
