"""Writer of forecasts to one zarr store, with initial time and lead time as dimensions.

Shape suffixes: C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import zarr

from credit.errors import ConfigError, CreditError
from credit.forecast.io.schema import (
    INITIAL_FIELDS,
    WRITE_HINT,
    ForecastSchema,
    use_stored_level_dims,
)
from credit.forecast.io.zarr_arrays import (
    TIME_NAMES,
    WRITTEN,
    create_arrays,
    crop_masks,
    find_store_differences,
    write_consolidated_metadata,
)
from credit.forecast.store_part import StorePart
from credit.utils.file_lock import file_lock
from credit.utils.page_cache import start_writeback
from credit.utils.temporary import find_stale_files, temporary_path

STORE = "forecasts.zarr"
# Creating a store takes seconds, so an older temporary store of another host was left by a killed process.
_STALE_SECONDS = 3600.0
# Error numbers of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

logger = logging.getLogger(__name__)


class ZarrStore:
    """Writer of forecasts to a zarr store; see `credit.forecast.io.forecast_writer.ForecastWriter`.

    The store is created for all initial times of the run, with a chunk for each variable, initial time, lead time and
    member, so that several processes can fill it. With domain parallelism, each rank's part has separate chunks. The
    array ``written`` marks the complete initial times. A later run with later initial times extends the store. A
    process locks the store while it creates or extends the store.

    The consolidated metadata let other programs open the store faster. This class does not read them, because they are
    out of date while a store is extended.

    Args:
        path: path of the store.
        schema: content of each forecast.
        initial_minutes: initial times of the run in minutes.
        layout: ``cf`` or ``weatherbench2``, which determines the names of the time dimensions.
        initial_state_checksum: function that takes an initial time in minutes and returns the checksum of the initial
            fields of the forecast; None to write no checksums.
        part: part of the fields that this process writes; None for whole fields.

    Raises:
        ConfigError: if the store exists with different content or with chunks that do not fit `part`, or if a new
            initial time of this run is before the last initial time in the store.
        CreditError: if the store cannot be written.
    """

    def __init__(
        self,
        path: Path,
        schema: ForecastSchema,
        initial_minutes: Sequence[int],
        layout: str,
        initial_state_checksum: Callable[[int], str] | None = None,
        part: StorePart | None = None,
    ) -> None:
        self._path = path
        self._schema = schema
        self._part = part
        self._grid_chunks = schema.grid.shape if part is None else part.choose_chunks()
        self._time_names = TIME_NAMES[layout]
        # Computing a checksum reads fields, so each checksum is cached.
        self._initial_state_checksum = None
        if initial_state_checksum is not None:
            self._initial_state_checksum = functools.cache(initial_state_checksum)
        self._initial_minutes = np.unique(np.asarray(initial_minutes, dtype=np.int64))
        # Index of an initial time -> number of fields that were not written yet.
        self._num_missing: dict[int, int] = {}
        # Chunks whose writeback the previous call of `put` has started.
        self._last_chunks: list[Path] = []
        self._temporary_path = temporary_path(path)
        try:
            if not path.exists() or self._find_stale_stores():
                with self._lock():
                    if not path.exists():
                        self._create()
            self._group = self._open()
            stored_dims = {name: array.metadata.dimension_names or () for name, array in self._group.arrays()}
            self._schema = use_stored_level_dims(schema, stored_dims)
            self._require_same_content()
            # An extended store keeps the sizes of its chunks.
            self._grid_chunks = self._group[schema.variables[0].name].chunks[-2:]
            if part is not None:
                part.require_aligned(self._grid_chunks, path)
            self._extend()
            # Writing a chunk is faster than testing if it has only missing values.
            self._arrays = {}
            for variable in schema.variables:
                self._arrays[variable.name] = self._group[variable.name].with_config({"write_empty_chunks": True})
        except OSError as error:
            shutil.rmtree(self._temporary_path, ignore_errors=True)
            raise self._build_write_error(error) from error

    def _open(self) -> zarr.Group:
        """Open the store for writing, without its consolidated metadata, which may be out of date."""
        return zarr.open_group(self._path, mode="r+", use_consolidated=False)

    def is_complete(self, initial_minutes: int) -> bool:
        """Return True if the store has the complete forecast from an initial time (minutes) with the same analysis."""
        index = self._find_index(initial_minutes)
        is_marked = bool(self._group[WRITTEN][index])
        if not is_marked or self._initial_state_checksum is None:
            return is_marked
        return f"{self._group[INITIAL_FIELDS][index]:016x}" == self._initial_state_checksum(initial_minutes)

    def put(self, initial_minutes: int, member: int, lead_index: int, fields_CHW: np.ndarray) -> None:
        """Write one lead time of one member; mark the initial time as complete when all fields are written.

        A process that writes only a part of the fields does not mark the initial time, see `mark_complete`.

        Args:
            initial_minutes: initial time in minutes.
            member: number of the member; 0 for a single forecast.
            lead_index: index of the lead time in ``lead_minutes`` of the schema.
            fields_CHW: float32 in physical units, NaN where missing; the part of the fields that this process writes.

        Raises:
            CreditError: if the store cannot be written, or another run has changed its initial times meanwhile.
        """
        index = self._find_index(initial_minutes)
        schema = self._schema
        part = self._part
        try:
            # The first fields of a forecast replace fields of an older forecast, which is no longer complete.
            if index not in self._num_missing:
                self._require_initial_time(index)
                self._group[WRITTEN][index] = 0
                # The checksum covers whole fields, so only one process writes it.
                if self._initial_state_checksum is not None and (part is None or part.is_first):
                    self._group[INITIAL_FIELDS][index] = int(self._initial_state_checksum(initial_minutes), 16)
                self._num_missing[index] = len(schema.lead_minutes) * (schema.members or 1)
            leading = (index, lead_index)
            if schema.members is not None:
                leading = (index, lead_index, member)
            selection = tuple(slice(position, position + 1) for position in leading)
            variables = schema.variables
            if part is not None:
                selection = (*selection, ..., *part.part.slices)
                variables = crop_masks(variables, part.part)
            for variable in variables:
                values = schema.select(variable, fields_CHW)
                # zarr writes values with the shape of a chunk without a copy.
                self._arrays[variable.name][selection] = values[(None,) * len(leading)]
            self._start_writeback(leading)
        except OSError as error:
            self.discard(initial_minutes)
            raise self._build_write_error(error) from error
        # If other processes write other members of this forecast, this counter never reaches 0. If they write other
        # parts of the fields, this process cannot detect that all parts are written. In both cases the caller marks it.
        self._num_missing[index] -= 1
        if self._num_missing[index] == 0 and part is None:
            self.mark_complete(initial_minutes)

    def mark_complete(self, initial_minutes: int) -> None:
        """Mark a forecast as complete, after the processes of the run have written all of its fields.

        Args:
            initial_minutes: initial time in minutes.

        Raises:
            CreditError: if the store cannot be written, or another run has changed its initial times meanwhile.
        """
        index = self._find_index(initial_minutes)
        self._num_missing.pop(index, None)
        try:
            self._require_initial_time(index)
            if self._initial_state_checksum is not None:
                checksum = int(self._initial_state_checksum(initial_minutes), 16)
                if int(self._group[INITIAL_FIELDS][index]) != checksum:
                    raise CreditError(f"{self._path}: an analysis changed while its forecasts were made; start again")
            self._group[WRITTEN][index] = 1
        except OSError as error:
            raise self._build_write_error(error) from error

    def _start_writeback(self, leading: tuple[int, ...]) -> None:
        """Start the writeback to disk of the chunks that `put` has written, and free older chunks from the page cache.

        The chunks of the previous call are on disk by now, so a second writeback only frees their page cache.

        Args:
            leading: indices of initial time, lead time and member of the chunks.
        """
        grid_indices = [(0, 0)] if self._part is None else self._part.find_chunks(self._grid_chunks)
        chunks = []
        for name, array in self._arrays.items():
            zeros = (0,) * (array.ndim - len(leading) - 2)
            for row, column in grid_indices:
                key = array.metadata.encode_chunk_key((*leading, *zeros, row, column))
                chunks.append(self._path / name / key)
        for path in (*self._last_chunks, *chunks):
            start_writeback(path)
        self._last_chunks = chunks

    def discard(self, initial_minutes: int) -> None:
        """Stop writing the incomplete forecast that starts at an initial time (in minutes).

        Its chunks stay in the store, but ``written`` is 0, so readers and later runs treat the forecast as missing.
        """
        self._num_missing.pop(self._find_index(initial_minutes), None)

    def close(self) -> None:
        """Do nothing, because `put` has already written all chunks."""

    def find_path(self, initial_minutes: int) -> Path:
        """Return the path of the store, which contains the forecasts from all initial times."""
        return self._path

    def _find_index(self, initial_minutes: int) -> int:
        """Return the index of an initial time (in minutes) in the store."""
        matches = np.flatnonzero(self._initial_minutes == initial_minutes)
        assert len(matches) == 1, f"{initial_minutes} is not an initial time of this store"
        return int(matches[0])

    def _require_initial_time(self, index: int) -> None:
        """Raise CreditError if another run has replaced an initial time of this run in the store.

        Args:
            index: index of the initial time.
        """
        if int(self._group[self._time_names.init][index]) != self._initial_minutes[index]:
            raise CreditError(f"{self._path}: another run has just appended other initial times; start again")

    def _build_write_error(self, error: OSError) -> CreditError:
        """Return an error that names the store, the reason in `error` and a remedy."""
        return CreditError(f"{self._path}: cannot be written ({error.strerror or error}); {WRITE_HINT}")

    def _require_same_content(self) -> None:
        """Raise ConfigError if the content of the store differs from the content to write.

        The message lists all differences.
        """
        has_checksums = self._initial_state_checksum is not None
        differences = find_store_differences(self._group, self._schema, self._time_names, has_checksums)
        if differences:
            raise ConfigError(
                f"{self._path}: differs from the new forecasts in {', '.join(differences)}; choose a different "
                "inference.folder, or remove the store"
            )

    def _extend(self) -> None:
        """Append the initial times of this run that are not yet in the store.

        The arrays with a dimension of initial times are created again in a temporary store, without fields. Then their
        files replace the files of the store. For each array, the values are replaced first, then the metadata with the
        new length. The array of initial times is replaced last. The consolidated metadata are written at the end. In
        this order, an extension can be repeated safely after an interruption, and while other processes run it.
        """
        requested_minutes = self._initial_minutes
        if self._merge_initial_times(requested_minutes) and self._is_consolidated():
            return
        with self._lock():
            # Another run may have extended the store before the lock was acquired. Its initial times are not moved.
            self._group = self._open()
            if not self._merge_initial_times(requested_minutes):
                self._create_temporary()
                self._move_arrays_over_initial_times()
                shutil.rmtree(self._temporary_path)
            write_consolidated_metadata(self._path)
            self._group = self._open()
        for index in np.flatnonzero(np.isin(self._initial_minutes, requested_minutes)):
            self._require_initial_time(index)

    def _move_arrays_over_initial_times(self) -> None:
        """Replace the arrays over initial times with the arrays of the temporary store; see `_extend` for the order."""
        # False sorts before True, so the array of initial times comes last, and the metadata of each array come last.
        names = sorted(self._find_arrays_over_initial_times(), key=lambda name: name == self._time_names.init)
        for name in names:
            files = [path for path in (self._temporary_path / name).rglob("*") if path.is_file()]
            for path in sorted(files, key=lambda path: path.name == "zarr.json"):
                target = self._path / path.relative_to(self._temporary_path)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)

    def _merge_initial_times(self, requested_minutes: np.ndarray) -> bool:
        """Set `_initial_minutes` to the initial times of the store, followed by new requested initial times.

        Returns:
            True if all arrays over initial times already have the new length, so the store need not be extended.

        Raises:
            ConfigError: if a new initial time is before the last initial time of the store.
        """
        stored_minutes = self._group[self._time_names.init][:]
        new_minutes = np.setdiff1d(requested_minutes, stored_minutes)
        self._initial_minutes = np.concatenate([stored_minutes, new_minutes])
        if len(new_minutes) and new_minutes[0] < stored_minutes.max():
            calendar = self._schema.calendar
            raise ConfigError(
                f"{self._path}: has initial times up to {calendar.format(stored_minutes.max())} but not "
                f"{calendar.format(new_minutes[0])}; a store can only be extended at its end: choose a different "
                "inference.folder; if runs share a store, start the run with the earlier times first"
            )
        lengths = {self._group[name].shape[0] for name in self._find_arrays_over_initial_times()}
        return lengths == {len(self._initial_minutes)}

    def _is_consolidated(self) -> bool:
        """Return True if the consolidated metadata exist and have the current shapes of the arrays."""
        consolidated = zarr.open_group(self._path, mode="r").metadata.consolidated_metadata
        if consolidated is None:
            return False
        shapes = {name: array.shape for name, array in self._group.arrays()}
        return {name: array.shape for name, array in consolidated.metadata.items()} == shapes

    def _find_arrays_over_initial_times(self) -> list[str]:
        """Return the names of the arrays whose first dimension is the initial time."""
        names = []
        for name, array in self._group.arrays():
            if array.metadata.dimension_names[:1] == (self._time_names.init,):
                names.append(name)
        return names

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Return a context that locks the store and removes stale temporary stores.

        On a file system without locks, a warning is logged. `_require_initial_time` then detects changes by another
        run.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock(self._path.with_name(f".{self._path.name}.lock")))
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                logger.warning(
                    "%s: its file system has no locks (%s); let only one run at a time append to this store",
                    self._path,
                    error.strerror,
                )
            else:
                for path in self._find_stale_stores():
                    shutil.rmtree(path, ignore_errors=True)
            yield

    def _find_stale_stores(self) -> list[Path]:
        """Return the paths of temporary stores of killed processes.

        A process has a temporary store only while it holds the lock. So for the process that holds the lock, all
        temporary stores of this host are stale. Temporary stores of other hosts are treated as stale when they are old.
        """
        return find_stale_files(self._path.parent, self._path.name, lambda process: False, _STALE_SECONDS)

    def _create_temporary(self) -> None:
        """Create a store under a temporary name, with all coordinates, and with fields that have no values yet."""
        with_checksums = self._initial_state_checksum is not None
        self._group = create_arrays(
            self._temporary_path,
            self._schema,
            self._initial_minutes,
            self._time_names,
            with_checksums,
            self._grid_chunks,
        )

    def _create(self) -> None:
        """Create the store under a temporary name and rename it, so that no process opens an incomplete store."""
        self._create_temporary()
        write_consolidated_metadata(self._temporary_path)
        try:
            os.replace(self._temporary_path, self._path)
        except OSError:
            if not self._path.exists():
                raise
            # Without locks, another job of an array may have created the store first.
            shutil.rmtree(self._temporary_path)
