"""Turns source files into the training store, resumably, and fits the statistics of the training period."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from tqdm import tqdm
from zarr.codecs import BloscCodec

from credit.config.schema_data import DataConfig
from credit.data import store
from credit.data.sources import SourceReader, open_sources
from credit.data.splits import Split, build_splits
from credit.data.statistics import fit_statistics
from credit.errors import DataError
from credit.grid import LatLonGrid
from credit.times import EPOCH

logger = logging.getLogger(__name__)

# room for coordinates and descriptions beside the fields
_SPARE_BYTES = 16 * 2**20


def preprocess(conf: DataConfig, progress: bool = True) -> Path:
    """Write the training store of a config, or finish one that was begun; a finished one is left as it is.

    Args:
        conf: the data section; `store` must be set.
        progress: show bars on a terminal.

    Returns:
        The store's path.

    Raises:
        DataError: for bad sources, a store of another config, or a full disk; an unfinished store is never taken for a
            finished one and goes on where it stopped.
    """
    if conf.store is None:
        raise DataError("data.store: not set; name the store to write, for example data.store=runs/my_run/store.zarr")
    path = Path(conf.store)
    if path.exists():
        store.require_same_identity(path, store.read_description(path), conf)
    sources = open_sources(conf)
    splits = build_splits(conf, sources.clock)
    with _disk_errors_of(path):
        group = _continue(path, sources, splits) if path.exists() else _create(path, conf, sources, splits)
        _write_fields(path, group, sources, progress)
        _write_statistics(path, group, conf.step_minutes, splits["train"], progress)
    return path


def times_within(sources: SourceReader, splits: Mapping[str, Split]) -> np.ndarray:
    """Return the times from the beginning of the first split to the end of the last."""
    first, last = store.period(splits)
    return sources.times[(sources.times >= first) & (sources.times <= last)]


def bytes_needed(sources: SourceReader, num_times: int) -> int:
    """Return the most bytes that the fields of so many times take in a store."""
    height, width = sources.grid.shape
    return 4 * num_times * len(sources.channels.stored) * height * width + _SPARE_BYTES


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


def _create(path: Path, conf: DataConfig, sources: SourceReader, splits: Mapping[str, Split]) -> zarr.Group:
    """Make the store without fields, beside its place, and move it there."""
    times = times_within(sources, splits)
    if len(times) == 0:
        raise DataError(f"data.splits: no time of the sources lies in them; {_span(sources, sources.times)}")
    require_space(path, bytes_needed(sources, len(times)))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        group = zarr.open_group(beside, mode="w", zarr_format=3)
        _add_arrays(group, sources, times)
        group.attrs["credit"] = {
            "format": store.FORMAT,
            "complete": False,
            "channels": sources.channels.to_dict(),
            "grid": sources.grid.to_dict(),
            "calendar": sources.clock.calendar,
            "attributes": sources.attributes,
            "masked_variables": sorted(sources.masks),
            "packing_steps": sources.packing_steps,
            "identity": store.identity(conf),
            "sources": _describe_files(sources),
            "period": list(store.period(splits)),
            "statistics": None,
            "statistics_period": None,
        }
        os.replace(beside, path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return zarr.open_group(path, mode="r+")


def _add_arrays(group: zarr.Group, sources: SourceReader, times: np.ndarray) -> None:
    grid, channels, cells = sources.grid, sources.channels, ("latitude", "longitude")
    time_axis = {"units": EPOCH, "calendar": sources.clock.calendar, "standard_name": "time", "axis": "T"}
    _add(group, "time", times, ("time",), time_axis)
    _add(group, "latitude", grid.lat, ("latitude",), {"units": "degrees_north", "standard_name": "latitude"})
    _add(group, "longitude", grid.lon, ("longitude",), {"units": "degrees_east", "standard_name": "longitude"})
    masks = [sources.masks[name] for name in sorted(sources.masks)]
    _add(group, "masks", np.array(masks, dtype=np.uint8).reshape(-1, *grid.shape), ("masked_variable", *cells))
    _add(group, "static_fields", sources.static(), ("static_channel", *cells))
    _add(group, "done", np.zeros(len(times), dtype=np.uint8), ("time",))
    group.create_array(
        "fields",
        shape=(len(times), len(channels.stored), *grid.shape),
        chunks=(1, len(channels.stored), *grid.shape),
        dtype=np.float32,
        fill_value=np.nan,
        compressors=BloscCodec(cname="lz4", clevel=1, shuffle="shuffle"),
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


def _continue(path: Path, sources: SourceReader, splits: Mapping[str, Split]) -> zarr.Group:
    """Open a store that was begun; grid, times and files must be those of now."""
    meta = store.read_description(path)
    group = zarr.open_group(path, mode="r+")
    difference = LatLonGrid.from_dict(meta["grid"]).difference(sources.grid)
    then, now = group["time"][:], times_within(sources, splits)
    if difference is None and not np.array_equal(then, now):
        difference = f"in the store {_span(sources, then)}, in the splits now {_span(sources, now)}"
    changed = [name for name, state in _describe_files(sources).items() if meta["sources"].get(name) != state]
    if difference is None and changed:
        difference = f"{len(changed)} source files are new or changed since, the first is {changed[0]}"
    if difference:
        raise DataError(f"data.store: {path} does not fit the sources: {difference}; {store.WAY_OUT}")
    left = int((group["done"][:] == 0).sum())
    if left:
        require_space(path, bytes_needed(sources, left))
    return group


def _write_fields(path: Path, group: zarr.Group, sources: SourceReader, progress: bool) -> None:
    """Write what is not there yet; a time is marked done after its fields."""
    fields, marks, times = group["fields"], group["done"], group["time"][:]
    done = marks[:]
    todo = np.flatnonzero(done == 0)
    if 0 < len(todo) < len(done):
        logger.info("%s: %d of %d times are there, going on", path, len(done) - len(todo), len(done))
    for index in tqdm(todo, desc=f"writing {path.name}", unit="time", disable=None if progress else True):
        fields[index] = sources.read(sources.index_of(int(times[index])))
        done[index] = 1
        marks[:] = done


def _write_statistics(path: Path, group: zarr.Group, step_minutes: int, train: Split, progress: bool) -> None:
    """Fit the statistics from the store's fields and declare the store complete."""
    meta = dict(group.attrs["credit"])
    if meta["complete"] and meta["statistics_period"] == [train.first, train.last]:
        logger.info("%s is complete", path)
        return
    reader = store.StoreReader(path, meta)
    statistics = fit_statistics(reader, train.first, train.last, step_minutes, meta["packing_steps"], progress)
    meta |= {"complete": True, "statistics": statistics.to_dict(), "statistics_period": [train.first, train.last]}
    group.attrs["credit"] = meta


def _describe_files(sources: SourceReader) -> dict[str, list[int]]:
    """Return path -> [bytes, time of change in ns] of every source; of a zarr store, those of its description."""
    described = {}
    for path in sources.paths:
        file = next((path / name for name in ("zarr.json", ".zmetadata", ".zgroup") if (path / name).exists()), path)
        status = file.stat()
        described[str(path.absolute())] = [status.st_size, status.st_mtime_ns]
    return described


@contextmanager
def _disk_errors_of(path: Path) -> Iterator[None]:
    """Say what to do about a full or read-only disk."""
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
