"""Climatology in a training store, so that verifications and new runs need not fit the climatology again.

The zarr group ``climatology`` of the store contains the array ``fields``: (T, K, C, H, W) float32 for T times of the
day, K parts of the year (or harmonics, see `Climatology`), the C channels ``channels.time_varying_stored``, H latitude
rows and W longitude columns.

A chunk contains one part of the year and as many channels as fit into 4 MiB. zarr verifies the CRC32C checksum of a
chunk at every read. The array is written block by block (see `credit.data.climatology.blocks`), each under a lock file
next to the store. A chunk file gets its name only when it is complete, so a block is complete when all its chunk files
exist. The group attribute ``credit`` (the description) contains settings, period and the flag ``complete``.
"""

from __future__ import annotations

import itertools
import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from credit.config.sections.data import DataConfig, PreprocessConfig
from credit.config.sections.verification import ClimatologyConfig
from credit.data.climatology.blocks import (
    Block,
    choose_block_shape,
    count_channels_per_chunk,
    estimate_fit_bytes,
    is_block_readable,
    is_block_written,
    list_chunk_files,
)
from credit.data.climatology.climatology import Climatology, LazyFields
from credit.data.climatology.fit import ClimatologyPlan, fit_climatology, fit_fields, plan_fit
from credit.data.splits import Split, build_splits
from credit.data.store.executor import run_until_done
from credit.data.store.store_creation import explain_disk_errors, require_disk_space
from credit.data.store.store_reader import StoreReader, open_configured_store, open_store
from credit.errors import DataError
from credit.utils.atomic import atomic_folder
from credit.utils.file_lock import file_lock
from credit.utils.progress import ProgressBar

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

logger = logging.getLogger(__name__)

FORMAT = 2
# Format 1 averaged over slightly different windows. The harmonics of formats 1 and 2 are equal.
_FORMAT_OF_OTHER_WINDOWS = 1
# Advice to the user if the climatology is outdated or incomplete.
_ADVICE = "run credit preprocess again"


@dataclass(frozen=True)
class FitTask:
    """Input of the processes that fit blocks. It can be pickled and sent to a machine with access to the same files.

    Attributes:
        path: folder of the store.
        conf: settings of the climatology.
        period: first and last time of the training period in minutes since 1900, both inclusive.
        progress: True to show a progress bar on a terminal.
    """

    path: Path
    conf: ClimatologyConfig
    period: tuple[int, int]
    progress: bool

    def plan_fit(self, reader: StoreReader) -> ClimatologyPlan:
        """Return the plan of the fit to the times of the store; see `credit.data.climatology.fit.plan_fit`."""
        return plan_fit(reader.times, reader.calendar, *self.period, self.conf)


def preprocess_climatology(
    conf: DataConfig,
    settings: PreprocessConfig,
    climatology: ClimatologyConfig,
    progress: bool = True,
    deep: bool = False,
) -> None:
    """Fit a climatology of all stored channels to ``data.splits.train``, and write it to the complete store.

    Several processes may call this function at once and share the work. An incomplete climatology is continued. A
    climatology with different settings or a different period is replaced. Missing or damaged blocks are fitted again.

    Args:
        conf: the ``data`` section of the config.
        settings: numbers of processes or cluster jobs that fit the blocks.
        climatology: settings of the climatology to fit.
        progress: True to show a progress bar on a terminal.
        deep: True to read all fields, which verifies their checksums; False to check only the file sizes.

    Raises:
        ConfigError: if the training period is too short for the method.
        DataError: if the store does not match the config, or the disk is full.
    """
    # A complete climatology is kept, except for its damaged blocks.
    path = Path(conf.store)
    lock_folder = _build_lock_folder_path(path)
    reader = open_configured_store(conf)
    train = build_splits(conf, reader.calendar)["train"]
    if describe_mismatch(path, climatology, train) is None:
        damaged_blocks = find_damaged_blocks(path, deep)
        if not damaged_blocks:
            logger.info("%s has its climatology", path)
            return
        logger.warning("%s: %d blocks of its climatology are fitted again", path, len(damaged_blocks))
        with file_lock(lock_folder / "create.lock"):
            _discard_blocks(path, damaged_blocks)
    is_single_process = settings.workers == 1 and settings.cluster == "none"
    task = FitTask(path, climatology, (train.first, train.last), progress and is_single_process)
    plan = task.plan_fit(reader)
    with explain_disk_errors(path):
        if not _has_matching_climatology(task):
            disk_bytes, _ = estimate_fit_bytes(plan, len(reader.channels.time_varying_stored), reader.grid.shape)
            require_disk_space(path, disk_bytes)
        # A different process may have created the group before this process got the lock.
        with file_lock(lock_folder / "create.lock"):
            if not _has_matching_climatology(task):
                _create_group(task, plan, reader)
        # A single process shows a progress bar for each block instead. None hides the bar outside of a terminal.
        is_bar_hidden = None if progress and not is_single_process else True
        with ProgressBar(desc="climatology", unit="block", total=len(_list_blocks(path)), disable=is_bar_hidden) as bar:
            run_until_done(partial(fit_block, task), partial(_find_missing_blocks, path), settings, bar)
        with file_lock(lock_folder / "close.lock"):
            _update_description(path, complete=True)
        shutil.rmtree(lock_folder, ignore_errors=True)


def load_or_fit_climatology(
    reader: FieldReader, channel_names: Sequence[str], train: Split, climatology: ClimatologyConfig
) -> Climatology:
    """Return the stored climatology of the training period, or fit a climatology if the store has no suitable one.

    Args:
        reader: reader of the fields; only the reader of a training store can have a stored climatology.
        channel_names: (C,) names of the stored channels to include in the climatology.
        train: the training period.
        climatology: settings of the climatology; the method must be ``harmonic`` or ``window``.

    Raises:
        ConfigError: if the training period is too short for the method.
        DataError: if the climatology of the store is damaged.
    """
    path = getattr(reader, "path", None)
    reason = "there is no store" if path is None else describe_mismatch(path, climatology, train)
    if reason is None:
        stored = _open_climatology(path, channel_names, reader.calendar.name)
        logger.info("climatology of %d channels: read from the store (%s)", len(channel_names), stored.description)
        return stored
    # Fitting may need much time and memory, so warn if the store contains a climatology that cannot be used.
    has_unused_climatology = path is not None and _read_description(path) is not None
    level = logging.WARNING if has_unused_climatology else logging.INFO
    logger.log(level, "climatology of %d channels: fitted now to data.splits.train; %s", len(channel_names), reason)
    return fit_climatology(reader, channel_names, train.first, train.last, climatology)


def describe_mismatch(path: Path, climatology: ClimatologyConfig, train: Split) -> str | None:
    """Return the reason why the stored climatology cannot be used for a config; None if it can be used.

    Args:
        path: folder of the store.
        climatology: settings of the climatology in the config.
        train: the training period of the config.
    """
    description = _read_description(path)
    if description is None:
        return "the store has no climatology (preprocess.climatology)"
    if not _is_reproducible(description):
        return f"the store's climatology is of another version of credit, which averaged other times ({_ADVICE})"
    stored_settings = description["settings"]
    settings = _select_relevant_settings(climatology)
    if stored_settings != settings:
        return f"the store's climatology has the settings {stored_settings}, not {settings}"
    if description["period"] != [train.first, train.last]:
        return f"the store's climatology is of a different period ({description['description']})"
    if not description["complete"]:
        return f"the store's climatology is not complete ({_ADVICE})"
    return None


def describe_stored(path: Path) -> str:
    """Return a description of a store's climatology for the user: method and period, or "none"."""
    description = _read_description(path)
    if description is None:
        return "none"
    text = description["description"]
    if not description["complete"]:
        text += ", not complete"
    return text


def find_damaged_blocks(path: Path, deep: bool = False) -> list[int]:
    """Return the indices of the blocks of a complete climatology that are missing or damaged in the store.

    Args:
        path: folder of the store.
        deep: True to read the fields, which verifies their checksums; False to check only the sizes of the files.

    Returns:
        Ascending indices in the result of `_list_blocks`; empty without a complete climatology in the store.
    """
    description = _read_description(path)
    if description is None or not description["complete"]:
        return []
    damaged_blocks = _find_missing_blocks(path)
    if deep:
        fields = _open_fields(path)
        for number, block in enumerate(_list_blocks(path)):
            if number not in damaged_blocks and not is_block_readable(fields, block):
                damaged_blocks.append(number)
    return sorted(damaged_blocks)


def fit_block(task: FitTask, number: int) -> int:
    """Fit and write a block of the climatology, unless it is already written or a different process is fitting it.

    Args:
        task: store and settings of the climatology.
        number: index of the block in the result of `_list_blocks`.

    Returns:
        1 if this call wrote the block, else 0.
    """
    with file_lock(_build_lock_folder_path(task.path) / f"{number:06d}.lock", wait=False) as is_held:
        fields = _open_fields(task.path, "r+")
        block = _list_blocks(task.path)[number]
        if not is_held or is_block_written(task.path, fields, block):
            return 0
        times_of_day, parts, channels = block
        reader = open_store(task.path)
        plan = task.plan_fit(reader)
        if plan.kind == "harmonic":
            # All harmonics are fitted together from the same sums.
            parts = slice(None)
        names = _read_description(task.path)["channels"][channels]
        fields[block] = fit_fields(plan, reader, names, times_of_day, parts, task.progress)
        return 1


def _build_lock_folder_path(path: Path) -> Path:
    """Return the path of the folder with the lock files of the blocks, which is next to the store."""
    return path.with_name(f".{path.name}.climatology")


def _open_fields(path: Path, mode: str = "r") -> zarr.Array:
    """Open the array of the fields of a store's climatology, (T, K, C, H, W) float32."""
    return zarr.open_group(path / "climatology", mode=mode)["fields"]


def _read_description(path: Path) -> dict[str, Any] | None:
    """Return the attribute ``credit`` of a store's climatology, which may be incomplete; None without a climatology."""
    try:
        return dict(zarr.open_group(path / "climatology", mode="r").attrs)["credit"]
    except (FileNotFoundError, KeyError):
        return None


def _update_description(path: Path, complete: bool) -> None:
    """Set the entry ``complete`` in the description of a store's climatology."""
    group = zarr.open_group(path / "climatology", mode="r+")
    group.attrs["credit"] = dict(group.attrs)["credit"] | {"complete": complete}


def _is_reproducible(description: dict[str, Any]) -> bool:
    """Return True if a fit with this version of the package would reproduce the stored climatology."""
    if description["format"] == _FORMAT_OF_OTHER_WINDOWS:
        return description["kind"] == "harmonic"
    return description["format"] == FORMAT


def _select_relevant_settings(conf: ClimatologyConfig) -> dict[str, Any]:
    """Return the settings that affect the values of a climatology, in the form in which the description stores them."""
    settings: dict[str, Any] = {"method": conf.method}
    if conf.method == "harmonic":
        settings["harmonics"] = conf.harmonics
    else:
        settings["window_days"] = conf.window_days
    settings["by_hour"] = conf.by_hour
    return settings


def _has_matching_climatology(task: FitTask) -> bool:
    """Return True if the store has a (possibly incomplete) climatology with the settings and period of the task."""
    description = _read_description(task.path)
    if description is None or not _is_reproducible(description):
        return False
    is_same_period = description["period"] == list(task.period)
    return is_same_period and description["settings"] == _select_relevant_settings(task.conf)


def _list_blocks(path: Path) -> list[Block]:
    """Return all blocks of a store's climatology, as slices of the first three axes (T, K, C) of the fields."""
    slices_of_axis = []
    for size, length in zip(_open_fields(path).shape[:3], _read_description(path)["block"], strict=True):
        starts = range(0, size, length)
        slices_of_axis.append([slice(start, min(start + length, size)) for start in starts])
    return list(itertools.product(*slices_of_axis))


def _find_missing_blocks(path: Path) -> list[int]:
    """Return the indices, in the result of `_list_blocks`, of all blocks with a missing or truncated chunk file."""
    fields = _open_fields(path)
    return [number for number, block in enumerate(_list_blocks(path)) if not is_block_written(path, fields, block)]


def _discard_blocks(path: Path, numbers: Sequence[int]) -> None:
    """Mark a climatology as incomplete, and delete the chunk files of the blocks with the given indices."""
    _update_description(path, complete=False)
    fields = _open_fields(path)
    blocks = _list_blocks(path)
    for number in numbers:
        for file in list_chunk_files(path, fields, blocks[number]):
            file.unlink(missing_ok=True)


def _create_group(task: FitTask, plan: ClimatologyPlan, reader: StoreReader) -> None:
    """Create the zarr group of the climatology with an empty array of fields, and replace an existing group."""
    names = [channel.name for channel in reader.channels.time_varying_stored]
    grid_shape = reader.grid.shape
    cells = math.prod(grid_shape)
    with atomic_folder(task.path / "climatology", _build_lock_folder_path(task.path)) as folder:
        group = zarr.open_group(folder, mode="w", zarr_format=3)
        group.create_array(
            "fields",
            shape=(*plan.shape, len(names), *grid_shape),
            chunks=(1, 1, count_channels_per_chunk(len(names), cells), *grid_shape),
            dtype=np.float32,
            fill_value=np.nan,
            compressors=[BloscCodec(cname="lz4", clevel=1, shuffle="shuffle"), Crc32cCodec()],
            dimension_names=("time_of_day", "part", "channel", "latitude", "longitude"),
            # Write all chunks, even if all values are missing, so that a missing chunk file means a lost chunk.
            config={"write_empty_chunks": True},
        )
        group.attrs["credit"] = {
            "format": FORMAT,
            "complete": False,
            "settings": _select_relevant_settings(task.conf),
            "period": list(task.period),
            "channels": names,
            "kind": plan.kind,
            "centres": plan.centres,
            "day_minutes": plan.day_minutes.tolist(),
            "description": plan.description,
            "years": plan.years,
            "block": list(choose_block_shape(plan, len(names), cells)),
        }


def _open_climatology(path: Path, channel_names: Sequence[str], calendar_name: str) -> Climatology:
    """Return the given channels of a store's climatology, with fields that are read when they are accessed."""
    description = _read_description(path)
    channel_index = [description["channels"].index(name) for name in channel_names]
    fields: np.ndarray | LazyFields = _build_lazy_fields(path, channel_index)
    # Harmonics without dependence on the time of the day are small, and every time needs all of them: read them now.
    if description["kind"] == "harmonic" and not description["day_minutes"]:
        fields = fields[0][None]
    centres = tuple(description["centres"]) if description["kind"] == "table" else None
    return Climatology(
        names=tuple(channel_names),
        calendar=calendar_name,
        kind=description["kind"],
        fields=fields,
        day_minutes=np.array(description["day_minutes"], dtype=np.int64),
        description=description["description"],
        years=description["years"],
        centres=centres,
    )


def _build_lazy_fields(path: Path, channel_index: list[int]) -> LazyFields:
    """Return lazily read fields of the given channels. Accessing the fields raises DataError if a chunk is damaged."""
    array = _open_fields(path)
    times_of_day, num_parts, _, *grid_shape = array.shape

    def read_part(time_of_day: int, part: int) -> np.ndarray:
        selection = (time_of_day, part, channel_index, slice(None), slice(None))
        try:
            fields_CHW = array.get_orthogonal_selection(selection)
            # zarr returns missing values for a lost chunk.
            if np.isnan(fields_CHW).all(axis=(1, 2)).any():
                raise ValueError("a chunk is lost")
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(
                f"store {path}: its climatology cannot be read ({error}); run credit preprocess CONFIG --deep with "
                "preprocess.climatology=true, which fits the damaged blocks again"
            ) from error
        return fields_CHW

    return LazyFields((times_of_day, num_parts, len(channel_index), *grid_shape), read_part)
