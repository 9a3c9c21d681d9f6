"""Reader of the training store, which contains every field that training reads, with one chunk for each time.

The current format is 2. A store is a zarr 3 group, which xarray and other tools can also open. Its arrays are:

| array | shape | content |
|---|---|---|
| ``fields`` | (time, channel, latitude, longitude) float32 | time-varying channels, physical units; NaN where masked |
| ``static_fields`` | (static_channel, latitude, longitude) float32 | ``channels.static_stored`` |
| ``masks`` | (masked_variable, latitude, longitude) uint8 | 1 where a declared variable is always missing |
| ``channel``, ``static_channel`` | strings | names of the channels; stores of versions up to 0.14 lack these two |
| ``time`` | (time,) int64 | minutes since 1900-01-01 in the calendar of its attributes |
| ``latitude``, ``longitude`` | float64 | north to south, eastward from the smallest in [0, 360) |
| ``done`` | (time,) uint8 | 1 if the fields of the time are written, 2 if they are bad and omitted |
| ``digest`` | (time,) uint64 | checksum of the fields, see `credit.data.store.store_writer.hash_fields` |
| ``moments`` | (time, 10, channel) float64 | count, mean, ... of the fields and of their change over a time step |

A chunk of ``fields`` contains one time. By default, chunks are compressed with LZ4 with shuffled bytes. They are then
as fast to read as uncompressed chunks, and half the size if the source data were packed. A chunk ends with a CRC32C
checksum that is verified at every read. With ``preprocess.blocks``, the file of a time is a shard of several chunks
(blocks of rows and columns), see `credit.data.store.chunk_reader`. Format 1 had no CRC32C, no ``digest`` and no
``moments``.

The group's attribute ``credit`` is the description of the store: format number, channels, grid, calendar, attributes of
the variables, packing steps, source files with their sizes and modification times, the identity (settings on which the
content depends, see `credit.data.store.store_settings`), the period, ``complete``, and the statistics with their period
and transforms. The description is replaced in one rename, after everything that it describes has been written.
"""

from __future__ import annotations

import hashlib
import json
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.sections.data import DataConfig
from credit.data.splits import Split, build_splits
from credit.data.store.chunk_cache import ChunkCache
from credit.data.store.chunk_reader import ChunkReader
from credit.data.store.statistics import Statistics
from credit.data.store.store_settings import (
    OTHER_STORE_ADVICE,
    config_identity,
    describe_statistics,
    describe_statistics_changes,
    expand_homes,
    format_period,
    require_same_identity,
)
from credit.errors import DataError
from credit.grid import LatLonGrid

FORMAT = 2
# Complete stores of these formats can be read.
_KNOWN_FORMATS = (1, FORMAT)
# Advice about lost or damaged parts, for many messages.
REPAIR_ADVICE = "run credit preprocess CONFIG, which rewrites the lost parts and keeps the rest"
# The arrays that the checksum of the whole store covers, in this order; see `hash_content`.
HASHED_ARRAYS = ("time", "done", "digest", "static_fields", "masks")
# Errors that zarr and its codecs raise for lost or damaged files.
READ_ERRORS = (OSError, ValueError, RuntimeError, KeyError)


class StoreReader:
    """Reader of a complete training store; see `credit.data.reader.FieldReader`.

    Args:
        path: folder of the store.
        meta: description of the store, from `read_description`.
        channels: channels of the config, whose channels read from data must be the same as in the store; None to use
            the channels in the description.

    Attributes:
        path: folder of the store.
        channels: the channels; `read` returns ``channels.time_varying_stored``, `static` returns
            ``channels.static_stored``.
        grid: grid of the fields, H rows and W columns.
        calendar: calendar of the times.
        times: (N,) int64 minutes since 1900, increasing, without the bad times.
        masks: mapping from the name of each variable with declared missing values to its mask, (H, W) bool, True in
            cells that are always missing.
        attributes: mapping from the name of a variable to its CF attributes, among them ``units``.
        statistics: statistics of the training period; None in a store that is not complete.

    Raises:
        DataError: if one of the small arrays is lost or damaged.
    """

    is_thread_safe = True

    def __init__(self, path: Path, meta: Mapping[str, Any], channels: ChannelMap | None = None) -> None:
        self.path = path
        # Stores of early versions have no checksum of the whole content.
        self._content_key = meta.get("content")
        self.channels = channels or ChannelMap.from_dict(meta["channels"])
        self.grid = LatLonGrid.from_dict(meta["grid"])
        self.calendar = Calendar(meta["calendar"])
        self.attributes: dict[str, dict] = meta["attributes"]
        self.statistics: Statistics | None = None
        if meta["complete"]:
            self.statistics = Statistics.from_dict(meta["statistics"])
        group = zarr.open_group(path, mode="r")
        # Marks of the times, as in `credit.data.store.store_writer`: 0 not written, 1 written, 2 bad.
        marks = _read_small_array(path, group, "done")
        num_lost_marks = int((marks == 0).sum())
        if meta["complete"] and num_lost_marks:
            raise DataError(f"data.store: {path}: {num_lost_marks} of its times have lost their marks; {REPAIR_ADVICE}")
        # The number of a chunk is the index of its time in the store. Bad times have no fields, so `times` omits them.
        self._chunk_numbers = np.flatnonzero(marks == 1)
        self.times: np.ndarray = _read_small_array(path, group, "time")[self._chunk_numbers]
        # zarr reads a lost chunk as zeros, so the times would no longer increase.
        if (np.diff(self.times) <= 0).any():
            raise DataError(f"data.store: {path}: its array time is lost; {REPAIR_ADVICE}")
        masks = _read_small_array(path, group, "masks")
        self.masks = {name: mask.astype(bool) for name, mask in zip(meta["masked_variables"], masks, strict=True)}
        self._fields = ChunkReader(open_array(path, group, "fields"), path / "fields")
        self._static = _read_small_array(path, group, "static_fields")

    def use_local_config(self, conf: DataConfig) -> None:
        """Switch to the paths in the config of this process, which may differ from the paths on other hosts.

        Args:
            conf: the ``data`` section of the config, which contains ``store``, ``cache`` and ``cache_folder``.

        Raises:
            DataError: if the store does not exist; or if ``cache`` is ``disk``, but the store has no checksum of its
                content, which identifies the copies of its chunks.
        """
        self.path = Path(conf.store)
        if not self.path.is_dir():
            raise DataError(
                f"data.store: {self.path} does not exist on {socket.gethostname()}; all hosts need access to it"
            )
        self._fields.folder = self.path / "fields"
        if conf.cache != "disk":
            return
        if self._content_key is None:
            raise DataError(
                f"data.cache: disk needs the checksum of a store to identify its copies, but {self.path} was written "
                f"by an earlier version and has no checksum; {OTHER_STORE_ADVICE}"
            )
        # With the checksum, a different store of the same name, or this store before a repair, uses a different folder.
        name = f"credit_{self.path.name}_{self._content_key[:16]}"
        # The checksum covers the values, but not their division into blocks.
        if self.num_blocks != (1, 1):
            name += f"_{self.num_blocks[0]}x{self.num_blocks[1]}"
        parent_folder = conf.cache_folder or tempfile.gettempdir()
        self._fields.cache = ChunkCache(Path(parent_folder) / name)

    def read(self, index: int) -> np.ndarray:
        """Return the fields of one time in physical units, (C, H, W) float32, with NaN in masked cells.

        The channels are in the order of ``channels.time_varying_stored``. `index` is the index of the time in `times`.

        Raises:
            DataError: if the chunk is lost or damaged.
        """
        fields_CHW = np.empty((len(self.channels.time_varying_stored), *self.grid.shape), dtype=np.float32)
        self.read_into(index, fields_CHW)
        return fields_CHW

    def read_each(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Return an iterator over the fields of several times, each (C, H, W) float32; see `read`."""
        return map(self.read, indices)

    @property
    def num_blocks(self) -> tuple[int, int]:
        """Number of blocks of rows and of columns in the fields of a time; (1, 1) if they are not divided."""
        return self._fields.num_blocks

    def read_into(
        self, index: int, targets: Sequence[np.ndarray | None], grid_part: tuple[slice, slice] | None = None
    ) -> None:
        """Read the fields of one time, or a part of them, into the arrays `targets`; see `FieldReader.read_into`.

        Args:
            index: index of the time in `times`.
            targets: for each channel of ``channels.time_varying_stored``, a contiguous array (H, W) float32, or (h, w)
                if `grid_part` is given; None to skip the channel.
            grid_part: rows and columns to read, with a start and a stop; None to read the complete fields. Only the
                blocks that overlap the part are read.

        Raises:
            DataError: if the chunk is lost, or a block that is read is damaged.
        """
        try:
            self._fields.read(int(self._chunk_numbers[index]), targets, grid_part)
        except (OSError, ValueError, RuntimeError) as error:
            time_text = self.calendar.format(self.times[index])
            if isinstance(error, FileNotFoundError):
                reason = "its chunk is lost"
                command = "credit preprocess CONFIG"
            else:
                reason = str(error)
                # Without --deep, a chunk of the right size is assumed to be undamaged.
                command = "credit preprocess CONFIG --deep"
            raise DataError(
                f"store {self.path}: the fields of {time_text} cannot be read ({reason}); run {command}, which "
                "rewrites lost and damaged parts and keeps the rest"
            ) from error

    def static(self) -> np.ndarray:
        """Return the static fields in physical units, (C, H, W) float32 in the order of ``channels.static_stored``."""
        return self._static.copy()

    def index_of(self, minutes: int) -> int | None:
        """Return the index in `times` of a time in minutes since 1900, None if the store does not have this time."""
        index = int(np.searchsorted(self.times, minutes))
        if index < len(self.times) and self.times[index] == minutes:
            return index
        return None


def read_description(path: Path) -> dict[str, Any]:
    """Return the description of a complete or incomplete store; the docstring of this module lists its entries.

    Raises:
        DataError: if the store does not exist, is not a training store, or has an unknown format.
    """
    if not path.exists():
        raise DataError(f"data.store: {path} does not exist; run credit preprocess CONFIG to write it")
    try:
        meta = dict(zarr.open_group(path, mode="r").attrs)["credit"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"data.store: {path} is not a training store ({error}); {OTHER_STORE_ADVICE}") from error
    if meta["format"] not in _KNOWN_FORMATS:
        formats = " and ".join(map(str, _KNOWN_FORMATS))
        raise DataError(
            f"data.store: {path} has format {meta['format']}, but this version reads {formats}; {OTHER_STORE_ADVICE}"
        )
    return meta


def open_array(path: Path, group: zarr.Group, name: str) -> zarr.Array:
    """Open an array of a store without reading its values.

    Args:
        path: folder of the store, for the error message.
        group: the open store.
        name: name of the array.

    Raises:
        DataError: if the metadata of the array are lost or damaged.
    """
    try:
        return group[name]
    except READ_ERRORS as error:
        raise DataError(
            f"data.store: {path}: the description of its array {name} is lost or damaged ({error}), so the array "
            f"cannot be read; restore {path / name / 'zarr.json'} from a copy, or {OTHER_STORE_ADVICE}"
        ) from error


def _read_small_array(path: Path, group: zarr.Group, name: str) -> np.ndarray:
    """Return all values of a small array of a store; for arguments and errors see `open_array`."""
    try:
        return open_array(path, group, name)[...]
    except READ_ERRORS as error:
        raise DataError(f"data.store: {path}: its array {name} is damaged ({error}); {REPAIR_ADVICE}") from error


def hash_content(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> str:
    """Return the checksum of a complete store, 16 bytes of BLAKE2b in hexadecimal digits.

    The checksum covers the fields through their checksums in the array ``digest``, so no field is read.

    Args:
        arrays: mapping from the name of each array in `HASHED_ARRAYS` to its values.
        meta: description of the store.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in HASHED_ARRAYS:
        digest.update(np.ascontiguousarray(arrays[name]))
    # Channels and grid define the meaning of the values. Sorted keys make the result independent of the key order.
    channels_and_grid = json.dumps([meta["channels"], meta["grid"]], sort_keys=True)
    digest.update(channels_and_grid.encode())
    return digest.hexdigest()


def open_store(path: str | Path) -> StoreReader:
    """Open a training store without a config, with the channels in its description.

    Raises:
        DataError: if `path` does not exist, is not a training store, or is incomplete.
    """
    meta = read_description(Path(path))
    _require_complete(Path(path), meta)
    return StoreReader(Path(path), meta)


def open_configured_store(conf: DataConfig) -> StoreReader:
    """Open the store that a config names, and check that it was written with the settings of the config.

    Raises:
        DataError: if the store does not exist, is incomplete, or was written with different settings; the message lists
            the differences.
    """
    path = Path(conf.store)
    meta = read_description(path)
    require_same_identity(path, meta, conf)
    _require_complete(path, meta)
    # The fields match the config; the times and the statistics must also match the config.
    splits = build_splits(conf, Calendar(meta["calendar"]))
    first, last = find_span_of_splits(splits)
    if first < meta["period"][0] or last > meta["period"][1]:
        raise DataError(
            f"data.store: {path} contains {format_period(meta, meta['period'])}, but data.splits need "
            f"{format_period(meta, (first, last))}; {OTHER_STORE_ADVICE}"
        )
    changes = describe_statistics_changes(meta, describe_statistics(conf, splits["train"]))
    if changes:
        raise DataError(
            f"data.store: the statistics of {path} do not match the config: {'; '.join(changes)}; run "
            "credit preprocess CONFIG again, which keeps the fields"
        )
    reader = StoreReader(path, meta, conf.channel_map())
    reader.use_local_config(conf)
    return reader


def find_span_of_splits(splits: Mapping[str, Split]) -> tuple[int, int]:
    """Return the first time of the earliest split and the last time of the latest split, in minutes since 1900."""
    first = min(split.first for split in splits.values())
    last = max(split.last for split in splits.values())
    return first, last


def is_store_from_sources(conf: DataConfig) -> bool:
    """Return True if the store of the config exists and was written from the sources of the config."""
    if not Path(conf.store).exists():
        return False
    key = "data.sources"
    meta = read_description(Path(conf.store))
    stored_identity = expand_homes(meta["identity"])
    return stored_identity.get(key) == config_identity(conf)[key]


def _require_complete(path: Path, meta: Mapping[str, Any]) -> None:
    """Raise DataError if the fields or the statistics of a store are not completely written."""
    if not meta["complete"]:
        raise DataError(f"data.store: {path} is not complete; run credit preprocess CONFIG to finish it")
