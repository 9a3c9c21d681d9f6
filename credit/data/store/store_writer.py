"""Writes the fields of a training store part by part, in any order, by any number of processes at once.

A part is a fixed run of the store's times. Its fields, their checksums and their moments come first, its marks last, so
a part that was begun by a process that died is done again whole. Each part has a lock file beside the store, which the
system frees with the process that holds it: no part is ever written by two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zarr

from credit.config.schema_data import TransformConfig
from credit.data.sources.source_reader import SourceReader
from credit.data.store.statistics import Moments, valid_cells
from credit.data.transforms import transform_channels
from credit.errors import DataError
from credit.utils.atomic import atomic_write_text
from credit.utils.file_lock import file_lock

WANTED, WRITTEN, BAD = 0, 1, 2
# of a time: five of its fields, and five of the change that ends there
MOMENTS = 10
_MOST_TIMES, _MOST_BYTES = 32, 2**30


@dataclass(frozen=True)
class WriteTask:
    """What a process needs to write parts; may be sent to another machine that sees the same files.

    Attributes:
        path: the store.
        sources: where the fields come from.
        step_minutes: the time step, over which changes are taken.
        transforms: variable -> its transform, where it has one; for the moments alone.
        skip_bad: note a time whose fields are bad and go on, instead of raising.
        held_bytes: may be held to read a chunk of the sources at once.
    """

    path: Path
    sources: SourceReader
    step_minutes: int
    transforms: Mapping[str, TransformConfig]
    skip_bad: bool
    held_bytes: int


def part_length(bytes_a_time: int, chunk_part: int) -> int:
    """Return how many times make a part: 32, or fewer if they are more than a GiB, so that little is done twice.

    More where so much of a chunk of the sources is read at once: each part that shares in a chunk unpacks it whole.

    Args:
        bytes_a_time: of fields.
        chunk_part: see `SourceReader.chunk_part`.
    """
    return max(1, min(_MOST_TIMES, _MOST_BYTES // bytes_a_time), chunk_part)


def pending_parts(marks: np.ndarray, length: int) -> list[int]:
    """Return the numbers of the parts of which some time is neither written nor bad."""
    return sorted({int(index) // length for index in np.flatnonzero(marks == WANTED)})


def lock_folder(path: Path) -> Path:
    """Return the folder of the parts' locks and notes, beside the store `path`; it is there until the store is done."""
    return path.with_name(f".{path.name}.parts")


def write_part(job: WriteTask, number: int) -> int:
    """Write a part, unless it is there already or another process is at it.

    Returns:
        The times that are there now and were not before.

    Raises:
        DataError: for bad fields, unless they are to be skipped.
    """
    group = zarr.open_group(job.path, mode="r+")
    length = group["done"].chunks[0]
    span = slice(number * length, min((number + 1) * length, group["time"].shape[0]))
    with file_lock(lock_folder(job.path) / f"{number:06d}.lock", wait=False) as mine:
        if not mine or (group["done"][span] != WANTED).all():
            return 0
        times = group["time"][:]
        reader = _Reader(job, group, times)
        fields, marks, digests, moments, bad = group["fields"], [], [], [], {}
        for index, found in zip(range(span.start, span.stop), reader.read_each(times[span]), strict=True):
            minutes = int(times[index])
            values = None if isinstance(found, DataError) else found
            if values is None:
                bad[minutes] = str(found)
            else:
                fields[index] = values
            marks.append(BAD if values is None else WRITTEN)
            digests.append(0 if values is None else digest(values))
            moments.append(reader.moments(minutes, values))
        group["moments"][span] = np.stack(moments)
        group["digest"][span] = np.array(digests, dtype=np.uint64)
        _note(lock_folder(job.path) / f"{number:06d}.json", bad)
        group["done"][span] = np.array(marks, dtype=np.uint8)
        return len(marks)


def mark_bad(path: Path, group: zarr.Group, number: int, index: int, minutes: int, text: str) -> None:
    """Mark a time of the store `path` that was written as bad, and note why.

    Args:
        path: the store.
        group: the same, open.
        number: of the part that the time is in.
        index: of the time.
        minutes: of the time.
        text: what is wrong.
    """
    with file_lock(lock_folder(path) / f"{number:06d}.lock"):
        file = lock_folder(path) / f"{number:06d}.json"
        noted = json.loads(file.read_text()) if file.exists() else {}
        _note(file, noted | {str(minutes): text})
        group["done"][index] = BAD


def digest(values: np.ndarray) -> int:
    """Return the checksum of a field's values: the first 8 bytes of BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(values), digest_size=8).digest(), "little")


def read_notes(path: Path) -> dict[int, str]:
    """Return minutes -> what is wrong, of the times that were skipped in the store `path`."""
    found: dict[int, str] = {}
    for file in sorted(lock_folder(path).glob("*.json")):
        found |= {int(minutes): text for minutes, text in json.loads(file.read_text()).items()}
    return found


def merge_moments(
    moments: zarr.Array, times: np.ndarray, marks: np.ndarray, first_minutes: int, last_minutes: int
) -> tuple[Moments, Moments]:
    """Return the moments of the states and of the changes in a period, merged time by time in order.

    Args:
        moments: (N, 10, C), of the state and of the change that ends at each time.
        times: (N,) minutes.
        marks: (N,) as in the store.
        first_minutes: the period's first time.
        last_minutes: its last time, included.
    """
    state = change = Moments.empty(moments.shape[2])
    step = moments.attrs["step_minutes"]
    bad = set(times[marks == BAD].tolist())
    for begin in range(0, len(times), moments.chunks[0]):
        span = slice(begin, begin + moments.chunks[0])
        inside = (times[span] >= first_minutes) & (times[span] <= last_minutes) & (marks[span] == WRITTEN)
        if not inside.any():
            continue
        rows = moments[span]
        for index in np.flatnonzero(inside):
            state = state.merge(Moments.of_rows(rows[index, :5]))
            # a change belongs to the period that both its ends are in, and has none where it begins at a bad time
            before = times[begin + index] - step
            if before >= first_minutes and before not in bad:
                change = change.merge(Moments.of_rows(rows[index, 5:]))
    return state, change


class _Reader:
    """Reads fields for one part; a field that a change needs is taken from where it is at hand."""

    def __init__(self, job: WriteTask, group: zarr.Group, times: np.ndarray) -> None:
        self._job, self._group, self._times = job, group, times
        self._valid = valid_cells(job.sources, job.sources.channels.stored)
        self._recent: dict[int, np.ndarray] = {}

    def read(self, minutes: int) -> np.ndarray:
        """Return the sources' fields at a time of the store."""
        return self._job.sources.read(self._job.sources.index_of(minutes))

    def read_each(self, times: np.ndarray) -> Iterator[np.ndarray | DataError]:
        """Yield the sources' fields at each of some times of the store; where they are to be skipped, what is wrong.

        Raises:
            DataError: for bad fields that are not to be skipped.
        """
        sources, held = self._job.sources, self._job.held_bytes
        at_once = sources.times_at_once(held)
        for first in range(0, len(times), at_once):
            indices = [sources.index_of(minutes) for minutes in times[first : first + at_once]]
            try:
                yield from list(sources.read_each(indices, held))
            except DataError:
                if not self._job.skip_bad:
                    raise
                yield from map(self._read_or_tell, indices)

    def _read_or_tell(self, index: int) -> np.ndarray | DataError:
        try:
            return self._job.sources.read(index)
        except DataError as error:
            return error

    def moments(self, minutes: int, values: np.ndarray | None) -> np.ndarray:
        """Return the moments (10, C) of a time's state and of the change that ends there; of nothing for None."""
        state = change = Moments.empty(len(self._valid))
        if values is not None:
            now = transform_channels(values, self._job.sources.channels.stored, self._job.transforms)
            state = Moments.of_fields(now, self._valid)
            before = self._before(minutes - self._job.step_minutes)
            if before is not None:
                change = Moments.of_fields(now, self._valid, before)
            self._recent = {t: f for t, f in self._recent.items() if t > minutes - self._job.step_minutes}
            self._recent[minutes] = now
        return np.concatenate([state.rows(), change.rows()])

    def _before(self, minutes: int) -> np.ndarray | None:
        """Return the transformed fields of an earlier time of the store, None where it has none or they are bad."""
        if minutes in self._recent:
            return self._recent[minutes]
        index = int(np.searchsorted(self._times, minutes))
        if self._times[min(index, len(self._times) - 1)] != minutes:
            return None
        mark = int(self._group["done"][index])
        if mark == WRITTEN:
            values = self._group["fields"][index]
        else:
            try:
                values = self.read(minutes)
            except DataError:
                return None  # its own part says so
        return transform_channels(values, self._job.sources.channels.stored, self._job.transforms)


def _note(path: Path, bad: Mapping[int, str]) -> None:
    if bad:
        atomic_write_text(path, json.dumps(bad))
    else:
        # those of a part that was written before, from files that have been corrected
        path.unlink(missing_ok=True)
