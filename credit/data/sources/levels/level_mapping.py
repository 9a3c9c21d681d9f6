"""Vertical mapping: the levels of a run, and the rows or the interpolation by which source files give them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr

from credit.config.sections.data import DataConfig
from credit.data.formats.cf import match_levels
from credit.data.sources.levels.hybrid_coefficients import MEAN_SURFACE_PA, load_coefficients, read_levels
from credit.data.sources.required_variables import VariableRequest
from credit.errors import DataError
from credit.physics.vertical import Column, HybridLevels, interpolation_weights

_PASCAL = {"hPa": 100.0, "Pa": 1.0}
_ROUNDING = 1e-6


class LevelResolver:
    """Levels of a run, and the way from the levels of its sources to them.

    Args:
        conf: the data section.

    Attributes:
        paths: files with coefficients that the config names.

    Raises:
        DataError: if one of these files cannot be read.
    """

    def __init__(self, conf: DataConfig) -> None:
        self._conf = conf
        self.paths: list[Path] = []
        self._run_levels = self._load(conf.coefficients, "data.coefficients")
        self._source_levels = [
            self._load(source.vertical and source.vertical.coefficients, f"data.sources.{number}.vertical.coefficients")
            for number, source in enumerate(conf.sources)
        ]

    def _load(self, path: str | None, key: str) -> HybridLevels | None:
        if path is None:
            return None
        self.paths.append(Path(path))
        return load_coefficients(Path(path), key)

    def find_column(
        self, dataset: xr.Dataset, coordinate: str, request: VariableRequest, number: int, origin: str
    ) -> tuple[tuple[int, ...] | None, Column | None]:
        """Return the rows of a file to read for a variable, and their way to the levels of the run.

        The rows are None if levels are matched by value, and the way is None if nothing is computed from them.

        Args:
            dataset: the file.
            coordinate: its level coordinate.
            request: the variable.
            number: index of the source in ``data.sources``.
            origin: the file, for messages.

        Raises:
            DataError: for levels without coefficients, levels of the run above the uppermost level of the file, or too
                few levels for the derived variable.
        """
        conf = self._conf
        kind = conf.field(request.serves).derive
        vertical = conf.sources[number].vertical
        needs_ground = kind in ("geopotential", "mean_sea_level_pressure")
        if needs_ground and (vertical is None or vertical.surface_geopotential is None):
            raise DataError(
                f"data.variable_options.{request.serves}.derive: {kind} is computed on hybrid levels, from surface "
                f"pressure and the height of the ground; set both in data.sources.{number}.vertical"
            )
        needs_pressure = kind in ("relative_humidity", "relative_humidity_water")
        if vertical is None:
            return None, self._pressure_column(request, number) if needs_pressure else None
        is_interpolated = conf.level_units != "model_level" or self._run_levels is not None
        if not (is_interpolated or needs_ground or needs_pressure):
            return None, None
        levels = read_levels(dataset, coordinate, self._source_levels[number], origin)
        # From the top down, as interpolation and the integrals of derived variables need them.
        order = np.argsort(levels.pressure(np.array(MEAN_SURFACE_PA)), kind="stable")
        if needs_ground:
            require_full_column(levels.take(order), request.serves, request.name, origin)
        if request.levels is None:
            # A 2-D variable is taken from the lowest level.
            return (int(order[-1]),), Column(levels.take(order[-1:]), None)
        levels = levels.take(order)
        rows = tuple(order.tolist())
        if not is_interpolated:
            matched_rows = match_levels(levels.values, request.levels, request.name, "", origin)
            return rows, Column(levels, None, matched_rows)
        if len(levels) < 2:
            raise DataError(f"{origin}: {request.name} has only one level, but interpolation needs at least two")
        target_levels = self._find_target_levels(request)
        # Levels of the run above the file are reported now, not when the first field is read.
        try:
            interpolation_weights(levels, target_levels, np.array(MEAN_SURFACE_PA))
        except DataError as error:
            raise DataError(
                f"{origin}: {request.name}: {error}: data.levels or data.variable_options.{request.serves}.levels"
            ) from error
        return rows, Column(levels, target_levels)

    def _find_target_levels(self, request: VariableRequest) -> HybridLevels:
        """Return the levels of the run that a variable has."""
        if self._run_levels is None:
            return HybridLevels.of_pressures(request.levels, _PASCAL[self._conf.level_units])
        origin = f"data.coefficients: {self._conf.coefficients}"
        return self._run_levels.take(match_levels(self._run_levels.values, request.levels, request.serves, "", origin))

    def _pressure_column(self, request: VariableRequest, number: int) -> Column:
        """Return the column of a source that has the pressure levels of the run."""
        if self._conf.level_units == "model_level":
            raise DataError(
                f"data.variable_options.{request.serves}.derive: on model levels pressure must be known; set "
                f"data.sources.{number}.vertical"
            )
        levels = HybridLevels.of_pressures(request.levels, _PASCAL[self._conf.level_units])
        return Column(levels, None, tuple(range(len(levels))))


def require_full_column(levels: HybridLevels, derived: str, source: str, origin: str) -> None:
    """Stop if a column of hybrid levels does not reach the ground without a gap.

    Args:
        levels: the column, from the top down.
        derived: the variable that is derived from it, for messages.
        source: the variable that has these levels, for messages.
        origin: the file, for messages.

    Raises:
        DataError: if a layer is missing, or the edges of the layers are not known.
    """
    is_complete = levels.a_bounds is not None and abs(levels.b_bounds[-1, 1] - 1.0) < _ROUNDING
    if is_complete:
        # The lower edge of each layer must be the upper edge of the next.
        edges = np.stack([levels.a_bounds, levels.b_bounds])
        is_complete = np.allclose(edges[:, 1:, 0], edges[:, :-1, 1], rtol=1e-5, atol=1e-7)
    if not is_complete:
        raise DataError(
            f"{origin}: {derived} is derived from whole columns, but {source} has {len(levels)} levels "
            f"({levels.values[0]:g} to {levels.values[-1]:g}) without those down to the ground, or without "
            "coefficients of half levels (hyai and hybi, bounds, pv); add what is missing, or name a file with the "
            "coefficients: data.sources.N.vertical.coefficients"
        )
