"""Forecasts as one zarr store over initial and lead times."""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import zarr
from zarr.errors import ZarrUserWarning

from credit.errors import ConfigError, CreditError
from credit.forecast.io.page_cache import start_writeback
from credit.forecast.io.schema import (
    HISTORY,
    HOURS,
    INITIAL_FIELDS,
    INITIAL_TIME,
    LATITUDE,
    LEAD_TIME,
    LONGITUDE,
    MADE_BY,
    MEMBER,
    QUANTIZED,
    REALIZATION,
    VALID_TIME,
    WRITE_HINT,
    ForecastSchema,
    OutputVariable,
    run_attributes,
    take_level_dims,
    window_bounds,
)
from credit.utils.file_lock import file_lock
from credit.utils.temporary import find_stale, temporary_path

STORE = "forecasts.zarr"
_NAMES = {
    "cf": {"init": "init_time", "lead": "lead_time"},
    "weatherbench2": {"init": "time", "lead": "prediction_timedelta"},
}
# WeatherBench 2 wants a timedelta, which xarray makes of hours where the attribute dtype says so
_LEAD_UNITS = {"cf": {"units": HOURS}, "weatherbench2": {"units": "hours", "dtype": "timedelta64[ns]"}}
WRITTEN = "written"
# that a coordinate's chunk has room for, however many there are: a store that grew is as one that was written at once;
# marks, which processes write one by one, have a chunk each
_INITIAL_TIMES = 1024
# another host's store in the making, which takes seconds, was left by a killed process after so long
_LEFT_SECONDS = 3600.0
# what file systems say that have no locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

logger = logging.getLogger(__name__)


class ZarrStore:
    """Writes forecasts of one layout into a store; see `credit.forecast.io.forecast_writer.ForecastWriter`.

    The store has a run's full size from the start, one chunk a variable, initial time and lead time, so that several
    processes can fill it; the variable ``written`` tells which initial times are whole. A later run with later initial
    times makes it longer. Who makes it, or makes it longer, holds a lock file beside it meanwhile. Its metadata are
    consolidated for others to open it quickly; here they are not looked at, as they lag behind while a store grows.
    """

    def __init__(
        self,
        path: Path,
        layout: ForecastSchema,
        initial_minutes: Sequence[int],
        names: str,
        started_from: Callable[[int], str] | None = None,
    ) -> None:
        self._path, self._layout, self._lead_units = path, layout, _LEAD_UNITS[names]
        self._init, self._lead = _NAMES[names]["init"], _NAMES[names]["lead"]
        self._started_from = None if started_from is None else functools.cache(started_from)
        self._initial = np.unique(np.asarray(initial_minutes, dtype=np.int64))
        self._missing: dict[int, int] = {}  # fields, by position of a forecast that is begun
        self._storing: list[Path] = []
        self._part = temporary_path(path)
        try:
            if not path.exists() or self._left():
                with self._alone():
                    if not path.exists():
                        self._create()
            self._group = self._open()
            stored_dims = {name: array.metadata.dimension_names or () for name, array in self._group.arrays()}
            self._layout = take_level_dims(layout, stored_dims)
            self._require_same()
            self._extend()
            # to look for chunks of nothing but missing values takes longer than to write them
            self._arrays = {
                variable.name: self._group[variable.name].with_config({"write_empty_chunks": True})
                for variable in layout.variables
            }
        except OSError as error:
            shutil.rmtree(self._part, ignore_errors=True)
            raise self._failure(error) from error

    def _open(self) -> zarr.Group:
        return zarr.open_group(self._path, mode="r+", use_consolidated=False)

    def is_complete(self, initial_minutes: int) -> bool:
        """Return whether this initial time was marked as written."""
        position = self._position(initial_minutes)
        written = bool(self._group[WRITTEN][position])
        if not written or self._started_from is None:
            return written
        return f"{self._group[INITIAL_FIELDS][position]:016x}" == self._started_from(initial_minutes)

    def put(self, initial_minutes: int, member: int, number: int, fields: np.ndarray) -> None:
        """Write one lead time of one member; with the last, the initial time is marked as written."""
        position, layout = self._position(initial_minutes), self._layout
        try:
            if position not in self._missing:
                self._require_own(position)
                self._group[WRITTEN][position] = 0
                if self._started_from is not None:
                    self._group[INITIAL_FIELDS][position] = int(self._started_from(initial_minutes), 16)
                self._missing[position] = len(layout.lead_minutes) * (layout.members or 1)
            numbers = (position, number) if layout.members is None else (position, number, member)
            place = tuple(slice(own, own + 1) for own in numbers)
            for variable in layout.variables:
                # of a chunk's own shape, so that zarr writes it without a copy
                self._arrays[variable.name][place] = layout.select(variable, fields)[(None,) * len(place)]
            self._begin_to_store(numbers)
            self._missing[position] -= 1
            if self._missing[position] == 0:
                self._require_own(position)
                self._group[WRITTEN][position] = 1
                del self._missing[position]
        except OSError as error:
            self.discard(initial_minutes)
            raise self._failure(error) from error

    def _begin_to_store(self, numbers: tuple[int, ...]) -> None:
        """Begin with the chunks of one field of each variable; those before have had their time to get stored."""
        chunks = [
            self._path / name / array.metadata.encode_chunk_key((*numbers, *(0,) * (array.ndim - len(numbers))))
            for name, array in self._arrays.items()
        ]
        for path in (*self._storing, *chunks):
            start_writeback(path)
        self._storing = chunks

    def discard(self, initial_minutes: int) -> None:
        """Forget a forecast that is half written; it is not marked."""
        self._missing.pop(self._position(initial_minutes), None)

    def close(self) -> None:
        """Every chunk is on disk already."""

    def path_of(self, initial_minutes: int) -> Path:
        """Return the store."""
        return self._path

    def _position(self, initial_minutes: int) -> int:
        match = np.flatnonzero(self._initial == initial_minutes)
        assert len(match) == 1, f"{initial_minutes} is no initial time of this store"
        return int(match[0])

    def _require_own(self, position: int) -> None:
        """Refuse to go on in a store to which another run has appended its own initial times."""
        if int(self._group[self._init][position]) != self._initial[position]:
            raise CreditError(f"{self._path}: another run has appended other initial times just now; start again")

    def _failure(self, error: OSError) -> CreditError:
        return CreditError(f"{self._path}: cannot be written ({error.strerror or error}); {WRITE_HINT}")

    def _require_same(self) -> None:
        """Refuse a store that holds something else than what is to be written."""
        group, layout = self._group, self._layout
        stored, asked = run_attributes(dict(group.attrs)), run_attributes(layout.global_attributes)
        wrong = [f"global attribute {key}" for key in {*stored, *asked} if stored.get(key) != asked.get(key)]
        if self._init not in group or self._lead not in group:
            wrong.append("inference.layout")
        elif not np.array_equal(group[self._lead][:], layout.lead_hours):
            wrong.append("lead times")
        if self._started_from is not None and INITIAL_FIELDS not in group:
            wrong.append(f"variable {INITIAL_FIELDS}, which earlier versions did not write")
        fields = {name for name, array in group.arrays() if array.metadata.dimension_names[-1:] == ("longitude",)}
        wrong += [f"variable {name}" for name in fields - {"longitude"} ^ {v.name for v in layout.variables}]
        for variable in layout.variables:
            if variable.name in fields:
                wrong += self._differences(variable)
        if wrong:
            raise ConfigError(
                f"{self._path}: differs from what is to be written in {', '.join(sorted(set(wrong)))}; choose another "
                "inference.folder, or remove the store"
            )

    def _differences(self, variable: OutputVariable) -> list[str]:
        """Return in what a stored variable is not what `_define_variable` makes."""
        group, layout, dim = self._group, self._layout, variable.level_dim
        array = group[variable.name]
        known = dim is None or (dim in group and np.array_equal(group[dim][:], layout.levels[dim]))
        compressors = tuple(codec.to_dict() for codec in array.compressors)
        same_dims = array.metadata.dimension_names[2:] == layout.dims(variable)
        checks = {
            f"levels of {variable.name}": known,
            f"dimensions of {variable.name}": same_dims and array.shape[2:] == layout.shape(variable),
            "inference.keep_bits": array.attrs.get(QUANTIZED) == layout.keep_bits,
            "inference.compression": compressors == tuple(codec.to_dict() for codec in self._compressors),
            f"attributes of {variable.name}": {**array.attrs, QUANTIZED: None}
            == {**self._attributes_of(variable), QUANTIZED: None},
        }
        return [what for what, same in checks.items() if not same]

    def _extend(self) -> None:
        """Append initial times that the store does not have, and take its own as they are.

        All arrays are made anew beside, without fields; then the files of each take the place of the old, the lengths
        after the values, those of the initial times last, and then the consolidated metadata, which tell of the former
        length till then: what is killed here or done by several at once is done again with the same result.
        """
        wanted = self._initial
        if self._has(wanted) and self._is_consolidated():
            return
        with self._alone():
            # another run may have been faster; its initial times stay where they are
            self._group = self._open()
            if not self._has(wanted):
                self._make_part()
                for name in sorted(self._growing, key=lambda name: name == self._init):
                    files = [path for path in (self._part / name).rglob("*") if path.is_file()]
                    for path in sorted(files, key=lambda path: path.name == "zarr.json"):
                        target = self._path / path.relative_to(self._part)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        os.replace(path, target)
                shutil.rmtree(self._part)
            _consolidate(self._path)
            self._group = self._open()
        for position in np.flatnonzero(np.isin(self._initial, wanted)):
            self._require_own(position)

    def _has(self, wanted: np.ndarray) -> bool:
        """Take the store's initial times and what is `wanted` behind them; return whether it is as long as that."""
        stored = self._group[self._init][:]
        new = np.setdiff1d(wanted, stored)
        self._initial = np.concatenate([stored, new])
        if len(new) and new[0] < stored.max():
            calendar = self._layout.calendar
            raise ConfigError(
                f"{self._path}: has initial times up to {calendar.format(stored.max())}, {calendar.format(new[0])} not "
                "among them; a store grows at its end only: choose another inference.folder, and of runs that share a "
                "store start the one with the earlier times first"
            )
        return all(self._group[name].shape[0] == len(self._initial) for name in self._growing)

    def _is_consolidated(self) -> bool:
        """Return whether the consolidated metadata have the arrays as long as they are."""
        known = zarr.open_group(self._path, mode="r").metadata.consolidated_metadata
        lengths = {name: own.shape for name, own in self._group.arrays()}
        return known is not None and {name: own.shape for name, own in known.metadata.items()} == lengths

    @property
    def _growing(self) -> list[str]:
        """Names of the arrays over initial times."""
        return [name for name, own in self._group.arrays() if own.metadata.dimension_names[:1] == (self._init,)]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Be the only process that makes the store, or makes it longer; removes what killed ones have left.

        A file system without locks gets a warning; there `_require_own` sees what another run has done.
        """
        with ExitStack() as held:
            try:
                held.enter_context(file_lock(self._path.with_name(f".{self._path.name}.lock")))
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                logger.warning(
                    "%s: its file system has no locks (%s); let one run at a time append to it", self._path,
                    error.strerror,
                )  # fmt: skip
            else:
                for path in self._left():
                    shutil.rmtree(path, ignore_errors=True)
            yield

    def _left(self) -> list[Path]:
        """Return stores in the making that have no fields: of this host, as none is made outside the lock, or old."""
        return find_stale(self._path.parent, self._path.name, lambda process: False, _LEFT_SECONDS)

    def _create(self) -> None:
        """Make the whole store beside and rename it, so that a store that exists is whole in its metadata."""
        self._make_part()
        _consolidate(self._part)
        try:
            os.replace(self._part, self._path)
        except OSError:
            if not self._path.exists():
                raise
            # another job of an array was faster
            shutil.rmtree(self._part)

    def _make_part(self) -> None:
        """Make a store without fields."""
        layout = self._layout
        self._group = zarr.open_group(self._part, mode="w", zarr_format=3)
        self._group.attrs.update({**layout.global_attributes, HISTORY: MADE_BY})
        time, init, lead = layout.time_attributes(), self._init, self._lead
        valid = self._initial[:, None] + layout.lead_minutes
        self._put(init, (init,), self._initial, {**INITIAL_TIME, **time})
        self._put(lead, (lead,), layout.lead_hours, {**LEAD_TIME, **self._lead_units})
        bounded = {name: window for window, name in layout.time_names("valid_time").items()}
        for name in dict.fromkeys(("valid_time", *bounded)):
            bounds = {"bounds": f"{name}_bnds"} if name in bounded else {}
            self._put(name, (init, lead), valid, {**VALID_TIME, **time, **bounds})
            if bounds:
                edges = window_bounds(bounded[name], self._initial[:, None], valid)
                self._put(f"{name}_bnds", (init, lead, "bnds"), edges, {})
        if layout.members is not None:
            self._put(MEMBER, (MEMBER,), np.arange(layout.members), REALIZATION)
        for dim, values in layout.levels.items():
            self._put(dim, (dim,), np.array(values), layout.level_attributes(dim))
        self._put("latitude", ("latitude",), layout.grid.lat, LATITUDE)
        self._put("longitude", ("longitude",), layout.grid.lon, LONGITUDE)
        marks = {"long_name": "1 where the forecast of the initial time is whole", "units": "1"}
        self._put(WRITTEN, (init,), np.zeros(len(self._initial), dtype=np.int8), marks)
        if self._started_from is not None:
            sums = {"long_name": "checksum of the fields that the forecast starts from", "units": "1"}
            self._put(INITIAL_FIELDS, (init,), np.zeros(len(self._initial), dtype=np.uint64), sums)
        for variable in layout.variables:
            self._define_variable(variable)

    def _define_variable(self, variable: OutputVariable) -> None:
        layout = self._layout
        shape = (len(self._initial), len(layout.lead_minutes), *layout.shape(variable))
        ones = 2 if layout.members is None else 3
        self._group.create_array(
            variable.name,
            shape=shape,
            chunks=(*(1,) * ones, *shape[ones:]),
            dtype="float32",
            fill_value=float("nan"),
            compressors=self._compressors,
            dimension_names=layout.dims(variable, self._init, self._lead),
            attributes=self._attributes_of(variable),
        )

    @property
    def _compressors(self) -> tuple[zarr.codecs.ZstdCodec, ...]:
        return (zarr.codecs.ZstdCodec(level=self._layout.compression),) if self._layout.compression else ()

    def _attributes_of(self, variable: OutputVariable) -> dict[str, str | int]:
        quantized = {} if self._layout.keep_bits is None else {QUANTIZED: self._layout.keep_bits}
        times = self._layout.time_names("valid_time").get(variable.window, "valid_time")
        return {**variable.attributes, **quantized, "coordinates": times}

    def _put(self, name: str, dims: tuple[str, ...], values: np.ndarray, attributes: dict) -> None:
        grows = (1 if name in (WRITTEN, INITIAL_FIELDS) else _INITIAL_TIMES, *values.shape[1:])
        array = self._group.create_array(
            name,
            shape=values.shape,
            chunks=grows if dims[0] == self._init else values.shape,
            dtype=values.dtype,
            dimension_names=dims,
            attributes=attributes,
        )
        array[...] = values


def _consolidate(path: Path) -> None:
    """Write the metadata of all arrays into the store's own, in one rename."""
    with warnings.catch_warnings():
        # xarray reads them, and without them it is xarray that warns; other programs may do without
        warnings.filterwarnings("ignore", "Consolidated metadata is currently not part", ZarrUserWarning)
        zarr.consolidate_metadata(path)
