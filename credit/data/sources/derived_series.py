"""A variable along time that is made of others: interpolated from a file's levels, or derived."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from credit.calendar import Calendar
from credit.config.schema_data import DataConfig
from credit.data.formats.cf import VariableLayout
from credit.data.formats.files import OpenFiles, file_key
from credit.data.formats.units import Conversion
from credit.data.sources.derived_variables import interpolation_kind, make
from credit.data.sources.required_variables import FIELD, SURFACE_GEOPOTENTIAL, SURFACE_PRESSURE
from credit.data.sources.series import VariableSeries, build_series, by_source, join_series, read_constant
from credit.data.sources.source_index import FileVariable, SourceIndex
from credit.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DerivedSeries(VariableSeries):
    """A variable whose fields are made when they are read.

    Attributes:
        name: the variable.
        kind: what is derived; None for an interpolated variable.
        inputs: role -> what is read beside, and the place of each of our times in it.
        ground: geopotential of the ground (h, w), where it is known.
        ground_file: where it is read from.
    """

    name: str
    kind: str | None
    inputs: Mapping[str, tuple[VariableSeries, np.ndarray]]
    ground: np.ndarray | None
    ground_file: FileVariable | None

    def comes_from(self, keys: Collection[str]) -> np.ndarray:
        """Return for each time whether it is made of one of some files; see `VariableSeries.comes_from`."""
        touched = super().comes_from(keys)
        for series, theirs in self.inputs.values():
            touched = touched | series.comes_from(keys)[theirs]
        if self.ground_file is not None and file_key(self.ground_file.path) in keys:
            touched = np.ones_like(touched)
        return touched

    def read(self, files: OpenFiles, places: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the fields of each of `places`, (levels or 1, H, W), on the run's grid and levels.

        Raises:
            DataError: see `credit.data.sources.derived_variables.make`.
        """
        parts = {FIELD: self.read_raw(files, places)}
        for role, (series, theirs) in self.inputs.items():
            parts[role] = series.read_raw(files, theirs[places])
        for place, *fields in zip(places, *parts.values(), strict=True):
            yield self._make(self.file_variables[self.file_index[place]], dict(zip(parts, fields, strict=True)))

    def _make(self, file_variable: FileVariable, fields: dict[str, np.ndarray]) -> np.ndarray:
        """Return the fields of one time.

        Args:
            file_variable: the main input in its file.
            fields: role -> what was read of it.
        """
        layout = file_variable.layout
        if SURFACE_PRESSURE in fields:
            fields[SURFACE_PRESSURE] = fields[SURFACE_PRESSURE][0].astype(np.float64)
        if self.ground is not None:
            fields[SURFACE_GEOPOTENTIAL] = self.ground
        back = layout.to_si if self.kind is None and isinstance(layout.to_si, Conversion) else None
        quantity = interpolation_kind(self.name, layout.attributes.get("standard_name", ""))
        try:
            return layout.to_run(make(self.kind, quantity, layout.column, fields, back))
        except DataError as error:
            raise DataError(f"{file_variable.path}: {self.name}: {error}") from error


def is_derived(name: str, file_variables: list[FileVariable], conf: DataConfig) -> bool:
    """Whether a variable is made of others, not read as it is."""
    return conf.field(name).derive is not None or any(
        file_variable.layout.column is not None for file_variable in file_variables
    )


def build_variable(name: str, scan: SourceIndex, conf: DataConfig, files: OpenFiles) -> VariableSeries:
    """Put the times of a variable together, which may come from several sources that follow each other.

    Raises:
        DataError: for a time in two sources; else see `build_series` and `build_derived`.
    """
    parts: list[VariableSeries] = []
    for file_variables in by_source(scan.file_variables[name]):
        if is_derived(name, file_variables, conf):
            parts.append(build_derived(name, file_variables, scan, conf, files))
        else:
            parts.append(build_series(name, file_variables, files, scan.calendar))
    return join_series(name, parts, scan.calendar)


def build_derived(
    name: str, main_variables: list[FileVariable], scan: SourceIndex, conf: DataConfig, files: OpenFiles
) -> DerivedSeries:
    """Put a variable together that is interpolated or derived; its times are those of its main input.

    Args:
        name: the variable.
        main_variables: the files of its main input, of one source.
        scan: what the sources hold.
        conf: the data section.
        files: opens the files.

    Raises:
        DataError: where an input is lacking at a time, or is on another grid.
    """
    main = build_series(name, main_variables, files, scan.calendar, raw=True)
    number, first = main.file_variables[0].source, main.file_variables[0].layout
    roles = dict(list(conf.field(name).derived_from.items())[1:])
    file_variables = {role: scan.inputs[name, variable] for role, variable in roles.items()}
    vertical, ground, ground_file = conf.sources[number].vertical, None, None
    if vertical is not None and first.column is not None:
        roles[SURFACE_PRESSURE] = vertical.surface_pressure
        file_variables[SURFACE_PRESSURE] = scan.inputs["", vertical.surface_pressure]
        if vertical.surface_geopotential is not None:
            origin = _of_source(scan.inputs["", vertical.surface_geopotential], number)
            _require_grid(name, main.file_variables, origin[:1])
            ground_file = origin[0]
            ground = read_constant(files, vertical.surface_geopotential, ground_file, raw=True)[0].astype(np.float64)
    inputs = {}
    for role, found in file_variables.items():
        parts = by_source(_of_source(found, number))
        parts = [
            build_series(roles[role], source_variables, files, scan.calendar, raw=True) for source_variables in parts
        ]
        series = join_series(roles[role], parts, scan.calendar)
        _require_grid(name, main.file_variables, series.file_variables)
        _require_levels(name, main.file_variables, series.file_variables)
        inputs[role] = series, _match(name, main, roles[role], series, scan.calendar)
    _say(name, conf.field(name).derive, first)
    kind = conf.field(name).derive
    return DerivedSeries(
        main.file_variables, main.times, main.file_index, main.position, name, kind, inputs, ground, ground_file
    )


def _say(name: str, kind: str | None, layout: VariableLayout) -> None:
    """Log what is done to a variable, below the ground above all."""
    if layout.column is None or layout.column.wanted is None:
        return
    extrapolated = kind == "geopotential" or interpolation_kind(name, layout.attributes.get("standard_name", ""))
    below = "extrapolated" if extrapolated else "held"
    logger.info("%s: from %d levels, linearly in ln p; %s below the lowest", name, len(layout.column.levels), below)


def _of_source(file_variables: list[FileVariable], number: int) -> list[FileVariable]:
    """Return the files of an input that are in the source of the main one, else all."""
    return [file_variable for file_variable in file_variables if file_variable.source == number] or file_variables


def _require_grid(name: str, main: list[FileVariable], others: list[FileVariable]) -> None:
    for file_variable in (*main, *others):
        difference = main[0].layout.grid.describe_mismatch(file_variable.layout.grid)
        if difference:
            raise DataError(
                f"{name} is made of what is in {main[0].path} and {file_variable.path}, which are on different grids: "
                f"{difference}; bring them to one"
            )


def _require_levels(name: str, main: list[FileVariable], others: list[FileVariable]) -> None:
    """Stop where two variables of one formula do not lie on the same levels."""
    columns = [file_variable.layout.column for file_variable in others]
    if None in columns:
        return
    first = main[0].layout.column.levels
    for file_variable in (*main, *others):
        levels = file_variable.layout.column.levels
        if len(levels) != len(first) or not np.allclose([levels.a, levels.b], [first.a, first.b], rtol=1e-6):
            raise DataError(
                f"{name} is made of what is on {len(first)} levels in {main[0].path} and on {len(levels)} others in "
                f"{file_variable.path} ({file_variable.layout.name}); all must be on the same"
            )


def _match(name: str, main: VariableSeries, role: str, series: VariableSeries, calendar: Calendar) -> np.ndarray:
    """Return the place of each time of the main input in another one."""
    places = np.searchsorted(series.times, main.times)
    there = series.times[np.minimum(places, len(series.times) - 1)] == main.times
    if not there.all():
        lacking = np.flatnonzero(~there)
        raise DataError(
            f"{name} needs {role} at the same times, but {role} is not there at {len(lacking)} of {len(there)}, the "
            f"first is {calendar.format(main.times[lacking[0]])}; add the files that have it, or name only files with "
            "both"
        )
    return places
