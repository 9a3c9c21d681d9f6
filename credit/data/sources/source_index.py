"""Looks once at every source file: what of the wanted variables it holds, where, on which grid and at which times."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.config.schema_data import DataConfig, VariableOptions
from credit.data.error_collector import ErrorCollector
from credit.data.formats.cf import Coordinates, VariableLayout, is_vector_component, level_values, match_levels
from credit.data.formats.files import OpenFiles, expand_paths
from credit.data.formats.grib import ABSENT
from credit.data.formats.regrid import Regridder
from credit.data.formats.run_grid import load_grid
from credit.data.formats.unit_checks import build_rules, read_file_range, require_units
from credit.data.formats.units import find_conversion
from credit.data.sources.derived_variables import derived_attributes, interpolation_kind, si_conversion
from credit.data.sources.level_mapping import LevelResolver
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
from credit.errors import ConfigError, DataError
from credit.grid import AxisOrder, LatLonGrid
from credit.physics.vertical import Column
from credit.utils.progress import ProgressBar

logger = logging.getLogger(__name__)

_KEPT_ATTRIBUTES = ("units", "standard_name", "long_name", "cell_methods")
_WESTERN = {"standard", "proleptic_gregorian"}  # they differ only before October 1582
_FIRST_GREGORIAN_YEAR = 1583
_FILES_WITH_BAR = 50


@dataclass(frozen=True)
class FileVariable:
    """One variable in one file.

    Attributes:
        path: the file; a URL as text.
        source: the number of its source in the config.
        layout: how the variable lies in it.
        positions: of the times that count, those in the period of the source; None where the file gives no time.
    """

    path: Path | str
    source: int
    layout: VariableLayout
    positions: np.ndarray | None

    @property
    def times(self) -> np.ndarray | None:
        """Minutes of the times that count; None where the file gives no time."""
        return None if self.positions is None else self.layout.times[self.positions]


@dataclass(frozen=True)
class SourceIndex:
    """What the sources hold.

    Attributes:
        grid: the run's grid.
        clock: the calendar that all files share.
        pieces: variable -> its files, in the order of the config; of what is derived, those of its first input.
        inputs: (variable, input) -> files of the other inputs; the variable is empty for what belongs to the ground.
        files: of each source.
        tables: the files with coefficients of levels.
        idle: (source, file) -> why the file gives nothing, where it has none of the variables.
    """

    grid: LatLonGrid
    clock: Calendar
    pieces: dict[str, list[FileVariable]]
    inputs: dict[tuple[str, str], list[FileVariable]]
    files: list[list[Path | str]]
    tables: list[Path]
    idle: dict[tuple[int, Path | str], str]

    @property
    def paths(self) -> dict[Path | str, int]:
        """Every file, with the number of the first source that has it."""
        every: dict[Path | str, int] = {}
        for number, files in enumerate(self.files):
            for path in files:
                every.setdefault(path, number)
        return every


def scan_sources(conf: DataConfig, files: OpenFiles, problems: ErrorCollector) -> SourceIndex | None:
    """Look at all files of all sources.

    Args:
        conf: the data section.
        files: opens them.
        problems: receives what is wrong, file by file.

    Returns:
        What was found, perhaps not all; None without a grid or a time.
    """
    wants = list_required_variables(conf)
    grid = tables = None
    with problems.collect():
        grid = load_grid(conf.grid) if conf.grid is not None else None
        tables = LevelResolver(conf)
    if tables is None:
        return None
    shared = _Shared(grid)
    pieces: dict[str, list[FileVariable]] = {want.serves: [] for want in wants if want.serves}
    inputs: dict[tuple[str, str], list[FileVariable]] = {(want.serves, want.name): [] for want in wants}
    files_of: list[list[Path | str]] = [[] for _ in conf.sources]
    idle: dict[tuple[int, Path | str], str] = {}
    present: list[set[str]] = [set() for _ in conf.sources]
    unusable: list[dict[str, str]] = [{} for _ in conf.sources]
    faulty: set[VariableRequest] = set()
    unread = 0
    for number, source in enumerate(conf.sources):
        with problems.collect():
            files_of[number] = expand_paths(source, f"data.sources.{number}")
        found = files_of[number]
        unread += not found
        offers = list(variables_in_source(source, wants))
        for path in ProgressBar(found, "looking at files", unit="file", disable=len(found) < _FILES_WITH_BAR or None):
            scanner = None
            with problems.collect():
                scanner = _FileScanner(path, files.get(path, number), number, conf, shared, tables)
            if scanner is None:
                unread += 1
                continue
            present[number] |= scanner.names
            unusable[number] |= scanner.unusable
            in_file = find_names(offers, scanner.names)
            if not in_file:
                idle[number, path] = describe_lack(offers, scanner.names)
            for want, name_in_file in in_file.items():
                # what is wrong in one file is mostly wrong in all
                if want in faulty:
                    continue
                faulty.add(want)
                with problems.collect():
                    piece = scanner.piece(want, name_in_file)
                    of_want = pieces[want.serves] if want.role == FIELD else inputs[want.serves, want.name]
                    of_want.append(piece)
                    faulty.discard(want)
    # what a file may hold that could not be read is not known to be missing
    if not unread:
        report_missing(conf, wants, present, unusable, problems)
    if shared.clock is None and not problems.messages:
        problems.add(
            f"no file of data.sources has a time axis (standard_name time), {files_of[0][0]} neither; prognostic "
            "variables need one: add it, for example with cdo settaxis,2000-01-01,00:00,6hour IN OUT"
        )
    known = shared.grid is not None and shared.clock is not None
    return SourceIndex(shared.grid, shared.clock, pieces, inputs, files_of, tables.paths, idle) if known else None


class _Shared:
    """The grid and the calendar of all files; the first file decides, of the grid only where none is given.

    Args:
        grid: the grid that all files are brought to; None if they must share one.
    """

    def __init__(self, grid: LatLonGrid | None = None) -> None:
        self.grid = grid
        self.clock: Calendar | None = None
        self._regrids = grid is not None
        self._grid_origin = self._clock_origin = ""
        self._grids: dict[tuple[bytes, ...], tuple[LatLonGrid, AxisOrder, bool]] = {}
        self._regridders: dict[tuple, Regridder] = {}

    def way(
        self, coordinates: Coordinates, dims: dict[str, str], method: str, vector: bool, where: str
    ) -> tuple[LatLonGrid, AxisOrder, Regridder | None]:
        """Return a file's grid and what brings its fields to the run's; equal coordinates are looked at once."""
        lat, lon = dims["lat"], dims["lon"]
        bounds = coordinates.bounds(coordinates.of_dim[lat][1])
        arrays = (coordinates.values(lat), coordinates.values(lon), *(() if bounds is None else (bounds,)))
        key = tuple(array.tobytes() for array in arrays)
        if key not in self._grids:
            grid, orientation = coordinates.grid(lat, lon, where)
            self._grids[key] = grid, orientation, self._is_the_runs(grid, where)
        grid, orientation, same = self._grids[key]
        if same:
            return grid, orientation, None
        if (key, method, vector) not in self._regridders:
            self._regridders[key, method, vector] = Regridder(grid, self.grid, method, vector)
        return grid, orientation, self._regridders[key, method, vector]

    def _is_the_runs(self, grid: LatLonGrid, where: str) -> bool:
        if self.grid is None:
            self.grid, self._grid_origin = grid, where
        difference = self.grid.difference(grid)
        if difference and not self._regrids:
            raise DataError(
                f"{self._grid_origin} and {where} are on different grids: {difference}; set data.grid to the one that "
                "all are to be brought to"
            )
        if difference:
            logger.info("%s and files like it are brought to the grid of data.grid: %s", where, difference)
        return difference is None

    def minutes(self, coordinate: xr.Variable, values: np.ndarray, where: str) -> np.ndarray:
        """Return minutes of encoded times."""
        if values.size == 0:
            raise DataError(f"{where}: the time axis has no time; leave the file out")
        if not np.isfinite(np.asarray(values, dtype=np.float64)).all():
            raise DataError(f"{where}: the time coordinate has missing values")
        try:
            clock = Calendar(str(coordinate.attrs.get("calendar", "standard")))
            minutes = clock.from_cf(values, str(coordinate.attrs.get("units", "")))
        except DataError as error:
            raise DataError(f"{where}: {error}; rewrite the time axis, for example as hours since a date") from error
        if self.clock is None:
            self.clock, self._clock_origin = clock, where
        both = {clock.calendar, self.clock.calendar}
        alike = both <= _WESTERN and clock.datetime(minutes.min()).year >= _FIRST_GREGORIAN_YEAR
        if len(both) > 1 and not alike:
            raise DataError(
                f"{where} has the calendar {clock.calendar}, {self._clock_origin} has {self.clock.calendar}; all files "
                "must share one"
            )
        return minutes


class _FileScanner:
    """Finds how variables lie in one file."""

    def __init__(
        self,
        path: Path | str,
        dataset: xr.Dataset,
        number: int,
        conf: DataConfig,
        shared: _Shared,
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

    def piece(self, want: VariableRequest, theirs: str) -> FileVariable:
        """Return a variable of the file, with its times in the period of the source at which it has all levels.

        Raises:
            DataError: see `layout`.
            ConfigError: for a period that is none.
        """
        layout = self.layout(want, theirs)
        if layout.times is None:
            return FileVariable(self._path, self._number, layout, None)
        counts = np.ones(len(layout.times), dtype=bool)
        period, key = self._conf.sources[self._number].period, f"data.sources.{self._number}.period"
        if period is not None:
            first = self._shared.clock.parse(period[0], key)
            last = self._shared.clock.parse_end(period[1], key)
            if last < first:
                raise ConfigError(f"{key}: {period[1]} is before {period[0]}; write [first, last]")
            counts &= (layout.times >= first) & (layout.times <= last)
        absent = self._dataset.variables[theirs].encoding.get(ABSENT)
        if absent is not None and layout.level_rows is not None:
            # levels that are not wanted may be absent
            lacking = counts & absent[:, list(layout.level_rows)].any(axis=1)
            counts &= ~lacking
            if lacking.any():
                first_time = self._shared.clock.format(layout.times[lacking][0])
                logger.warning(
                    "%s: %s lacks levels at %d of %d times, the first is %s; these times are left out",
                    *(self._where, want.name, lacking.sum(), len(lacking), first_time),
                )
        return FileVariable(self._path, self._number, layout, np.flatnonzero(counts))

    def layout(self, want: VariableRequest, theirs: str) -> VariableLayout:
        """Return how a variable lies in the file.

        Raises:
            DataError: for a missing level; a grid, a calendar or units that do not fit; dimensions not known; levels
                without coefficients.
        """
        variable = self._dataset.variables[theirs]
        if variable.dtype.kind not in "biuf":
            raise DataError(
                f"{self._where}: {theirs} holds no numbers but {variable.dtype}; write it as numbers, or name another "
                f"variable (data.sources.N.rename: {{{want.name}: NAME}})"
            )
        level_units = None if want.levels is None else self._conf.level_units
        dims = self._coordinates.roles(theirs, self._where, level_units)
        kind = self._conf.field(want.serves).derive
        is_field = want.role == FIELD
        # what belongs to other inputs is not the variable's
        field = self._conf.field(want.serves) if is_field else VariableOptions()
        kept = {key: str(variable.attrs[key]) for key in _KEPT_ATTRIBUTES if key in variable.attrs}
        rows, column = self._rows(want, kind, dims)
        role = next(iter(field.derived_from), None) if is_field else want.role
        if role is None and column is not None:
            role = interpolation_kind(want.serves, kept.get("standard_name", ""))
        # the one quantity that needs its formula's unit to be interpolated
        to_si = (
            si_conversion(role, theirs, kept, self._where) if kind or not is_field or role == "temperature" else None
        )
        packed = np.dtype(variable.encoding.get("dtype", float)).kind in "iu"
        step = abs(float(variable.encoding.get("scale_factor", 0.0))) if packed else 0.0
        read, step_in_file = kept.copy(), step
        if kind and is_field:
            kept, step = derived_attributes(kind), 0.0
        vector = is_vector_component(field.vector, kept.get("standard_name", ""))
        method = field.regrid or self._conf.regrid
        grid, orientation, regridder = self._shared.way(self._coordinates, dims, method, vector, self._where)
        times, window_bounds = self._times(dims)
        conversion = None
        if field.units is not None:
            conversion = find_conversion(kept.get("units", ""), field.units, want.serves, self._where)
            kept["units"] = field.units
            step *= abs(conversion.scale) if conversion else 1.0
        is_read = is_field and kind is None
        # who declares a variable's range takes it as it is
        if is_read and field.valid_range is None:
            require_units(want.serves, read, self._where)
        packing = (step_in_file, float(variable.encoding.get("add_offset", 0.0))) if step_in_file else None
        # xarray moves to the encoding what it has decoded
        declared = variable.encoding | variable.attrs
        has_fill_value = not declared.keys().isdisjoint(("_FillValue", "missing_value"))
        rules = build_rules(
            want.name,
            read,
            levels=want.levels if want.levels is not None and column is None else (None,),
            level_units=self._conf.level_units,
            packing=None if has_fill_value else packing,
            file_range=read_file_range(declared, packing),
            valid_range=field.valid_range if is_read else None,
            conversion=conversion,
            has_options=is_read,
        )
        return VariableLayout(
            theirs, dims, rows, column, grid, orientation, regridder, conversion, to_si, times, window_bounds,
            kept, step, variable.encoding.get("preferred_chunks", {}).get(dims.get("time"), 1),
            rules, f"{self._where}: {want.name}", self._shared.clock,
        )  # fmt: skip

    def _rows(
        self, want: VariableRequest, kind: str | None, dims: dict[str, str]
    ) -> tuple[tuple[int, ...] | None, Column | None]:
        """Return which rows of the levels are read, and how the run's levels are made of them where they are not."""
        coordinates = self._coordinates
        lowest = kind == "mean_sea_level_pressure"
        if want.levels is None and not lowest:
            return self._rows_2d(want.name, dims, want.role == FIELD), None
        name = coordinates.of_dim[dims["level"]][1] if "level" in dims else coordinates.scalar.get("level")
        if name is None:
            way_out = "" if kind else "; list it in vars_2D"
            raise DataError(f"{self._where}: {want.name} is in vars_3D but has no levels there{way_out}")
        rows, column = self._tables.find_column(self._dataset, name, want, self._number, self._where)
        if rows is None:
            have = level_values(self._dataset.variables[name], name, self._conf.level_units, self._where)
            rows = match_levels(have, want.levels, want.name, self._conf.level_units, self._where)
        return rows, column

    def _rows_2d(self, ours: str, dims: dict[str, str], is_field: bool) -> tuple[int, ...] | None:
        length = self._dataset.sizes[dims["level"]] if "level" in dims else 0
        if length > 1 and is_field:
            raise DataError(
                f"{self._where}: {ours} is in vars_2D but lies on {length} levels there; list it in vars_3D"
            )
        if length > 1:
            raise DataError(f"{self._where}: {ours} lies on {length} levels there, but it must be a field on none")
        return (0,) if length else None

    def _times(self, dims: dict[str, str]) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return minutes of the times and of their bounds; a scalar time stands for one field."""
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
