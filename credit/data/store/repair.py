"""Repair of a training store: what is lost, or comes from source files that changed, is marked to be written again.

A store is mended by the command that writes it. Marks of the parts go first to "wanted", so that a process which is
killed in between leaves a store that is not complete, never one that is taken for whole.
"""

from __future__ import annotations

import logging
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
from credit.config.schema_data import DataConfig, TransformConfig
from credit.data.formats.files import OpenFiles, expand_paths, file_fingerprint, file_key
from credit.data.sources.source_reader import SourceReader
from credit.data.store.integrity import WHOLE_ARRAYS, Damage
from credit.data.store.outliers import find_outliers
from credit.data.store.store_reader import FORMAT, READ_ERRORS, WAY_OUT, open_array, read_description
from credit.data.store.store_writer import BAD, MOMENTS, WANTED, WRITTEN, mark_bad, read_notes
from credit.errors import DataError

logger = logging.getLogger(__name__)

_MOST_NAMED = 3
# Share of all times that may be skipped as bad.
MOST_BAD = 0.05
REDO_CHANGED = (
    "run credit_preprocess CONFIG, which says whether any field comes from them, and with --redo-changed writes those "
    "parts again; or name another data.store to keep this one"
)


@dataclass(frozen=True)
class SourceChanges:
    """Source files of a store that are not what they were when it was written.

    Attributes:
        changed: files of another size or time of change.
        new: files that were not there.
        gone: files that are not there any more.
    """

    changed: list[str]
    new: list[str]
    gone: list[str]

    def describe_changed(self) -> str:
        """Return in words which files changed."""
        return f"since it was written, {_count_files(self.changed)} changed"


def compare_sources(before: Mapping[str, list[int]], now: Mapping[str, list[int]]) -> SourceChanges:
    """Return how source files differ, each with its size and time of change as in `SourceReader.describe_files`.

    A file of the same name, size and time of change in another folder is the same file, which has been moved.
    """
    states_before = {(Path(key).name, *state) for key, state in before.items()}
    states_now = {(Path(key).name, *state) for key, state in now.items()}
    return SourceChanges(
        changed=[key for key, state in now.items() if key in before and before[key] != list(state)],
        new=[key for key, state in now.items() if key not in before and (Path(key).name, *state) not in states_before],
        gone=[key for key, state in before.items() if key not in now and (Path(key).name, *state) not in states_now],
    )


def find_source_changes(conf: DataConfig, meta: Mapping[str, Any]) -> SourceChanges:
    """Return how the source files of a store differ from what they were, without opening them."""
    files, now = OpenFiles(conf.sources), {}
    for number, source in enumerate(conf.sources):
        try:
            paths = expand_paths(source, f"data.sources.{number}")
            now |= {file_key(path): files.fingerprint(path, number) for path in paths if file_key(path) not in now}
        except DataError:
            # An archive that is out of reach, as on a compute node, is no change.
            continue
    for key in meta["sources"]:
        # Files of coefficients belong to no source.
        if key not in now and os.path.exists(key):
            now[key] = file_fingerprint(Path(key))
    return compare_sources(meta["sources"], now)


def find_times_to_redo(
    path: Path, meta: Mapping[str, Any], sources: SourceReader, times: np.ndarray, redo_changed: bool
) -> np.ndarray | None:
    """Return the minutes of the times of a store that come from files which are new or changed.

    None where no such file gives a field of the store, static ones included; its description is brought up to date.

    Args:
        path: the store.
        meta: its description.
        sources: what it is made of.
        times: (N,) its times.
        redo_changed: whether such times may be written again.

    Raises:
        DataError: where there are such fields, and they are not to be written again, or cannot be.
    """
    changes = compare_sources(meta["sources"], sources.describe_files())
    keys = {*changes.changed, *changes.new}
    if not keys:
        return None
    affected = np.intersect1d(sources.find_times_from(keys), times)
    if len(affected) == 0 and not sources.gives_static(keys):
        group = zarr.open_group(path, mode="r+")
        group.attrs["credit"] = {**meta, "sources": sources.describe_files()}
        logger.info("%s: nothing in it comes from %s, new or changed since", path, _count_files(sorted(keys)))
        return None
    is_in_parts = meta["format"] == FORMAT
    if not (redo_changed and is_in_parts):
        advice = REDO_CHANGED if is_in_parts else _without_parts(meta)
        raise DataError(
            f"data.store: {path} was written before its sources changed: new or changed since are "
            f"{_count_files(sorted(keys))}; {advice}"
        )
    return affected


def read_times(path: Path) -> np.ndarray:
    """Return the times of a store, none where they are lost."""
    try:
        return open_array(path, zarr.open_group(path, mode="r"), "time")[:]
    except READ_ERRORS:
        return np.empty(0, dtype=np.int64)


def mark_for_writing(
    path: Path, sources: SourceReader, times: np.ndarray, damage: Damage, changed_times: np.ndarray | None
) -> None:
    """Mark the parts that are damaged, or hold times of changed files, to be written again; others stay.

    Args:
        path: the store.
        sources: what it is made of.
        times: (N,) minutes of the store.
        damage: what was found in it.
        changed_times: minutes of the times that come from changed files; None where no file has changed.

    Raises:
        DataError: for a store of format 1, which has no parts.
    """
    group, meta = zarr.open_group(path, mode="r+"), read_description(path)
    length = group["done"].chunks[0]
    if meta["complete"] and not damage and changed_times is None:
        return
    arrays = _arrays_to_write(path, group, sources, times)
    if not arrays and not damage and changed_times is None:
        return
    if meta["format"] != FORMAT:
        raise DataError(f"{damage.describe(path, meta, times, length)}; {_without_parts(meta)}")
    # The moments of a time hold its change since the time before.
    changed_times = np.empty(0, dtype=np.int64) if changed_times is None else changed_times
    touched = np.union1d(changed_times, changed_times + group["moments"].attrs["step_minutes"])
    changed_parts = set((np.flatnonzero(np.isin(times, touched)) // length).tolist())
    parts = {*damage.parts, *changed_parts}
    if "masks" in arrays and "masks" not in damage.arrays:
        # Other cells are missing now, and all moments are those of the cells that are not.
        parts = set(range(-(-len(times) // length)))
    # Marks first: a process that is killed here leaves marks that are lost, which every later look sees.
    for number in sorted(parts):
        group["done"][number * length : (number + 1) * length] = np.uint8(WANTED)
    for name, values in arrays.items():
        logger.warning("%s: %s is written again", path, name)
        group[name][...] = values
    to_judge = sorted(changed_parts.union(meta.get("parts_to_judge", [])))
    group.attrs["credit"] = {
        **meta,
        "complete": False,
        "sources": sources.describe_files(),
        **({"parts_to_judge": to_judge} if to_judge else {}),
    }
    if parts:
        logger.warning("%s: %d parts of %d times are written again, the others stay", path, len(parts), length)


def mark_outliers(path: Path, group: zarr.Group, meta: Mapping[str, Any], conf: DataConfig) -> None:
    """Mark the times as bad that have values far from all others, where the config skips bad times.

    All times of a new store are judged. Of a store that was complete before, only what changed files gave and what was
    bad before: its other times stay what they were when models were trained on them.

    Args:
        path: the store, whose fields are all there.
        group: the same, open.
        meta: its description.
        conf: the data section.

    Raises:
        DataError: for such a value where bad times are not skipped.
    """
    times, marks, length = group["time"][:], group["done"][:], group["done"].chunks[0]
    calendar = Calendar(meta["calendar"])
    is_judged = np.ones(len(times), dtype=bool)
    # The checksum of the whole is written when a store is complete for the first time.
    if "content" in meta:
        was_bad = set(meta.get("bad_times", {}))
        is_judged = np.isin(np.arange(len(times)) // length, meta.get("parts_to_judge", []))
        is_judged |= np.array([calendar.format(minutes) in was_bad for minutes in times])
    is_judged &= marks == WRITTEN
    if not is_judged.any():
        return
    moments_T5C = group["moments"][:, : MOMENTS // 2]
    # A time that was marked as bad here has the moments of its values.
    moments_T5C[marks != WRITTEN, 0] = 0
    accepted = [name for name, field in conf.variable_options.items() if field.valid_range is not None]
    transforms = {name: TransformConfig(**transform) for name, transform in meta.get("moments_transforms", {}).items()}
    channels = ChannelMap.from_dict(meta["channels"]).stored
    for index, outlier in find_outliers(moments_T5C, channels, accepted, transforms).items():
        if not is_judged[index]:
            continue
        message = f"{calendar.format(times[index])}: {outlier}"
        if conf.on_bad_time != "skip":
            raise DataError(
                f"data.store: {path}: {message}; correct the file and run credit_preprocess CONFIG --redo-changed, or "
                "leave such times out with data.on_bad_time: skip, or, to accept the value, set "
                f"data.variable_options.{outlier.variable}.valid_range: [least, greatest] and name another data.store"
            )
        mark_bad(path, group, index // length, index, int(times[index]), message)


def discard_climatology(path: Path) -> None:
    """Remove the climatology of a store whose fields are others now."""
    if (path / "climatology").exists():
        logger.warning("%s: its fields have changed, so its climatology is removed (preprocess.climatology)", path)
        shutil.rmtree(path / "climatology")


def _arrays_to_write(path: Path, group: zarr.Group, sources: SourceReader, times: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays without parts that are not what the sources give."""
    masks = [sources.masks[name] for name in sorted(sources.masks)]
    source_arrays = {
        "time": times,
        "static_fields": sources.static(),
        "masks": np.array(masks, dtype=np.uint8).reshape(-1, *sources.grid.shape),
    }
    arrays = {}
    for name in WHOLE_ARRAYS:
        try:
            is_same = np.array_equal(open_array(path, group, name)[...], source_arrays[name], equal_nan=name != "time")
        except READ_ERRORS:
            is_same = False
        if not is_same:
            arrays[name] = source_arrays[name]
    return arrays


def _without_parts(meta: Mapping[str, Any]) -> str:
    """Return what to do about a store of an earlier format that has to be written again."""
    return f"a store of format {meta['format']} cannot be written in parts: {WAY_OUT}"


def _count_files(files: Iterable[str]) -> str:
    names = list(files)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    noun = "file" if len(names) == 1 else "files"
    return f"{len(names)} source {noun} ({', '.join(names[:_MOST_NAMED])}{more})"


def require_few_bad(path: Path, marks: np.ndarray) -> None:
    """Stop where more times are bad than may be skipped.

    Raises:
        DataError: naming the first of them.
    """
    bad = int((marks == BAD).sum())
    if bad > MOST_BAD * len(marks):
        first = next(iter(read_notes(path).values()), "")
        raise DataError(
            f"data.store: {path}: {bad} of {len(marks)} times are bad; data.on_bad_time: skip is for at most one in "
            f"{1 / MOST_BAD:.0f}: correct the files and run the same command with --redo-changed. The first: {first}"
        )
