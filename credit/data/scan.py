"""Looks once at every source file: what of the wanted variables it holds, where, on which grid and at which times."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr
from tqdm import tqdm

from credit.channels import ChannelMap
from credit.config.schema_data import DataConfig, GridConfig, SourceConfig
from credit.data.cf import Coordinates, Layout, is_vector_component, level_values, match_levels
from credit.data.files import OpenFiles, expand_path, expand_paths, open_file
from credit.data.problems import Problems
from credit.data.regrid import Regridder
from credit.data.units import find_conversion
from credit.errors import DataError, did_you_mean
from credit.grid import LatLonGrid, Orientation
from credit.times import Clock

logger = logging.getLogger(__name__)

_KEPT_ATTRIBUTES = ("units", "standard_name", "long_name", "cell_methods")
# these two differ only before October 1582
_WESTERN = {"standard", "proleptic_gregorian"}
_FIRST_GREGORIAN_YEAR = 1583
_FILES_WITH_BAR = 50

Levels = tuple[float, ...] | None


@dataclass(frozen=True)
class Piece:
    """One variable in one file.

    Attributes:
        path: the file; a URL as text.
        source: the number of its source in the config.
        layout: how the variable lies in it.
    """

    path: Path | str
    source: int
    layout: Layout


@dataclass(frozen=True)
class Scan:
    """What the sources hold.

    Attributes:
        grid: the run's grid.
        clock: the calendar that all files share.
        pieces: variable -> its files, in the order of the config.
        paths: every file, with the number of the first source that has it.
    """

    grid: LatLonGrid
    clock: Clock
    pieces: dict[str, list[Piece]]
    paths: dict[Path | str, int]


def wanted_variables(channels: ChannelMap) -> dict[str, Levels]:
    """Return variable -> its levels (None for a 2-D variable) of everything that is read from data."""
    wanted: dict[str, Levels] = {}
    for channel in channels.stored + channels.static_stored:
        before = wanted.get(channel.variable) or ()
        wanted[channel.variable] = None if channel.level is None else (*before, channel.level)
    return wanted


def scan_sources(conf: DataConfig, files: OpenFiles, problems: Problems) -> Scan | None:
    """Look at all files of all sources.

    Args:
        conf: the data section.
        files: opens them.
        problems: receives what is wrong, file by file.

    Returns:
        What was found, perhaps not all; None without a grid or a time.
    """
    wanted = wanted_variables(conf.channel_map())
    grid = None
    if conf.grid is not None:
        with problems.collect():
            grid = load_grid(conf.grid)
        if grid is None:
            return None
    shared = _Shared(grid)
    pieces: dict[str, list[Piece]] = {name: [] for name in wanted}
    paths: dict[Path | str, int] = {}
    present: list[set[str]] = [set() for _ in conf.sources]
    faulty: set[str] = set()
    unread = 0
    for number, source in enumerate(conf.sources):
        found: list[Path | str] = []
        with problems.collect():
            found = expand_paths(source, f"data.sources.{number}")
        unread += not found
        paths |= {path: number for path in found if path not in paths}
        for path in tqdm(found, "looking at files", unit="file", disable=len(found) < _FILES_WITH_BAR or None):
            scanner = None
            with problems.collect():
                scanner = _FileScanner(path, files.get(path, number), conf, shared)
            if scanner is None:
                unread += 1
                continue
            present[number] |= scanner.names
            for ours, theirs in _names_of(source, wanted).items():
                # what is wrong in one file is mostly wrong in all
                if theirs in scanner.names and ours not in faulty:
                    faulty.add(ours)
                    with problems.collect():
                        layout = scanner.layout(ours, theirs, wanted[ours])
                        pieces[ours].append(Piece(path, number, layout))
                        faulty.discard(ours)
    # what a file may hold that could not be read is not known to be missing
    if not unread:
        _require_all(conf, wanted, present, problems)
    if shared.clock is None and not problems.messages:
        problems.add(
            f"no file of data.sources has a time axis (standard_name time), {next(iter(paths))} neither; prognostic "
            "variables need one: add it, for example with cdo settaxis,2000-01-01,00:00,6hour IN OUT"
        )
    known = shared.grid is not None and shared.clock is not None
    return Scan(shared.grid, shared.clock, pieces, paths) if known else None


def load_grid(conf: GridConfig) -> LatLonGrid:
    """Return the grid that ``data.grid`` describes.

    Raises:
        DataError: where the file of ``like`` does not have one latitude and one longitude of a global grid.
    """
    if conf.like is None:
        return LatLonGrid.equiangular(conf.rows, conf.columns, conf.poles)
    path = expand_path(conf.like, "data.grid.like")[0]
    with open_file(path, SourceConfig(path=str(path))) as dataset:
        coordinates = Coordinates(dataset)
        roles = {dim: role for dim, (role, _) in coordinates.of_dim.items()}
        lat, lon = ([dim for dim in roles if roles[dim] == role] for role in ("lat", "lon"))
        if len(lat) != 1 or len(lon) != 1:
            raise DataError(
                f"data.grid.like: {path} has {len(lat)} latitude and {len(lon)} longitude coordinates, one of each is "
                "needed; name another file, or rows, columns and poles"
            )
        return coordinates.grid(lat[0], lon[0], str(path))[0]


def _names_of(source: SourceConfig, wanted: dict[str, Levels]) -> dict[str, str]:
    """Return our name -> name in the files of what a source is to give."""
    chosen = wanted if source.variables is None else [name for name in source.variables if name in wanted]
    return {ours: source.rename.get(ours, ours) for ours in chosen}


def _require_all(conf: DataConfig, wanted: dict[str, Levels], present: list[set[str]], problems: Problems) -> None:
    """Note the variables that no file holds, and those that a source promises but does not hold."""
    everything = set().union(*present)
    offered: set[str] = set()
    for number, source in enumerate(conf.sources):
        names = _names_of(source, wanted)
        offered |= {ours for ours, theirs in names.items() if theirs in present[number]}
        for ours, theirs in names.items() if source.variables is not None else ():
            if theirs not in present[number]:
                offered.add(ours)
                hint = did_you_mean(theirs, present[number])
                problems.add(f'data.sources.{number}.variables: "{theirs}" is not in its files{hint}')
    for ours in wanted:
        if ours not in offered:
            theirs = next((source.rename[ours] for source in conf.sources if ours in source.rename), ours)
            cut = "; data.sources.N.select may leave it out" if any(source.select for source in conf.sources) else ""
            problems.add(
                f'data.variables: "{theirs}" is in no file of data.sources{did_you_mean(theirs, everything)} '
                f"(data.sources.N.rename maps our name to that in the files{cut})"
            )


class _Shared:
    """The grid and the calendar of all files; the first file decides, of the grid only where none is given.

    Args:
        grid: the grid that all files are brought to; None if they must share one.
    """

    def __init__(self, grid: LatLonGrid | None = None) -> None:
        self.grid = grid
        self.clock: Clock | None = None
        self._regrids = grid is not None
        self._grid_origin = self._clock_origin = ""
        self._grids: dict[tuple[bytes, ...], tuple[LatLonGrid, Orientation, bool]] = {}
        self._regridders: dict[tuple, Regridder] = {}

    def way(
        self, coordinates: Coordinates, dims: dict[str, str], method: str, vector: bool, where: str
    ) -> tuple[Orientation, Regridder | None]:
        """Return what brings a file's fields to the run's grid; equal coordinates are looked at once."""
        lat, lon = dims["lat"], dims["lon"]
        bounds = coordinates.bounds(coordinates.of_dim[lat][1])
        arrays = (coordinates.values(lat), coordinates.values(lon), *(() if bounds is None else (bounds,)))
        key = tuple(array.tobytes() for array in arrays)
        if key not in self._grids:
            grid, orientation = coordinates.grid(lat, lon, where)
            self._grids[key] = grid, orientation, self._is_the_runs(grid, where)
        grid, orientation, same = self._grids[key]
        if same:
            return orientation, None
        if (key, method, vector) not in self._regridders:
            self._regridders[key, method, vector] = Regridder(grid, self.grid, method, vector)
        return orientation, self._regridders[key, method, vector]

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
            clock = Clock(str(coordinate.attrs.get("calendar", "standard")))
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

    def __init__(self, path: Path | str, dataset: xr.Dataset, conf: DataConfig, shared: _Shared) -> None:
        self.names = {str(name) for name, variable in dataset.variables.items() if variable.ndim >= 2}
        self._where = str(path)
        self._dataset = dataset
        self._conf = conf
        self._shared = shared
        self._coordinates = Coordinates(dataset)
        self._decoded: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}

    def layout(self, ours: str, theirs: str, levels: Levels) -> Layout:
        """Return how a variable lies in the file.

        Raises:
            DataError: for a missing level; a grid, a calendar or units that do not fit; dimensions not known.
        """
        variable = self._dataset.variables[theirs]
        coordinates = self._coordinates
        dims = coordinates.roles(theirs, self._where)
        field = self._conf.field(ours)
        kept = {key: str(variable.attrs[key]) for key in _KEPT_ATTRIBUTES if key in variable.attrs}
        vector = is_vector_component(field.vector, kept.get("standard_name", ""))
        method = field.regrid or self._conf.regrid
        orientation, regridder = self._shared.way(coordinates, dims, method, vector, self._where)
        times, window_bounds = self._times(dims)
        rows = self._rows_2d(ours, dims) if levels is None else self._rows_3d(ours, dims, levels)
        packed = np.dtype(variable.encoding.get("dtype", float)).kind in "iu"
        step = abs(float(variable.encoding.get("scale_factor", 0.0))) if packed else 0.0
        conversion = None
        if field.units is not None:
            conversion = find_conversion(kept.get("units", ""), field.units, ours, self._where)
            kept["units"] = field.units
            step *= abs(conversion.scale) if conversion else 1.0
        return Layout(theirs, dims, rows, orientation, regridder, conversion, times, window_bounds, kept, step)

    def _rows_2d(self, ours: str, dims: dict[str, str]) -> tuple[int, ...] | None:
        length = self._dataset.sizes[dims["level"]] if "level" in dims else 0
        if length > 1:
            raise DataError(
                f"{self._where}: {ours} is in vars_2D but lies on {length} levels there; list it in vars_3D"
            )
        return (0,) if length else None

    def _rows_3d(self, ours: str, dims: dict[str, str], levels: Sequence[float]) -> tuple[int, ...]:
        coordinates = self._coordinates
        name = coordinates.of_dim[dims["level"]][1] if "level" in dims else coordinates.scalar.get("level")
        if name is None:
            raise DataError(f"{self._where}: {ours} is in vars_3D but has no levels there; list it in vars_2D")
        have = level_values(self._dataset.variables[name], name, self._conf.level_units, self._where)
        return match_levels(have, levels, ours, self._conf.level_units, self._where)

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
