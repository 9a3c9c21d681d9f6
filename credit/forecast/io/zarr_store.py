"""Forecasts as one zarr store over initial and lead times.

Shapes: C output channels, H rows, W columns.
"""

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
    INITIAL_FIELDS,
    QUANTIZED,
    WRITE_HINT,
    ForecastSchema,
    OutputVariable,
    run_attributes,
    take_level_dims,
)
from credit.forecast.io.zarr_arrays import (
    TIME_NAMES,
    WRITTEN,
    build_compressors,
    create_arrays,
    variable_attributes,
)
from credit.utils.file_lock import file_lock
from credit.utils.temporary import find_stale, temporary_path

STORE = "forecasts.zarr"
# Creating a store takes seconds, so a temporary store of another host that is older was left by a killed process.
_LEFT_SECONDS = 3600.0
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

logger = logging.getLogger(__name__)


class ZarrStore:
    """Writes forecasts of one layout into a store; see `credit.forecast.io.forecast_writer.ForecastWriter`.

    The store has a run's full size from the start, with one chunk for each variable, initial time and lead time, so
    that several processes can fill it. The variable ``written`` marks the initial times that are complete. A later run
    with later initial times extends the store. A process that creates or extends the store holds a lock file meanwhile.
    The consolidated metadata are for other programs, which open the store faster with them. This class does not read
    them, because they are out of date while a store grows.
    """

    def __init__(
        self,
        path: Path,
        layout: ForecastSchema,
        initial_minutes: Sequence[int],
        names: str,
        started_from: Callable[[int], str] | None = None,
    ) -> None:
        self._path = path
        self._layout = layout
        self._names = TIME_NAMES[names]
        self._started_from = None if started_from is None else functools.cache(started_from)
        self._initial_minutes = np.unique(np.asarray(initial_minutes, dtype=np.int64))
        # Index of an initial time -> number of fields that an incomplete forecast lacks.
        self._num_missing: dict[int, int] = {}
        # Chunks whose writeback was started last.
        self._last_chunks: list[Path] = []
        self._temporary_path = temporary_path(path)
        try:
            if not path.exists() or self._stale_stores():
                with self._lock():
                    if not path.exists():
                        self._create()
            self._group = self._open()
            stored_dims = {name: array.metadata.dimension_names or () for name, array in self._group.arrays()}
            self._layout = take_level_dims(layout, stored_dims)
            self._require_same()
            self._extend()
            # Testing whether a chunk has only missing values takes longer than writing it.
            self._arrays = {
                variable.name: self._group[variable.name].with_config({"write_empty_chunks": True})
                for variable in layout.variables
            }
        except OSError as error:
            shutil.rmtree(self._temporary_path, ignore_errors=True)
            raise self._failure(error) from error

    def _open(self) -> zarr.Group:
        return zarr.open_group(self._path, mode="r+", use_consolidated=False)

    def is_complete(self, initial_minutes: int) -> bool:
        """Return whether this initial time is marked as complete, with the same analysis."""
        index = self._index_of(initial_minutes)
        is_marked = bool(self._group[WRITTEN][index])
        if not is_marked or self._started_from is None:
            return is_marked
        return f"{self._group[INITIAL_FIELDS][index]:016x}" == self._started_from(initial_minutes)

    def put(self, initial_minutes: int, member: int, number: int, fields_CHW: np.ndarray) -> None:
        """Write one lead time of one member; the last of them marks the initial time as complete."""
        index = self._index_of(initial_minutes)
        layout = self._layout
        try:
            if index not in self._num_missing:
                self._require_initial_time(index)
                self._group[WRITTEN][index] = 0
                if self._started_from is not None:
                    self._group[INITIAL_FIELDS][index] = int(self._started_from(initial_minutes), 16)
                self._num_missing[index] = len(layout.lead_minutes) * (layout.members or 1)
            leading = (index, number) if layout.members is None else (index, number, member)
            selection = tuple(slice(position, position + 1) for position in leading)
            for variable in layout.variables:
                values = layout.select(variable, fields_CHW)
                # Values of the shape of a chunk are written by zarr without a copy.
                self._arrays[variable.name][selection] = values[(None,) * len(leading)]
            self._start_writeback(leading)
            self._num_missing[index] -= 1
            if self._num_missing[index] == 0:
                self._require_initial_time(index)
                self._group[WRITTEN][index] = 1
                del self._num_missing[index]
        except OSError as error:
            self.discard(initial_minutes)
            raise self._failure(error) from error

    def _start_writeback(self, leading: tuple[int, ...]) -> None:
        """Start the writeback of the last chunk of each variable.

        The chunks before them are on disk by now, and a second call removes them from the page cache.
        """
        chunks = []
        for name, array in self._arrays.items():
            position = (*leading, *(0,) * (array.ndim - len(leading)))
            chunks.append(self._path / name / array.metadata.encode_chunk_key(position))
        for path in (*self._last_chunks, *chunks):
            start_writeback(path)
        self._last_chunks = chunks

    def discard(self, initial_minutes: int) -> None:
        """Forget an incomplete forecast, which is not marked."""
        self._num_missing.pop(self._index_of(initial_minutes), None)

    def close(self) -> None:
        """Do nothing: all chunks are on disk already."""

    def path_of(self, initial_minutes: int) -> Path:
        """Return the store."""
        return self._path

    def _index_of(self, initial_minutes: int) -> int:
        matches = np.flatnonzero(self._initial_minutes == initial_minutes)
        assert len(matches) == 1, f"{initial_minutes} is not an initial time of this store"
        return int(matches[0])

    def _require_initial_time(self, index: int) -> None:
        """Refuse to continue in a store to which another run has appended its own initial times."""
        if int(self._group[self._names.init][index]) != self._initial_minutes[index]:
            raise CreditError(f"{self._path}: another run has appended other initial times just now; start again")

    def _failure(self, error: OSError) -> CreditError:
        return CreditError(f"{self._path}: cannot be written ({error.strerror or error}); {WRITE_HINT}")

    def _require_same(self) -> None:
        """Refuse a store whose content differs from what is to be written."""
        group = self._group
        layout = self._layout
        stored_attributes = run_attributes(dict(group.attrs))
        attributes = run_attributes(layout.global_attributes)
        differences = set()
        for key in {*stored_attributes, *attributes}:
            if stored_attributes.get(key) != attributes.get(key):
                differences.add(f"global attribute {key}")
        if self._names.init not in group or self._names.lead not in group:
            differences.add("inference.layout")
        elif not np.array_equal(group[self._names.lead][:], layout.lead_hours):
            differences.add("lead times")
        if self._started_from is not None and INITIAL_FIELDS not in group:
            differences.add(f"variable {INITIAL_FIELDS}, which earlier versions did not write")
        stored_fields = set()
        for name, array in group.arrays():
            if name != "longitude" and array.metadata.dimension_names[-1:] == ("longitude",):
                stored_fields.add(name)
        for name in stored_fields ^ {variable.name for variable in layout.variables}:
            differences.add(f"variable {name}")
        for variable in layout.variables:
            if variable.name in stored_fields:
                differences.update(self._variable_differences(variable))
        if differences:
            raise ConfigError(
                f"{self._path}: differs from what is to be written in {', '.join(sorted(differences))}; choose another "
                "inference.folder, or remove the store"
            )

    def _variable_differences(self, variable: OutputVariable) -> list[str]:
        """Return the names of properties of a stored variable that `_define_variable` would make otherwise."""
        group = self._group
        layout = self._layout
        dim = variable.level_dim
        array = group[variable.name]
        same_levels = dim is None or (dim in group and np.array_equal(group[dim][:], layout.levels[dim]))
        stored_dims = array.metadata.dimension_names[2:]
        same_dims = stored_dims == layout.dims(variable) and array.shape[2:] == layout.shape(variable)
        stored_compressors = [codec.to_dict() for codec in array.compressors]
        # The number of bits has a check of its own.
        stored_attributes = {**array.attrs, QUANTIZED: None}
        attributes = {**variable_attributes(layout, variable), QUANTIZED: None}
        checks = {
            f"levels of {variable.name}": same_levels,
            f"dimensions of {variable.name}": same_dims,
            "inference.keep_bits": array.attrs.get(QUANTIZED) == layout.keep_bits,
            "inference.compression": stored_compressors == [codec.to_dict() for codec in build_compressors(layout)],
            f"attributes of {variable.name}": stored_attributes == attributes,
        }
        return [name for name, is_same in checks.items() if not is_same]

    def _extend(self) -> None:
        """Append the initial times that the store does not have; leave its own in place.

        All arrays over initial times are created in a temporary store, without fields. Then their files replace the
        old ones. The order makes the operation repeatable: an array's metadata, which have its length, after its
        values; the array of initial times last; then the consolidated metadata, which have the former lengths until
        then. If a process is killed, or several run at once, a repetition gives the same result.
        """
        requested_minutes = self._initial_minutes
        if self._merge_initial_times(requested_minutes) and self._is_consolidated():
            return
        with self._lock():
            # Another run may have extended the store before the lock was acquired. Its initial times stay in place.
            self._group = self._open()
            if not self._merge_initial_times(requested_minutes):
                self._create_temporary()
                names = sorted(self._names_over_init(), key=lambda name: name == self._names.init)
                for name in names:
                    files = [path for path in (self._temporary_path / name).rglob("*") if path.is_file()]
                    for path in sorted(files, key=lambda path: path.name == "zarr.json"):
                        target = self._path / path.relative_to(self._temporary_path)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        os.replace(path, target)
                shutil.rmtree(self._temporary_path)
            _consolidate(self._path)
            self._group = self._open()
        for index in np.flatnonzero(np.isin(self._initial_minutes, requested_minutes)):
            self._require_initial_time(index)

    def _merge_initial_times(self, requested_minutes: np.ndarray) -> bool:
        """Set the initial times to those of the store, followed by the new ones of `requested_minutes`.

        Returns:
            True if all arrays of the store have this length already.

        Raises:
            ConfigError: if a new initial time is before the last one of the store.
        """
        stored_minutes = self._group[self._names.init][:]
        new_minutes = np.setdiff1d(requested_minutes, stored_minutes)
        self._initial_minutes = np.concatenate([stored_minutes, new_minutes])
        if len(new_minutes) and new_minutes[0] < stored_minutes.max():
            calendar = self._layout.calendar
            raise ConfigError(
                f"{self._path}: has initial times up to {calendar.format(stored_minutes.max())} but not "
                f"{calendar.format(new_minutes[0])}; a store grows at its end only: choose another inference.folder, "
                "and of runs that share a store start the one with the earlier times first"
            )
        return all(self._group[name].shape[0] == len(self._initial_minutes) for name in self._names_over_init())

    def _is_consolidated(self) -> bool:
        """Return whether the consolidated metadata have the present shapes of the arrays."""
        consolidated = zarr.open_group(self._path, mode="r").metadata.consolidated_metadata
        if consolidated is None:
            return False
        shapes = {name: array.shape for name, array in self._group.arrays()}
        return {name: array.shape for name, array in consolidated.metadata.items()} == shapes

    def _names_over_init(self) -> list[str]:
        """Return the names of the arrays over initial times."""
        first_dim = (self._names.init,)
        return [name for name, array in self._group.arrays() if array.metadata.dimension_names[:1] == first_dim]

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Lock the store while it is created or extended; remove temporary stores of killed processes.

        On a file system without locks there is a warning. `_require_initial_time` then detects interference of another
        run.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock(self._path.with_name(f".{self._path.name}.lock")))
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                logger.warning(
                    "%s: its file system has no locks (%s); let one run at a time append to it",
                    self._path,
                    error.strerror,
                )
            else:
                for path in self._stale_stores():
                    shutil.rmtree(path, ignore_errors=True)
            yield

    def _stale_stores(self) -> list[Path]:
        """Return temporary stores that no process uses any more.

        Stores are created with the lock held, so all temporary stores of this host are stale; those of other hosts are
        if they are old.
        """
        return find_stale(self._path.parent, self._path.name, lambda process: False, _LEFT_SECONDS)

    def _create_temporary(self) -> None:
        """Create a store without fields under a temporary name."""
        with_checksums = self._started_from is not None
        self._group = create_arrays(
            self._temporary_path, self._layout, self._initial_minutes, self._names, with_checksums
        )

    def _create(self) -> None:
        """Create the store under a temporary name and rename it, so that the metadata of a store are complete."""
        self._create_temporary()
        _consolidate(self._temporary_path)
        try:
            os.replace(self._temporary_path, self._path)
        except OSError:
            if not self._path.exists():
                raise
            # Without locks, another job of an array may have created the store first.
            shutil.rmtree(self._temporary_path)


def _consolidate(path: Path) -> None:
    """Write the metadata of all arrays into those of the group, in one rename."""
    with warnings.catch_warnings():
        # xarray reads consolidated metadata, and warns if there are none; other programs may ignore them.
        warnings.filterwarnings("ignore", "Consolidated metadata is currently not part", ZarrUserWarning)
        zarr.consolidate_metadata(path)
