"""Parallel writer of the fields of a training store, part by part, in any order, by any number of processes at once.

A part is a fixed range of the store's times. Each time has a mark, which tells whether its fields are written. The
fields of a part, their checksums and their moments are written first and the marks last, so a part that a killed
process had begun is written again from its beginning. Each part has a lock file beside the store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
import zarr
from numcodecs import blosc
from zarr.codecs import BloscCodec

from credit.config.sections.data import TransformConfig
from credit.data.sources.source_reader import SourceReader
from credit.data.store.statistics import Moments, valid_cells
from credit.data.transforms import transform_channels
from credit.errors import DataError, UnavailableError
from credit.utils.atomic import atomic_write_text
from credit.utils.file_lock import file_lock

# Marks of a time in the array ``done``: its fields are to be written, are written, or are bad and left out.
NOT_WRITTEN = 0
WRITTEN = 1
BAD = 2
# Each time has ten moments: five of its fields, and five of the change over the time step that ends at this time.
NUM_MOMENTS = 10
# Upper bounds of the number of times and the size of a part, see `choose_part_length`.
_MAX_PART_TIMES = 32
_MAX_PART_BYTES = 2**30


@dataclass(frozen=True)
class WriteTask:
    """Input of the processes that write parts. It can be pickled and sent to a machine that sees the same files.

    Attributes:
        path: folder of the store.
        sources: reader of the source files.
        step_minutes: time step in minutes, over which changes are taken.
        transforms: mapping from the name of a variable to its transform, for variables that have one. They are applied
            before moments are computed, not to the stored fields.
        skip_bad: True marks a time with bad (wrong or unreadable) fields and continues; False raises an error.
        held_bytes: memory in bytes that may be used to read a whole chunk of the sources at once.
    """

    path: Path
    sources: SourceReader
    step_minutes: int
    transforms: Mapping[str, TransformConfig]
    skip_bad: bool
    held_bytes: int


def choose_part_length(bytes_per_time: int, times_per_chunk: int) -> int:
    """Return the number of times in a part.

    It is 32, or fewer if 32 times exceed 1 GiB, so that little must be written again after an interruption. It is at
    least `times_per_chunk`, because every part that needs any time of a chunk of the sources decompresses the whole
    chunk.

    Args:
        bytes_per_time: size in bytes of the fields of one time.
        times_per_chunk: number of times of a chunk of the sources that are read at once; see
            `SourceReader.count_chunk_times_in_memory`.
    """
    return max(1, min(_MAX_PART_TIMES, _MAX_PART_BYTES // bytes_per_time), times_per_chunk)


def list_pending_parts(marks: np.ndarray, part_length: int) -> list[int]:
    """Return the numbers of the parts in which at least one time is not written yet.

    Args:
        marks: (N,) mark of each time: `NOT_WRITTEN`, `WRITTEN` or `BAD`.
        part_length: number of times in a part.
    """
    pending_times = np.flatnonzero(marks == NOT_WRITTEN)
    return np.unique(pending_times // part_length).tolist()


def lock_folder(path: Path) -> Path:
    """Return the path of the folder with the lock files and notes of the parts, beside the store.

    The folder is removed when the store is complete. Notes are JSON files about bad times.
    """
    return path.with_name(f".{path.name}.parts")


def write_part(task: WriteTask, number: int) -> int:
    """Write a part, unless it is written already or another process is writing it.

    Args:
        task: store, sources and settings.
        number: number of the part, from 0.

    Returns:
        The number of times that were written or marked as bad; 0 if there was nothing to do.

    Raises:
        DataError: if fields are bad, and ``task.skip_bad`` is False.
        UnavailableError: if a server does not deliver a chunk.
    """
    try:
        return _write_pending_part(task, number)
    except BaseException:
        # Without this, the process would end only after the fetches for later times, which may fail as slowly.
        task.sources.fetch_plan.stop()
        raise


def _write_pending_part(task: WriteTask, number: int) -> int:
    """Write a part; for arguments, result and errors see `write_part`."""
    group = zarr.open_group(task.path, mode="r+")
    part_length = group["done"].chunks[0]
    span = slice(number * part_length, min((number + 1) * part_length, group["time"].shape[0]))
    with file_lock(lock_folder(task.path) / f"{number:06d}.lock", wait=False) as is_held:
        if not is_held:
            # Another process is writing this part.
            return 0
        if (group["done"][span] != NOT_WRITTEN).all():
            return 0
        # Each time gets a mark, a checksum and moments; bad times have no fields.
        times = group["time"][:]
        part_reader = _PartReader(task, group, times)
        # By default zarr would leave out a block in which all values are missing.
        fields = group["fields"].with_config({"write_empty_chunks": True})
        algorithm = digest_algorithm(group["digest"])
        marks = []
        digests = []
        moments = []
        bad_times: dict[int, str] = {}
        indices = range(span.start, span.stop)
        for index, result in zip(indices, part_reader.read_each(times[span]), strict=True):
            minutes = int(times[index])
            if isinstance(result, DataError):
                bad_times[minutes] = str(result)
                marks.append(BAD)
                digests.append(0)
                moments.append(part_reader.compute_moments(minutes, None))
            else:
                file = task.path / f"fields/c/{index}/0/0/0"
                if fields.shards is None:
                    write_chunk(fields, file, result)
                else:
                    # zarr would read the blocks of a file that exists, which may be damaged, to keep some of them.
                    file.unlink(missing_ok=True)
                    fields[index] = result
                marks.append(WRITTEN)
                digests.append(hash_fields(result, algorithm))
                moments.append(part_reader.compute_moments(minutes, result))
        group["moments"][span] = np.stack(moments)
        group["digest"][span] = np.array(digests, dtype=np.uint64)
        _write_notes(_notes_file(task.path, number), bad_times)
        # The marks are written last, because they state that everything else of the part exists.
        group["done"][span] = np.array(marks, dtype=np.uint8)
        return len(marks)


def mark_bad(path: Path, group: zarr.Group, number: int, index: int, minutes: int, reason: str) -> None:
    """Mark a time whose fields are written already as bad, and note the reason.

    Args:
        path: folder of the store.
        group: the store, open for writing.
        number: number of the part that contains the time.
        index: index of the time in the store.
        minutes: the time in minutes since 1900.
        reason: text that says what is wrong with the fields.
    """
    with file_lock(lock_folder(path) / f"{number:06d}.lock"):
        file = _notes_file(path, number)
        notes = json.loads(file.read_text()) if file.exists() else {}
        notes[str(minutes)] = reason
        _write_notes(file, notes)
        group["done"][index] = BAD


def write_chunk(array: zarr.Array, file: Path, fields_CHW: np.ndarray) -> None:
    """Write the chunk file of one time with the bytes that zarr would write, for which zarr takes 2 ms longer.

    Args:
        array: array (time, channel, latitude, longitude) whose codecs are ``bytes``, optionally Blosc, and CRC32C.
        file: the chunk file. It is replaced in one step, and not flushed to the disk.
        fields_CHW: (C, H, W) float32 fields.
    """
    chunk = np.ascontiguousarray(fields_CHW)
    for codec in array.metadata.codecs:
        if isinstance(codec, BloscCodec):
            compressor = codec.cname.value.encode()
            chunk = blosc.compress(chunk, compressor, codec.clevel, blosc.SHUFFLE, codec.blocksize, codec.typesize)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.part")
    try:
        with temporary.open("wb") as opened:
            opened.writelines([chunk, google_crc32c.value(chunk).to_bytes(4, "little")])
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def digest_algorithm(digest: zarr.Array) -> str:
    """Return the algorithm of the checksums in the array ``digest``, see `hash_fields`."""
    return digest.attrs.get("algorithm", "blake2b")


def hash_fields(values: np.ndarray, algorithm: str) -> int:
    """Return the checksum of fields of any shape as an integer of 64 bits.

    Args:
        values: the fields, float32.
        algorithm: ``crc32c`` gives the CRC32C plus 2^32, because 0 is the mark of a lost checksum; ``blake2b``, of
            old versions, gives the first 8 bytes of BLAKE2b, little-endian, and takes 20 times as long.
    """
    if algorithm == "crc32c":
        return google_crc32c.value(np.ascontiguousarray(values)) + 2**32
    assert algorithm == "blake2b", algorithm
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(values), digest_size=8).digest(), "little")


def read_skipped_times(path: Path) -> dict[int, str]:
    """Return the noted bad times of a store, as a mapping from the time in minutes since 1900 to the reason."""
    skipped_times: dict[int, str] = {}
    for file in sorted(lock_folder(path).glob("*.json")):
        for minutes, reason in json.loads(file.read_text()).items():
            skipped_times[int(minutes)] = reason
    return skipped_times


def merge_moments(
    moments: zarr.Array, times: np.ndarray, marks: np.ndarray, first_minutes: int, last_minutes: int
) -> tuple[Moments, Moments]:
    """Merge the moments of all times in a period, in ascending order of the times.

    Args:
        moments: array of the store, (N, 10, C) float64: for each time and channel five moments of the fields, and five
            of the change over the time step that ends at this time; see `Moments.to_rows`.
        times: (N,) times of the store in minutes since 1900.
        marks: (N,) marks of the times: `NOT_WRITTEN`, `WRITTEN` or `BAD`.
        first_minutes: first time of the period in minutes since 1900.
        last_minutes: last time of the period in minutes since 1900, inclusive.

    Returns:
        The moments of the fields, and the moments of the changes over a time step.
    """
    state = change = Moments.empty(moments.shape[2])
    step = moments.attrs["step_minutes"]
    bad_times = set(times[marks == BAD].tolist())
    # The array is read one chunk at a time, because the moments of all times are large.
    chunk_length = moments.chunks[0]
    for start in range(0, len(times), chunk_length):
        span = slice(start, start + chunk_length)
        is_in_period = (times[span] >= first_minutes) & (times[span] <= last_minutes)
        used_rows = np.flatnonzero(is_in_period & (marks[span] == WRITTEN))
        if not len(used_rows):
            continue
        chunk = moments[span]
        for row in used_rows:
            # The first five moments are those of the fields, the other five those of the change.
            state = state.merge(Moments.from_rows(chunk[row, :5]))
            # A change belongs to the period if both its ends do. One that begins at a bad time does not exist.
            begin_of_change = times[start + row] - step
            if begin_of_change >= first_minutes and begin_of_change not in bad_times:
                change = change.merge(Moments.from_rows(chunk[row, 5:]))
    return state, change


class _PartReader:
    """Reader of the fields for one part, and of their moments.

    Args:
        task: store, sources and settings.
        group: the open store. Fields of an earlier time, which a change needs, are read from it if they are written.
        times: (N,) times of the store in minutes since 1900.
    """

    def __init__(self, task: WriteTask, group: zarr.Group, times: np.ndarray) -> None:
        self._task = task
        self._group = group
        self._times = times
        self._channels = task.sources.channels.time_varying_stored
        # True in the cells over which moments are computed.
        self._valid_CHW = valid_cells(task.sources, self._channels)
        # Transformed fields of recent times, by time in minutes, for changes that begin at these times.
        self._recent: dict[int, np.ndarray] = {}

    def read_each(self, times: np.ndarray) -> Iterator[np.ndarray | DataError]:
        """Read the fields of the sources at several times.

        Args:
            times: times of the part, in minutes since 1900.

        Yields:
            For each time the fields, (C, H, W) float32; or the error if the fields are bad and bad times are skipped.

        Raises:
            DataError: if fields are bad, and bad times are not skipped.
        """
        sources = self._task.sources
        held_bytes = self._task.held_bytes
        times_at_once = sources.count_times_at_once(held_bytes)
        all_indices = [sources.index_of(minutes) for minutes in times]
        for start in range(0, len(times), times_at_once):
            indices = all_indices[start : start + times_at_once]
            next_indices = all_indices[start + times_at_once : start + 2 * times_at_once]
            sources.fetch_plan.fetch_ahead(indices, next_indices, held_bytes)
            try:
                # All times are read before the first is yielded: after an error, every one is read again below.
                yield from list(sources.read_each(indices, held_bytes))
            except UnavailableError:
                # The server failed, which is no reason to leave the time out of the store.
                raise
            except DataError:
                if not self._task.skip_bad:
                    raise
                # One bad time makes the common read fail, so each time is read separately.
                for index in indices:
                    yield self._read_or_error(index)

    def _read_or_error(self, index: int) -> np.ndarray | DataError:
        """Return the fields at an index of the sources' times, (C, H, W) float32, or the error if they are bad."""
        try:
            return self._task.sources.read(index)
        except UnavailableError:
            raise
        except DataError as error:
            return error

    def compute_moments(self, minutes: int, fields_CHW: np.ndarray | None) -> np.ndarray:
        """Compute five moments of the fields of a time, and five of the change that ends there, (10, C) float64.

        Args:
            minutes: the time in minutes since 1900.
            fields_CHW: fields of the time in physical units; None if they are bad, which gives empty moments.
        """
        from credit.data.kernels import compute_moments  # imports numba, which only writers need

        state = change = Moments.empty(len(self._channels))
        if fields_CHW is not None:
            transformed_CHW = transform_channels(fields_CHW, self._channels, self._task.transforms)
            state = compute_moments(transformed_CHW, self._valid_CHW)
            begin_of_change = minutes - self._task.step_minutes
            previous_CHW = self._read_transformed(begin_of_change)
            if previous_CHW is not None:
                change = compute_moments(transformed_CHW, self._valid_CHW, previous_CHW)
            # Changes that end at later times begin after `begin_of_change`.
            self._recent = {time: recent for time, recent in self._recent.items() if time > begin_of_change}
            self._recent[minutes] = transformed_CHW
        return np.concatenate([state.to_rows(), change.to_rows()])

    def _read_transformed(self, minutes: int) -> np.ndarray | None:
        """Return the transformed fields of a time in minutes since 1900.

        The result is None if the store does not have the time, or if its fields are bad.
        """
        if minutes in self._recent:
            return self._recent[minutes]
        index = int(np.searchsorted(self._times, minutes))
        has_time = index < len(self._times) and self._times[index] == minutes
        if not has_time:
            return None
        if int(self._group["done"][index]) == WRITTEN:
            fields_CHW = self._group["fields"][index]
        else:
            # The part of that time is not written yet.
            sources = self._task.sources
            try:
                fields_CHW = sources.read(sources.index_of(minutes))
            except UnavailableError:
                raise
            except DataError:
                # The part that contains this time reports it.
                return None
        return transform_channels(fields_CHW, self._channels, self._task.transforms)


def _notes_file(path: Path, number: int) -> Path:
    """Return the path of the JSON file with the bad times of a part and their reasons."""
    return lock_folder(path) / f"{number:06d}.json"


def _write_notes(file: Path, bad_times: Mapping[int | str, str]) -> None:
    """Write the notes about the bad times of a part, or remove the file if there are none.

    Args:
        file: the JSON file of the part.
        bad_times: mapping from a bad time in minutes since 1900 to the reason.
    """
    if bad_times:
        atomic_write_text(file, json.dumps(bad_times))
    else:
        # An earlier attempt may have left notes about source files that have been corrected since.
        file.unlink(missing_ok=True)
