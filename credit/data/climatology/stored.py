"""The climatology that a training store keeps, so that no verification and no new run has to fit it again.

A zarr group ``climatology`` in the store:

| array | shape | what |
|---|---|---|
| ``fields`` | (time_of_day, part, channel, latitude, longitude) float32 | of ``channels.stored``; see `Climatology` |
| ``done`` | (block,) uint8 | 1 where a block is written |
| ``digest`` | (block,) uint64 | checksum of a block's fields |

A chunk of ``fields`` is one part of the year, of at most 4 MiB of channels, with a CRC32C that is verified at every
read, so that a time of the year is read without the rest. It is written block by block: each is fitted by itself, in so
much memory as `BLOCK_BYTES` says, and has a lock beside the store. The attribute ``credit`` holds settings, period, and
``complete``, set when all blocks are there.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from credit.config.schema_data import DataConfig, PreprocessConfig
from credit.config.schema_forecast import ClimatologyConfig
from credit.data.climatology.climatology import Climatology, LazyFields
from credit.data.climatology.fit import ClimatologyPlan, fit_climatology, fit_fields, plan_fit
from credit.data.splits import Split, build_splits
from credit.data.store import store_writer
from credit.data.store.chunk_reader import find_fault_of_size
from credit.data.store.executor import run_parts
from credit.data.store.preprocess import disk_errors_of, require_space
from credit.data.store.store_reader import READ_ERRORS, StoreReader, open_configured_store, open_store
from credit.errors import DataError
from credit.utils.progress import ProgressBar

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

logger = logging.getLogger(__name__)

FORMAT = 2
# their windows had other times; harmonics are the same
_FORMAT_WITHOUT_CENTRES = 1
# of sums and fields while a block is fitted
BLOCK_BYTES = 4 * 2**30
_CHUNK_BYTES = 4 * 2**20
_BYTES_A_VALUE = 8 + 4  # its sum and itself
_SECONDS_BETWEEN_LOOKS = 2.0
_WAY_OUT = "run credit_preprocess again"


@dataclass(frozen=True)
class FitTask:
    """What a process needs to fit blocks; may be sent to another machine that sees the same files.

    Attributes:
        path: the store.
        conf: the climatology.
        period: first and last minute.
        progress: show a bar on a terminal.
    """

    path: Path
    conf: ClimatologyConfig
    period: tuple[int, int]
    progress: bool

    def plan(self, reader: StoreReader) -> ClimatologyPlan:
        """Return how it is fitted to the store's times."""
        return plan_fit(reader.times, reader.clock, *self.period, self.conf)


def preprocess_climatology(
    conf: DataConfig,
    settings: PreprocessConfig,
    wanted: ClimatologyConfig,
    progress: bool = True,
    deep: bool = False,
) -> None:
    """Fit a climatology of every stored channel to ``data.splits.train`` and keep it in the complete store of a config.

    Several processes may do it at once; one that was begun goes on, one with other settings or period is replaced.
    Blocks of a complete one that are lost or damaged are fitted again.

    Args:
        conf: the data section.
        settings: how the work is shared out.
        wanted: the climatology.
        progress: show a bar on a terminal.
        deep: compare the checksums of one that is complete.

    Raises:
        ConfigError: if the training period cannot carry it.
        DataError: if the store is not what the config describes, or the disk is full.
    """
    path = Path(conf.store)
    reader = open_configured_store(conf)
    train = build_splits(conf, reader.clock)["train"]
    if difference(path, wanted, train) is None:
        damaged = find_damaged_blocks(path, deep)
        if not damaged:
            logger.info("%s has its climatology", path)
            return
        logger.warning("%s: %d blocks of its climatology are fitted again", path, len(damaged))
        with store_writer.lock(_lock_folder(path) / "create.lock"):
            _mark_blocks(path, damaged)
    alone = settings.workers == 1 and settings.cluster == "none"
    job = FitTask(path, wanted, (train.first, train.last), progress and alone)
    fit = job.plan(reader)
    with disk_errors_of(path):
        if not _begun(job):
            require_space(path, bytes_of(fit, len(reader.channels.stored), reader.grid.shape)[0])
        with store_writer.lock(_lock_folder(path) / "create.lock"):
            if not _begun(job):
                _create(job, fit, reader)
        _fit_blocks(job, settings, None if progress and not alone else True)
        with store_writer.lock(_lock_folder(path) / "close.lock"):
            group = zarr.open_group(path / "climatology", mode="r+")
            whole = hashlib.blake2b(group["digest"][:].tobytes(), digest_size=16).hexdigest()
            group.attrs["credit"] = dict(group.attrs)["credit"] | {"complete": True, "content": whole}
        shutil.rmtree(_lock_folder(path), ignore_errors=True)


def load_or_fit_climatology(
    reader: FieldReader, channel_names: Sequence[str], train: Split, wanted: ClimatologyConfig
) -> Climatology:
    """Return a climatology of the training period: the store's if it is the wanted one, else one that is fitted now.

    Raises:
        ConfigError: if the training period cannot carry it.
        DataError: if the store's is damaged.
    """
    path = getattr(reader, "path", None)
    reason = "there is no store" if path is None else difference(path, wanted, train)
    if reason is None:
        climatology = _open(path, channel_names, reader.clock.calendar)
        logger.info("climatology of %d channels: that of the store (%s)", len(channel_names), climatology.description)
        return climatology
    # one that was made and is not taken: fitting it now may take long, and much memory
    level = logging.INFO if path is None or _describe(path) is None else logging.WARNING
    logger.log(level, "climatology of %d channels: fitted now to data.splits.train; %s", len(channel_names), reason)
    return fit_climatology(reader, channel_names, train.first, train.last, wanted)


def difference(path: Path, wanted: ClimatologyConfig, train: Split) -> str | None:
    """Return why a store's climatology is not the wanted one, None where it is."""
    meta = _describe(path)
    if meta is None:
        return "the store has none (preprocess.climatology)"
    if not _is_current(meta):
        return f"the store's is of another version of credit, which averaged other times ({_WAY_OUT})"
    before, now = meta["settings"], _about(wanted)
    if before != now:
        return f"the store's is with {before}, not {now}"
    if meta["period"] != [train.first, train.last]:
        return f"the store's is of another period ({meta['description']})"
    return None if meta["complete"] else f"the store's is not complete ({_WAY_OUT})"


def describe_stored(path: Path) -> str:
    """Return in words which climatology a store has."""
    meta = _describe(path)
    return "none" if meta is None else meta["description"] + ("" if meta["complete"] else ", not complete")


def find_damaged_blocks(path: Path, deep: bool = False) -> list[int]:
    """Return the blocks of a store's complete climatology that are lost or damaged.

    Args:
        path: the store.
        deep: read the fields and compare checksums; else look at the sizes of their files.
    """
    meta = _describe(path)
    if meta is None or not meta["complete"]:
        return []
    group = zarr.open_group(path / "climatology", mode="r")
    array = group["fields"]
    damaged = []
    for number, block in enumerate(_blocks(array.shape[:3], meta["block"])):
        # the chunks of the block, of one time of the day and one part each
        spans = [
            range(span.start // length, -(-span.stop // length))
            for span, length in zip(block, array.chunks, strict=False)
        ]
        names = ("/".join(map(str, place)) for place in itertools.product(*spans))
        faults = (find_fault_of_size(f"{path}/climatology/fields/c/{name}/0/0", None, True) for name in names)
        is_damaged = any(fault is not None for fault in faults)
        if deep and not is_damaged:
            try:
                is_damaged = store_writer.digest(array[block]) != int(group["digest"][number])
            except READ_ERRORS:
                is_damaged = True
        if is_damaged:
            damaged.append(number)
    return damaged


def _mark_blocks(path: Path, numbers: Sequence[int]) -> None:
    """Mark blocks of a climatology to be fitted again; it is not complete from now on."""
    group = zarr.open_group(path / "climatology", mode="r+")
    group.attrs["credit"] = dict(group.attrs)["credit"] | {"complete": False}
    for number in numbers:
        group["done"][number] = 0


def bytes_of(fit: ClimatologyPlan, channels: int, grid_shape: tuple[int, int]) -> tuple[int, int]:
    """Return the most bytes that a climatology takes in a store, and in memory while a process fits it."""
    (members, count), cells = fit.shape, math.prod(grid_shape)
    _, parts_at_once, channels_at_once = _block_shape(fit, channels, cells)
    # besides, two copies of a time's fields
    memory = cells * (_BYTES_A_VALUE * parts_at_once * channels_at_once + 8 * channels)
    return 4 * members * count * channels * cells, memory


def _lock_folder(path: Path) -> Path:
    return path.with_name(f".{path.name}.climatology")


def _describe(path: Path) -> dict[str, Any] | None:
    """Return the description of a store's climatology, complete or not, None where it has none."""
    try:
        return dict(zarr.open_group(path / "climatology", mode="r").attrs)["credit"]
    except (FileNotFoundError, KeyError):
        return None


def _is_current(meta: dict[str, Any]) -> bool:
    """Whether a store's climatology has the numbers that a fit has now."""
    before = meta["format"] == _FORMAT_WITHOUT_CENTRES and meta["kind"] == "harmonic"
    return meta["format"] == FORMAT or before


def _about(conf: ClimatologyConfig) -> dict[str, Any]:
    """Return what of the config the numbers depend on."""
    width = {"harmonics": conf.harmonics} if conf.method == "harmonic" else {"window_days": conf.window_days}
    return {"method": conf.method, **width, "by_hour": conf.by_hour}


def _begun(job: FitTask) -> bool:
    """Whether the store has such a climatology, complete or not."""
    meta = _describe(job.path)
    if meta is None or not _is_current(meta):
        return False
    return (meta["settings"], meta["period"]) == (_about(job.conf), list(job.period))


def _block_shape(fit: ClimatologyPlan, channels: int, cells: int) -> tuple[int, int, int]:
    """Return how many times of the day, parts of the year and channels are fitted at once.

    Neighbouring parts of the year need mostly the same times, and a read brings all channels; so a block has all
    channels and as many parts as there is room for, and fewer channels only where one part is too much.
    """
    at_once = BLOCK_BYTES // (_BYTES_A_VALUE * cells)
    least = fit.shape[1] if fit.kind == "harmonic" else 1
    chunk = _channels_a_chunk(channels, cells)
    # whole chunks, so that no two processes write the same
    channels_at_once = min(channels, max(1, at_once // least // chunk) * chunk)
    return 1, max(least, min(fit.shape[1], at_once // channels_at_once)), channels_at_once


def _channels_a_chunk(channels: int, cells: int) -> int:
    return max(1, min(channels, _CHUNK_BYTES // (4 * cells)))


def _blocks(shape: Sequence[int], lengths: Sequence[int]) -> list[tuple[slice, ...]]:
    """Return the blocks of an array, of the given lengths along its first axes, as slices."""
    axes = (
        [slice(first, min(first + length, size)) for first in range(0, size, length)]
        for size, length in zip(shape, lengths, strict=True)
    )
    return list(itertools.product(*axes))


def _create(job: FitTask, fit: ClimatologyPlan, reader: StoreReader) -> None:
    """Make the group without fields, beside the store, and move it to its place; one that is there goes."""
    channels, grid = reader.channels.stored, reader.grid
    cells, shape = math.prod(grid.shape), (*fit.shape, len(channels))
    lengths = _block_shape(fit, len(channels), cells)
    count = len(_blocks(shape, lengths))
    place, folder = job.path / "climatology", _lock_folder(job.path)
    beside, before = folder / "made", folder / "replaced"
    shutil.rmtree(before, ignore_errors=True)
    group = zarr.open_group(beside, mode="w", zarr_format=3)
    group.create_array(
        "fields",
        shape=(*shape, *grid.shape),
        chunks=(1, 1, _channels_a_chunk(len(channels), cells), *grid.shape),
        dtype=np.float32,
        fill_value=np.nan,
        compressors=[BloscCodec(cname="lz4", clevel=1, shuffle="shuffle"), Crc32cCodec()],
        dimension_names=("time_of_day", "part", "channel", "latitude", "longitude"),
        config={"write_empty_chunks": True},
    )
    for name, dtype in (("done", np.uint8), ("digest", np.uint64)):
        group.create_array(
            name, shape=(count,), chunks=(1,), dtype=dtype, fill_value=0, config={"write_empty_chunks": True}
        )
    group.attrs["credit"] = {
        "format": FORMAT,
        "complete": False,
        "settings": _about(job.conf),
        "period": list(job.period),
        "channels": [channel.name for channel in channels],
        "kind": fit.kind,
        "centres": fit.centres,
        "day_minutes": fit.day_minutes.tolist(),
        "description": fit.description,
        "years": fit.years,
        "block": list(lengths),
    }
    if place.exists():
        os.replace(place, before)
    os.replace(beside, place)


def _fit_blocks(job: FitTask, settings: PreprocessConfig, hidden: bool | None) -> None:
    """Fit the blocks that are not there yet, and wait for those that other processes are at."""
    marks = zarr.open_group(job.path / "climatology", mode="r")["done"]
    with ProgressBar(desc="climatology", unit="block", total=len(marks[:]), disable=hidden) as bar:
        while not marks[:].all():
            for count in run_parts(partial(fit_block, job), np.flatnonzero(marks[:] == 0).tolist(), settings):
                bar.update(count)
            if not marks[:].all():
                time.sleep(_SECONDS_BETWEEN_LOOKS)  # another process is at what is left


def fit_block(job: FitTask, number: int) -> int:
    """Fit and write a block, unless it is there already or another process is at it; returns how many are new."""
    with store_writer.lock(_lock_folder(job.path) / f"{number:06d}.lock", wait=False) as mine:
        group = zarr.open_group(job.path / "climatology", mode="r+")
        if not mine or group["done"][number]:
            return 0
        meta, array = dict(group.attrs)["credit"], group["fields"]
        block = _blocks(array.shape[:3], meta["block"])[number]
        members, columns, channels = block
        reader = open_store(job.path)
        fit = job.plan(reader)
        # harmonics are not parted
        columns = slice(None) if fit.kind == "harmonic" else columns
        fields = fit_fields(fit, reader, meta["channels"][channels], members, columns, job.progress)
        array[block] = fields
        group["digest"][number] = store_writer.digest(fields)
        group["done"][number] = 1
        return 1


def _open(path: Path, channel_names: Sequence[str], calendar: str) -> Climatology:
    """Return a store's climatology of some channels; what is more than harmonics of the year is read when needed."""
    meta = _describe(path)
    fields: Any = _stored_fields(path, [meta["channels"].index(name) for name in channel_names])
    if meta["kind"] == "harmonic" and not meta["day_minutes"]:
        fields = fields[0][None]
    day_minutes = np.array(meta["day_minutes"], dtype=np.int64)
    return Climatology(
        tuple(channel_names), calendar, meta["kind"], fields, day_minutes, meta["description"], meta["years"],
        tuple(meta["centres"]) if meta["kind"] == "table" else None,
    )  # fmt: skip


def _stored_fields(path: Path, channels: list[int]) -> LazyFields:
    """Return the fields of some channels, read when they are asked for."""
    array = zarr.open_group(path / "climatology", mode="r")["fields"]
    times_of_day, count, _, *cells = array.shape
    everywhere = slice(None)

    def read(time_of_day: int, part: int) -> np.ndarray:
        try:
            fields = array.get_orthogonal_selection((time_of_day, part, channels, everywhere, everywhere))
            # zarr takes a chunk that is lost for one of missing values
            if np.isnan(fields).all(axis=(1, 2)).any():
                raise ValueError("a chunk is lost")
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(
                f"store {path}: its climatology cannot be read ({error}); run credit_preprocess CONFIG --deep, with "
                "preprocess.climatology=true, which fits what is damaged again"
            ) from error
        return fields

    return LazyFields((times_of_day, count, len(channels), *cells), read)
