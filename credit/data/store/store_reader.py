"""The training store: every field that training reads, one chunk a time, in the order of the channels.

Format 2, a zarr 3 group that xarray and other tools open as well:

| array | shape | what |
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
from credit.config.schema_data import DataConfig, VariableOptions
from credit.config.schema_source import SourceConfig
from credit.data.splits import Split, build_splits
from credit.data.store.chunk_cache import ChunkCache
from credit.data.store.chunk_reader import ChunkReader
from credit.data.store.statistics import Statistics
from credit.errors import DataError
from credit.grid import LatLonGrid

FORMAT = 2
# what was complete in these can be read
_KNOWN_FORMATS = (1, FORMAT)
WAY_OUT = "name another data.store and run credit_preprocess, which leaves this one as it is"
# for what is lost or damaged; the command writes these parts again, and only these
MEND = "run credit_preprocess CONFIG, which writes what is lost again and keeps the rest"
# The arrays that the checksum of the whole is taken of, in this order.
CONTENT = ("time", "done", "digest", "static_fields", "masks")
# Errors of zarr and its codecs for what is lost or damaged.
READ_ERRORS = (OSError, ValueError, RuntimeError, KeyError)


class StoreReader:
    """Reads a complete training store; see `credit.data.reader.FieldReader`.

    Args:
        path: the store.
        meta: its description, from `read_description`.
        channels: the channels to present; their stored and static ones must be those of the store.

    Attributes:
        path: the store.
        statistics: of the training period; None in a store that is not complete.
    """

    is_thread_safe = True

    def __init__(self, path: Path, meta: Mapping[str, Any], channels: ChannelMap | None = None) -> None:
        self.path, self._content = path, meta.get("content")
        self.channels = channels or ChannelMap.from_dict(meta["channels"])
        self.grid = LatLonGrid.from_dict(meta["grid"])
        self.calendar = Calendar(meta["calendar"])
        self.attributes: dict[str, dict] = meta["attributes"]
        self.statistics = Statistics.from_dict(meta["statistics"]) if meta["complete"] else None
        group = zarr.open_group(path, mode="r")
        small = {name: _read_small(path, group, name) for name in ("done", "time", "masks", "static_fields")}
        if meta["complete"] and (small["done"] == 0).any():
            count = int((small["done"] == 0).sum())
            raise DataError(f"data.store: {path}: {count} of its times have lost their marks; {MEND}")
        # the places of the times that were not left out as bad
        self._places = np.flatnonzero(small["done"] == 1)
        self.times: np.ndarray = small["time"][self._places]
        if (np.diff(self.times) <= 0).any():
            raise DataError(f"data.store: {path}: its array time is lost; {MEND}")
        masked = meta["masked_variables"]
        self.masks = {name: mask.astype(bool) for name, mask in zip(masked, small["masks"], strict=True)}
        self._fields = ChunkReader(open_array(path, group, "fields"), path / "fields")
        self._static: np.ndarray = small["static_fields"]

    def find_here(self, conf: DataConfig) -> None:
        """Read the store, and copies of its chunks, where this process's own config and environment have them.

        Raises:
            DataError: if the store is not there, or, for copies, has no checksum of its content.
        """
        self.path = Path(conf.store)
        if not self.path.is_dir():
            raise DataError(
                f"data.store: {self.path} is not there on {socket.gethostname()}; every host must see the store"
            )
        self._fields.folder = self.path / "fields"
        if conf.cache != "disk":
            return
        if self._content is None:
            raise DataError(
                f"data.cache: disk tells copies of a store from those of another by its checksum, which {self.path} of "
                f"an earlier version does not have; {WAY_OUT}"
            )
        name = f"credit_{self.path.name}_{self._content[:16]}"
        self._fields.copies = ChunkCache(Path(conf.cache_folder or tempfile.gettempdir()) / name)

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

    def read_into(self, index: int, places: Sequence[np.ndarray | None]) -> None:
        """Read the fields of one time straight to where they are needed; see `credit.data.reader.FieldReader`."""
        try:
            self._fields.read(int(self._places[index]), places)
        except (OSError, ValueError, RuntimeError) as error:
            lost = isinstance(error, FileNotFoundError)
            when = self.calendar.format(self.times[index])
            reason = "its chunk is lost" if lost else str(error)
            # without --deep a chunk whose size is right is taken to be whole
            command = "credit_preprocess CONFIG" + ("" if lost else " --deep")
            raise DataError(
                f"store {self.path}: the fields of {when} cannot be read ({reason}); run {command}, which writes what "
                "is lost or damaged again and keeps the rest"
            ) from error

    def static(self) -> np.ndarray:
        """Return the static fields, (C, H, W) float32 in the order of ``channels.static_stored``."""
        return self._static.copy()

    def index_of(self, minutes: int) -> int | None:
        """Return the place of a time in `times`, None where it is not there."""
        index = int(np.searchsorted(self.times, minutes))
        return index if index < len(self.times) and self.times[index] == minutes else None


def read_description(path: Path) -> dict[str, Any]:
    """Return the description of a store, complete or not.

    Raises:
        DataError: if it is absent, no store, or of another format.
    """
    if not path.exists():
        raise DataError(f"data.store: {path} does not exist; run credit_preprocess CONFIG to write it")
    try:
        meta = dict(zarr.open_group(path, mode="r").attrs)["credit"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"data.store: {path} is no training store ({error}); {WAY_OUT}") from error
    if meta["format"] not in _KNOWN_FORMATS:
        known = " and ".join(map(str, _KNOWN_FORMATS))
        raise DataError(f"data.store: {path} has format {meta['format']}, this version reads {known}; {WAY_OUT}")
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
    """Return the checksum of everything that a complete store holds, the fields by their own checksums.

    Args:
        arrays: name -> values, of `CONTENT`.
        meta: the store's description.
    """
    whole = hashlib.blake2b(digest_size=16)
    for name in CONTENT:
        whole.update(np.ascontiguousarray(arrays[name]))
    whole.update(json.dumps([meta["channels"], meta["grid"]], sort_keys=True).encode())
    return whole.hexdigest()


def open_store(path: str | Path) -> StoreReader:
    """Open a training store as it is.

    Raises:
        DataError: if it is absent or incomplete.
    """
    meta = read_description(Path(path))
    _require_complete(Path(path), meta)
    return StoreReader(Path(path), meta)


def open_configured_store(conf: DataConfig) -> StoreReader:
    """Open the store that a config names, if it is what the config describes.

    Raises:
        DataError: if it is absent, incomplete, or was made from another config; the differences are named.
    """
    path = Path(conf.store)
    meta = read_description(path)
    require_same_identity(path, meta, conf)
    _require_complete(path, meta)
    splits = build_splits(conf, Calendar(meta["calendar"]))
    first, last = period(splits)
    if first < meta["period"][0] or last > meta["period"][1]:
        raise DataError(
            f"data.store: {path} holds {_span(meta, meta['period'])}, data.splits need {_span(meta, (first, last))}; "
            f"{WAY_OUT}"
        )
    changes = statistics_changes(meta, describe_statistics(conf, splits["train"]))
    if changes:
        raise DataError(
            f"data.store: the statistics of {path} are others: {'; '.join(changes)}; run credit_preprocess CONFIG "
            "again, it keeps the fields"
        )
    reader = StoreReader(path, meta, conf.channel_map())
    reader.find_here(conf)
    return reader


def period(splits: Mapping[str, Split]) -> tuple[int, int]:
    """Return the first and the last minute of all splits."""
    return min(split.first for split in splits.values()), max(split.last for split in splits.values())


def describe_statistics(conf: DataConfig, train: Split) -> dict[str, Any]:
    """Return what the statistics of a store depend on besides its fields, as the store's description holds it."""
    return {
        "statistics_period": [train.first, train.last],
        "statistics_transforms": describe_transforms(conf),
    }


def describe_transforms(conf: DataConfig) -> dict[str, Any]:
    """Return variable -> its transform, as a store's description holds them."""
    return {name: one.model_dump(mode="json") for name, one in sorted(conf.transforms.items())}


def statistics_changes(meta: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return in what a store's statistics are not the wanted ones, in words."""
    changes = []
    before, now = meta["statistics_period"], wanted["statistics_period"]
    if before != now:
        changes.append(f"they are of {_span(meta, before)}, data.splits.train is {_span(meta, now)}")
    # stores of before there were transforms do not mention any
    before, now = meta.get("statistics_transforms", {}), wanted["statistics_transforms"]
    if before != now:
        changes.append(f"they are with data.transforms {before or 'none'}, the config has {now or 'none'}")
    return changes


def identity(conf: DataConfig) -> dict[str, Any]:
    """Return what of the config a store's content depends on, by key."""
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
        # without a source that is brought to them, the fields do not depend on the coefficients
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
    # stores that were made before there were these do not have them
    unset = {
        key
        for key in ("select", "times", "vertical", "type", "options", "period")
        if getattr(source, key) == SourceConfig.model_fields[key].default
    }
    return source.model_dump(mode="json", exclude={"storage_options"} | unset)


def require_same_identity(path: Path, meta: Mapping[str, Any], conf: DataConfig) -> None:
    """Stop where a store was made from other channels, levels, sources, time step or treatment of values.

    Raises:
        DataError: naming the differences.
    """
    differences = []
    theirs, ours = ChannelMap.from_dict(meta["channels"]), conf.channel_map()
    if theirs.stored != ours.stored or theirs.static_stored != ours.static_stored:
        differences.append(f"channels: {theirs.difference(ours)}")
    # Earlier versions kept `~` in the paths of the config, and had other names for some of its keys.
    saved = {rename_dotted_key(key): value for key, value in meta["identity"].items()}
    before, now = _with_homes(saved), identity(conf)
    # of other channels other keys are known; of the same ones a key that is not known was not given
    for key in sorted(set(before) & set(now) if differences else set(before) | set(now)):
        if before.get(key) != now.get(key):
            differences.append(f"{key}: {_brief(before.get(key))} in the store, {_brief(now.get(key))} in the config")
    if differences:
        raise DataError(f"data.store: {path} was made from another config; {'; '.join(differences)}; {WAY_OUT}")


def is_store_of(conf: DataConfig) -> bool:
    """Return whether the config's store is there and was made of the config's sources."""
    if not Path(conf.store).exists():
        return False
    key = "data.sources"
    # earlier versions kept `~` in the paths of the config
    return _with_homes(read_description(Path(conf.store))["identity"].get(key)) == identity(conf)[key]


def _require_complete(path: Path, meta: Mapping[str, Any]) -> None:
    if not meta["complete"]:
        raise DataError(f"data.store: {path} is not complete; run credit_preprocess CONFIG to finish it")


def _with_homes(value: Any) -> Any:
    """Return a value of the identity with ``~`` expanded at the beginning of every text."""
    if isinstance(value, Mapping):
        return {key: _with_homes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_homes(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def _brief(value: object) -> str:
    """Return a value of the identity in words; of a source, what is not the default."""
    if not isinstance(value, list) or not all(isinstance(source, dict) for source in value):
        return str(value)
    return ", ".join(
        str({key: item for key, item in source.items() if item not in (None, {}, "auto")}) for source in value
    )


def _span(meta: Mapping[str, Any], ends: tuple[int, int] | list[int]) -> str:
    calendar = Calendar(meta["calendar"])
    return f"{calendar.format(ends[0])}..{calendar.format(ends[1])}"
