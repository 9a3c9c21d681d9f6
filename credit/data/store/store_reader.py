"""Reader of the training store: every field that training reads, one chunk for each time.

Format 2, a zarr 3 group that xarray and other tools open as well:

| array | shape | content |
|---|---|---|
| ``fields`` | (time, channel, latitude, longitude) float32 | ``channels.stored``, physical units; NaN where masked |
| ``static_fields`` | (static_channel, latitude, longitude) float32 | ``channels.static_stored`` |
| ``masks`` | (masked_variable, latitude, longitude) uint8 | 1 where a declared variable is always missing |
| ``channel``, ``static_channel`` | strings | their names; stores of versions up to 0.14 have none |
| ``time`` | (time,) int64 | minutes since 1900-01-01 in the calendar of its attributes |
| ``latitude``, ``longitude`` | float64 | north to south, eastward from the smallest in [0, 360) |
| ``done`` | (time,) uint8 | 1 where the fields of that time are written, 2 where they are bad and left out |
| ``digest`` | (time,) uint64 | checksum of the fields, the first 8 bytes of BLAKE2b |
| ``moments`` | (time, 10, channel) float64 | of the fields and of their change over a step: count, mean, ... |

A chunk of ``fields`` is one time, compressed by LZ4 with shuffled bytes: as fast to read as no compression, and half
the size for data that were packed. It ends with a CRC32C that is verified at every read. Format 1 had neither that nor
the last two arrays. The group's attribute ``credit`` holds the format's number, channels, grid,
calendar, attributes of the variables, packing steps, the sources with their sizes and times of change, the identity
(what of the config the content depends on), the period, ``complete`` and the statistics with their period and
transforms. It is replaced in one rename, after everything it speaks of is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.renamed_keys import rename_dotted_key
from credit.config.sections.data import DataConfig, VariableOptions
from credit.config.sections.source import SourceConfig
from credit.data.splits import Split, build_splits
from credit.data.store.chunk_cache import ChunkCache
from credit.data.store.chunk_reader import ChunkReader
from credit.data.store.statistics import Statistics
from credit.data.store.statistics_settings import describe_statistics, describe_statistics_changes, format_period
from credit.errors import DataError
from credit.grid import LatLonGrid

FORMAT = 2
# Complete stores of these formats can be read.
_KNOWN_FORMATS = (1, FORMAT)
WAY_OUT = "name another data.store and run credit_preprocess, which leaves this one as it is"
# Advice for lost or damaged parts, which the command writes again.
MEND = "run credit_preprocess CONFIG, which writes what is lost again and keeps the rest"
# The arrays that the checksum of the whole store covers, in this order.
CONTENT = ("time", "done", "digest", "static_fields", "masks")
# Errors that zarr and its codecs raise for lost or damaged files.
READ_ERRORS = (OSError, ValueError, RuntimeError, KeyError)


class StoreReader:
    """Reader of a complete training store; see `credit.data.reader.FieldReader`.

    Args:
        path: the store.
        meta: its description, from `read_description`.
        channels: the channels of the config, whose stored and static ones must be those of the store; by default those
            of the store.

    Attributes:
        path: the store.
        statistics: of the training period; None in a store that is not complete.
    """

    is_thread_safe = True

    def __init__(self, path: Path, meta: Mapping[str, Any], channels: ChannelMap | None = None) -> None:
        self.path = path
        # Stores of early versions have no checksum of the whole.
        self._content_key = meta.get("content")
        self.channels = channels or ChannelMap.from_dict(meta["channels"])
        self.grid = LatLonGrid.from_dict(meta["grid"])
        self.calendar = Calendar(meta["calendar"])
        self.attributes: dict[str, dict] = meta["attributes"]
        self.statistics = Statistics.from_dict(meta["statistics"]) if meta["complete"] else None
        group = zarr.open_group(path, mode="r")
        marks = _read_small(path, group, "done")
        num_lost_marks = int((marks == 0).sum())
        if meta["complete"] and num_lost_marks:
            raise DataError(f"data.store: {path}: {num_lost_marks} of its times have lost their marks; {MEND}")
        # Bad times have no fields, so they are left out of `times`.
        self._chunk_numbers = np.flatnonzero(marks == 1)
        self.times: np.ndarray = _read_small(path, group, "time")[self._chunk_numbers]
        if (np.diff(self.times) <= 0).any():
            raise DataError(f"data.store: {path}: its array time is lost; {MEND}")
        masks = _read_small(path, group, "masks")
        self.masks = {name: mask.astype(bool) for name, mask in zip(meta["masked_variables"], masks, strict=True)}
        self._fields = ChunkReader(open_array(path, group, "fields"), path / "fields")
        self._static = _read_small(path, group, "static_fields")

    def use_local_config(self, conf: DataConfig) -> None:
        """Read the store, and node-local copies of its chunks, where the config of this process has them.

        Raises:
            DataError: if the store is not there, or, for copies, has no checksum of its content.
        """
        self.path = Path(conf.store)
        if not self.path.is_dir():
            raise DataError(
                f"data.store: {self.path} does not exist on {socket.gethostname()}; every host must see the store"
            )
        self._fields.folder = self.path / "fields"
        if conf.cache != "disk":
            return
        if self._content_key is None:
            raise DataError(
                f"data.cache: disk needs the checksum of a store to tell its copies from those of another, and "
                f"{self.path} was written by an earlier version and has none; {WAY_OUT}"
            )
        name = f"credit_{self.path.name}_{self._content_key[:16]}"
        self._fields.cache = ChunkCache(Path(conf.cache_folder or tempfile.gettempdir()) / name)

    def read(self, index: int) -> np.ndarray:
        """Return the fields of one time, (C, H, W) float32 in the order of ``channels.stored``; NaN where masked.

        Raises:
            DataError: if the chunk is lost or damaged.
        """
        fields = np.empty((len(self.channels.stored), *self.grid.shape), dtype=np.float32)
        self.read_into(index, fields)
        return fields

    def read_each(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the fields of several times; see `read`."""
        return map(self.read, indices)

    def read_into(self, index: int, targets: Sequence[np.ndarray | None]) -> None:
        """Read the fields of one time into given arrays; see `credit.data.reader.FieldReader`."""
        try:
            self._fields.read(int(self._chunk_numbers[index]), targets)
        except (OSError, ValueError, RuntimeError) as error:
            when = self.calendar.format(self.times[index])
            reason = str(error)
            # Without --deep a chunk of the right size is taken to be undamaged.
            command = "credit_preprocess CONFIG --deep"
            if isinstance(error, FileNotFoundError):
                reason = "its chunk is lost"
                command = "credit_preprocess CONFIG"
            raise DataError(
                f"store {self.path}: the fields of {when} cannot be read ({reason}); run {command}, which writes "
                "lost and damaged parts again and keeps the rest"
            ) from error

    def static(self) -> np.ndarray:
        """Return the static fields, (C, H, W) float32 in the order of ``channels.static_stored``."""
        return self._static.copy()

    def index_of(self, minutes: int) -> int | None:
        """Return the index of a time in `times`, None if the store does not have it."""
        index = int(np.searchsorted(self.times, minutes))
        if index < len(self.times) and self.times[index] == minutes:
            return index
        return None


def read_description(path: Path) -> dict[str, Any]:
    """Return the description of a store, complete or not.

    Raises:
        DataError: if it does not exist, is not a training store, or is of another format.
    """
    if not path.exists():
        raise DataError(f"data.store: {path} does not exist; run credit_preprocess CONFIG to write it")
    try:
        meta = dict(zarr.open_group(path, mode="r").attrs)["credit"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"data.store: {path} is not a training store ({error}); {WAY_OUT}") from error
    if meta["format"] not in _KNOWN_FORMATS:
        formats = " and ".join(map(str, _KNOWN_FORMATS))
        raise DataError(f"data.store: {path} has format {meta['format']}, but this version reads {formats}; {WAY_OUT}")
    return meta


def open_array(path: Path, group: zarr.Group, name: str) -> zarr.Array:
    """Return an array of a store.

    Raises:
        DataError: if its description is lost or damaged.
    """
    try:
        return group[name]
    except READ_ERRORS as error:
        raise DataError(
            f"data.store: {path}: the description of its array {name} is lost or damaged ({error}), without which "
            f"the array cannot be read; restore {path / name / 'zarr.json'} from a copy, or {WAY_OUT}"
        ) from error


def _read_small(path: Path, group: zarr.Group, name: str) -> np.ndarray:
    try:
        return open_array(path, group, name)[...]
    except READ_ERRORS as error:
        raise DataError(f"data.store: {path}: its array {name} is damaged ({error}); {MEND}") from error


def hash_content(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> str:
    """Return the checksum of a complete store, which covers the fields through their checksums.

    Args:
        arrays: name -> values of each array in `CONTENT`.
        meta: the store's description.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in CONTENT:
        digest.update(np.ascontiguousarray(arrays[name]))
    digest.update(json.dumps([meta["channels"], meta["grid"]], sort_keys=True).encode())
    return digest.hexdigest()


def open_store(path: str | Path) -> StoreReader:
    """Open a training store with its own channels.

    Raises:
        DataError: if it does not exist or is incomplete.
    """
    meta = read_description(Path(path))
    _require_complete(Path(path), meta)
    return StoreReader(Path(path), meta)


def open_configured_store(conf: DataConfig) -> StoreReader:
    """Open the store that a config names, if it is what the config describes.

    Raises:
        DataError: if it does not exist, is incomplete, or was written from another config; the message names the
            differences.
    """
    path = Path(conf.store)
    meta = read_description(path)
    require_same_identity(path, meta, conf)
    _require_complete(path, meta)
    splits = build_splits(conf, Calendar(meta["calendar"]))
    first, last = splits_span(splits)
    if first < meta["period"][0] or last > meta["period"][1]:
        raise DataError(
            f"data.store: {path} holds {format_period(meta, meta['period'])}, data.splits need "
            f"{format_period(meta, (first, last))}; {WAY_OUT}"
        )
    changes = describe_statistics_changes(meta, describe_statistics(conf, splits["train"]))
    if changes:
        raise DataError(
            f"data.store: the statistics of {path} differ from those of the config: {'; '.join(changes)}; run "
            "credit_preprocess CONFIG again, which keeps the fields"
        )
    reader = StoreReader(path, meta, conf.channel_map())
    reader.use_local_config(conf)
    return reader


def splits_span(splits: Mapping[str, Split]) -> tuple[int, int]:
    """Return the first and the last minute of all splits."""
    first = min(split.first for split in splits.values())
    last = max(split.last for split in splits.values())
    return first, last


def identity(conf: DataConfig) -> dict[str, Any]:
    """Return config key -> value of all settings on which the content of a store depends."""
    channels = conf.channel_map()
    names = sorted({channel.variable for channel in channels.stored + channels.static_stored})
    fields = {name: conf.field(name) for name in names}
    return {
        "data.timestep": f"{conf.step_minutes} min",
        "data.level_units": conf.level_units,
        "data.sources": [_identity_of(source) for source in conf.sources],
        **{f"data.variable_options.{name}.missing": field.missing for name, field in fields.items()},
        **{f"data.variable_options.{name}.temporal": field.temporal for name, field in fields.items()},
        **{
            f"data.variable_options.{name}.restarts": field.restarts for name, field in fields.items() if field.restarts
        },
        **{f"data.variable_options.{name}.units": field.units for name, field in fields.items() if field.units},
        **{
            f"data.variable_options.{name}.valid_range": list(field.valid_range)
            for name, field in fields.items()
            if field.valid_range is not None
        },
        **{f"data.variable_options.{name}.derive": field.derive for name, field in fields.items() if field.derive},
        **{f"data.variable_options.{name}.inputs": field.inputs for name, field in fields.items() if field.inputs},
        # Unless a source is interpolated to model levels, the fields do not depend on the coefficients.
        **({"data.coefficients": conf.coefficients} if conf.coefficients and conf.has_vertical else {}),
        **(_regridding(conf, fields) if conf.grid else {}),
    }


def _regridding(conf: DataConfig, fields: Mapping[str, VariableOptions]) -> dict[str, Any]:
    return {
        "data.grid": conf.grid.model_dump(mode="json", exclude_none=True),
        "data.regrid": conf.regrid,
        **{f"data.variable_options.{name}.regrid": field.regrid for name, field in fields.items()},
        **{f"data.variable_options.{name}.vector": field.vector for name, field in fields.items()},
    }


def _identity_of(source: SourceConfig) -> dict[str, Any]:
    # Stores of earlier versions do not have these keys, so they are left out if they have their default.
    excluded_keys = {"storage_options"}
    for key in ("select", "times", "vertical", "type", "options", "period"):
        if getattr(source, key) == SourceConfig.model_fields[key].default:
            excluded_keys.add(key)
    return source.model_dump(mode="json", exclude=excluded_keys)


def require_same_identity(path: Path, meta: Mapping[str, Any], conf: DataConfig) -> None:
    """Refuse a store that was written from other channels, levels, sources, time step or treatment of values.

    Raises:
        DataError: naming the differences.
    """
    stored_channels = ChannelMap.from_dict(meta["channels"])
    channels = conf.channel_map()
    has_same_channels = (
        stored_channels.stored == channels.stored and stored_channels.static_stored == channels.static_stored
    )
    # Earlier versions had other names for some of the keys.
    saved = {rename_dotted_key(key): value for key, value in meta["identity"].items()}
    stored_identity = _expand_homes(saved)
    config_identity = identity(conf)
    differences = []
    if has_same_channels:
        keys = set(stored_identity) | set(config_identity)
    else:
        differences.append(f"channels: {stored_channels.describe_mismatch(channels)}")
        # A key of a variable that only one of the two has would repeat the difference in channels.
        keys = set(stored_identity) & set(config_identity)
    for key in sorted(keys):
        stored_value = stored_identity.get(key)
        value = config_identity.get(key)
        if stored_value != value:
            differences.append(
                f"{key}: {_format_value(stored_value)} in the store, {_format_value(value)} in the config"
            )
    if differences:
        raise DataError(f"data.store: {path} was written from another config; {'; '.join(differences)}; {WAY_OUT}")


def is_store_of(conf: DataConfig) -> bool:
    """Return whether the store of the config exists and was written from the sources of the config."""
    if not Path(conf.store).exists():
        return False
    key = "data.sources"
    stored_identity = _expand_homes(read_description(Path(conf.store))["identity"])
    return stored_identity.get(key) == identity(conf)[key]


def _require_complete(path: Path, meta: Mapping[str, Any]) -> None:
    if not meta["complete"]:
        raise DataError(f"data.store: {path} is not complete; run credit_preprocess CONFIG to finish it")


def _expand_homes(value: Any) -> Any:
    """Return a value of the identity with ``~`` at the beginning of every text expanded.

    Earlier versions stored the paths of the config as they were written there.
    """
    if isinstance(value, Mapping):
        return {key: _expand_homes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand_homes(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def _format_value(value: object) -> str:
    """Return a value of the identity as text; of sources, only the settings that are not the default."""
    if not isinstance(value, list) or not all(isinstance(source, dict) for source in value):
        return str(value)
    texts = []
    for source in value:
        settings = {key: setting for key, setting in source.items() if setting not in (None, {}, "auto")}
        texts.append(str(settings))
    return ", ".join(texts)
