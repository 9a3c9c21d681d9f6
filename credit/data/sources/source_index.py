"""Index of the source files: the variables that each has, and their layout, grid and times."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.config.sections.data import DataConfig, VariableOptions
from credit.data.error_collector import ErrorCollector
from credit.data.formats.cf import Coordinates, VariableLayout, is_vector_component, level_values, match_levels
from credit.data.formats.files import OpenFiles, expand_paths
from credit.data.formats.grib.dataset import ABSENT
from credit.data.formats.run_grid import load_grid
from credit.data.formats.unit_checks import build_rules, range_in_file_units, read_file_range, require_units
from credit.data.formats.units import find_conversion
from credit.data.sources.derived_variables import derived_attributes, interpolation_kind, si_conversion
from credit.data.sources.levels.level_mapping import LevelResolver
from credit.data.sources.required_variables import (
    FIELD,
    VariableRequest,
    describe_lack,
    find_names,
    find_unusable,
    list_required_variables,
    report_missing,
    variables_in_source,
)
from credit.data.sources.shared_coordinates import SharedCoordinates
from credit.errors import ConfigError, DataError
from credit.grid import LatLonGrid
from credit.physics.vertical import Column
from credit.utils.progress import ProgressBar

logger = logging.getLogger(__name__)

_KEPT_ATTRIBUTES = ("units", "standard_name", "long_name", "cell_methods")
_FILES_WITH_BAR = 50


@dataclass(frozen=True)
class FileVariable:
    """One variable in one file.

    Attributes:
        path: the file; a URL as text.
        source: number of its source in the config.
        layout: layout of the variable in the file.
        positions: indices in the file of the times in the period of the source; None if the file has no time.
    """

    path: Path | str
    source: int
    layout: VariableLayout
    positions: np.ndarray | None

    @property
    def times(self) -> np.ndarray | None:
        """Return the minutes of the times in the period of the source; None if the file has no time."""
        return None if self.positions is None else self.layout.times[self.positions]


@dataclass(frozen=True)
class SourceIndex:
    """Contents of the sources.

    Attributes:
        grid: grid of the run.
        calendar: calendar that all files share.
        file_variables: variable -> its files, in the order of the config; for a derived variable, those of its first
            input.
        inputs: (variable, input) -> files of the other inputs; the variable is empty for fields of the ground.
        files: files of each source.
        tables: files with coefficients of levels.
        idle: (source, file) -> why the file gives nothing, for files with none of the variables.
    """

    grid: LatLonGrid
    calendar: Calendar
    file_variables: dict[str, list[FileVariable]]
    inputs: dict[tuple[str, str], list[FileVariable]]
    files: list[list[Path | str]]
    tables: list[Path]
    idle: dict[tuple[int, Path | str], str]

    @property
    def paths(self) -> dict[Path | str, int]:
        """Return file -> number of the first source that has it."""
        first_source: dict[Path | str, int] = {}
        for number, files in enumerate(self.files):
            for path in files:
                first_source.setdefault(path, number)
        return first_source


def scan_sources(conf: DataConfig, files: OpenFiles, problems: ErrorCollector) -> SourceIndex | None:
    """Inspect all files of all sources.

    Args:
        conf: the data section.
        files: opens them.
        problems: receives the problems of each file.

    Returns:
        The index, which may be incomplete if there are problems; None without a grid or a time.
    """
    requests = list_required_variables(conf)
    grid = tables = None
    with problems.collect():
        grid = load_grid(conf.grid) if conf.grid is not None else None
        tables = LevelResolver(conf)
    if tables is None:
        return None
    shared = SharedCoordinates(grid)
    file_variables: dict[str, list[FileVariable]] = {request.serves: [] for request in requests if request.serves}
    inputs: dict[tuple[str, str], list[FileVariable]] = {(request.serves, request.name): [] for request in requests}
    files_of: list[list[Path | str]] = [[] for _ in conf.sources]
    idle: dict[tuple[int, Path | str], str] = {}
    present: list[set[str]] = [set() for _ in conf.sources]
    unusable: list[dict[str, str]] = [{} for _ in conf.sources]
    faulty: set[VariableRequest] = set()
    num_unread = 0
    for number, source in enumerate(conf.sources):
        with problems.collect():
            files_of[number] = expand_paths(source, f"data.sources.{number}")
        paths = files_of[number]
        if not paths:
            num_unread += 1
        offers = list(variables_in_source(source, requests))
        for path in ProgressBar(paths, "looking at files", unit="file", disable=len(paths) < _FILES_WITH_BAR or None):
            scanner = None
            with problems.collect():
                scanner = _FileScanner(path, files.get(path, number), number, conf, shared, tables)
            if scanner is None:
                num_unread += 1
                continue
            present[number] |= scanner.names
            unusable[number] |= scanner.unusable
            in_file = find_names(offers, scanner.names)
            if not in_file:
                idle[number, path] = describe_lack(offers, scanner.names)
            for request, name_in_file in in_file.items():
                # A problem in one file mostly is in all of them, so it is reported once.
                if request in faulty:
                    continue
                faulty.add(request)
                with problems.collect():
                    file_variable = scanner.file_variable(request, name_in_file)
                    of_want = (
                        file_variables[request.serves]
                        if request.role == FIELD
                        else inputs[request.serves, request.name]
                    )
                    of_want.append(file_variable)
                    faulty.discard(request)
    # A file that could not be read may have the variables that are missing.
    if not num_unread:
        report_missing(conf, requests, present, unusable, problems)
    if shared.calendar is None and not problems.messages:
        problems.add(
            f"no file of data.sources has a time axis (standard_name time), {files_of[0][0]} neither; prognostic "
            "variables need one: add it, for example with cdo settaxis,2000-01-01,00:00,6hour IN OUT"
        )
    if shared.grid is None or shared.calendar is None:
        return None
    return SourceIndex(shared.grid, shared.calendar, file_variables, inputs, files_of, tables.paths, idle)


class _FileScanner:
    """Inspection of one file."""

    def __init__(
        self,
        path: Path | str,
        dataset: xr.Dataset,
        number: int,
        conf: DataConfig,
        shared: SharedCoordinates,
        tables: LevelResolver,
    ) -> None:
        self.names = {str(name) for name, variable in dataset.variables.items() if variable.ndim >= 2}
        self._path = path
        self.unusable = find_unusable(dataset, number)
        self._where = str(path)
        self._dataset = dataset
        self._number = number
        self._conf = conf
        self._shared = shared
        self._tables = tables
        self._coordinates = Coordinates(dataset)
        self._decoded: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}

    def file_variable(self, request: VariableRequest, name_in_file: str) -> FileVariable:
        """Return a variable of the file, with its times in the period of the source at which it has all levels.

        Raises:
            DataError: see `layout`.
            ConfigError: for a period that ends before it begins.
        """
        layout = self.layout(request, name_in_file)
        if layout.times is None:
            return FileVariable(self._path, self._number, layout, None)
        is_used = np.ones(len(layout.times), dtype=bool)
        period = self._conf.sources[self._number].period
        key = f"data.sources.{self._number}.period"
        if period is not None:
            first = self._shared.calendar.parse(period[0], key)
            last = self._shared.calendar.parse_period_end(period[1], key)
            if last < first:
                raise ConfigError(f"{key}: {period[1]} is before {period[0]}; write [first, last]")
            is_used &= (layout.times >= first) & (layout.times <= last)
        absent = self._dataset.variables[name_in_file].encoding.get(ABSENT)
        if absent is not None and layout.level_rows is not None:
            # Only absence of the levels that are read matters.
            is_incomplete = is_used & absent[:, list(layout.level_rows)].any(axis=1)
            is_used &= ~is_incomplete
            if is_incomplete.any():
                first_time = self._shared.calendar.format(layout.times[is_incomplete][0])
                logger.warning(
                    "%s: %s lacks levels at %d of %d times, the first is %s; these times are left out",
                    *(self._where, request.name, is_incomplete.sum(), len(is_incomplete), first_time),
                )
        return FileVariable(self._path, self._number, layout, np.flatnonzero(is_used))

    def layout(self, request: VariableRequest, name_in_file: str) -> VariableLayout:
        """Return the layout of a variable in the file.

        Raises:
            DataError: for a missing level; a grid, a calendar or units that do not fit; unknown dimensions; levels
                without coefficients.
        """
        variable = self._dataset.variables[name_in_file]
        if variable.dtype.kind not in "biuf":
            raise DataError(
                f"{self._where}: {name_in_file} has values of type {variable.dtype}, not numbers; write numbers, "
                f"or name another variable (data.sources.N.rename: {{{request.name}: NAME}})"
            )
        dims = self._coordinates.roles(name_in_file, self._where, self._conf.level_units if request.levels else None)
        kind = self._conf.field(request.serves).derive
        is_field = request.role == FIELD
        # The options of a variable do not apply to its further inputs.
        field = self._conf.field(request.serves) if is_field else VariableOptions()
        attributes = {key: str(variable.attrs[key]) for key in _KEPT_ATTRIBUTES if key in variable.attrs}
        rows, column = self._rows(request, kind, dims)
        role = next(iter(field.derived_from), None) if is_field else request.role
        if role is None and column is not None:
            role = interpolation_kind(request.serves, attributes.get("standard_name", ""))
        # Temperature is the only quantity that must be in SI units to be interpolated.
        to_si = None
        if kind or not is_field or role == "temperature":
            to_si = si_conversion(role, name_in_file, attributes, self._where)
        attributes_in_file = attributes.copy()
        step = step_in_file = _packing_step(variable)
        if kind and is_field:
            # A derived variable has attributes of its own, and values that are not packed.
            attributes = derived_attributes(kind)
            step = 0.0
        vector = is_vector_component(field.vector, attributes.get("standard_name", ""))
        method = field.regrid or self._conf.regrid
        grid, orientation, regridder = self._shared.regridder(self._coordinates, dims, method, vector, self._where)
        times, window_bounds = self._times(dims)
        conversion = None
        if field.units is not None:
            conversion = find_conversion(attributes.get("units", ""), field.units, request.serves, self._where)
            attributes["units"] = field.units
            step *= abs(conversion.scale) if conversion else 1.0
        is_read = is_field and kind is None
        # A declared range means that the units are to be accepted as they are.
        if is_read and field.valid_range is None:
            require_units(request.serves, attributes_in_file, self._where)
        packing = (step_in_file, float(variable.encoding.get("add_offset", 0.0))) if step_in_file else None
        # xarray moves attributes that it has decoded to the encoding.
        declared = variable.encoding | variable.attrs
        has_fill_value = not declared.keys().isdisjoint(("_FillValue", "missing_value"))
        rules = build_rules(
            request.name,
            attributes_in_file,
            levels=request.levels if request.levels is not None and column is None else (None,),
            level_units=self._conf.level_units,
            packing=None if has_fill_value else packing,
            file_range=read_file_range(declared, packing),
            valid_range=range_in_file_units(field.valid_range, conversion) if is_read else None,
            has_options=is_read,
        )
        return VariableLayout(
            name=name_in_file,
            dims=dims,
            level_rows=rows,
            column=column,
            grid=grid,
            orientation=orientation,
            regridder=regridder,
            conversion=conversion,
            to_si=to_si,
            times=times,
            window_bounds=window_bounds,
            attributes=attributes,
            packing_step=step,
            chunk_times=variable.encoding.get("preferred_chunks", {}).get(dims.get("time"), 1),
            rules=rules,
            origin=f"{self._where}: {request.name}",
            calendar=self._shared.calendar,
        )

    def _rows(
        self, request: VariableRequest, kind: str | None, dims: dict[str, str]
    ) -> tuple[tuple[int, ...] | None, Column | None]:
        """Return the rows of the levels to read, and their interpolation to the run's levels (None if not needed)."""
        coordinates = self._coordinates
        lowest = kind == "mean_sea_level_pressure"
        if request.levels is None and not lowest:
            return self._rows_2d(request.name, dims, request.role == FIELD), None
        name = coordinates.of_dim[dims["level"]][1] if "level" in dims else coordinates.scalar.get("level")
        if name is None:
            advice = "" if kind else "; list it in vars_2D"
            raise DataError(f"{self._where}: {request.name} is in vars_3D but has no levels there{advice}")
        rows, column = self._tables.find_column(self._dataset, name, request, self._number, self._where)
        if rows is None:
            have = level_values(self._dataset.variables[name], name, self._conf.level_units, self._where)
            rows = match_levels(have, request.levels, request.name, self._conf.level_units, self._where)
        return rows, column

    def _rows_2d(self, name: str, dims: dict[str, str], is_field: bool) -> tuple[int, ...] | None:
        length = self._dataset.sizes[dims["level"]] if "level" in dims else 0
        if length > 1 and is_field:
            raise DataError(
                f"{self._where}: {name} is in vars_2D but lies on {length} levels there; list it in vars_3D"
            )
        if length > 1:
            raise DataError(f"{self._where}: {name} lies on {length} levels there, but it must have no levels")
        return (0,) if length else None

    def _times(self, dims: dict[str, str]) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the minutes of the times and of their bounds; a scalar time is the time of a single field."""
        coordinates = self._coordinates
        name = coordinates.of_dim[dims["time"]][1] if "time" in dims else coordinates.scalar.get("time")
        if name is None:
            return None, None
        if name not in self._decoded:
            coordinate = self._dataset.variables[name]
            times = self._shared.minutes(coordinate, np.atleast_1d(coordinate.values), self._where)
            bounds = coordinates.bounds(name)
            if bounds is not None:
                bounds = self._shared.minutes(coordinate, bounds, self._where).reshape(-1, 2)
            self._decoded[name] = times, bounds
        return self._decoded[name]


def _packing_step(variable: xr.Variable) -> float:
    """Return the step of packed integers in the units of the file, 0 if the variable is not packed."""
    is_packed = np.dtype(variable.encoding.get("dtype", float)).kind in "iu"
    return abs(float(variable.encoding.get("scale_factor", 0.0))) if is_packed else 0.0
