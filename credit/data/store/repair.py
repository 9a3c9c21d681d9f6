"""Repair of a training store: lost parts, and parts from changed source files, are marked as not written.

The command that writes a store also repairs it by writing the marked parts. The marks are reset first, so if the
process is killed during a repair, the store is known to be incomplete.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.sections.data import DataConfig, TransformConfig
from credit.data.formats.files import OpenFiles, build_file_key, expand_paths, read_file_fingerprint
from credit.data.sources.source_reader import SourceReader
from credit.data.store.integrity import WHOLE_ARRAYS, Damage
from credit.data.store.outliers import find_outliers
from credit.data.store.store_reader import FORMAT, READ_ERRORS, open_array, read_description
from credit.data.store.store_settings import OTHER_STORE_ADVICE
from credit.data.store.store_writer import BAD, NOT_WRITTEN, NUM_MOMENTS, WRITTEN, mark_time_as_bad, read_bad_times
from credit.errors import DataError

logger = logging.getLogger(__name__)

# Largest number of files that a message names.
_MAX_NAMED_FILES = 3
# Fraction of all times that may be skipped as bad.
MAX_BAD_FRACTION = 0.05
# Advice about source files that have changed, for several messages.
REDO_CHANGED_ADVICE = (
    "run credit preprocess CONFIG, which reports whether any field comes from these files, and with --redo-changed "
    "rewrites the parts that do; or name another data.store to keep this store"
)


@dataclass(frozen=True)
class SourceChanges:
    """Differences between the current source files and the source files from which a store was written.

    Attributes:
        changed: files whose size or modification time has changed.
        new: files that did not exist when the store was written.
        gone: files that no longer exist.
    """

    changed: list[str]
    new: list[str]
    gone: list[str]

    def describe_changed_files(self) -> str:
        """Return a phrase about `changed`, such as ``since it was written, 2 source files (...) changed``."""
        return f"since it was written, {_describe_files(self.changed)} changed"


def compare_fingerprints(earlier: Mapping[str, list[int]], current: Mapping[str, list[int]]) -> SourceChanges:
    """Return the differences between the current source files and the source files from which a store was written.

    If a file in a different folder has the same name, size and modification time, it is treated as the same file.

    Args:
        earlier: mapping from key to fingerprint of the files when the store was written, from
            `SourceReader.fingerprint_files`.
        current: mapping from key to fingerprint of the current files.
    """
    # Name, size and modification time together identify a file that was moved.
    earlier_states = {(Path(key).name, *state) for key, state in earlier.items()}
    current_states = {(Path(key).name, *state) for key, state in current.items()}
    changes = SourceChanges(changed=[], new=[], gone=[])
    for key, state in current.items():
        if key in earlier:
            if earlier[key] != list(state):
                changes.changed.append(key)
        elif (Path(key).name, *state) not in earlier_states:
            changes.new.append(key)
    for key, state in earlier.items():
        if key not in current and (Path(key).name, *state) not in current_states:
            changes.gone.append(key)
    return changes


def find_source_changes(conf: DataConfig, meta: Mapping[str, Any]) -> SourceChanges:
    """Return the differences between the current source files and the source files from which a store was written.

    No field is read. Sources whose files cannot be found are ignored.

    Args:
        conf: the ``data`` section of the config with the current sources.
        meta: description of the store.
    """
    files = OpenFiles(conf.sources)
    now: dict[str, list[int]] = {}
    for number, source in enumerate(conf.sources):
        try:
            for path in expand_paths(source, f"data.sources.{number}"):
                if build_file_key(path) not in now:
                    now[build_file_key(path)] = files.fingerprint(path, number)
        except DataError:
            # An archive that is not accessible, for example from a compute node, is not treated as changed.
            continue
    for key in meta["sources"]:
        # Files of coefficients do not belong to a source.
        if key not in now and os.path.exists(key):
            now[key] = read_file_fingerprint(Path(key))
    return compare_fingerprints(meta["sources"], now)


def find_times_to_redo(
    path: Path, meta: Mapping[str, Any], sources: SourceReader, times: np.ndarray, redo_changed: bool
) -> np.ndarray | None:
    """Return the times of a store whose fields come from new or changed source files.

    If no field of the store (including static fields) comes from new or changed files, the function only updates the
    list of files in the description of the store.

    Args:
        path: folder of the store.
        meta: description of the store.
        sources: the sources of the store.
        times: (N,) times of the store in minutes since 1900.
        redo_changed: True if fields from new or changed files may be rewritten.

    Returns:
        (K,) int64 minutes since 1900, a selection of `times`; empty if only static fields come from new or changed
        files; None if no field comes from them.

    Raises:
        DataError: if fields come from new or changed files, but `redo_changed` is False or the store has format 1,
            whose parts cannot be rewritten.
    """
    changes = compare_fingerprints(meta["sources"], sources.fingerprint_files())
    keys = {*changes.changed, *changes.new}
    if not keys:
        return None
    # New files may only contain later times, and changed files may only contain variables that are not in the store.
    affected = np.intersect1d(sources.find_times_from_files(keys), times)
    if len(affected) == 0 and not sources.has_static_from_files(keys):
        group = zarr.open_group(path, mode="r+")
        group.attrs["credit"] = {**meta, "sources": sources.fingerprint_files()}
        logger.info("%s: no field comes from new or changed files: %s", path, _describe_files(sorted(keys)))
        return None
    # Stores of format 1 have no parts.
    has_parts = meta["format"] == FORMAT
    if not (redo_changed and has_parts):
        advice = REDO_CHANGED_ADVICE
        if not has_parts:
            advice = _build_rewrite_advice(meta)
        raise DataError(
            f"data.store: {path} was written before its sources changed; new or changed since then: "
            f"{_describe_files(sorted(keys))}; {advice}"
        )
    return affected


def read_times(path: Path) -> np.ndarray:
    """Return the times of a store, (N,) int64 minutes since 1900; an empty array if the times are lost."""
    try:
        return open_array(path, zarr.open_group(path, mode="r"), "time")[:]
    except READ_ERRORS:
        return np.empty(0, dtype=np.int64)


def mark_for_writing(
    path: Path, sources: SourceReader, times: np.ndarray, damage: Damage, changed_times: np.ndarray | None
) -> None:
    """Mark as not written the parts that are damaged or contain times from changed files.

    Args:
        path: folder of the store.
        sources: the sources of the store.
        times: (N,) times of the store in minutes since 1900.
        damage: damage that was found in the store.
        changed_times: (K,) times in minutes since 1900 whose fields come from changed files; None if no file has
            changed.

    Raises:
        DataError: if parts must be marked in a store of format 1, which has no parts.
    """
    group = zarr.open_group(path, mode="r+")
    meta = read_description(path)
    part_length = group["done"].chunks[0]
    # A complete store without damage is not changed if its source files are the same.
    if meta["complete"] and not damage and changed_times is None:
        return
    arrays = _find_outdated_arrays(path, group, sources, times)
    if not arrays and not damage and changed_times is None:
        return
    if meta["format"] != FORMAT:
        raise DataError(f"{damage.describe(path, meta, times, part_length)}; {_build_rewrite_advice(meta)}")
    if changed_times is None:
        changed_times = np.empty(0, dtype=np.int64)
    # The moments of a time contain the change since the previous time, so the next time is also affected.
    next_times = changed_times + group["moments"].attrs["step_minutes"]
    is_affected = np.isin(times, np.union1d(changed_times, next_times))
    changed_parts = set((np.flatnonzero(is_affected) // part_length).tolist())
    parts = {*damage.parts, *changed_parts}
    if "masks" in arrays and "masks" not in damage.arrays:
        # If the masks change, all parts must be rewritten, because moments exclude masked cells.
        parts = set(range(math.ceil(len(times) / part_length)))
    # The marks are reset first: if the process is killed after this loop, every later check finds the lost marks.
    for number in sorted(parts):
        group["done"][number * part_length : (number + 1) * part_length] = np.uint8(NOT_WRITTEN)
    for name, values in arrays.items():
        logger.warning("%s: %s is rewritten", path, name)
        group[name][...] = values
    description = {**meta, "complete": False, "sources": sources.fingerprint_files()}
    parts_to_judge = sorted(changed_parts.union(meta.get("parts_to_judge", [])))
    if parts_to_judge:
        description["parts_to_judge"] = parts_to_judge
    group.attrs["credit"] = description
    if parts:
        logger.warning("%s: %d parts of %d times are rewritten, other parts are kept", path, len(parts), part_length)


def mark_outliers(path: Path, group: zarr.Group, meta: Mapping[str, Any], conf: DataConfig) -> None:
    """Mark times with outliers (values far from all other values) as bad.

    In a new store, all times are checked. In a store that was complete before, only times from changed files and times
    that were bad before are checked. The other times are not changed, because models may have been trained on them.

    Args:
        path: folder of the store, in which all fields are written.
        group: the open store.
        meta: description of the store.
        conf: the ``data`` section of the config.

    Raises:
        DataError: if there is an outlier, and ``data.on_bad_time`` is not ``skip``.
    """
    times = group["time"][:]
    marks = group["done"][:]
    part_length = group["done"].chunks[0]
    calendar = Calendar(meta["calendar"])
    is_judged = np.ones(len(times), dtype=bool)
    # A store with the checksum `content` was complete before, because the checksum is added when a store is completed.
    if "content" in meta:
        previous_bad_times = set(meta.get("bad_times", {}))
        is_judged = np.isin(np.arange(len(times)) // part_length, meta.get("parts_to_judge", []))
        is_judged |= np.array([calendar.format(minutes) in previous_bad_times for minutes in times])
    # Bad times have no fields, so they are not checked.
    is_judged &= marks == WRITTEN
    if not is_judged.any():
        return
    # The first half of the moments describes the fields, and the second half describes their changes.
    moments_T5C = group["moments"][:, : NUM_MOMENTS // 2]
    # A time that this function marked as bad before still has moments; a count of 0 excludes them.
    moments_T5C[marks != WRITTEN, 0] = 0
    unchecked_variables = [name for name, field in conf.variable_options.items() if field.valid_range is not None]
    transforms = {name: TransformConfig(**transform) for name, transform in meta.get("moments_transforms", {}).items()}
    channels = ChannelMap.from_dict(meta["channels"]).time_varying_stored
    for index, outlier in find_outliers(moments_T5C, channels, unchecked_variables, transforms).items():
        if not is_judged[index]:
            continue
        message = f"{calendar.format(times[index])}: {outlier}"
        if conf.on_bad_time != "skip":
            raise DataError(
                f"data.store: {path}: {message}; correct the file and run credit preprocess CONFIG --redo-changed, or "
                "skip times with outliers with data.on_bad_time: skip, or, to accept the value, set "
                f"data.variable_options.{outlier.variable}.valid_range: [least, greatest] and name another data.store"
            )
        mark_time_as_bad(path, group, index // part_length, index, int(times[index]), message)


def discard_climatology(path: Path) -> None:
    """Remove the climatology of a store whose fields have changed."""
    if (path / "climatology").exists():
        logger.warning("%s: its fields have changed, so its climatology is removed (preprocess.climatology)", path)
        shutil.rmtree(path / "climatology")


def _find_outdated_arrays(
    path: Path, group: zarr.Group, sources: SourceReader, times: np.ndarray
) -> dict[str, np.ndarray]:
    """Return a mapping from name to new values, for the arrays of `WHOLE_ARRAYS` that differ from the sources."""
    masks = [sources.masks[name] for name in sorted(sources.masks)]
    source_arrays = {
        "time": times,
        "static_fields": sources.static(),
        "masks": np.array(masks, dtype=np.uint8).reshape(-1, *sources.grid.shape),
    }
    arrays = {}
    for name in WHOLE_ARRAYS:
        try:
            stored_values = open_array(path, group, name)[...]
            # Static fields may be missing in some cells.
            is_same = np.array_equal(stored_values, source_arrays[name], equal_nan=name != "time")
        except READ_ERRORS:
            is_same = False
        if not is_same:
            arrays[name] = source_arrays[name]
    return arrays


def _build_rewrite_advice(meta: Mapping[str, Any]) -> str:
    """Return the advice for a store of format 1, which must be rewritten completely."""
    return f"a store of format {meta['format']} cannot be written in parts: {OTHER_STORE_ADVICE}"


def _describe_files(files: Iterable[str]) -> str:
    """Return a phrase with the number of source files and the names of the first files."""
    names = list(files)
    noun = "files"
    if len(names) == 1:
        noun = "file"
    names_text = ", ".join(names[:_MAX_NAMED_FILES])
    if len(names) > _MAX_NAMED_FILES:
        names_text += f" and {len(names) - _MAX_NAMED_FILES} more"
    return f"{len(names)} source {noun} ({names_text})"


def require_few_bad_times(path: Path, marks: np.ndarray) -> None:
    """Raise DataError if more than 5 % of the times of a store are bad.

    Args:
        path: folder of the store.
        marks: (N,) marks of the times, see `credit.data.store.store_writer`.

    Raises:
        DataError: if more than 5 % of the times are bad; the message gives the reason of the first bad time.
    """
    num_bad = int((marks == BAD).sum())
    if num_bad > MAX_BAD_FRACTION * len(marks):
        first_reason = next(iter(read_bad_times(path).values()), "")
        raise DataError(
            f"data.store: {path}: {num_bad} of {len(marks)} times are bad; data.on_bad_time: skip accepts at most "
            f"one in {1 / MAX_BAD_FRACTION:.0f}: correct the files and run the same command with --redo-changed. The "
            f"first bad time: {first_reason}"
        )
