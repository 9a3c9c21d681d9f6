"""Forecasts as one zarr store over initial and lead times."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zarr

from credit.errors import ConfigError, CreditError
from credit.forecast.layout import (
    HOURS,
    INITIAL_TIME,
    LATITUDE,
    LEAD_TIME,
    LONGITUDE,
    MEMBER,
    QUANTIZED,
    REALIZATION,
    VALID_TIME,
    WRITE_HINT,
    ForecastLayout,
)

_NAMES = {
    "cf": {"init": "init_time", "lead": "lead_time"},
    "weatherbench2": {"init": "time", "lead": "prediction_timedelta"},
}
# WeatherBench 2 wants a timedelta, which xarray makes of hours where the attribute dtype says so
_LEAD_UNITS = {"cf": {"units": HOURS}, "weatherbench2": {"units": "hours", "dtype": "timedelta64[ns]"}}
WRITTEN = "written"


class ZarrStore:
    """Writes forecasts of one layout into a store; see `credit.forecast.writer.ForecastWriter`.

    The store has its full size from the start, one chunk a variable, initial time and lead time, so that several
    processes can fill it; the variable ``written`` tells which initial times are whole.
    """

    def __init__(self, path: Path, layout: ForecastLayout, initial_minutes: Sequence[int], names: str) -> None:
        self._path, self._layout = path, layout
        self._init, self._lead = _NAMES[names]["init"], _NAMES[names]["lead"]
        self._initial = np.asarray(initial_minutes, dtype=np.int64)
        self._missing: dict[int, int] = {}  # fields, by position of a forecast that is begun
        # jobs of an array on several hosts may have one process number
        self._part = path.with_name(f"{path.name}.part.{socket.gethostname()}.{os.getpid()}")
        try:
            if path.exists():
                self._group = zarr.open_group(path, mode="r+")
                self._check_same(names)
            else:
                self._create(names)
            # to look for chunks of nothing but missing values takes longer than to write them
            self._arrays = {
                variable.name: self._group[variable.name].with_config({"write_empty_chunks": True})
                for variable in layout.variables
            }
        except OSError as error:
            shutil.rmtree(self._part, ignore_errors=True)
            raise self._failure(error) from error

    def is_complete(self, initial_minutes: int) -> bool:
        """Return whether this initial time was marked as written."""
        return bool(self._group[WRITTEN][self._position(initial_minutes)])

    def put(self, initial_minutes: int, member: int, number: int, fields: np.ndarray) -> None:
        """Write one lead time of one member; with the last, the initial time is marked as written."""
        position, layout = self._position(initial_minutes), self._layout
        try:
            if position not in self._missing:
                self._group[WRITTEN][position] = 0
                self._missing[position] = len(layout.lead_minutes) * (layout.members or 1)
            numbers = (position, number) if layout.members is None else (position, number, member)
            place = tuple(slice(own, own + 1) for own in numbers)
            for variable in layout.variables:
                # of a chunk's own shape, so that zarr writes it without a copy
                self._arrays[variable.name][place] = layout.select(variable, fields)[(None,) * len(place)]
            self._missing[position] -= 1
            if self._missing[position] == 0:
                self._group[WRITTEN][position] = 1
                del self._missing[position]
        except OSError as error:
            self.discard(initial_minutes)
            raise self._failure(error) from error

    def discard(self, initial_minutes: int) -> None:
        """Forget a forecast that is half written; it is not marked."""
        self._missing.pop(self._position(initial_minutes), None)

    def close(self) -> None:
        """Every chunk is on disk already."""

    def place(self, initial_minutes: int) -> Path:
        """Return the store."""
        return self._path

    def _position(self, initial_minutes: int) -> int:
        match = np.flatnonzero(self._initial == initial_minutes)
        assert len(match) == 1, f"{initial_minutes} is no initial time of this store"
        return int(match[0])

    def _failure(self, error: OSError) -> CreditError:
        return CreditError(f"{self._path}: cannot be written ({error.strerror or error}); {WRITE_HINT}")

    def _check_same(self, names: str) -> None:
        group, layout = self._group, self._layout
        same = (
            dict(group.attrs) == layout.global_attributes
            and self._init in group
            and np.array_equal(group[self._init][:], self._initial)
            and np.array_equal(group[self._lead][:], layout.lead_hours)
            and all(v.name in group and group[v.name].shape[2:] == layout.shape(v) for v in layout.variables)
        )
        if not same:
            raise ConfigError(
                f"{self._path}: holds forecasts of another checkpoint, of other initial or lead times, variables or "
                f"names ({names} is asked for); remove it or set another save_loc"
            )

    def _create(self, names: str) -> None:
        """Make the whole store beside and rename it, so that a store that exists is whole in its metadata."""
        layout = self._layout
        self._group = zarr.open_group(self._part, mode="w", zarr_format=3)
        self._group.attrs.update(layout.global_attributes)
        time, init, lead = layout.time_attributes(), self._init, self._lead
        valid = self._initial[:, None] + layout.lead_minutes
        self._put(init, (init,), self._initial, {**INITIAL_TIME, **time})
        self._put(lead, (lead,), layout.lead_hours, {**LEAD_TIME, **_LEAD_UNITS[names]})
        bounds = {"bounds": "valid_time_bnds"} if layout.has_windows else {}
        self._put("valid_time", (init, lead), valid, {**VALID_TIME, **time, **bounds})
        if layout.has_windows:
            edges = np.stack([valid - layout.step_minutes, valid], axis=-1)
            self._put("valid_time_bnds", (init, lead, "bnds"), edges, {})
        if layout.members is not None:
            self._put(MEMBER, (MEMBER,), np.arange(layout.members), REALIZATION)
        for dim, values in layout.levels.items():
            self._put(dim, (dim,), np.array(values), layout.level_attributes(dim))
        self._put("latitude", ("latitude",), layout.grid.lat, LATITUDE)
        self._put("longitude", ("longitude",), layout.grid.lon, LONGITUDE)
        marks = {"long_name": "1 where the forecast of the initial time is whole", "units": "1"}
        self._put(WRITTEN, (init,), np.zeros(len(self._initial), dtype=np.int8), marks, chunk=1)
        for variable in layout.variables:
            shape = (len(self._initial), len(layout.lead_minutes), *layout.shape(variable))
            ones = 2 if layout.members is None else 3
            quantized = {} if layout.keep_bits is None else {QUANTIZED: layout.keep_bits}
            self._group.create_array(
                variable.name,
                shape=shape,
                chunks=(*(1,) * ones, *shape[ones:]),
                dtype="float32",
                fill_value=float("nan"),
                compressors=zarr.codecs.ZstdCodec(level=layout.compression) if layout.compression else None,
                dimension_names=layout.dims(variable, init, lead),
                attributes={**variable.attributes, **quantized, "coordinates": "valid_time"},
            )
        try:
            os.replace(self._part, self._path)
        except OSError:
            if not self._path.exists():
                raise
            # another job of an array was faster
            shutil.rmtree(self._part)
        self._group = zarr.open_group(self._path, mode="r+")
        self._check_same(names)

    def _put(
        self, name: str, dims: tuple[str, ...], values: np.ndarray, attributes: dict, chunk: int | None = None
    ) -> None:
        array = self._group.create_array(
            name,
            shape=values.shape,
            chunks=(chunk,) if chunk else values.shape,
            dtype=values.dtype,
            dimension_names=dims,
            attributes=attributes,
        )
        array[...] = values
