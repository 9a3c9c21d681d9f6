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
        ground_piece: where it is read from.
    """

    name: str
    kind: str | None
    inputs: Mapping[str, tuple[VariableSeries, np.ndarray]]
    ground: np.ndarray | None
    ground_piece: FileVariable | None

    def comes_from(self, keys: Collection[str]) -> np.ndarray:
        """Return for each time whether it is made of one of some files; see `VariableSeries.comes_from`."""
        touched = super().comes_from(keys)
        for series, theirs in self.inputs.values():
            touched = touched | series.comes_from(keys)[theirs]
        if self.ground_piece is not None and file_key(self.ground_piece.path) in keys:
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
            yield self._make(self.pieces[self.piece[place]], dict(zip(parts, fields, strict=True)))

    def _make(self, piece: FileVariable, fields: dict[str, np.ndarray]) -> np.ndarray:
        """Return the fields of one time.

        Args:
            piece: the main input in its file.
            fields: role -> what was read of it.
        """
        layout = piece.layout
        if SURFACE_PRESSURE in fields:
            fields[SURFACE_PRESSURE] = fields[SURFACE_PRESSURE][0].astype(np.float64)
        if self.ground is not None:
            fields[SURFACE_GEOPOTENTIAL] = self.ground
        back = layout.to_si if self.kind is None and isinstance(layout.to_si, Conversion) else None
        quantity = interpolation_kind(self.name, layout.attributes.get("standard_name", ""))
        try:
            return layout.to_run(make(self.kind, quantity, layout.column, fields, back))
        except DataError as error:
            raise DataError(f"{piece.path}: {self.name}: {error}") from error


def is_derived(name: str, pieces: list[FileVariable], conf: DataConfig) -> bool:
    """Whether a variable is made of others, not read as it is."""
    return conf.field(name).derive is not None or any(piece.layout.column is not None for piece in pieces)


def build_variable(name: str, scan: SourceIndex, conf: DataConfig, files: OpenFiles) -> VariableSeries:
    """Put the times of a variable together, which may come from several sources that follow each other.

    Raises:
        DataError: for a time in two sources; else see `build_series` and `build_derived`.
    """
    parts: list[VariableSeries] = []
    for pieces in by_source(scan.pieces[name]):
        if is_derived(name, pieces, conf):
            parts.append(build_derived(name, pieces, scan, conf, files))
        else:
            parts.append(build_series(name, pieces, files, scan.calendar))
    return join_series(name, parts, scan.calendar)


def build_derived(
    name: str, own_pieces: list[FileVariable], scan: SourceIndex, conf: DataConfig, files: OpenFiles
) -> DerivedSeries:
    """Put a variable together that is interpolated or derived; its times are those of its main input.

    Args:
        name: the variable.
        own_pieces: the files of its main input, of one source.
        scan: what the sources hold.
        conf: the data section.
        files: opens the files.

    Raises:
        DataError: where an input is lacking at a time, or is on another grid.
    """
    main = build_series(name, own_pieces, files, scan.calendar, raw=True)
    number, first = main.pieces[0].source, main.pieces[0].layout
    roles = dict(list(conf.field(name).derived_from.items())[1:])
    pieces = {role: scan.inputs[name, variable] for role, variable in roles.items()}
    vertical, ground, ground_piece = conf.sources[number].vertical, None, None
    if vertical is not None and first.column is not None:
        roles[SURFACE_PRESSURE] = vertical.surface_pressure
        pieces[SURFACE_PRESSURE] = scan.inputs["", vertical.surface_pressure]
        if vertical.surface_geopotential is not None:
            origin = _of_source(scan.inputs["", vertical.surface_geopotential], number)
            _require_grid(name, main.pieces, origin[:1])
            ground_piece = origin[0]
            ground = read_constant(files, vertical.surface_geopotential, ground_piece, raw=True)[0].astype(np.float64)
    inputs = {}
    for role, found in pieces.items():
        parts = by_source(_of_source(found, number))
        parts = [
            build_series(roles[role], pieces_of_source, files, scan.calendar, raw=True) for pieces_of_source in parts
        ]
        series = join_series(roles[role], parts, scan.calendar)
        _require_grid(name, main.pieces, series.pieces)
        _require_levels(name, main.pieces, series.pieces)
        inputs[role] = series, _match(name, main, roles[role], series, scan.calendar)
    _say(name, conf.field(name).derive, first)
    kind = conf.field(name).derive
    return DerivedSeries(main.pieces, main.times, main.piece, main.position, name, kind, inputs, ground, ground_piece)


def _say(name: str, kind: str | None, layout: VariableLayout) -> None:
    """Log what is done to a variable, below the ground above all."""
    if layout.column is None or layout.column.wanted is None:
        return
    extrapolated = kind == "geopotential" or interpolation_kind(name, layout.attributes.get("standard_name", ""))
    below = "extrapolated" if extrapolated else "held"
    logger.info("%s: from %d levels, linearly in ln p; %s below the lowest", name, len(layout.column.levels), below)


def _of_source(pieces: list[FileVariable], number: int) -> list[FileVariable]:
    """Return the files of an input that are in the source of the main one, else all."""
    return [piece for piece in pieces if piece.source == number] or pieces


def _require_grid(name: str, main: list[FileVariable], others: list[FileVariable]) -> None:
    for piece in (*main, *others):
        difference = main[0].layout.grid.describe_mismatch(piece.layout.grid)
        if difference:
            raise DataError(
                f"{name} is made of what is in {main[0].path} and {piece.path}, which are on different grids: "
                f"{difference}; bring them to one"
            )


def _require_levels(name: str, main: list[FileVariable], others: list[FileVariable]) -> None:
    """Stop where two variables of one formula do not lie on the same levels."""
    columns = [piece.layout.column for piece in others]
    if None in columns:
        return
    first = main[0].layout.column.levels
    for piece in (*main, *others):
        levels = piece.layout.column.levels
        if len(levels) != len(first) or not np.allclose([levels.a, levels.b], [first.a, first.b], rtol=1e-6):
            raise DataError(
                f"{name} is made of what is on {len(first)} levels in {main[0].path} and on {len(levels)} others in "
                f"{piece.path} ({piece.layout.name}); all must be on the same"
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
