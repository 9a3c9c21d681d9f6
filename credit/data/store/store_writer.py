"""Parallel writer of the fields of a training store, part by part, in any order, in any number of processes at once.

A part is a fixed range of the store's times. Each time has a mark, which states whether its fields are written. The
fields of a part, their checksums and their moments are written first and the marks last. If a process is killed, its
part is therefore rewritten from the beginning. Each part has a lock file in a folder next to the store.
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
from credit.data.store.statistics import Moments, build_valid_mask
from credit.data.transforms import transform_channels
from credit.errors import DataError, UnavailableError
from credit.utils.atomic import atomic_write_text
from credit.utils.file_lock import file_lock

# Marks of a time in the array ``done``: its fields are not yet written, are written, or are bad and omitted.
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
    """Input of the processes that write parts; it can be pickled and sent to a machine with access to the same files.

    Attributes:
        path: folder of the store.
        sources: reader of the source files.
        step_minutes: time step in minutes, over which changes are computed.
        transforms: mapping from the name of a variable to its transform. Transforms are applied before moments are
            computed; the stored fields are not transformed.
        skip_bad: True to mark a time with bad (wrong or unreadable) fields and continue; False to raise an error.
        memory_limit_bytes: memory in bytes that may be used to read a complete chunk of the sources at once.
    """

    path: Path
    sources: SourceReader
    step_minutes: int
    transforms: Mapping[str, TransformConfig]
    skip_bad: bool
    memory_limit_bytes: int


def choose_part_length(bytes_per_time: int, times_per_chunk: int) -> int:
    """Return the number of times in a part.

    The number is 32, or fewer if 32 times exceed 1 GiB, so that little must be rewritten after an interruption. It is
    at least `times_per_chunk`, because every part that needs any time of a chunk of the sources decompresses the
    complete chunk.

    Args:
        bytes_per_time: size in bytes of the fields of one time.
        times_per_chunk: number of times in a chunk of the sources that are read at once; see
            `SourceReader.count_chunk_times_in_memory`.
    """
    return max(1, min(_MAX_PART_TIMES, _MAX_PART_BYTES // bytes_per_time), times_per_chunk)


def list_pending_parts(marks: np.ndarray, part_length: int) -> list[int]:
    """Return the numbers of the parts in which at least one time is not yet written.

    Args:
        marks: (N,) mark of each time: `NOT_WRITTEN`, `WRITTEN` or `BAD`.
        part_length: number of times in a part.
    """
    pending_times = np.flatnonzero(marks == NOT_WRITTEN)
    return np.unique(pending_times // part_length).tolist()


def build_lock_folder_path(path: Path) -> Path:
    """Return the path of the folder with the lock files and notes of the parts, which is next to the store.

    The folder is removed when the store is complete. Notes are JSON files with the bad times of a part.
    """
    return path.with_name(f".{path.name}.parts")


def write_part(task: WriteTask, number: int) -> int:
    """Write a part, unless it is already written or another process is writing it.

    Args:
        task: store, sources and settings.
        number: number of the part, starting at 0.

    Returns:
        The number of times that were written or marked as bad; 0 if the part was not written by this call.

    Raises:
        DataError: if fields are bad, and ``task.skip_bad`` is False.
        UnavailableError: if a server does not send a chunk.
    """
    try:
        return _write_pending_part(task, number)
    except BaseException:
        # Otherwise, the process would end only after the fetches for later times, which may also fail slowly.
        task.sources.fetch_plan.stop()
        raise


def _write_pending_part(task: WriteTask, number: int) -> int:
    """Write a part; for arguments, result and errors see `write_part`."""
    group = zarr.open_group(task.path, mode="r+")
    part_length = group["done"].chunks[0]
    span = slice(number * part_length, min((number + 1) * part_length, group["time"].shape[0]))
    with file_lock(build_lock_folder_path(task.path) / f"{number:06d}.lock", wait=False) as is_held:
        if not is_held:
            # Another process is writing this part.
            return 0
        if (group["done"][span] != NOT_WRITTEN).all():
            return 0
        # A mark, a checksum and moments are written for each time; bad times have no fields.
        times = group["time"][:]
        part_reader = _SourcePartReader(task, group, times)
        # By default, zarr would not write a block in which all values are missing.
        fields = group["fields"].with_config({"write_empty_chunks": True})
        algorithm = read_digest_algorithm(group["digest"])
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
                    # If the file existed, zarr would read its blocks, which may be damaged, to keep some of them.
                    file.unlink(missing_ok=True)
                    fields[index] = result
                marks.append(WRITTEN)
                digests.append(hash_fields(result, algorithm))
                moments.append(part_reader.compute_moments(minutes, result))
        group["moments"][span] = np.stack(moments)
        group["digest"][span] = np.array(digests, dtype=np.uint64)
        _write_notes(_build_notes_path(task.path, number), bad_times)
        # The marks are written last, because they state that the rest of the part is complete.
        group["done"][span] = np.array(marks, dtype=np.uint8)
        return len(marks)


def mark_time_as_bad(path: Path, group: zarr.Group, number: int, index: int, minutes: int, reason: str) -> None:
    """Mark a time whose fields are already written as bad, and write a note with the reason.

    Args:
        path: folder of the store.
        group: the store, open for writing.
        number: number of the part that contains the time.
        index: index of the time in the store.
        minutes: the time in minutes since 1900.
        reason: description of the problem with the fields.
    """
    with file_lock(build_lock_folder_path(path) / f"{number:06d}.lock"):
        file = _build_notes_path(path, number)
        notes = json.loads(file.read_text()) if file.exists() else {}
        notes[str(minutes)] = reason
        _write_notes(file, notes)
        group["done"][index] = BAD


def write_chunk(array: zarr.Array, file: Path, fields_CHW: np.ndarray) -> None:
    """Write the chunk file of one time with the same bytes as zarr, but 2 ms faster.

    Args:
        array: array (time, channel, latitude, longitude) whose codecs are ``bytes``, optionally Blosc, and CRC32C.
        file: path of the chunk file, which is replaced atomically and not flushed to the disk.
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


def read_digest_algorithm(digest: zarr.Array) -> str:
    """Return the algorithm of the checksums in the array ``digest``, see `hash_fields`."""
    return digest.attrs.get("algorithm", "blake2b")


def hash_fields(values: np.ndarray, algorithm: str) -> int:
    """Return the checksum of fields of any shape as a 64-bit integer.

    Args:
        values: the fields, float32.
        algorithm: ``crc32c`` for the CRC32C plus 2^32, because 0 means a lost checksum; or ``blake2b`` (old versions)
            for the first 8 bytes of BLAKE2b, little-endian, which takes 20 times as long.
    """
    if algorithm == "crc32c":
        return google_crc32c.value(np.ascontiguousarray(values)) + 2**32
    assert algorithm == "blake2b", algorithm
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(values), digest_size=8).digest(), "little")


def read_bad_times(path: Path) -> dict[int, str]:
    """Return the bad times in the notes of a store, as a mapping from minutes since 1900 to the reason."""
    skipped_times: dict[int, str] = {}
    for file in sorted(build_lock_folder_path(path).glob("*.json")):
        for minutes, reason in json.loads(file.read_text()).items():
            skipped_times[int(minutes)] = reason
    return skipped_times


def merge_moments(
    moments: zarr.Array, times: np.ndarray, marks: np.ndarray, first_minutes: int, last_minutes: int
) -> tuple[Moments, Moments]:
    """Merge the moments of all times in a period, in increasing order of the times.

    Args:
        moments: array of the store, (N, 10, C) float64: for each time and channel, five moments of the fields, and five
            moments of the change over the time step that ends at this time; see `Moments.to_rows`.
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
            # The first five moments describe the fields, and the other five describe the change.
            state = state.merge(Moments.from_rows(chunk[row, :5]))
            # A change is used if both its times are in the period. A change that begins at a bad time does not exist.
            begin_of_change = times[start + row] - step
            if begin_of_change >= first_minutes and begin_of_change not in bad_times:
                change = change.merge(Moments.from_rows(chunk[row, 5:]))
    return state, change


class _SourcePartReader:
    """Reader of the fields of one part from the sources, which also computes the moments of the fields.

    Args:
        task: store, sources and settings.
        group: the open store. If the fields of an earlier time are written, they are read from the store.
        times: (N,) times of the store in minutes since 1900.
    """

    def __init__(self, task: WriteTask, group: zarr.Group, times: np.ndarray) -> None:
        self._task = task
        self._group = group
        self._times = times
        self._channels = task.sources.channels.time_varying_stored
        # True in the cells over which moments are computed.
        self._valid_CHW = build_valid_mask(task.sources, self._channels)
        # Time in minutes -> transformed fields of recent times, for changes that begin at these times.
        self._recent: dict[int, np.ndarray] = {}

    def read_each(self, times: np.ndarray) -> Iterator[np.ndarray | DataError]:
        """Yield the fields of the sources at several times.

        Args:
            times: times of the part, in minutes since 1900.

        Yields:
            For each time, the fields (C, H, W) float32; or the error if the fields are bad and bad times are skipped.

        Raises:
            DataError: if fields are bad, and bad times are not skipped.
        """
        sources = self._task.sources
        memory_limit_bytes = self._task.memory_limit_bytes
        times_at_once = sources.count_times_at_once(memory_limit_bytes)
        all_indices = [sources.index_of(minutes) for minutes in times]
        for start in range(0, len(times), times_at_once):
            indices = all_indices[start : start + times_at_once]
            next_indices = all_indices[start + times_at_once : start + 2 * times_at_once]
            sources.fetch_plan.fetch_ahead(indices, next_indices, memory_limit_bytes)
            try:
                # All times are read before the first time is yielded, because after an error all are read again below.
                yield from list(sources.read_each(indices, memory_limit_bytes))
            except UnavailableError:
                # If the server fails, the time is not bad, so it must not be skipped.
                raise
            except DataError:
                if not self._task.skip_bad:
                    raise
                # A single bad time makes the common read fail, so each time is read separately.
                for index in indices:
                    yield self._read_or_error(index)

    def _read_or_error(self, index: int) -> np.ndarray | DataError:
        """Return the fields (C, H, W) float32 at an index of ``sources.times``, or the error if the fields are bad."""
        try:
            return self._task.sources.read(index)
        except UnavailableError:
            raise
        except DataError as error:
            return error

    def compute_moments(self, minutes: int, fields_CHW: np.ndarray | None) -> np.ndarray:
        """Return five moments of the fields of a time, and five of the change that ends at the time, (10, C) float64.

        Args:
            minutes: the time in minutes since 1900.
            fields_CHW: fields of the time in physical units; None if they are bad, so that the moments are empty.
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

        The result is None if the store does not contain the time, or if its fields are bad.
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
            # The part of this time is not yet written.
            sources = self._task.sources
            try:
                fields_CHW = sources.read(sources.index_of(minutes))
            except UnavailableError:
                raise
            except DataError:
                # The error is reported when the part that contains this time is written.
                return None
        return transform_channels(fields_CHW, self._channels, self._task.transforms)


def _build_notes_path(path: Path, number: int) -> Path:
    """Return the path of the JSON file with the bad times of a part and their reasons."""
    return build_lock_folder_path(path) / f"{number:06d}.json"


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
