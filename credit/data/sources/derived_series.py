"""Time series of variables that are interpolated vertically or derived from other variables when they are read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from credit.calendar import Calendar
from credit.config.sections.data import DataConfig
from credit.data.error_collector import ErrorCollector
from credit.data.formats.files import OpenFiles, build_file_key
from credit.data.formats.units import Conversion
from credit.data.formats.variable_layout import VariableLayout
from credit.data.sources.derived_variables import compute_derived, find_extrapolated_quantity
from credit.data.sources.file_scanner import FileVariable
from credit.data.sources.reading.file_reads import read_static_variable
from credit.data.sources.required_variables import FIELD, SURFACE_GEOPOTENTIAL, SURFACE_PRESSURE
from credit.data.sources.series import VariableSeries, build_series, group_by_source, join_series
from credit.data.sources.source_index import SourceIndex
from credit.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DerivedSeries(VariableSeries):
    """Time series of a variable that is interpolated vertically or derived from several inputs when it is read.

    The main input is the variable that is interpolated, or the first input of the formula. The attributes of the base
    class describe the main input. Letters of shapes: N times, K levels of the file, h and w rows and columns of the
    grid of the file.

    Attributes:
        name: name of the variable in the run.
        kind: the derived quantity (``data.variable_options.NAME.derive``); None for an interpolated variable.
        inputs: mapping from the role in the formula to a pair, for each input except the main input. The pair is the
            series of the input, and the (N,) indices in this series of the times of the main input.
        surface_geopotential: (h, w) float64 surface geopotential in m2 s-2; None if it is not known.
        surface_geopotential_file: file from which `surface_geopotential` was read; None if it is not known.
    """

    name: str
    kind: str | None
    inputs: Mapping[str, tuple[VariableSeries, np.ndarray]]
    surface_geopotential: np.ndarray | None
    surface_geopotential_file: FileVariable | None

    def is_from_files(self, keys: Collection[str]) -> np.ndarray:
        """Return (N,) bool, True at the times at which any input is read from one of the given files.

        Args:
            keys: keys of the files, see `credit.data.formats.files.build_file_key`.
        """
        is_affected = super().is_from_files(keys)
        for series, input_index in self.inputs.values():
            is_affected = is_affected | series.is_from_files(keys)[input_index]
        # The height of the surface is an input at every time.
        if self.surface_geopotential_file is not None and build_file_key(self.surface_geopotential_file.path) in keys:
            is_affected = np.ones_like(is_affected)
        return is_affected

    def read(self, files: OpenFiles, indices: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the computed fields at each time, (levels or 1, H, W) float32 on the grid and levels of the run.

        Args:
            files: cache that opens the files.
            indices: increasing indices in `times`.

        Raises:
            DataError: see `credit.data.sources.derived_variables.compute_derived`.
        """
        # There is one iterator over the fields of each input; all iterators advance together by one time.
        fields_of_role = {FIELD: self.read_on_file_grid(files, indices)}
        for role, (series, input_index) in self.inputs.items():
            fields_of_role[role] = series.read_on_file_grid(files, input_index[indices])
        for index, *fields in zip(indices, *fields_of_role.values(), strict=True):
            file_variable = self.file_variables[self.file_index[index]]
            fields_at_time = dict(zip(fields_of_role, fields, strict=True))
            yield self._compute(file_variable, fields_at_time)

    def _compute(self, file_variable: FileVariable, fields: dict[str, np.ndarray]) -> np.ndarray:
        """Return the computed fields of one time, (levels or 1, H, W) float32 on the grid and levels of the run.

        Args:
            file_variable: the main input in its file.
            fields: mapping from the role of each input to its fields, (K, h, w) in SI units on the grid of the file.
        """
        layout = file_variable.layout
        if SURFACE_PRESSURE in fields:
            # The level axis has length 1. Pressures are computed in float64.
            fields[SURFACE_PRESSURE] = fields[SURFACE_PRESSURE][0].astype(np.float64)
        if self.surface_geopotential is not None:
            fields[SURFACE_GEOPOTENTIAL] = self.surface_geopotential
        # An interpolated variable is converted back to the units of its file, which `regrid_and_convert` expects.
        si_conversion = None
        if self.kind is None and isinstance(layout.si_conversion, Conversion):
            si_conversion = layout.si_conversion
        quantity = find_extrapolated_quantity(self.name, layout.attributes.get("standard_name", ""))
        try:
            derived = compute_derived(self.kind, quantity, layout.level_mapping, fields, si_conversion)
            return layout.regrid_and_convert(derived)
        except DataError as error:
            raise DataError(f"{file_variable.path}: {self.name}: {error}") from error


def report_interpolated_static(
    name: str, file_variables: Sequence[FileVariable], conf: DataConfig, problems: ErrorCollector
) -> None:
    """Add a problem if a static variable would be interpolated vertically, because such a field varies in time.

    Args:
        name: name of the variable.
        file_variables: the variable in each of its files.
        conf: the ``data`` section of the config.
        problems: collector of the problems.
    """
    if is_derived(name, file_variables, conf):
        problems.add(
            f"{name} is static and on levels, and its source has vertical, but interpolated fields vary in time; list "
            f"{name} under dynamic_forcing"
        )


def is_derived(name: str, file_variables: list[FileVariable], conf: DataConfig) -> bool:
    """Return True if a variable is derived or interpolated vertically, False if it is read without a formula.

    Args:
        name: name of the variable.
        file_variables: the variable (or its main input) in each of its files.
        conf: the ``data`` section of the config.
    """
    has_level_mapping = any(file_variable.layout.level_mapping is not None for file_variable in file_variables)
    return conf.options_of(name).derive is not None or has_level_mapping


def build_variable_series(name: str, source_index: SourceIndex, conf: DataConfig, files: OpenFiles) -> VariableSeries:
    """Build the time series of a variable; several sources that follow each other in time are joined.

    Args:
        name: name of the variable.
        source_index: contents of the sources.
        conf: the ``data`` section of the config.
        files: cache that opens the files.

    Raises:
        SourceOverlapError: if two sources have the variable at the same time.
        DataError: see `build_series` and `build_derived_series`.
    """
    series_of_sources: list[VariableSeries] = []
    for file_variables in group_by_source(source_index.file_variables[name]):
        if is_derived(name, file_variables, conf):
            series_of_sources.append(build_derived_series(name, file_variables, source_index, conf, files))
        else:
            series_of_sources.append(build_series(name, file_variables, files, source_index.calendar))
    return join_series(name, series_of_sources, source_index.calendar)


def build_derived_series(
    name: str, main_variables: list[FileVariable], source_index: SourceIndex, conf: DataConfig, files: OpenFiles
) -> DerivedSeries:
    """Build the time series of an interpolated or derived variable, at the times of its main input.

    Args:
        name: name of the variable.
        main_variables: the main input in each of its files, all of one source.
        source_index: contents of the sources.
        conf: the ``data`` section of the config.
        files: cache that opens the files.

    Raises:
        DataError: if an input is missing at a time, or its grid or levels differ from those of the main input.
    """
    calendar = source_index.calendar
    kind = conf.options_of(name).derive
    main = build_series(name, main_variables, files, calendar, on_file_grid=True)
    source_number = main.file_variables[0].source_number
    first_layout = main.file_variables[0].layout
    # Mapping from the role to the name of each input, without the first input, which is the main input.
    roles = dict(list(conf.options_of(name).derived_from.items())[1:])
    variables_of_role = {role: source_index.inputs[name, variable] for role, variable in roles.items()}
    # On hybrid levels, surface pressure is an additional input, and the height of the surface is read once.
    vertical = conf.sources[source_number].vertical
    surface_geopotential = None
    surface_geopotential_file = None
    if vertical is not None and first_layout.level_mapping is not None:
        roles[SURFACE_PRESSURE] = vertical.surface_pressure
        variables_of_role[SURFACE_PRESSURE] = source_index.inputs["", vertical.surface_pressure]
        surface_name = vertical.surface_geopotential
        if surface_name is not None:
            surface_geopotential_file = _prefer_source(source_index.inputs["", surface_name], source_number)[0]
            _require_same_grid(name, main.file_variables, [surface_geopotential_file])
            surface_fields = read_static_variable(files, surface_name, surface_geopotential_file, on_file_grid=True)
            surface_geopotential = surface_fields[0].astype(np.float64)
    # Each additional input has a separate series, which must have all times of the main input.
    inputs = {}
    for role, input_variables in variables_of_role.items():
        input_name = roles[role]
        series_of_sources = []
        for source_variables in group_by_source(_prefer_source(input_variables, source_number)):
            series_of_sources.append(build_series(input_name, source_variables, files, calendar, on_file_grid=True))
        series = join_series(input_name, series_of_sources, calendar)
        _require_same_grid(name, main.file_variables, series.file_variables)
        _require_same_levels(name, main.file_variables, series.file_variables)
        inputs[role] = series, _match_times(name, main, input_name, series, calendar)
    _log_interpolation(name, kind, first_layout)
    return DerivedSeries(
        main.file_variables,
        main.times,
        main.file_index,
        main.position,
        name,
        kind,
        inputs,
        surface_geopotential,
        surface_geopotential_file,
    )


def _log_interpolation(name: str, kind: str | None, layout: VariableLayout) -> None:
    """Log the method of vertical interpolation of a variable, and of extrapolation below the lowest level."""
    mapping = layout.level_mapping
    if mapping is None or mapping.target_levels is None:
        return
    below = "kept constant"
    if kind == "geopotential" or find_extrapolated_quantity(name, layout.attributes.get("standard_name", "")):
        below = "extrapolated"
    logger.info(
        "%s: interpolated linearly in ln p from %d levels; %s below the lowest level", name, len(mapping.levels), below
    )


def _prefer_source(file_variables: list[FileVariable], source_number: int) -> list[FileVariable]:
    """Return the files of an input that belong to a source, or all files of the input if none belongs to it."""
    in_source = [file_variable for file_variable in file_variables if file_variable.source_number == source_number]
    return in_source or file_variables


def _require_same_grid(name: str, main: list[FileVariable], others: list[FileVariable]) -> None:
    """Raise DataError if the files of the inputs of a variable are not all on the same grid.

    Args:
        name: name of the variable.
        main: the main input in each of its files.
        others: a different input in each of its files.
    """
    for file_variable in (*main, *others):
        difference = main[0].layout.grid.describe_mismatch(file_variable.layout.grid)
        if difference:
            raise DataError(
                f"{name}: its inputs in {main[0].path} and {file_variable.path} are on different grids: "
                f"{difference}; regrid one of the files"
            )


def _require_same_levels(name: str, main: list[FileVariable], others: list[FileVariable]) -> None:
    """Raise DataError if two inputs of a formula are not on the same levels; for arguments see `_require_same_grid`."""
    # An input at the surface has no levels.
    if any(file_variable.layout.level_mapping is None for file_variable in others):
        return
    first = main[0].layout.level_mapping.levels
    for file_variable in (*main, *others):
        levels = file_variable.layout.level_mapping.levels
        if len(levels) != len(first) or not np.allclose([levels.a, levels.b], [first.a, first.b], rtol=1e-6):
            raise DataError(
                f"{name}: its inputs are on {len(first)} levels in {main[0].path} and on {len(levels)} different "
                f"levels in {file_variable.path} ({file_variable.layout.name}); they must be on the same levels"
            )


def _match_times(
    name: str, main: VariableSeries, input_name: str, series: VariableSeries, calendar: Calendar
) -> np.ndarray:
    """Return the index of each time of the main input in the series of an additional input, (N,) int64.

    Args:
        name: name of the derived variable.
        main: series of the main input.
        input_name: name of the additional input.
        series: series of the additional input.
        calendar: calendar of the times, for error messages.

    Raises:
        DataError: if the additional input does not have all times of the main input.
    """
    index = np.searchsorted(series.times, main.times)
    # A time after the last time of the series has no index in it, so the time is compared with the last time.
    is_present = series.times[np.minimum(index, len(series.times) - 1)] == main.times
    if not is_present.all():
        missing = np.flatnonzero(~is_present)
        raise DataError(
            f"{name} needs {input_name} at the same times, but {input_name} is missing at {len(missing)} of "
            f"{len(main.times)} times, the first is {calendar.format(main.times[missing[0]])}; add the files with "
            f"{input_name}, or name only files with both variables"
        )
    return index
