"""Looks once at every source file: what of the wanted variables it holds, where, on which grid and at which times."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr
from tqdm import tqdm

from credit.channels import ChannelMap
from credit.config.schema_data import DataConfig
from credit.data.cf import Coordinates, Layout, level_values, match_levels
from credit.data.files import OpenFiles, expand_paths
from credit.data.problems import Problems
from credit.errors import DataError, did_you_mean
from credit.grid import LatLonGrid, Orientation
from credit.times import Clock

logger = logging.getLogger(__name__)

_KEPT_ATTRIBUTES = ("units", "standard_name", "long_name", "cell_methods")
# these differ only before October 1582
_WESTERN = ("standard", "proleptic_gregorian")
_FIRST_GREGORIAN_YEAR = 1583


@dataclass(frozen=True)
class Piece:
    """One variable in one file."""

    path: Path
    file_format: str
    source: int
    layout: Layout


@dataclass(frozen=True)
class Scan:
    """What the sources hold.

    Attributes:
        grid: the grid that all files share.
        clock: the calendar that all files share.
        pieces: variable -> its files, in the order of the config.
        paths: every file.
    """

    grid: LatLonGrid
    clock: Clock
    pieces: dict[str, list[Piece]]
    paths: list[Path]


def wanted_variables(channels: ChannelMap) -> dict[str, tuple[float, ...] | None]:
    """Return variable -> its levels (None for a 2-D variable) of everything that is read from data."""
    wanted: dict[str, tuple[float, ...] | None] = {}
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
        What was found; None where no grid or no time was.
    """
    wanted = wanted_variables(conf.channel_map())
    shared = _Shared()
    pieces: dict[str, list[Piece]] = {name: [] for name in wanted}
    paths: list[Path] = []
    seen: set[str] = set()
    for number, source in enumerate(conf.sources):
        key = f"data.sources.{number}"
        found: list[Path] = []
        with problems.collect():
            found = expand_paths(source, key)
        named = {ours: source.rename.get(ours, ours) for ours in source.variables or wanted if ours in wanted}
        for path in tqdm(found, desc="looking at files", unit="file", disable=None if len(found) > 50 else True):
            with problems.collect():
                dataset = files.get(path, source.format)
                seen |= {str(name) for name, variable in dataset.variables.items() if variable.ndim >= 2}
                for ours, layout in _scan_file(path, dataset, named, wanted, conf.level_units, shared, problems).items():
                    pieces[ours].append(Piece(path, source.format, number, layout))
        for ours in named if source.variables else ():
            if found and not any(piece.source == number for piece in pieces[ours]):
                problems.add(_not_found(named[ours], seen, f"{key}.variables names it, but its files do not hold it"))
        paths += found
    for name, parts in pieces.items():
        if not parts and not any(f": {name} " in message for message in problems.messages):
            problems.add(_not_found(name, seen, "no source holds it"))
    if shared.grid is None:
        return None
    if shared.clock is None:
        problems.add("no file of data.sources has a time axis; prognostic variables need one (standard_name time)")
        return None
    return Scan(shared.grid, shared.clock, pieces, paths)


def _not_found(name: str, seen: set[str], rule: str) -> str:
    hint = did_you_mean(name, seen)
    return f'data.variables: "{name}": {rule}{hint}; sources.N.rename {{ours: theirs}} maps names' if seen else (
        f'data.variables: "{name}": {rule}'
    )


class _Shared:
    """The grid and the calendar that all files must share; the first file decides."""

    def __init__(self) -> None:
        self.grid: LatLonGrid | None = None
        self.clock: Clock | None = None
        self._grid_origin = self._clock_origin = ""
        self._orientations: dict[tuple[bytes, ...], Orientation] = {}

    def orientation(self, lat: np.ndarray, lon: np.ndarray, bounds: np.ndarray | None, where: str) -> Orientation:
        key = (lat.tobytes(), lon.tobytes())
        if key not in self._orientations:
            grid, orientation = LatLonGrid.from_coords(lat, lon, bounds, where)
            if self.grid is None:
                self.grid, self._grid_origin = grid, where
            difference = self.grid.difference(grid)
            if difference:
                raise DataError(
                    f"{where} is on another grid than {self._grid_origin}: {difference}; bring all files to one grid"
                )
            self._orientations[key] = orientation
        return self._orientations[key]

    def minutes(self, coordinate: xr.Variable, values: np.ndarray, where: str) -> np.ndarray:
        clock = Clock(str(coordinate.attrs.get("calendar", "standard")))
        try:
            if not np.isfinite(np.asarray(values, dtype=np.float64)).all():
                raise DataError("missing values in the time coordinate")
            minutes = clock.from_cf(values, str(coordinate.attrs.get("units", "")))
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        if self.clock is None:
            self.clock, self._clock_origin = clock, where
        both = {clock.calendar, self.clock.calendar}
        western = both <= set(_WESTERN) and clock.datetime(minutes.min()).year >= _FIRST_GREGORIAN_YEAR
        if len(both) > 1 and not western:
            raise DataError(
                f"{where} has the calendar {clock.calendar}, {self._clock_origin} has {self.clock.calendar}; all files "
                "must share one"
            )
        return minutes


def _scan_file(
    path: Path,
    dataset: xr.Dataset,
    named: Mapping[str, str],
    wanted: Mapping[str, tuple[float, ...] | None],
    level_units: str,
    shared: _Shared,
    problems: Problems,
) -> dict[str, Layout]:
    """Return our name -> layout of the wanted variables in one file."""
    coordinates = Coordinates(dataset)
    layouts: dict[str, Layout] = {}
    decoded: dict[str, np.ndarray] = {}
    for ours, theirs in named.items():
        if theirs not in dataset.variables:
            continue
        with problems.collect():
            variable = dataset.variables[theirs]
            where = str(path)
            roles = coordinates.roles(theirs, where)
            rows = _level_rows(dataset, coordinates, roles, ours, theirs, wanted[ours], level_units, where)
            lat_name = coordinates.of_dim[roles["lat"]][1]
            orientation = shared.orientation(
                coordinates.values(roles["lat"]), coordinates.values(roles["lon"]), coordinates.bounds(lat_name), where
            )
            times, windows = _times(dataset, coordinates, roles, shared, decoded, where)
            kept = {key: str(variable.attrs[key]) for key in _KEPT_ATTRIBUTES if key in variable.attrs}
            packed = np.dtype(variable.encoding.get("dtype", float)).kind in "iu"
            step = abs(float(variable.encoding.get("scale_factor", 0.0))) if packed else 0.0
            layouts[ours] = Layout(theirs, roles, rows, orientation, times, windows, kept, step)
    return layouts


def _level_rows(
    dataset: xr.Dataset,
    coordinates: Coordinates,
    roles: Mapping[str, str],
    ours: str,
    theirs: str,
    levels: Sequence[float] | None,
    level_units: str,
    where: str,
) -> tuple[int, ...] | None:
    sizes = dataset.variables[theirs].sizes
    if levels is None:
        if "level" in roles and sizes[roles["level"]] > 1:
            raise DataError(
                f"{where}: {ours} is in vars_2D but lies on {sizes[roles['level']]} levels there; list it in vars_3D"
            )
        return (0,) if "level" in roles else None
    name = coordinates.of_dim[roles["level"]][1] if "level" in roles else coordinates.scalar.get("level")
    if name is None:
        raise DataError(f"{where}: {ours} is in vars_3D but has no levels there; list it in vars_2D")
    have = level_values(dataset.variables[name], name, level_units, where)
    return match_levels(have, levels, ours, level_units, where)


def _times(
    dataset: xr.Dataset,
    coordinates: Coordinates,
    roles: Mapping[str, str],
    shared: _Shared,
    decoded: dict[str, np.ndarray],
    where: str,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return minutes of the variable's times and of their bounds; a scalar time stands for one field."""
    name = coordinates.of_dim[roles["time"]][1] if "time" in roles else coordinates.scalar.get("time")
    if name is None:
        return None, None
    if name not in decoded:
        coordinate = dataset.variables[name]
        decoded[name] = shared.minutes(coordinate, np.atleast_1d(coordinate.values), where)
        bounds = coordinates.bounds(name)
        if bounds is not None:
            decoded[f"{name} bounds"] = shared.minutes(coordinate, bounds, where).reshape(-1, 2)
    return decoded[name], decoded.get(f"{name} bounds")
