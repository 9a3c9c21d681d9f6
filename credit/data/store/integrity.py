"""Verification of a training store: which chunks are lost or damaged, and which parts are to be written again.

The cheap check looks at every chunk once, without reading its fields: that it is there, and that its file has the size
that the codec's header, or the array's shape, says. It reads the small arrays whole and compares their checksum with
that of the store's description. The deep one reads every field and compares it with its checksums.

Each chunk of the fields has a folder of its own, so listing folders would cost more than opening the files; they are
opened by many threads, because a parallel file system answers many requests at once.
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
from credit.data.store.store_writer import WANTED, WRITTEN, digest
from credit.errors import DataError
from credit.utils.progress import ProgressBar

# Requests on their way at once; each waits for the file system, not for the processor.
_THREADS = 32
# Of fields that are held at once while checksums are compared, compressed and not.
_DEEP_BYTES = 2 * 2**30
_DEEP_THREADS = 8
_CHUNKS_A_TASK = 128
_SECONDS_TO_BAR = 3.0
# Of the small arrays these come from the sources at once; they have no parts.
WHOLE_ARRAYS = ("time", "static_fields", "masks")


@dataclass(frozen=True)
class Damage:
    """Account of what is lost or damaged in a store.

    Attributes:
        times: index of a time -> what is wrong with its fields, marks or moments.
        parts: numbers of the parts that hold these times.
        arrays: name of an array that has no parts -> what is wrong with it, or may be.
        unchecked: what cannot be checked in this store, in words.
        num_chunks: chunks of fields that were looked at.
        is_deep: whether checksums were compared.
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
        """Return in words what is wrong and which parts are to be written again.

        Args:
            path: the store.
            meta: its description.
            minutes: (N,) its times.
            part_length: of its parts, in times.
        """
        names_of_reason: dict[str, list[str]] = {}
        for name, reason in self.arrays.items():
            names_of_reason.setdefault(reason, []).append(name)
        sentences = [f"{', '.join(names)}: {reason}" for reason, names in names_of_reason.items()]
        if self.times:
            clock = Calendar(meta["calendar"])
            first = min(self.times)
            sentences.append(
                f"{len(self.times)} of {len(minutes)} times are lost or damaged, the first is "
                f"{clock.format(minutes[first])} ({self.times[first]}); they lie in {_count(self.parts, 'part')} of "
                f"{part_length} times ({_ranges(self.parts)})"
            )
        return f"data.store: {path}: {'; '.join(sentences)}"


def find_damage(path: Path, deep: bool = False, progress: bool = False) -> Damage:
    """Return what is lost or damaged in a store, complete or not.

    Args:
        path: the store.
        deep: read every field and compare checksums.
        progress: show a bar on a terminal where it takes long.

    Raises:
        DataError: if the description of an array is lost, without which nothing can be read.
    """
    group, meta = zarr.open_group(path, mode="r"), read_description(path)
    arrays = {name: open_array(path, group, name) for name in ("time", "done", "fields", *WHOLE_ARRAYS)}
    marks, times = read_by_part(arrays["done"])
    times = dict.fromkeys(times, "its mark is lost")
    if meta["complete"]:
        times |= {int(index): "its mark is lost" for index in np.flatnonzero(marks == WANTED)}
    written = np.flatnonzero(marks == WRITTEN)
    unchecked: list[str] = []
    digests = None
    if "digest" in group:
        digests, lost = read_by_part(open_array(path, group, "digest"))
        lost += np.flatnonzero((digests == 0) & (marks == WRITTEN)).tolist()
        times |= {index: "its checksum is lost" for index in lost if marks[index] == WRITTEN}
        times |= _find_lost_moments(path, group, marks, deep)
    else:
        unchecked.append("the values of its fields have no checksums (format 1)")
    chunks = ChunkReader(arrays["fields"], path / "fields")
    look, threads = chunks.find_fault, _THREADS
    if deep:
        look = _comparer(chunks, arrays["fields"].shape[1:], digests)
        bytes_a_time = 4 * math.prod(arrays["fields"].shape[1:])
        threads = max(1, min(_DEEP_THREADS, _DEEP_BYTES // (2 * bytes_a_time)))
    times |= _look_at_chunks(look, written.tolist(), threads, progress)
    values = {"done": marks, "digest": digests}
    small = _find_damaged_arrays(path, arrays, values, meta, bool(times), unchecked)
    length = arrays["done"].chunks[0]
    parts = sorted({index // length for index in times})
    return Damage(dict(sorted(times.items())), parts, small, unchecked, len(written), deep)


def find_damage_to_mend(path: Path, deep: bool, progress: bool) -> Damage:
    """Return what of a store is to be written again; see `verify_checkpoint`. Fields are read only of a complete store.

    What a deep look finds is marked before the store ceases to be complete, so it is not looked for again meanwhile.
    """
    return find_damage(path, deep and read_description(path)["complete"], progress)


def require_whole(path: Path, deep: bool = False, progress: bool = True) -> Damage:
    """Return the account of a store where nothing is lost or damaged; see `verify_checkpoint`.

    Raises:
        DataError: naming what is, and the command that writes it again.
    """
    damage = find_damage(path, deep, progress)
    if damage:
        group, meta = zarr.open_group(path, mode="r"), read_description(path)
        minutes, _ = read_by_part(group["time"])
        command = "credit_preprocess CONFIG" + (" --deep" if deep else "")
        raise DataError(
            f"{damage.describe(path, meta, minutes, group['done'].chunks[0])}; run {command}, which writes these parts "
            "again and keeps the rest"
        )
    return damage


def read_by_part(array: zarr.Array) -> tuple[np.ndarray, list[int]]:
    """Return an array along time, 0 where it cannot be read, and the indices where that is so."""
    try:
        return array[:], []
    except READ_ERRORS:
        pass
    values, lost = np.zeros(array.shape, dtype=array.dtype), []
    length = array.chunks[0]
    for first in range(0, len(values), length):
        span = slice(first, min(first + length, len(values)))
        try:
            values[span] = array[span]
        except READ_ERRORS:
            lost += range(span.start, span.stop)
    return values, lost


def _find_lost_moments(path: Path, group: zarr.Group, marks: np.ndarray, deep: bool) -> dict[int, str]:
    """Return the times whose moments are lost; only a part without any field may have none."""
    array = open_array(path, group, "moments")
    length = array.chunks[0]
    lost: dict[int, str] = {}
    for number in range(-(-len(marks) // length)):
        span = range(number * length, min((number + 1) * length, len(marks)))
        if not (marks[span.start : span.stop] == WRITTEN).any():
            continue
        reason = "its moments are lost"
        try:
            file = path / "moments" / "c" / str(number) / "0" / "0"
            is_there = file.stat().st_size > 0
            if is_there and deep:
                reason = "its moments are damaged"
                is_there = bool(array[span.start : span.stop].any())
        except READ_ERRORS:
            is_there = False
        if not is_there:
            lost |= dict.fromkeys(span, reason)
    return lost


def _comparer(chunks: ChunkReader, shape: tuple[int, ...], digests: np.ndarray | None) -> Callable[[int], str | None]:
    """Return a function that reads the fields of a time and says what is wrong with them, None where nothing is."""

    def compare(index: int) -> str | None:
        fields = np.empty(shape, dtype=np.float32)
        try:
            chunks.read(index, fields)
        except FileNotFoundError:
            return "its chunk is lost"
        except READ_ERRORS as error:
            return str(error)
        if digests is not None and digest(fields) != int(digests[index]):
            return "its fields are others than those that were written"
        return None

    return compare


def _look_at_chunks(
    look: Callable[[int], str | None], indices: Sequence[int], threads: int, progress: bool
) -> dict[int, str]:
    """Return index -> what is wrong, of the chunks where something is."""

    def look_at_some(some: Sequence[int]) -> list[str | None]:
        return [look(index) for index in some]

    tasks = [indices[first : first + _CHUNKS_A_TASK] for first in range(0, len(indices), _CHUNKS_A_TASK)]
    faults: dict[int, str] = {}
    hidden = None if progress else True
    with (
        ThreadPoolExecutor(threads) as pool,
        ProgressBar(
            desc="checking the store", unit="time", total=len(indices), disable=hidden, delay=_SECONDS_TO_BAR
        ) as bar,
    ):
        for some, reasons in zip(tasks, pool.map(look_at_some, tasks), strict=True):
            faults |= {index: reason for index, reason in zip(some, reasons, strict=True) if reason is not None}
            bar.update(len(some))
    return faults


def _find_damaged_arrays(
    path: Path,
    arrays: Mapping[str, zarr.Array],
    values: Mapping[str, np.ndarray],
    meta: Mapping[str, Any],
    has_lost_times: bool,
    unchecked: list[str],
) -> dict[str, str]:
    """Return what is wrong with the arrays that have no parts.

    zarr does not write a chunk whose values are all the fill value, so one that is not there may be as it should; the
    checksum of the whole decides.
    """
    values = dict(values)
    damaged: dict[str, str] = {}
    absent: list[str] = []
    for name in WHOLE_ARRAYS:
        array = arrays[name]
        try:
            values[name] = array[...]
        except READ_ERRORS as error:
            damaged[name] = f"its chunk is damaged ({error})"
            continue
        if array.size and not os.path.exists(path / name / "c" / "/".join("0" * array.ndim)):
            absent.append(name)
    if "content" not in meta or not meta["complete"]:
        if meta["complete"]:
            unchecked.append("its times, masks and static fields have no checksum (an earlier version)")
        # Times that are all the fill value are never right, static fields may be.
        return damaged | {name: "its chunk is lost" for name in absent if name == "time"}
    # The checksum covers the marks, too; where these are lost it says nothing of the rest.
    if not damaged and not has_lost_times and hash_content(values, meta) != meta["content"]:
        reason = "its chunk is lost" if absent else "the checksum of these and of the marks is another"
        damaged |= dict.fromkeys(absent or WHOLE_ARRAYS, reason)
    elif has_lost_times:
        damaged |= dict.fromkeys(absent, "its chunk is lost")
    return damaged


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _ranges(numbers: Iterable[int]) -> str:
    """Return increasing numbers in words, 0, 3 to 5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    return ", ".join(texts[:10]) + (", ..." if len(texts) > 10 else "")
