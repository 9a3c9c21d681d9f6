"""Mapping from the levels of source files to the levels of the run, by selection or by interpolation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr

from credit.config.sections.data import DataConfig
from credit.data.formats.cf import match_levels
from credit.data.sources.levels.hybrid_coefficients import (
    MEAN_SURFACE_PA,
    PA_PER_LEVEL_UNIT,
    load_coefficients,
    read_levels,
)
from credit.data.sources.required_variables import VariableRequest
from credit.errors import DataError
from credit.physics.vertical import HybridLevels, LevelMapping, build_interpolator

# Tolerance for rounding errors of the coefficient b, which is 1 at the surface.
_ROUNDING = 1e-6


class LevelResolver:
    """Finder of the mapping from the levels of source files to the levels of the run.

    Args:
        conf: the ``data`` section of the config.

    Attributes:
        paths: paths of the files with coefficients of hybrid levels that the config names.

    Raises:
        DataError: if a file with coefficients cannot be read.
    """

    def __init__(self, conf: DataConfig) -> None:
        self._conf = conf
        self.paths: list[Path] = []
        self._run_levels = self._load_levels(conf.coefficients, "data.coefficients")
        # For each source, all levels of its model; None if the config names no file with coefficients.
        self._source_levels: list[HybridLevels | None] = []
        for source_number, source in enumerate(conf.sources):
            path = None
            if source.vertical is not None:
                path = source.vertical.coefficients
            self._source_levels.append(self._load_levels(path, f"data.sources.{source_number}.vertical.coefficients"))

    def _load_levels(self, path: str | None, key: str) -> HybridLevels | None:
        """Return the levels from a file with coefficients; None if `path` is None.

        Args:
            path: path of the file in the config; None if the config names no file.
            key: config key that names the file, for error messages.
        """
        if path is None:
            return None
        self.paths.append(Path(path))
        return load_coefficients(Path(path), key)

    def find_level_mapping(
        self, dataset: xr.Dataset, coordinate: str, request: VariableRequest, source_number: int, origin: str
    ) -> tuple[tuple[int, ...] | None, LevelMapping | None]:
        """Return the indices of the levels to read from a file, and their mapping to the levels of the run.

        Args:
            dataset: the open file.
            coordinate: name of the level coordinate in the file.
            request: the variable that the run needs.
            source_number: index of the source of the file in ``data.sources``.
            origin: name of the file, for error messages.

        Returns:
            The indices of the levels in the file, None if the caller must match the levels by value; and the mapping
            from the levels of the file to the levels of the run, None if nothing needs the mapping.

        Raises:
            DataError: if coefficients or levels are missing, or a level of the run is above all levels of the file.
        """
        kind = self._conf.options_of(request.target_variable).derive
        vertical = self._conf.sources[source_number].vertical
        needs_ground = kind in ("geopotential", "mean_sea_level_pressure")
        if needs_ground and (vertical is None or vertical.surface_geopotential is None):
            raise DataError(
                f"data.variable_options.{request.target_variable}.derive: {kind} is computed on hybrid levels, from "
                f"surface pressure and surface geopotential; set both in data.sources.{source_number}.vertical"
            )
        needs_pressure = kind in ("relative_humidity", "relative_humidity_water")
        # A source without `vertical` is on the levels of the run.
        if vertical is None:
            level_mapping = self._map_pressure_levels(request, source_number) if needs_pressure else None
            return None, level_mapping
        # Without coefficients, the pressure of the run's model levels is not known; levels are then matched by number.
        is_interpolated = self._conf.level_units != "model_level" or self._run_levels is not None
        if not (is_interpolated or needs_ground or needs_pressure):
            return None, None
        levels = read_levels(dataset, coordinate, self._source_levels[source_number], origin)
        # Interpolation and the integrals of derived variables need the levels from the top down.
        order = np.argsort(levels.pressure(np.array(MEAN_SURFACE_PA)), kind="stable")
        if needs_ground:
            require_full_column(levels.select(order), request.target_variable, request.name, origin)
        if request.levels is None:
            # A 2-D variable is computed from the lowest level.
            return (int(order[-1]),), LevelMapping(levels.select(order[-1:]), None)
        levels = levels.select(order)
        rows = tuple(order.tolist())
        if not is_interpolated:
            # The formula needs complete columns; the levels of the run are selected from its result.
            matched_rows = match_levels(levels.values, request.levels, request.name, "", origin)
            return rows, LevelMapping(levels, None, matched_rows)
        if len(levels) < 2:
            raise DataError(f"{origin}: {request.name} has one level, but interpolation needs two; name other files")
        target_levels = self._find_target_levels(request)
        # Levels of the run above the levels of the file are reported before the first field is read.
        try:
            build_interpolator(levels, target_levels, np.array(MEAN_SURFACE_PA))
        except DataError as error:
            key = f"data.variable_options.{request.target_variable}.levels"
            raise DataError(f"{origin}: {request.name}: {error}: data.levels or {key}") from error
        return rows, LevelMapping(levels, target_levels)

    def _find_target_levels(self, request: VariableRequest) -> HybridLevels:
        """Return the levels of a variable in the run; raise DataError if ``data.coefficients`` lacks a level."""
        run_levels = self._run_levels
        if run_levels is None:
            return HybridLevels.from_pressures(request.levels, PA_PER_LEVEL_UNIT[self._conf.level_units])
        origin = f"data.coefficients: {self._conf.coefficients}"
        rows = match_levels(run_levels.values, request.levels, request.target_variable, "", origin)
        return run_levels.select(rows)

    def _map_pressure_levels(self, request: VariableRequest, source_number: int) -> LevelMapping:
        """Return the mapping for a source that is already on the pressure levels of the run.

        The fields are not interpolated, but formulas need the pressure of the levels.

        Raises:
            DataError: if the run is on model levels, whose pressure is not known.
        """
        if self._conf.level_units == "model_level":
            raise DataError(
                f"data.variable_options.{request.target_variable}.derive: the pressure of model levels must be known; "
                f"set data.sources.{source_number}.vertical"
            )
        levels = HybridLevels.from_pressures(request.levels, PA_PER_LEVEL_UNIT[self._conf.level_units])
        return LevelMapping(levels, None, tuple(range(len(levels))))


def require_full_column(levels: HybridLevels, derived_variable: str, file_variable: str, origin: str) -> None:
    """Raise DataError if a column of hybrid levels has a gap or does not extend to the surface.

    Args:
        levels: the levels of the column, from the top down.
        derived_variable: name of the variable that is derived from the column, for error messages.
        file_variable: name of the variable in the file that is on these levels, for error messages.
        origin: name of the file, for error messages.

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
            f"{origin}: {derived_variable} is derived from complete columns, but {file_variable} has "
            f"{len(levels)} levels ({levels.values[0]:g} to {levels.values[-1]:g}) that do not extend to the ground, "
            "or have no coefficients of half levels (hyai and hybi, bounds, pv); add the levels or coefficients, or "
            "name a file with the coefficients: data.sources.N.vertical.coefficients"
        )
