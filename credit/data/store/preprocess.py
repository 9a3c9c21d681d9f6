"""Write the training store from source files, resumably, and fit the statistics of the training period.

The store is first created without fields. Then its parts are written (`credit.data.store.store_writer`), in any order.
At the end it gets statistics, the list of times that were left out, and the checksum of the whole.
"""

from __future__ import annotations

import errno
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
from zarr.codecs import BloscCodec, Crc32cCodec

from credit import __version__
from credit.calendar import EPOCH, Calendar
from credit.config.sections.data import DataConfig, PreprocessConfig, TransformConfig
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
    require_few_bad,
)
from credit.data.store.statistics import Statistics, fit_statistics, summarise
from credit.data.store.statistics_settings import describe_statistics, describe_statistics_changes, describe_transforms
from credit.errors import DataError
from credit.grid import LatLonGrid
from credit.utils.atomic import atomic_folder
from credit.utils.file_lock import file_lock
from credit.utils.progress import ProgressBar

logger = logging.getLogger(__name__)

# Space for coordinates and descriptions besides the fields.
_SPARE_BYTES = 16 * 2**20
_COMPRESSORS = {"lz4": [BloscCodec(cname="lz4", clevel=1, shuffle="shuffle")], "none": []}
_VERSIONS = ("numpy", "xarray", "netCDF4", "zarr")


def preprocess(
    conf: DataConfig,
    settings: PreprocessConfig | None = None,
    progress: bool = True,
    deep: bool = False,
    redo_changed: bool = False,
) -> Path:
    """Write the training store of a config, finish one that was begun, or repair one that is damaged.

    In a complete store only lost or damaged parts are written again. Several processes may do this at once.

    Args:
        conf: the data section; `store` must be set.
        settings: how the parts are distributed among processes; by default this process writes them.
        progress: show progress bars on a terminal.
        deep: read every field of a complete store, and write parts again that do not match their checksums.
        redo_changed: write parts again if their source files have changed.

    Returns:
        The store's path.

    Raises:
        DataError: for bad sources, a store of another config, or a full disk; the next call continues.
    """
    if conf.store is None:
        raise DataError("data.store: not set; name the store to write, for example data.store=runs/my_run/store.zarr")
    path = Path(conf.store)
    settings = settings or PreprocessConfig()
    if path.exists():
        store_reader.require_same_identity(path, store_reader.read_description(path), conf)
    sources = open_sources(conf)
    splits = build_splits(conf, sources.calendar)
    with disk_errors_of(path):
        # Several processes may check the store at once, because this only reads.
        damage = find_damage_to_repair(path, deep, progress) if path.exists() else Damage()
        with _remove_unused_locks(path), file_lock(store_writer.lock_folder(path) / "create.lock"):
            if not path.exists():
                group = _create(path, conf, sources, splits, settings)
            else:
                if damage:
                    # Another process may have marked the damage, or written the parts again, in the meantime.
                    damage = find_damage_to_repair(path, deep, progress)
                group = _continue(path, sources, splits, damage, redo_changed)
        _write_fields(path, group, conf, sources, settings, progress)
        _close(path, group, conf, splits["train"], progress)
    return path


def times_within(sources: SourceReader, splits: Mapping[str, Split]) -> np.ndarray:
    """Return the times from the start of the first split to the end of the last."""
    first, last = store_reader.splits_span(splits)
    return sources.times[(sources.times >= first) & (sources.times <= last)]


def bytes_needed(sources: SourceReader, num_times: int) -> int:
    """Return the most bytes that the fields and moments of a number of times take in a store."""
    height, width = sources.grid.shape
    bytes_per_field = 4 * height * width + 8 * store_writer.MOMENTS
    return num_times * len(sources.channels.stored) * bytes_per_field + _SPARE_BYTES


def require_space(path: Path, needed_bytes: int) -> None:
    """Stop if the disk does not have enough free space.

    Raises:
        DataError: naming the store, the space that is needed and the space that is free.
    """
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise DataError(
            f"data.store: {path} needs up to {_format_size(needed_bytes)} more, but only {_format_size(free_bytes)} "
            f"are free in {folder}; free some space, or name another data.store"
        )


def _create(
    path: Path, conf: DataConfig, sources: SourceReader, splits: Mapping[str, Split], settings: PreprocessConfig
) -> zarr.Group:
    """Create the store without fields."""
    times = times_within(sources, splits)
    if len(times) == 0:
        raise DataError(f"data.splits: no time of the sources lies in them; {_format_span(sources, sources.times)}")
    require_space(path, bytes_needed(sources, len(times)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(path) as folder:
        group = zarr.open_group(folder, mode="w", zarr_format=3)
        _add_arrays(group, sources, times, conf.step_minutes, settings)
        group.attrs["credit"] = {
            "format": store_reader.FORMAT,
            "complete": False,
            "channels": sources.channels.to_dict(),
            "grid": sources.grid.to_dict(),
            "calendar": sources.calendar.name,
            "attributes": sources.attributes,
            "masked_variables": sorted(sources.masks),
            "packing_steps": sources.packing_steps,
            "identity": store_reader.identity(conf),
            "sources": sources.describe_files(),
            "period": list(store_reader.splits_span(splits)),
            "statistics": None,
            "statistics_period": None,
            "moments_transforms": describe_transforms(conf),
        }
    return zarr.open_group(path, mode="r+")


def _add_arrays(
    group: zarr.Group, sources: SourceReader, times: np.ndarray, step_minutes: int, settings: PreprocessConfig
) -> None:
    grid = sources.grid
    channels = sources.channels
    cell_dims = ("latitude", "longitude")
    time_axis = {"units": EPOCH, "calendar": sources.calendar.name, "standard_name": "time", "axis": "T"}
    _add(group, "time", times, ("time",), time_axis)
    _add(group, "latitude", grid.lat, ("latitude",), {"units": "degrees_north", "standard_name": "latitude"})
    _add(group, "longitude", grid.lon, ("longitude",), {"units": "degrees_east", "standard_name": "longitude"})
    masks = [sources.masks[name] for name in sorted(sources.masks)]
    _add(group, "masks", np.array(masks, dtype=np.uint8).reshape(-1, *grid.shape), ("masked_variable", *cell_dims))
    _add(group, "static_fields", sources.static(), ("static_channel", *cell_dims))
    # Names of channels as coordinates, by which xarray and other tools select.
    for dim, dim_channels in (("channel", channels.stored), ("static_channel", channels.static_stored)):
        names = np.array([channel.name for channel in dim_channels], dtype=np.dtypes.StringDType())
        _add(group, dim, names, (dim,))
    num_channels = len(channels.stored)
    bytes_per_time = 4 * num_channels * grid.shape[0] * grid.shape[1]
    part_length = store_writer.part_length(bytes_per_time, sources.count_chunk_times_in_memory(settings.held_bytes))
    arrays_along_time = (
        ("done", (), np.uint8, ()),
        ("digest", (), np.uint64, ()),
        ("moments", (store_writer.MOMENTS, num_channels), np.float64, ("moment", "channel")),
    )
    for name, shape_per_time, dtype, dims in arrays_along_time:
        # A chunk is one part, so no two processes write the same chunk.
        group.create_array(
            name,
            shape=(len(times), *shape_per_time),
            chunks=(part_length, *shape_per_time),
            dtype=dtype,
            fill_value=0,
            dimension_names=("time", *dims),
            config={"write_empty_chunks": True},
            attributes={"step_minutes": step_minutes} if name == "moments" else None,
        )
    group.create_array(
        "fields",
        shape=(len(times), num_channels, *grid.shape),
        chunks=(1, num_channels, *grid.shape),
        dtype=np.float32,
        fill_value=np.nan,
        # zarr and `ChunkReader` verify the checksum at every read.
        compressors=[*_COMPRESSORS[settings.compression], Crc32cCodec()],
        dimension_names=("time", "channel", *cell_dims),
        config={"write_empty_chunks": True},
        attributes={"channel": [channel.name for channel in channels.stored]},
    )


def _add(
    group: zarr.Group, name: str, values: np.ndarray, dims: tuple[str, ...], attributes: Mapping[str, Any] | None = None
) -> None:
    """Add a small array in one chunk."""
    # zarr does not allow chunks of length 0.
    chunks = tuple(max(1, length) for length in values.shape)
    array = group.create_array(
        name, shape=values.shape, chunks=chunks, dtype=values.dtype, dimension_names=dims, attributes=attributes
    )
    if values.size:
        array[...] = values


def _continue(
    path: Path, sources: SourceReader, splits: Mapping[str, Split], damage: Damage, redo_changed: bool
) -> zarr.Group:
    """Open a store that was begun or finished, and mark damaged parts and those of changed files to be written again.

    Raises:
        DataError: if its grid or its times are not those of the sources and splits.
    """
    meta = store_reader.read_description(path)
    if meta["format"] != store_reader.FORMAT and not meta["complete"]:
        raise DataError(
            f"data.store: {path} was begun by another version, in format {meta['format']}; {store_reader.WAY_OUT}"
        )
    group = zarr.open_group(path, mode="r+")
    mismatch = LatLonGrid.from_dict(meta["grid"]).describe_mismatch(sources.grid)
    stored_times = read_times(path)
    times = times_within(sources, splits)
    # Times that are lost can be written again if their number is right.
    are_times_lost = "time" in damage.arrays and group["done"].shape == times.shape
    if mismatch is None and not are_times_lost and not np.array_equal(stored_times, times):
        mismatch = f"in the store {_format_span(sources, stored_times)}, in the splits {_format_span(sources, times)}"
    if mismatch:
        raise DataError(f"data.store: {path} does not fit the sources: {mismatch}; {store_reader.WAY_OUT}")
    changed_times = find_times_to_redo(path, meta, sources, times, redo_changed)
    # The lock keeps other processes from declaring the store complete in between.
    with file_lock(store_writer.lock_folder(path) / "close.lock"):
        mark_for_writing(path, sources, times, damage, changed_times)
    num_pending = int((group["done"][:] == store_writer.WANTED).sum())
    if num_pending:
        require_space(path, bytes_needed(sources, num_pending))
    return group


def _write_fields(
    path: Path, group: zarr.Group, conf: DataConfig, sources: SourceReader, settings: PreprocessConfig, progress: bool
) -> None:
    """Write the parts that are pending, and wait for those that other processes are writing.

    Raises:
        DataError: for bad fields.
    """
    # All moments must use the transforms that the store was begun with, even if the config has others now.
    stored_transforms = dict(group.attrs)["credit"].get("moments_transforms", {})
    transforms = {name: TransformConfig.model_validate(transform) for name, transform in stored_transforms.items()}
    task = store_writer.WriteTask(
        path, sources, conf.step_minutes, transforms, conf.on_bad_time == "skip", settings.held_bytes
    )
    marks = group["done"][:]
    num_done = int((marks != store_writer.WANTED).sum())
    if 0 < num_done < len(marks):
        logger.info("%s: %d of %d times are written, continuing", path, num_done, len(marks))

    def list_pending() -> list[int]:
        return store_writer.pending_parts(group["done"][:], group["done"].chunks[0])

    is_hidden = None if progress and num_done < len(marks) else True
    title = f"writing {path.name}"
    with ProgressBar(desc=title, unit="time", initial=num_done, total=len(marks), disable=is_hidden) as bar:
        run_until_done(partial(store_writer.write_part, task), list_pending, settings, bar)


def _close(path: Path, group: zarr.Group, conf: DataConfig, train: Split, progress: bool) -> None:
    """Complete a store whose fields are all written: statistics, list of bad times, checksum.

    Raises:
        DataError: for outliers that are not to be skipped, or more bad times than may be skipped.
    """
    statistics_settings = describe_statistics(conf, train)
    with file_lock(store_writer.lock_folder(path) / "close.lock"):
        meta = dict(zarr.open_group(path, mode="r").attrs)["credit"]
        if meta["complete"] and not describe_statistics_changes(meta, statistics_settings):
            logger.info("%s is complete", path)
        else:
            if not meta["complete"]:
                previous_content = meta.get("content")
                # Only the process that completes the store reads the moments of all times, which are large.
                mark_outliers(path, group, meta, conf)
                meta.pop("parts_to_judge", None)
                require_few_bad(path, group["done"][:])
                meta |= _summary(path, group, meta)
                if previous_content not in (None, meta["content"]):
                    discard_climatology(path)
            reader = store_reader.StoreReader(path, meta)
            statistics = _fit(group, reader, meta, conf, train, progress)
            meta |= {"complete": True, "statistics": statistics.to_dict(), **statistics_settings}
            group.attrs["credit"] = meta
    shutil.rmtree(store_writer.lock_folder(path), ignore_errors=True)


def _fit(
    group: zarr.Group,
    reader: store_reader.StoreReader,
    meta: Mapping[str, Any],
    conf: DataConfig,
    train: Split,
    progress: bool,
) -> Statistics:
    """Return the statistics of the training period, from the moments in the store if their transforms are the same."""
    period = (train.first, train.last)
    step = conf.step_minutes
    packing = meta["packing_steps"]
    if meta.get("moments_transforms") != describe_transforms(conf):
        # Outliers were searched when the fields were written, so every variable is accepted here.
        variables = {channel.variable for channel in reader.channels.stored}
        return fit_statistics(reader, *period, step, packing, progress, conf.transforms, accepted=variables)
    moments = store_writer.merge_moments(group["moments"], group["time"][:], group["done"][:], *period)
    return summarise(reader, *moments, period, step, packing, conf.transforms)


def _summary(path: Path, group: zarr.Group, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the description that need all fields: bad times, gaps, checksum, versions."""
    times = group["time"][:]
    marks = group["done"][:]
    calendar = Calendar(meta["calendar"])
    # In a store that is repaired, the reasons of the parts that stayed are those of the previous description.
    reasons = dict(meta.get("bad_times", {}))
    for minutes, reason in store_writer.read_skipped_times(path).items():
        reasons[calendar.format(minutes)] = reason
    bad_times = {calendar.format(minutes) for minutes in times[marks == store_writer.BAD]}
    reasons = {when: reason for when, reason in sorted(reasons.items()) if when in bad_times}
    for when, reason in reasons.items():
        logger.warning("%s is left out: %s", when, reason)
    written_times = times[marks == store_writer.WRITTEN]
    gaps = []
    if len(written_times) > 1:
        intervals = np.diff(written_times)
        for index in np.flatnonzero(intervals > intervals.min()):
            gaps.append([calendar.format(written_times[index]), calendar.format(written_times[index + 1])])
    content = {name: group[name][...] for name in store_reader.CONTENT}
    return {
        "bad_times": reasons,
        "gaps": gaps,
        "content": store_reader.hash_content(content, meta),
        "versions": {"credit": __version__, **{name: version(name) for name in _VERSIONS}},
    }


@contextmanager
def _remove_unused_locks(path: Path) -> Iterator[None]:
    """Remove the folder of locks if the store cannot be created or is refused, and no part was written."""
    try:
        yield
    except BaseException:
        folder = store_writer.lock_folder(path)
        if folder.exists() and {file.name for file in folder.iterdir()} == {"create.lock"}:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def disk_errors_of(path: Path) -> Iterator[None]:
    """Raise errors of a full or read-only disk as `DataError`, with what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"data.store: {path} cannot be written ({error}); name another data.store") from error
        free_bytes = shutil.disk_usage(path.parent if path.parent.exists() else Path.cwd()).free
        raise DataError(
            f"data.store: {path}: the disk is full ({_format_size(free_bytes)} free); free some space and run the same "
            "command again (it continues where it stopped), or name another data.store"
        ) from error


def _format_span(sources: SourceReader, times: np.ndarray) -> str:
    """Return the first, the last and the number of some times as text."""
    if len(times) == 0:
        return "no time"
    return f"{sources.calendar.format(times[0])}..{sources.calendar.format(times[-1])} ({len(times)} times)"


def _format_size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
