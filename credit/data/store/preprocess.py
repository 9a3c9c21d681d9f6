"""Turns source files into the training store, resumably, and fits the statistics of the training period.

The store is made without fields; then its parts are written (`credit.data.store.store_writer`), in any order; then it
is closed: statistics, what was left out, checksum of the whole.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
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
from credit.config.schema_data import DataConfig, PreprocessConfig, TransformConfig
from credit.data.sources.source_reader import SourceReader, open_sources
from credit.data.splits import Split, build_splits
from credit.data.store import store_reader, store_writer
from credit.data.store.executor import run_parts
from credit.data.store.integrity import Damage, find_damage_to_mend
from credit.data.store.repair import (
    discard_climatology,
    find_times_to_redo,
    mark_for_writing,
    mark_outliers,
    read_times,
    require_few_bad,
)
from credit.data.store.statistics import Statistics, fit_statistics, summarise
from credit.errors import DataError
from credit.grid import LatLonGrid
from credit.utils.progress import ProgressBar

logger = logging.getLogger(__name__)

# room for coordinates and descriptions beside the fields
_SPARE_BYTES = 16 * 2**20
_SECONDS_BETWEEN_LOOKS = 2.0
_COMPRESSORS = {"lz4": [BloscCodec(cname="lz4", clevel=1, shuffle="shuffle")], "none": []}
_VERSIONS = ("numpy", "xarray", "netCDF4", "zarr")


def preprocess(
    conf: DataConfig,
    settings: PreprocessConfig | None = None,
    progress: bool = True,
    deep: bool = False,
    redo_changed: bool = False,
) -> Path:
    """Write the training store of a config, finish one that was begun, or mend one that is damaged.

    A complete store is left as it is, but for parts that are lost or damaged: these are written again.
    Several processes may do it at once: each writes parts that no other has.

    Args:
        conf: the data section; `store` must be set.
        settings: how the work is shared out; by default this process does it.
        progress: show bars on a terminal.
        deep: read every field of a store that is complete, and write again what does not agree with its checksums.
        redo_changed: write the parts again whose source files have changed since.

    Returns:
        The store's path.

    Raises:
        DataError: for bad sources, a store of another config, or a full disk; an unfinished store is never taken for a
            finished one and goes on where it stopped.
    """
    if conf.store is None:
        raise DataError("data.store: not set; name the store to write, for example data.store=runs/my_run/store.zarr")
    path, settings = Path(conf.store), settings or PreprocessConfig()
    if path.exists():
        store_reader.require_same_identity(path, store_reader.read_description(path), conf)
    sources = open_sources(conf)
    splits = build_splits(conf, sources.clock)
    with disk_errors_of(path):
        # Looking only reads, so the processes of a job do it side by side, before any of them holds the lock.
        damage = find_damage_to_mend(path, deep, progress) if path.exists() else Damage()
        with _made_or_nothing(path), store_writer.lock(store_writer.lock_folder(path) / "create.lock"):
            if not path.exists():
                group = _create(path, conf, sources, splits, settings)
            else:
                if damage:
                    # Another process may have marked it, or written it again, in the meantime.
                    damage = find_damage_to_mend(path, deep, progress)
                group = _continue(path, sources, splits, damage, redo_changed)
        _write_fields(path, group, conf, sources, settings, progress)
        _close(path, group, conf, splits["train"], progress)
    return path


def times_within(sources: SourceReader, splits: Mapping[str, Split]) -> np.ndarray:
    """Return the times from the beginning of the first split to the end of the last."""
    first, last = store_reader.period(splits)
    return sources.times[(sources.times >= first) & (sources.times <= last)]


def bytes_needed(sources: SourceReader, num_times: int) -> int:
    """Return the most bytes that the fields of so many times and their moments take in a store."""
    height, width = sources.grid.shape
    return num_times * len(sources.channels.stored) * (4 * height * width + 8 * store_writer.MOMENTS) + _SPARE_BYTES


def require_space(path: Path, need: int) -> None:
    """Stop where the disk has no room for `need` bytes more.

    Raises:
        DataError: naming the store, what is needed and what is free.
    """
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < need:
        raise DataError(
            f"data.store: {path} needs up to {_size(need)} more, {_size(free)} are free in {folder}; make room, or "
            "name another data.store"
        )


def _create(
    path: Path, conf: DataConfig, sources: SourceReader, splits: Mapping[str, Split], settings: PreprocessConfig
) -> zarr.Group:
    """Make the store without fields, beside its place, and move it there."""
    times = times_within(sources, splits)
    if len(times) == 0:
        raise DataError(f"data.splits: no time of the sources lies in them; {_span(sources, sources.times)}")
    require_space(path, bytes_needed(sources, len(times)))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        group = zarr.open_group(beside, mode="w", zarr_format=3)
        _add_arrays(group, sources, times, conf.step_minutes, settings)
        group.attrs["credit"] = {
            "format": store_reader.FORMAT,
            "complete": False,
            "channels": sources.channels.to_dict(),
            "grid": sources.grid.to_dict(),
            "calendar": sources.clock.calendar,
            "attributes": sources.attributes,
            "masked_variables": sorted(sources.masks),
            "packing_steps": sources.packing_steps,
            "identity": store_reader.identity(conf),
            "sources": sources.describe_files(),
            "period": list(store_reader.period(splits)),
            "statistics": None,
            "statistics_period": None,
            "moments_transforms": store_reader.describe_transforms(conf),
        }
        os.replace(beside, path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return zarr.open_group(path, mode="r+")


def _add_arrays(
    group: zarr.Group, sources: SourceReader, times: np.ndarray, step_minutes: int, settings: PreprocessConfig
) -> None:
    grid, channels, cells = sources.grid, sources.channels, ("latitude", "longitude")
    time_axis = {"units": EPOCH, "calendar": sources.clock.calendar, "standard_name": "time", "axis": "T"}
    _add(group, "time", times, ("time",), time_axis)
    _add(group, "latitude", grid.lat, ("latitude",), {"units": "degrees_north", "standard_name": "latitude"})
    _add(group, "longitude", grid.lon, ("longitude",), {"units": "degrees_east", "standard_name": "longitude"})
    masks = [sources.masks[name] for name in sorted(sources.masks)]
    _add(group, "masks", np.array(masks, dtype=np.uint8).reshape(-1, *grid.shape), ("masked_variable", *cells))
    _add(group, "static_fields", sources.static(), ("static_channel", *cells))
    # names as coordinates, by which other tools select
    for dim, named in (("channel", channels.stored), ("static_channel", channels.static_stored)):
        _add(group, dim, np.array([channel.name for channel in named], dtype=np.dtypes.StringDType()), (dim,))
    count = len(channels.stored)
    bytes_a_time = 4 * count * grid.shape[0] * grid.shape[1]
    length = store_writer.part_length(bytes_a_time, sources.chunk_part(settings.held_bytes))
    for name, rest, dtype, dims in (
        ("done", (), np.uint8, ()),
        ("digest", (), np.uint64, ()),
        ("moments", (store_writer.MOMENTS, count), np.float64, ("moment", "channel")),
    ):
        # a chunk is a part's, so that no two processes write the same
        group.create_array(
            name,
            shape=(len(times), *rest),
            chunks=(length, *rest),
            dtype=dtype,
            fill_value=0,
            dimension_names=("time", *dims),
            config={"write_empty_chunks": True},
            attributes={"step_minutes": step_minutes} if name == "moments" else None,
        )
    group.create_array(
        "fields",
        shape=(len(times), len(channels.stored), *grid.shape),
        chunks=(1, len(channels.stored), *grid.shape),
        dtype=np.float32,
        fill_value=np.nan,
        # the checksum is verified at every read
        compressors=[*_COMPRESSORS[settings.compression], Crc32cCodec()],
        dimension_names=("time", "channel", *cells),
        config={"write_empty_chunks": True},
        attributes={"channel": [channel.name for channel in channels.stored]},
    )


def _add(
    group: zarr.Group, name: str, values: np.ndarray, dims: tuple[str, ...], attributes: Mapping[str, Any] | None = None
) -> None:
    shape = tuple(max(1, length) for length in values.shape)
    made = group.create_array(
        name, shape=values.shape, chunks=shape, dtype=values.dtype, dimension_names=dims, attributes=attributes
    )
    if values.size:
        made[...] = values


def _continue(
    path: Path, sources: SourceReader, splits: Mapping[str, Split], damage: Damage, redo_changed: bool
) -> zarr.Group:
    """Open a store that was begun or finished; what is damaged, or from changed files, is marked to be written again.

    Grid and times must be those of now.
    """
    meta = store_reader.read_description(path)
    if meta["format"] != store_reader.FORMAT and not meta["complete"]:
        raise DataError(
            f"data.store: {path} was begun by another version, in format {meta['format']}; {store_reader.WAY_OUT}"
        )
    group = zarr.open_group(path, mode="r+")
    difference = LatLonGrid.from_dict(meta["grid"]).difference(sources.grid)
    then, now = read_times(path), times_within(sources, splits)
    are_lost = "time" in damage.arrays and group["done"].shape == now.shape
    if difference is None and not are_lost and not np.array_equal(then, now):
        difference = f"in the store {_span(sources, then)}, in the splits now {_span(sources, now)}"
    if difference:
        raise DataError(f"data.store: {path} does not fit the sources: {difference}; {store_reader.WAY_OUT}")
    changed_times = find_times_to_redo(path, meta, sources, now, redo_changed)
    # another process must not declare the store complete in between
    with store_writer.lock(store_writer.lock_folder(path) / "close.lock"):
        mark_for_writing(path, sources, now, damage, changed_times)
    left = int((group["done"][:] == store_writer.WANTED).sum())
    if left:
        require_space(path, bytes_needed(sources, left))
    return group


def _write_fields(
    path: Path, group: zarr.Group, conf: DataConfig, sources: SourceReader, settings: PreprocessConfig, progress: bool
) -> None:
    """Write the parts that are not there yet, and wait for those that other processes are at.

    Raises:
        DataError: for bad fields.
    """
    # those that the store was begun with, whatever the config says now: its moments must all be of one kind
    begun_with = dict(group.attrs)["credit"].get("moments_transforms", {})
    transforms = {name: TransformConfig.model_validate(one) for name, one in begun_with.items()}
    job = store_writer.WriteTask(
        path, sources, conf.step_minutes, transforms, conf.bad_times == "skip", settings.held_bytes
    )
    marks, length = group["done"][:], group["done"].chunks[0]
    there = int((marks != store_writer.WANTED).sum())
    if 0 < there < len(marks):
        logger.info("%s: %d of %d times are there, going on", path, there, len(marks))
    hidden = None if progress and there < len(marks) else True
    with ProgressBar(desc=f"writing {path.name}", unit="time", initial=there, total=len(marks), disable=hidden) as bar:
        while (marks == store_writer.WANTED).any():
            for count in run_parts(
                partial(store_writer.write_part, job), store_writer.pending_parts(marks, length), settings
            ):
                bar.update(count)
            marks = group["done"][:]
            if (marks == store_writer.WANTED).any():
                time.sleep(_SECONDS_BETWEEN_LOOKS)  # another process is at what is left


def _close(path: Path, group: zarr.Group, conf: DataConfig, train: Split, progress: bool) -> None:
    """Declare a store complete whose fields are all there, with statistics and what was left out.

    Raises:
        DataError: for outliers that are not to be skipped, or more bad times than may be skipped.
    """
    fitted_as = store_reader.describe_statistics(conf, train)
    with store_writer.lock(store_writer.lock_folder(path) / "close.lock"):
        meta = dict(zarr.open_group(path, mode="r").attrs)["credit"]
        if meta["complete"] and store_reader.statistics_changes(meta, fitted_as) == []:
            logger.info("%s is complete", path)
        else:
            if not meta["complete"]:
                before = meta.get("content")
                # Only here, as the moments of all times are large and every process of a job would hold them.
                mark_outliers(path, group, meta, conf)
                meta.pop("parts_to_judge", None)
                require_few_bad(path, group["done"][:])
                meta |= _summary(path, group, meta)
                if before not in (None, meta["content"]):
                    discard_climatology(path)
            reader = store_reader.StoreReader(path, meta)
            statistics = _fit(group, reader, meta, conf, train, progress)
            group.attrs["credit"] = meta | {"complete": True, "statistics": statistics.to_dict(), **fitted_as}
    shutil.rmtree(store_writer.lock_folder(path), ignore_errors=True)


def _fit(
    group: zarr.Group,
    reader: store_reader.StoreReader,
    meta: Mapping[str, Any],
    conf: DataConfig,
    train: Split,
    progress: bool,
) -> Statistics:
    """Return the statistics of the training period, from the moments of its times where the store has them."""
    period, step, packing = (train.first, train.last), conf.step_minutes, meta["packing_steps"]
    if meta.get("moments_transforms") != store_reader.describe_transforms(conf):
        # The outliers of a store were looked for when its fields were written.
        variables = {channel.variable for channel in reader.channels.stored}
        return fit_statistics(reader, *period, step, packing, progress, conf.transforms, accepted=variables)
    moments = store_writer.merge_moments(group["moments"], group["time"][:], group["done"][:], *period)
    return summarise(reader, *moments, period, step, packing, conf.transforms)


def _summary(path: Path, group: zarr.Group, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a store when all its fields are there: bad and missing times, checksum of the whole."""
    times, marks = group["time"][:], group["done"][:]
    clock = Calendar(meta["calendar"])
    # Of a store that is mended, the bad times of the parts that stayed are known from before.
    still_bad = {clock.format(minutes) for minutes in times[marks == store_writer.BAD]}
    bad = dict(meta.get("bad_times", {}))
    bad |= {clock.format(minutes): text for minutes, text in store_writer.read_notes(path).items()}
    bad = {when: text for when, text in sorted(bad.items()) if when in still_bad}
    for when, text in bad.items():
        logger.warning("%s is left out: %s", when, text)
    kept = times[marks == store_writer.WRITTEN]
    steps = np.diff(kept)
    gaps = np.flatnonzero(steps > steps.min()) if len(steps) else []
    return {
        "bad_times": bad,
        "gaps": [[clock.format(kept[place]), clock.format(kept[place + 1])] for place in gaps],
        "content": store_reader.hash_content({name: group[name][...] for name in store_reader.CONTENT}, meta),
        "versions": {"credit": __version__, **{name: version(name) for name in _VERSIONS}},
    }


@contextmanager
def _made_or_nothing(path: Path) -> Iterator[None]:
    """Leave no folder of locks behind where a store cannot be made or is refused."""
    try:
        yield
    except BaseException:
        folder = store_writer.lock_folder(path)
        if folder.exists() and {file.name for file in folder.iterdir()} == {"create.lock"}:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def disk_errors_of(path: Path) -> Iterator[None]:
    """Say what to do about a full or read-only disk where a store is written."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"data.store: {path} cannot be written ({error}); name another data.store") from error
        free = shutil.disk_usage(path.parent if path.parent.exists() else Path.cwd()).free
        raise DataError(
            f"data.store: {path}: the disk is full ({_size(free)} free); make room and run the same command again "
            "(it goes on where it stopped), or name another data.store"
        ) from error


def _span(sources: SourceReader, times: np.ndarray) -> str:
    """Return the first and last of some times in words."""
    if len(times) == 0:
        return "no time"
    return f"{sources.clock.format(times[0])}..{sources.clock.format(times[-1])} ({len(times)} times)"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
