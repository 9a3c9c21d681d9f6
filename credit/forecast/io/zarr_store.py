"""Writer of forecasts to one zarr store, in which initial and lead time are dimensions.

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
    with_stored_level_dims,
)
from credit.forecast.io.zarr_arrays import (
    TIME_NAMES,
    WRITTEN,
    consolidate,
    create_arrays,
    find_store_differences,
    select_masks,
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

    The store is created for all initial times of the run, with one chunk for each variable, initial time, lead time and
    member, so that several processes can fill it. If ranks divide the fields among them, each part has chunks of its
    own. The array ``written`` marks the complete initial times. A later run with later initial times extends the store.
    A process that creates or extends the store locks it meanwhile.

    The consolidated metadata let other programs open the store faster. This class does not rely on them, because they
    are out of date while a store is extended.

    Args:
        path: path of the store.
        schema: content of each forecast.
        initial_minutes: initial times of the run in minutes.
        layout: ``cf`` or ``weatherbench2``, which determines the names of the time dimensions.
        initial_state_checksum: function that takes an initial time in minutes and returns the checksum of the fields
            that the forecast starts from; None to write no checksums.
        part: part of the fields that this process writes; None for whole fields.

    Raises:
        ConfigError: if the store exists with other content or with chunks that do not fit `part`, or has later initial
            times than a new one of this run.
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
        # Computing a checksum reads fields, so each one is computed once.
        self._initial_state_checksum = None
        if initial_state_checksum is not None:
            self._initial_state_checksum = functools.cache(initial_state_checksum)
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
            self._schema = with_stored_level_dims(schema, stored_dims)
            self._require_same_content()
            # A store that is extended keeps its chunks.
            self._grid_chunks = self._group[schema.variables[0].name].chunks[-2:]
            if part is not None:
                part.require_aligned(self._grid_chunks, path)
            self._extend()
            # Testing whether a chunk has only missing values takes longer than writing it.
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
        """Return True if the forecast from an initial time is complete and was made from the same initial state."""
        index = self._find_index(initial_minutes)
        is_marked = bool(self._group[WRITTEN][index])
        if not is_marked or self._initial_state_checksum is None:
            return is_marked
        return f"{self._group[INITIAL_FIELDS][index]:016x}" == self._initial_state_checksum(initial_minutes)

    def put(self, initial_minutes: int, member: int, lead_index: int, fields_CHW: np.ndarray) -> None:
        """Write one lead time of one member; mark the initial time as complete when all of them are written.

        A process that writes a part of the fields does not mark it, see `mark_complete`.

        Args:
            initial_minutes: initial time in minutes.
            member: number of the member, 0 for a single forecast.
            lead_index: index of the lead time in ``lead_minutes`` of the schema.
            fields_CHW: float32 in physical units, NaN where missing; the part of the fields that this process writes.

        Raises:
            CreditError: if the store cannot be written, or another run has changed its initial times meanwhile.
        """
        index = self._find_index(initial_minutes)
        schema = self._schema
        part = self._part
        try:
            # The first fields of a forecast: an older forecast of this time does not count as complete any more.
            if index not in self._num_missing:
                self._require_initial_time(index)
                self._group[WRITTEN][index] = 0
                # The checksum is that of whole fields, which one process reads.
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
                variables = select_masks(variables, part.part)
            for variable in variables:
                values = schema.select(variable, fields_CHW)
                # Values of the shape of a chunk are written by zarr without a copy.
                self._arrays[variable.name][selection] = values[(None,) * len(leading)]
            self._start_writeback(leading)
        except OSError as error:
            self.discard(initial_minutes)
            raise self._build_write_error(error) from error
        # If other processes write other members of this forecast, this counter never reaches 0. If they write other
        # parts of its fields, only the caller knows when all of them are written.
        self._num_missing[index] -= 1
        if self._num_missing[index] == 0 and part is None:
            self.mark_complete(initial_minutes)

    def mark_complete(self, initial_minutes: int) -> None:
        """Mark a forecast as complete, all fields of which are written, by this process or by several.

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
        """Start the writeback to disk of the chunks that `put` wrote at the leading indices `leading`.

        The chunks of the previous call are on disk by now, and a second call for them frees their page cache.
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
        """Stop writing the incomplete forecast from an initial time, in minutes.

        Its chunks stay in the store. As ``written`` is 0 for it, readers and later runs treat the forecast as missing.
        """
        self._num_missing.pop(self._find_index(initial_minutes), None)

    def close(self) -> None:
        """Do nothing, because `put` writes each chunk at once."""

    def find_path(self, initial_minutes: int) -> Path:
        """Return the path of the store, in which the forecasts from all initial times are."""
        return self._path

    def _find_index(self, initial_minutes: int) -> int:
        """Return the index of an initial time (in minutes) in the store."""
        matches = np.flatnonzero(self._initial_minutes == initial_minutes)
        assert len(matches) == 1, f"{initial_minutes} is not an initial time of this store"
        return int(matches[0])

    def _require_initial_time(self, index: int) -> None:
        """Refuse to write to a store in which another run has replaced an initial time of this run.

        Raises:
            CreditError: if the initial time that the store has at `index` is not the one of this run.
        """
        if int(self._group[self._time_names.init][index]) != self._initial_minutes[index]:
            raise CreditError(f"{self._path}: another run has appended other initial times just now; start again")

    def _build_write_error(self, error: OSError) -> CreditError:
        """Convert an error of the operating system to an error of this package."""
        return CreditError(f"{self._path}: cannot be written ({error.strerror or error}); {WRITE_HINT}")

    def _require_same_content(self) -> None:
        """Refuse a store whose content differs from what is to be written.

        Raises:
            ConfigError: naming all differences.
        """
        has_checksums = self._initial_state_checksum is not None
        differences = find_store_differences(self._group, self._schema, self._time_names, has_checksums)
        if differences:
            raise ConfigError(
                f"{self._path}: differs from what is to be written in {', '.join(differences)}; choose another "
                "inference.folder, or remove the store"
            )

    def _extend(self) -> None:
        """Append the initial times of this run that the store lacks, after the existing ones.

        The arrays that have initial times as a dimension are created anew in a temporary store, without fields. Then
        their files replace those of the store: of each array first the values and then the metadata, which state the
        length; the array of initial times as the last one. The consolidated metadata are written at the end. In this
        order, an extension that was interrupted, or that several processes make at once, can be repeated safely.
        """
        requested_minutes = self._initial_minutes
        if self._merge_initial_times(requested_minutes) and self._is_consolidated():
            return
        with self._lock():
            # Another run may have extended the store before the lock was acquired. Its initial times stay in place.
            self._group = self._open()
            if not self._merge_initial_times(requested_minutes):
                self._create_temporary()
                self._move_arrays_over_initial_times()
                shutil.rmtree(self._temporary_path)
            consolidate(self._path)
            self._group = self._open()
        for index in np.flatnonzero(np.isin(self._initial_minutes, requested_minutes)):
            self._require_initial_time(index)

    def _move_arrays_over_initial_times(self) -> None:
        """Replace the arrays over initial times with those of the temporary store; see `_extend` for the order."""
        # False sorts before True: the array of initial times comes last, and of each array the metadata.
        names = sorted(self._find_arrays_over_initial_times(), key=lambda name: name == self._time_names.init)
        for name in names:
            files = [path for path in (self._temporary_path / name).rglob("*") if path.is_file()]
            for path in sorted(files, key=lambda path: path.name == "zarr.json"):
                target = self._path / path.relative_to(self._temporary_path)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)

    def _merge_initial_times(self, requested_minutes: np.ndarray) -> bool:
        """Set `_initial_minutes` to the initial times of the store, followed by the requested ones that it lacks.

        Returns:
            True if all arrays over initial times have this length already, so that nothing has to be extended.

        Raises:
            ConfigError: if an initial time that the store lacks is before the last one of the store.
        """
        stored_minutes = self._group[self._time_names.init][:]
        new_minutes = np.setdiff1d(requested_minutes, stored_minutes)
        self._initial_minutes = np.concatenate([stored_minutes, new_minutes])
        if len(new_minutes) and new_minutes[0] < stored_minutes.max():
            calendar = self._schema.calendar
            raise ConfigError(
                f"{self._path}: has initial times up to {calendar.format(stored_minutes.max())} but not "
                f"{calendar.format(new_minutes[0])}; a store grows at its end only: choose another inference.folder, "
                "and of runs that share a store start the one with the earlier times first"
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
        """Context that locks the store while it is created or extended, and removes stores that killed runs have left.

        On a file system without locks, it logs a warning. `_require_initial_time` then detects interference of another
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
        """Return the paths of temporary stores that killed processes have left.

        A process has a temporary store only while it holds the lock. So to the holder of the lock, all temporary stores
        of this host are stale. Those of other hosts count as stale when they are old.
        """
        return find_stale_files(self._path.parent, self._path.name, lambda process: False, _STALE_SECONDS)

    def _create_temporary(self) -> None:
        """Create a store with all coordinates, but without fields, under a temporary name."""
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
        """Create the store under a temporary name and rename it, so that no process sees a store without all arrays."""
        self._create_temporary()
        consolidate(self._temporary_path)
        try:
            os.replace(self._temporary_path, self._path)
        except OSError:
            if not self._path.exists():
                raise
            # Without locks, another job of an array may have created the store first.
            shutil.rmtree(self._temporary_path)
