"""Variables along time that are computed from others: interpolated from the levels of a file, or derived."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from credit.calendar import Calendar
from credit.config.sections.data import DataConfig
from credit.data.formats.cf import VariableLayout
from credit.data.formats.files import OpenFiles, file_key
from credit.data.formats.units import Conversion
from credit.data.sources.derived_variables import compute_derived, interpolation_kind
from credit.data.sources.required_variables import FIELD, SURFACE_GEOPOTENTIAL, SURFACE_PRESSURE
from credit.data.sources.series import VariableSeries, build_series, by_source, join_series, read_constant
from credit.data.sources.source_index import FileVariable, SourceIndex
from credit.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DerivedSeries(VariableSeries):
    """Variable whose fields are computed when they are read.

    Attributes:
        name: the variable.
        kind: the derived quantity; None for an interpolated variable.
        inputs: role -> series of another input, and (N,) index in it of each time.
        ground: geopotential of the ground (h, w); None if it is not known.
        ground_file: the file that it is read from.
    """

    name: str
    kind: str | None
    inputs: Mapping[str, tuple[VariableSeries, np.ndarray]]
    ground: np.ndarray | None
    ground_file: FileVariable | None

    def comes_from(self, keys: Collection[str]) -> np.ndarray:
        """Return for each time whether an input comes from one of the given files; see `VariableSeries.comes_from`."""
        is_given = super().comes_from(keys)
        for series, input_index in self.inputs.values():
            is_given = is_given | series.comes_from(keys)[input_index]
        if self.ground_file is not None and file_key(self.ground_file.path) in keys:
            is_given = np.ones_like(is_given)
        return is_given

    def read(self, files: OpenFiles, indices: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the fields (levels or 1, H, W), on the grid and levels of the run, at each of some indices in `times`.

        Raises:
            DataError: see `credit.data.sources.derived_variables.compute_derived`.
        """
        # Role -> iterator over the fields of this input, read in step with each other.
        fields_of_role = {FIELD: self.read_raw(files, indices)}
        for role, (series, input_index) in self.inputs.items():
            fields_of_role[role] = series.read_raw(files, input_index[indices])
        for index, *fields in zip(indices, *fields_of_role.values(), strict=True):
            file_variable = self.file_variables[self.file_index[index]]
            yield self._compute(file_variable, dict(zip(fields_of_role, fields, strict=True)))

    def _compute(self, file_variable: FileVariable, fields: dict[str, np.ndarray]) -> np.ndarray:
        """Return the fields of one time.

        Args:
            file_variable: the main input in its file.
            fields: role -> fields of this input.
        """
        layout = file_variable.layout
        if SURFACE_PRESSURE in fields:
            fields[SURFACE_PRESSURE] = fields[SURFACE_PRESSURE][0].astype(np.float64)
        if self.ground is not None:
            fields[SURFACE_GEOPOTENTIAL] = self.ground
        back = layout.to_si if self.kind is None and isinstance(layout.to_si, Conversion) else None
        quantity = interpolation_kind(self.name, layout.attributes.get("standard_name", ""))
        try:
            return layout.to_run(compute_derived(self.kind, quantity, layout.column, fields, back))
        except DataError as error:
            raise DataError(f"{file_variable.path}: {self.name}: {error}") from error


def is_derived(name: str, file_variables: list[FileVariable], conf: DataConfig) -> bool:
    """Return whether a variable is derived or interpolated, not read as it is in the files."""
    return conf.field(name).derive is not None or any(
        file_variable.layout.column is not None for file_variable in file_variables
    )


def build_variable(name: str, scan: SourceIndex, conf: DataConfig, files: OpenFiles) -> VariableSeries:
    """Build the series of a variable, which may come from several sources that follow each other in time.

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
    """Build the series of an interpolated or derived variable; its times are those of its main input.

    Args:
        name: the variable.
        main_variables: its main input in the files of one source.
        scan: contents of the sources.
        conf: the data section.
        files: opens the files.

    Raises:
        DataError: if an input is missing at a time, or is on another grid.
    """
    main = build_series(name, main_variables, files, scan.calendar, raw=True)
    number = main.file_variables[0].source
    first = main.file_variables[0].layout
    # Role -> variable of the inputs besides the main one, which is the first.
    roles = dict(list(conf.field(name).derived_from.items())[1:])
    variables_of_role = {role: scan.inputs[name, variable] for role, variable in roles.items()}
    vertical = conf.sources[number].vertical
    ground = None
    ground_file = None
    if vertical is not None and first.column is not None:
        roles[SURFACE_PRESSURE] = vertical.surface_pressure
        variables_of_role[SURFACE_PRESSURE] = scan.inputs["", vertical.surface_pressure]
        if vertical.surface_geopotential is not None:
            origin = _of_source(scan.inputs["", vertical.surface_geopotential], number)
            _require_grid(name, main.file_variables, origin[:1])
            ground_file = origin[0]
            ground = read_constant(files, vertical.surface_geopotential, ground_file, raw=True)[0].astype(np.float64)
    inputs = {}
    for role, input_variables in variables_of_role.items():
        parts = []
        for source_variables in by_source(_of_source(input_variables, number)):
            parts.append(build_series(roles[role], source_variables, files, scan.calendar, raw=True))
        series = join_series(roles[role], parts, scan.calendar)
        _require_grid(name, main.file_variables, series.file_variables)
        _require_levels(name, main.file_variables, series.file_variables)
        inputs[role] = series, _match_times(name, main, roles[role], series, scan.calendar)
    _log_interpolation(name, conf.field(name).derive, first)
    kind = conf.field(name).derive
    return DerivedSeries(
        main.file_variables, main.times, main.file_index, main.position, name, kind, inputs, ground, ground_file
    )


def _log_interpolation(name: str, kind: str | None, layout: VariableLayout) -> None:
    """Log how a variable is interpolated, and how it continues below the ground."""
    if layout.column is None or layout.column.target is None:
        return
    extrapolated = kind == "geopotential" or interpolation_kind(name, layout.attributes.get("standard_name", ""))
    below = "extrapolated" if extrapolated else "kept constant"
    logger.info("%s: from %d levels, linearly in ln p; %s below the lowest", name, len(layout.column.levels), below)


def _of_source(file_variables: list[FileVariable], number: int) -> list[FileVariable]:
    """Return the files of an input that are in the source of the main input, or all if there are none."""
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
    """Stop if two variables of one formula are not on the same levels."""
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


def _match_times(name: str, main: VariableSeries, role: str, series: VariableSeries, calendar: Calendar) -> np.ndarray:
    """Return the index in another input of each time of the main input."""
    index = np.searchsorted(series.times, main.times)
    is_present = series.times[np.minimum(index, len(series.times) - 1)] == main.times
    if not is_present.all():
        missing = np.flatnonzero(~is_present)
        raise DataError(
            f"{name} needs {role} at the same times, but {role} is not there at {len(missing)} of {len(main.times)}, "
            f"the first is {calendar.format(main.times[missing[0]])}; add the files that have it, or name only files "
            "with both"
        )
    return index
