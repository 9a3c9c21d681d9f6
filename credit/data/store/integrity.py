"""Verification of a training store: detection of lost and damaged chunks, and of the parts that must be rewritten.

A part is a range of times that is written together, see `credit.data.store.store_writer`. The mark of a time states
whether its fields are written. The description of a store is its metadata, see `credit.data.store.store_reader`.

The quick check does not read the fields. It checks that the file of every chunk exists and has the size that the shape
of the array or the header of the codec implies. The quick check also reads the small arrays, and compares their
checksum with the checksum in the store's description. The deep check reads every field and verifies its checksums.

Each chunk of the fields is in a separate folder, so listing folders would take longer than opening the files. Many
threads open the files, because a parallel file system answers many requests at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from credit.calendar import Calendar
from credit.data.store.chunk_reader import ChunkReader
from credit.data.store.store_reader import READ_ERRORS, hash_content, open_array, read_description
from credit.data.store.store_writer import NOT_WRITTEN, WRITTEN, hash_fields, read_digest_algorithm
from credit.errors import DataError
from credit.utils.progress import ProgressBar

# Each thread of the quick check waits for the file system, not for the processor.
_QUICK_THREADS = 32
# Memory in bytes of the deep check for fields, compressed and decompressed.
_DEEP_BYTES = 2 * 2**30
_DEEP_THREADS = 8
_CHUNKS_PER_TASK = 128
_SECONDS_UNTIL_BAR = 3.0
_MAX_LISTED_RANGES = 10
# Small arrays that are written completely at once, and not part by part.
WHOLE_ARRAYS = ("time", "static_fields", "masks")


@dataclass(frozen=True)
class Damage:
    """Lost or damaged contents of a store.

    Attributes:
        times: mapping from the index of a damaged time to a description of the fault in its fields, mark or moments.
        parts: numbers of the parts that contain the damaged times.
        arrays: mapping from the name of a damaged array to a description of its fault or possible fault. Only arrays
            that are written completely at once are listed here (`WHOLE_ARRAYS`).
        unchecked: sentences about contents that cannot be checked in this store.
        num_chunks: number of chunks of fields that were checked.
        is_deep: True if checksums were compared.
    """

    times: dict[int, str] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)
    arrays: dict[str, str] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)
    num_chunks: int = 0
    is_deep: bool = False

    def __bool__(self) -> bool:
        return bool(self.times or self.arrays)

    def describe(self, path: Path, meta: Mapping[str, Any], minutes: np.ndarray, part_length: int) -> str:
        """Return a message about the damage and the parts that must be rewritten.

        Args:
            path: folder of the store.
            meta: description of the store, from `read_description`.
            minutes: (N,) times of the store in minutes since 1900.
            part_length: number of times in a part.
        """
        # Arrays with the same damage are listed together.
        names_by_reason: dict[str, list[str]] = {}
        for name, reason in self.arrays.items():
            names_by_reason.setdefault(reason, []).append(name)
        sentences = [f"{', '.join(names)}: {reason}" for reason, names in names_by_reason.items()]
        if self.times:
            calendar = Calendar(meta["calendar"])
            first = min(self.times)
            sentences.append(
                f"{len(self.times)} of {len(minutes)} times are lost or damaged, the first is "
                f"{calendar.format(minutes[first])} ({self.times[first]}); they are in "
                f"{_format_part_count(self.parts)} of {part_length} times ({_format_ranges(self.parts)})"
            )
        return f"data.store: {path}: {'; '.join(sentences)}"


def find_damage(path: Path, deep: bool = False, progress: bool = False) -> Damage:
    """Return the lost or damaged contents of a complete or incomplete store.

    Args:
        path: folder of the store.
        deep: True to read every field and verify checksums; False to check only the file sizes of the fields' chunks.
        progress: True to show a progress bar on a terminal if the check takes long.

    Raises:
        DataError: if the metadata of an array are lost, so that the array cannot be read.
    """
    group = zarr.open_group(path, mode="r")
    meta = read_description(path)
    arrays = {name: open_array(path, group, name) for name in ("time", "done", "fields", *WHOLE_ARRAYS)}
    # The marks state which times have fields. In a complete store all times are marked, so a 0 is a lost mark.
    marks, lost_marks = read_by_part(arrays["done"])
    if meta["complete"]:
        lost_marks += np.flatnonzero(marks == NOT_WRITTEN).tolist()
    damaged_times = dict.fromkeys(lost_marks, "its mark is lost")
    written = np.flatnonzero(marks == WRITTEN)
    # Checksums and moments of the times, which stores of format 1 do not have.
    unchecked: list[str] = []
    digests = None
    if "digest" in group:
        # zarr reads a lost chunk of checksums as zeros.
        digests, lost_digests = read_by_part(open_array(path, group, "digest"))
        lost_digests += np.flatnonzero(digests == 0).tolist()
        for index in lost_digests:
            if marks[index] == WRITTEN:
                damaged_times[index] = "its checksum is lost"
        damaged_times |= _find_lost_moments(path, group, marks, deep)
    else:
        unchecked.append("the values of its fields have no checksums (format 1)")
    # The fields: sizes of the chunks or, in a deep check, checksums.
    fields_shape = arrays["fields"].shape[1:]
    chunks = ChunkReader(arrays["fields"], path / "fields")
    if deep:
        # Each thread needs memory for the compressed and the decompressed fields of a time.
        bytes_per_thread = 2 * 4 * math.prod(fields_shape)
        num_threads = max(1, min(_DEEP_THREADS, _DEEP_BYTES // bytes_per_thread))
        find_fault = _build_deep_check(chunks, fields_shape, digests, group)
    else:
        num_threads = _QUICK_THREADS
        find_fault = chunks.find_fault
    damaged_times |= _check_chunks(find_fault, written.tolist(), num_threads, progress)
    # The arrays that are written completely at once.
    values = {"done": marks, "digest": digests}
    damaged_arrays = _find_damaged_arrays(path, arrays, values, meta, bool(damaged_times), unchecked)
    part_length = arrays["done"].chunks[0]
    parts = sorted({index // part_length for index in damaged_times})
    return Damage(dict(sorted(damaged_times.items())), parts, damaged_arrays, unchecked, len(written), deep)


def find_damage_to_repair(path: Path, deep: bool, progress: bool) -> Damage:
    """Return the damage that ``credit preprocess`` must repair.

    The result is that of `find_damage`, but `deep` is ignored for an incomplete store. An incomplete store is being
    written or repaired, and damage that an earlier deep check found is already marked.

    Args:
        path: folder of the store.
        deep: as in `find_damage`.
        progress: as in `find_damage`.

    Raises:
        DataError: see `find_damage`.
    """
    return find_damage(path, deep and read_description(path)["complete"], progress)


def require_undamaged(path: Path, deep: bool = False, progress: bool = True) -> Damage:
    """Raise DataError if any content of a store is lost or damaged.

    Args:
        path: folder of the store.
        deep: as in `find_damage`.
        progress: as in `find_damage`.

    Returns:
        The result of `find_damage`, which has no damage, but may list contents that cannot be checked.

    Raises:
        DataError: if there is damage; the message describes it, and names the command that rewrites the contents.
    """
    damage = find_damage(path, deep, progress)
    if damage:
        group = zarr.open_group(path, mode="r")
        meta = read_description(path)
        minutes, _ = read_by_part(group["time"])
        # Without --deep, the command would not find damage that only a deep check finds.
        command = "credit preprocess CONFIG"
        if deep:
            command += " --deep"
        raise DataError(
            f"{damage.describe(path, meta, minutes, group['done'].chunks[0])}; run {command}, which rewrites these "
            "parts and keeps the rest"
        )
    return damage


def read_by_part(array: zarr.Array) -> tuple[np.ndarray, list[int]]:
    """Return the readable values of an array along time, and the indices of the unreadable times.

    Args:
        array: (N, ...) zarr array with one chunk for each part of a store.

    Returns:
        The values, with 0 at the times that cannot be read; and the indices of the times that cannot be read.
    """
    try:
        return array[:], []
    except READ_ERRORS:
        # The array is read chunk by chunk below, to determine which chunks are damaged.
        pass
    values = np.zeros(array.shape, dtype=array.dtype)
    lost: list[int] = []
    part_length = array.chunks[0]
    for start in range(0, len(values), part_length):
        span = slice(start, min(start + part_length, len(values)))
        try:
            values[span] = array[span]
        except READ_ERRORS:
            lost += range(span.start, span.stop)
    return values, lost


def _find_lost_moments(path: Path, group: zarr.Group, marks: np.ndarray, deep: bool) -> dict[int, str]:
    """Return a mapping from the index of each time whose moments are lost or damaged to the reason.

    Parts without any written field have no moments, so they are not checked.

    Args:
        path: folder of the store.
        group: the open store.
        marks: (N,) marks of the times.
        deep: True to read the moments; False to check only the sizes of their files.
    """
    array = open_array(path, group, "moments")
    part_length = array.chunks[0]
    lost: dict[int, str] = {}
    for number in range(math.ceil(len(marks) / part_length)):
        span = range(number * part_length, min((number + 1) * part_length, len(marks)))
        if not (marks[span.start : span.stop] == WRITTEN).any():
            continue
        # zarr returns zeros for a lost chunk, so the file of the chunk is checked.
        reason = "its moments are lost"
        try:
            file = path / "moments" / "c" / str(number) / "0" / "0"
            has_moments = file.stat().st_size > 0
            if has_moments and deep:
                reason = "its moments are damaged"
                has_moments = bool(array[span.start : span.stop].any())
        except READ_ERRORS:
            has_moments = False
        if not has_moments:
            lost |= dict.fromkeys(span, reason)
    return lost


def _build_deep_check(
    chunks: ChunkReader, shape: tuple[int, ...], digests: np.ndarray | None, group: zarr.Group
) -> Callable[[int], str | None]:
    """Build a function that reads the fields of a time and compares them with their checksums.

    Args:
        chunks: reader of the fields.
        shape: shape (C, H, W) of the fields of a time.
        digests: (N,) checksums of the fields of each time; None in a store of format 1.
        group: the store, whose array ``digest`` names the algorithm of the checksums.

    Returns:
        Function with the index of a time as argument, which returns the fault in its fields, or None if there is no
        fault. Several threads may call the function at the same time.
    """
    algorithm = "" if digests is None else read_digest_algorithm(group["digest"])

    def find_fault(index: int) -> str | None:
        fields_CHW = np.empty(shape, dtype=np.float32)
        try:
            chunks.read(index, fields_CHW)
        except FileNotFoundError:
            return "its chunk is lost"
        except READ_ERRORS as error:
            return str(error)
        if digests is not None and hash_fields(fields_CHW, algorithm) != int(digests[index]):
            return "its fields differ from the written fields"
        return None

    return find_fault


def _check_chunks(
    find_fault: Callable[[int], str | None], indices: Sequence[int], num_threads: int, progress: bool
) -> dict[int, str]:
    """Check chunks in several threads, and return a mapping from the number of each faulty chunk to its fault.

    Args:
        find_fault: function with the number of a chunk as argument, which returns the fault of the chunk, or None.
        indices: numbers of the chunks to check; the number of a chunk is the index of its time.
        num_threads: number of threads that call `find_fault`.
        progress: as in `find_damage`.
    """

    def find_faults(task_indices: Sequence[int]) -> list[str | None]:
        return [find_fault(index) for index in task_indices]

    # A separate task for each chunk would take longer than the check.
    starts = range(0, len(indices), _CHUNKS_PER_TASK)
    tasks = [indices[start : start + _CHUNKS_PER_TASK] for start in starts]
    faults: dict[int, str] = {}
    # With None, the bar is shown only on a terminal.
    is_hidden = None if progress else True
    bar = ProgressBar(
        desc="checking the store",
        unit="time",
        total=len(indices),
        disable=is_hidden,
        delay=_SECONDS_UNTIL_BAR,
    )
    with ThreadPoolExecutor(num_threads) as pool, bar:
        for task_indices, task_faults in zip(tasks, pool.map(find_faults, tasks), strict=True):
            for index, fault in zip(task_indices, task_faults, strict=True):
                if fault is not None:
                    faults[index] = fault
            bar.update(len(task_indices))
    return faults


def _find_damaged_arrays(
    path: Path,
    arrays: Mapping[str, zarr.Array],
    values: Mapping[str, np.ndarray],
    meta: Mapping[str, Any],
    has_lost_times: bool,
    unchecked: list[str],
) -> dict[str, str]:
    """Check the arrays that are written completely at once, and return a mapping from name to fault.

    zarr does not write a chunk if all its values equal the fill value, so the file of a chunk may be absent although
    the chunk is not lost. The checksum of the store shows whether the chunk is lost.

    Args:
        path: folder of the store.
        arrays: the open arrays by name.
        values: values of the arrays ``done`` and ``digest``, which the checksum of the store also covers.
        meta: description of the store.
        has_lost_times: True if marks, checksums, moments or fields of any time are lost.
        unchecked: list to which a sentence about contents that cannot be checked is added.
    """
    values = dict(values)
    damaged: dict[str, str] = {}
    absent_arrays: list[str] = []
    for name in WHOLE_ARRAYS:
        array = arrays[name]
        try:
            values[name] = array[...]
        except READ_ERRORS as error:
            damaged[name] = f"its chunk is damaged ({error})"
            continue
        # Each of these arrays is a single chunk, which has the index 0 along every axis.
        chunk_file = path / name / "c" / "/".join("0" * array.ndim)
        if array.size and not os.path.exists(chunk_file):
            absent_arrays.append(name)
    if "content" not in meta or not meta["complete"]:
        if meta["complete"]:
            unchecked.append("its times, masks and static fields have no checksum (an earlier version)")
        # All values of static fields may equal the fill value, but the values of times never do.
        if "time" in absent_arrays:
            damaged["time"] = "its chunk is lost"
        return damaged
    # The checksum also covers the marks. If marks are lost, the checksum cannot be used to check the other arrays.
    if not damaged and not has_lost_times and hash_content(values, meta) != meta["content"]:
        if absent_arrays:
            damaged |= dict.fromkeys(absent_arrays, "its chunk is lost")
        else:
            reason = "the checksum of these arrays and of the marks does not match"
            damaged |= dict.fromkeys(WHOLE_ARRAYS, reason)
    elif has_lost_times:
        damaged |= dict.fromkeys(absent_arrays, "its chunk is lost")
    return damaged


def _format_part_count(parts: Sequence[int]) -> str:
    """Return the number of parts as a string, for example "1 part" or "3 parts"."""
    if len(parts) == 1:
        return "1 part"
    return f"{len(parts)} parts"


def _format_ranges(numbers: Iterable[int]) -> str:
    """Return increasing integers as a string in which ranges are shortened, for example "0, 3 to 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = []
    for first, last in spans:
        if first == last:
            texts.append(str(first))
        else:
            texts.append(f"{first} to {last}")
    if len(texts) > _MAX_LISTED_RANGES:
        texts = [*texts[:_MAX_LISTED_RANGES], "..."]
    return ", ".join(texts)
