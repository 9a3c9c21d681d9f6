"""Write the training store from source files, resumably, and fit the statistics of the training period.

The store is first created without fields. Then its parts, which are ranges of times, are written in any order (see
`credit.data.store.store_writer`). At the end, the statistics, the list of bad times and the checksum of the store are
added to its description; the store is then complete.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from credit import __version__
from credit.calendar import Calendar
from credit.config.sections.data import DataConfig, PreprocessConfig, TransformConfig
from credit.data.formats.files import OpenFiles
from credit.data.sources.reading.fetch_estimate import estimate_fetch, format_bytes
from credit.data.sources.source_reader import SourceReader, open_sources
from credit.data.splits import Split, build_splits
from credit.data.store import store_reader, store_writer
from credit.data.store.executor import run_until_done
from credit.data.store.integrity import Damage, find_damage_to_repair
from credit.data.store.repair import (
    discard_climatology,
    find_times_to_redo,
    mark_for_writing,
    mark_outliers,
    read_times,
    require_few_bad_times,
)
from credit.data.store.statistics import Statistics, build_statistics_from_moments, fit_statistics
from credit.data.store.store_creation import (
    create_store,
    estimate_store_bytes,
    explain_disk_errors,
    format_time_span,
    require_disk_space,
    select_times_in_splits,
)
from credit.data.store.store_settings import (
    OTHER_STORE_ADVICE,
    describe_statistics,
    describe_statistics_changes,
    describe_transforms,
    require_same_identity,
)
from credit.errors import DataError
from credit.grid import LatLonGrid
from credit.utils.file_lock import file_lock
from credit.utils.progress import ProgressBar

logger = logging.getLogger(__name__)

# Libraries whose versions the description of a store records.
_RECORDED_LIBRARIES = ("numpy", "xarray", "netCDF4", "zarr")


def write_training_store(
    conf: DataConfig,
    settings: PreprocessConfig | None = None,
    progress: bool = True,
    deep: bool = False,
    redo_changed: bool = False,
) -> Path:
    """Write the training store of a config, finish an incomplete store, or repair a damaged store.

    In a complete store, only lost or damaged parts are written again. Several processes may call this function at the
    same time and share the work.

    Args:
        conf: the ``data`` section of the config; `store` must be set.
        settings: the ``preprocess`` section, such as the number of processes; None to write all parts in this process.
        progress: True to show progress bars on a terminal.
        deep: True to read every field of a complete store, and to rewrite the parts that do not match their checksums.
        redo_changed: True to rewrite the parts whose source files have changed; False to raise an error instead.

    Returns:
        Path of the store.

    Raises:
        DataError: if the sources have problems, the store was written with a different config, or the disk is full. The
            next call continues where the failed call stopped.
    """
    path = _require_store_path(conf)
    settings = settings or PreprocessConfig()
    # Reject the store of a different config before the sources are opened, which may take minutes.
    if path.exists():
        require_same_identity(path, store_reader.read_description(path), conf)
    sources = open_sources(conf, OpenFiles(conf.sources, max_fetches=settings.fetches))
    splits = build_splits(conf, sources.calendar)
    with explain_disk_errors(path):
        # Several processes may check the store at once, because the check only reads.
        damage = Damage()
        if path.exists():
            damage = find_damage_to_repair(path, deep, progress)
        with _remove_unused_locks(path), file_lock(store_writer.build_lock_folder_path(path) / "create.lock"):
            if not path.exists():
                group = create_store(path, conf, sources, splits, settings)
            else:
                if damage:
                    # In the meantime, another process may have marked the damage or rewritten the parts.
                    damage = find_damage_to_repair(path, deep, progress)
                group = _reopen_store(path, sources, splits, damage, redo_changed)
        _warn_of_other_blocks(path, group, sources, settings)
        _write_fields(path, group, conf, sources, settings, progress)
        _finish_store(path, group, conf, splits["train"], progress)
    return path


def describe_work(conf: DataConfig, settings: PreprocessConfig) -> str:
    """Return a multi-line summary of what `write_training_store` would fetch and write; write nothing.

    For remote sources, the fields of the first time are fetched to measure the download rate.

    Args:
        conf: the ``data`` section of the config; `store` must be set.
        settings: the ``preprocess`` section.

    Raises:
        DataError: if the sources have problems, no time is in the splits, the store was written with a different
            config, or a server does not answer.
    """
    path = _require_store_path(conf)
    sources = open_sources(conf, OpenFiles(conf.sources, max_fetches=settings.fetches))
    times = select_times_in_splits(sources, build_splits(conf, sources.calendar))
    if not len(times):
        raise DataError(f"data.splits: the sources have no time in them; {format_time_span(sources, sources.times)}")
    if path.exists():
        require_same_identity(path, store_reader.read_description(path), conf)
        mismatch = _describe_time_difference(sources, read_times(path), times)
        if mismatch is not None:
            raise _build_mismatch_error(path, mismatch)
        times = times[zarr.open_group(path, mode="r")["done"][:] == store_writer.NOT_WRITTEN]
    if not len(times):
        return f"{path} has all times: nothing needs to be fetched or written"
    _, stored_shape = settings.blocks.find_block_and_padded_shape(sources.grid.shape)
    lines = [f"{path}: {format_time_span(sources, times)} will be written"]
    if sources.fetch_plan.urls:
        lines.append(estimate_fetch(sources, [sources.index_of(minutes) for minutes in times]).describe())
        sources.fetch_plan.stop()
    store_bytes = estimate_store_bytes(sources, len(times), stored_shape)
    lines.append(f"to write: at most {format_bytes(store_bytes)}")
    return "\n".join(lines)


def _require_store_path(conf: DataConfig) -> Path:
    """Return the path of the store of a config.

    Raises:
        DataError: if ``data.store`` is not set.
    """
    if conf.store is None:
        raise DataError("data.store: not set; name the store to write, for example data.store=runs/my_run/store.zarr")
    return Path(conf.store)


def _describe_time_difference(sources: SourceReader, stored_times: np.ndarray, times: np.ndarray) -> str | None:
    """Return the difference between the times of a store and the times of the splits; None if they are the same."""
    if np.array_equal(stored_times, times):
        return None
    return f"in the store {format_time_span(sources, stored_times)}, in the splits {format_time_span(sources, times)}"


def _build_mismatch_error(path: Path, mismatch: str) -> DataError:
    """Return the error for a store whose grid or times differ from those of the sources."""
    return DataError(f"data.store: {path} does not match the sources: {mismatch}; {OTHER_STORE_ADVICE}")


def _reopen_store(
    path: Path, sources: SourceReader, splits: Mapping[str, Split], damage: Damage, redo_changed: bool
) -> zarr.Group:
    """Open an existing store, and mark damaged parts and parts from changed files, so that they are written again.

    Args:
        path: folder of the store.
        sources: the sources; their grid must equal the grid of the store.
        splits: the splits; their times must equal the times of the store.
        damage: damage that was found in the store.
        redo_changed: True if the parts of changed source files may be rewritten.

    Returns:
        The store, open for writing.

    Raises:
        DataError: if the grid of the store differs from the sources, if its times differ from the splits, or if source
            files have changed and `redo_changed` is False.
    """
    meta = store_reader.read_description(path)
    if meta["format"] != store_reader.FORMAT and not meta["complete"]:
        raise DataError(
            f"data.store: {path} was begun by an older version, in format {meta['format']}; {OTHER_STORE_ADVICE}"
        )
    group = zarr.open_group(path, mode="r+")
    mismatch = LatLonGrid.from_dict(meta["grid"]).describe_mismatch(sources.grid)
    stored_times = read_times(path)
    times = select_times_in_splits(sources, splits)
    # If the times in the store are lost but their number is right, they can be rewritten, so they are not compared.
    are_times_lost = "time" in damage.arrays and group["done"].shape == times.shape
    if mismatch is None and not are_times_lost:
        mismatch = _describe_time_difference(sources, stored_times, times)
    if mismatch:
        raise _build_mismatch_error(path, mismatch)
    changed_times = find_times_to_redo(path, meta, sources, times, redo_changed)
    # The lock prevents other processes from declaring the store complete in the meantime.
    with file_lock(store_writer.build_lock_folder_path(path) / "close.lock"):
        mark_for_writing(path, sources, times, damage, changed_times)
    num_pending = int((group["done"][:] == store_writer.NOT_WRITTEN).sum())
    if num_pending:
        fields = group["fields"]
        # A divided field is stored as a shard, whose last blocks may extend beyond the grid.
        stored_shape = (fields.shards or fields.chunks)[2:]
        require_disk_space(path, estimate_store_bytes(sources, num_pending, stored_shape))
    return group


def _warn_of_other_blocks(path: Path, group: zarr.Group, sources: SourceReader, settings: PreprocessConfig) -> None:
    """Log a warning if the blocks of an existing store differ from ``preprocess.blocks``."""
    block_shape, _ = settings.blocks.find_block_and_padded_shape(sources.grid.shape)
    stored_shape = group["fields"].chunks[2:]
    if stored_shape != block_shape:
        logger.warning(
            "data.store: %s keeps its blocks of %d x %d cells; preprocess.blocks defines blocks of %d x %d cells; name "
            "another data.store to write these",
            path,
            *stored_shape,
            *block_shape,
        )


def _write_fields(
    path: Path, group: zarr.Group, conf: DataConfig, sources: SourceReader, settings: PreprocessConfig, progress: bool
) -> None:
    """Write all parts that are not yet written, and wait for the parts that other processes are writing.

    Raises:
        DataError: if fields are bad, unless ``data.on_bad_time`` is ``skip``.
    """
    # All moments must use the transforms with which the store was begun, even if the config has changed.
    stored_transforms = dict(group.attrs)["credit"].get("moments_transforms", {})
    transforms = {name: TransformConfig.model_validate(transform) for name, transform in stored_transforms.items()}
    task = store_writer.WriteTask(
        path, sources, conf.step_minutes, transforms, conf.on_bad_time == "skip", settings.memory_limit_bytes
    )
    marks = group["done"][:]
    num_done = int((marks != store_writer.NOT_WRITTEN).sum())
    if 0 < num_done < len(marks):
        logger.info("%s: %d of %d times are written, continuing", path, num_done, len(marks))
    if num_done < len(marks) and sources.fetch_plan.urls:
        pending_times = group["time"][:][marks == store_writer.NOT_WRITTEN]
        estimate = estimate_fetch(sources, [sources.index_of(minutes) for minutes in pending_times])
        logger.info("%s", estimate.describe())
        if settings.workers > 1 or settings.cluster != "none":
            # Other processes read the times, so the fetched chunks of the first time are not needed in this process.
            sources.fetch_plan.stop()

    def list_pending() -> list[int]:
        return store_writer.list_pending_parts(group["done"][:], group["done"].chunks[0])

    # True hides the bar; None shows the bar only on a terminal.
    is_hidden: bool | None = True
    if progress and num_done < len(marks):
        is_hidden = None
    with ProgressBar(
        desc=f"writing {path.name}", unit="time", initial=num_done, total=len(marks), disable=is_hidden
    ) as bar:
        try:
            run_until_done(partial(store_writer.write_part, task), list_pending, settings, bar)
        finally:
            sources.fetch_plan.stop()


def _finish_store(path: Path, group: zarr.Group, conf: DataConfig, train: Split, progress: bool) -> None:
    """Complete a store whose fields are all written, by adding the statistics, the bad times and the checksum.

    Raises:
        DataError: if there are outliers and ``data.on_bad_time`` is not ``skip``, or if there are too many bad times.
    """
    statistics_settings = describe_statistics(conf, train)
    # Several processes may call this function at once; the first process completes the store.
    with file_lock(store_writer.build_lock_folder_path(path) / "close.lock"):
        meta = dict(zarr.open_group(path, mode="r").attrs)["credit"]
        if meta["complete"] and not describe_statistics_changes(meta, statistics_settings):
            logger.info("%s is complete", path)
        else:
            # If the store is already complete, only the statistics of the new period or transforms are needed.
            if not meta["complete"]:
                previous_content = meta.get("content")
                # Only the process that completes the store reads the moments of all times, which are large.
                mark_outliers(path, group, meta, conf)
                meta.pop("parts_to_judge", None)
                require_few_bad_times(path, group["done"][:])
                meta |= _describe_written_fields(path, group, meta)
                # The climatology was fitted to the previous fields.
                if previous_content not in (None, meta["content"]):
                    discard_climatology(path)
            reader = store_reader.StoreReader(path, meta)
            statistics = _fit_statistics(group, reader, meta, conf, train, progress)
            meta |= {"complete": True, "statistics": statistics.to_dict(), **statistics_settings}
            group.attrs["credit"] = meta
    shutil.rmtree(store_writer.build_lock_folder_path(path), ignore_errors=True)


def _fit_statistics(
    group: zarr.Group,
    reader: store_reader.StoreReader,
    meta: Mapping[str, Any],
    conf: DataConfig,
    train: Split,
    progress: bool,
) -> Statistics:
    """Return the statistics of the training period.

    The statistics are computed from the moments in the store, or from the fields if the transforms have changed.

    Args:
        group: the open store.
        reader: reader of the store.
        meta: description of the store.
        conf: the ``data`` section of the config, whose time step and transforms are used.
        train: the training period.
        progress: True to show a progress bar on a terminal.

    Raises:
        DataError: see `fit_statistics`.
    """
    period = (train.first, train.last)
    step = conf.step_minutes
    packing = meta["packing_steps"]
    # The moments are computed from transformed values, so if the transforms change, all fields must be read again.
    if meta.get("moments_transforms") != describe_transforms(conf):
        # Outliers were searched when the fields were written, so every variable is accepted here.
        variables = {channel.variable for channel in reader.channels.time_varying_stored}
        return fit_statistics(reader, *period, step, packing, progress, conf.transforms, unchecked_variables=variables)
    state, tendency = store_writer.merge_moments(group["moments"], group["time"][:], group["done"][:], *period)
    return build_statistics_from_moments(reader, state, tendency, period, step, packing, conf.transforms)


def _describe_written_fields(path: Path, group: zarr.Group, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the store's description that depend on the written fields.

    Returns:
        ``bad_times``, a mapping from each bad time to the reason; ``gaps``, a list of pairs (last time before a gap,
        first time after it); ``content``, the checksum of the store; and ``versions``, a mapping from library to
        version. Times are strings in the format of `Calendar.format`.
    """
    times = group["time"][:]
    marks = group["done"][:]
    calendar = Calendar(meta["calendar"])
    # In a repaired store, the reasons for the parts that were not rewritten are read from the previous description.
    reasons = dict(meta.get("bad_times", {}))
    for minutes, reason in store_writer.read_bad_times(path).items():
        reasons[calendar.format(minutes)] = reason
    # Times that were bad before, and have been written since, are removed.
    bad_times = {calendar.format(minutes) for minutes in times[marks == store_writer.BAD]}
    reasons = {time_text: reason for time_text, reason in sorted(reasons.items()) if time_text in bad_times}
    for time_text, reason in reasons.items():
        logger.warning("%s is left out: %s", time_text, reason)
    written_times = times[marks == store_writer.WRITTEN]
    # A gap is an interval that is longer than the shortest interval.
    gaps = []
    if len(written_times) > 1:
        intervals = np.diff(written_times)
        for index in np.flatnonzero(intervals > intervals.min()):
            gaps.append([calendar.format(written_times[index]), calendar.format(written_times[index + 1])])
    # The array ``digest`` contains the checksums of the fields, so only small arrays are read.
    hashed_arrays = {name: group[name][...] for name in store_reader.HASHED_ARRAYS}
    versions = {"credit": __version__}
    for name in _RECORDED_LIBRARIES:
        versions[name] = version(name)
    return {
        "bad_times": reasons,
        "gaps": gaps,
        "content": store_reader.hash_content(hashed_arrays, meta),
        "versions": versions,
    }


@contextmanager
def _remove_unused_locks(path: Path) -> Iterator[None]:
    """Return a context that removes the folder of locks if an error occurs before any part has been written."""
    try:
        yield
    except BaseException:
        folder = store_writer.build_lock_folder_path(path)
        if folder.exists() and {file.name for file in folder.iterdir()} == {"create.lock"}:
            shutil.rmtree(folder, ignore_errors=True)
        raise
