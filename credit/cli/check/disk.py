"""Checks of the folders to which a run writes, of the free disk space, and of the time to read the source files."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from credit.cli.check.data import DataSummary
from credit.cli.check.report import CheckReport
from credit.config import Config
from credit.data.climatology.blocks import estimate_fit_bytes
from credit.data.climatology.fit import plan_fit
from credit.data.climatology.stored import describe_mismatch
from credit.data.sources.source_reader import SourceReader
from credit.data.store.store_creation import estimate_store_bytes, select_times_in_splits
from credit.errors import ConfigError
from credit.train.build.dry_run import DryRunResult
from credit.train.monitor.run_files import read_status

# Size in bytes of netCDF's cache of unpacked chunks of a variable.
_NETCDF_CACHE_BYTES = 2**24


def check_folder(config: Config, report: CheckReport) -> None:
    """Check that the run folder and the forecast folder are writable, by creating a temporary file in each.

    Args:
        config: config of the run.
        report: receives an error for a folder that is not writable, and a warning if the last run in it failed.
    """
    save_loc = Path(config.save_loc)
    folders = {"save_loc": save_loc, "inference.folder": save_loc / config.inference.folder}
    tested_folders = set()
    for key, folder in folders.items():
        # The path may be a file instead of a folder. Creating the temporary file then fails, which reports the error.
        existing_folder = _find_nearest_existing(folder, is_folder=False)
        # Both keys may lead to the same existing folder. Its error is reported only once.
        if existing_folder in tested_folders:
            continue
        tested_folders.add(existing_folder)
        try:
            with tempfile.TemporaryFile(dir=existing_folder):
                report.add_note(f"{key}: {folder} is writable")
        except OSError as error:
            report.add(
                f"{key}: {folder}: {existing_folder} cannot be written ({error.strerror}); choose another folder"
            )
    status = read_status(save_loc)
    if status.get("status") == "failed":
        report.add_warning(f"save_loc: its last run failed at step {status.get('step')}: {status.get('reason')}")


@dataclass(frozen=True)
class _DiskDemand:
    """Upper bound of the bytes that a run will still write for one purpose.

    Attributes:
        purpose: name of the files in messages, such as "checkpoints".
        folder: folder in which the files will be written; it need not exist yet.
        num_bytes: upper bound of the number of bytes that will still be written.
    """

    purpose: str
    folder: Path
    num_bytes: int


def check_disk_space(
    config: Config,
    data: DataSummary,
    dry_run: DryRunResult | None,
    forecast_bytes: int,
    num_steps: int,
    report: CheckReport,
) -> None:
    """Compare the bytes that the run will write with the free bytes of each disk.

    Args:
        config: config of the run.
        data: summary of the data.
        dry_run: result of the dry run, with the size of a checkpoint; None if the model cannot be built.
        forecast_bytes: upper bound of the size of all forecasts in bytes.
        num_steps: optimizer steps of the run, 0 if unknown.
        report: receives errors and notes.
    """
    # Collect the sizes of all files that will still be written: forecasts, store, climatology and checkpoints.
    folder = Path(config.save_loc)
    forecast_folder = folder / config.inference.folder
    missing_bytes = max(0, forecast_bytes - _compute_folder_bytes(forecast_folder))
    demands = [_DiskDemand("forecasts", forecast_folder, missing_bytes)]
    store_bytes = _compute_store_bytes(config, data)
    if store_bytes:
        store = Path(config.data.store)
        demands.append(_DiskDemand("data.store", store, store_bytes))
        task = "completed or repaired" if store.exists() else "written"
        report.add_note(f"store: {store} must be {task} (credit preprocess), at most {store_bytes / 2**30:.2f} GiB")
    _report_long_chunks(config, data, report)
    climatology_bytes = _compute_climatology_bytes(config, data, report)
    if climatology_bytes:
        demands.append(_DiskDemand("climatology", Path(config.data.store), climatology_bytes))
    if dry_run is not None:
        checkpoint_bytes = _compute_checkpoint_bytes(config, dry_run, num_steps, report)
        demands.append(_DiskDemand("checkpoints", folder, checkpoint_bytes))

    # Folders on the same disk share its free bytes. A disk is identified by its device number.
    demands_by_disk: dict[int, list[_DiskDemand]] = {}
    for demand in demands:
        device = _find_nearest_existing(demand.folder).stat().st_dev
        demands_by_disk.setdefault(device, []).append(demand)
    for disk_demands in demands_by_disk.values():
        _compare_with_free_space(disk_demands, report)


def _compare_with_free_space(demands: list[_DiskDemand], report: CheckReport) -> None:
    """Report how many bytes will be written to a disk; report an error if the disk has less free space.

    Args:
        demands: all demands with folders on this disk.
        report: receives the note and the error.
    """
    folder = _find_nearest_existing(demands[0].folder)
    needed_bytes = sum(demand.num_bytes for demand in demands)
    free_bytes = shutil.disk_usage(folder).free
    purposes = ", ".join(f"{demand.purpose} {demand.num_bytes / 2**30:.2f}" for demand in demands)
    text = f"up to {needed_bytes / 2**30:.2f} GiB more are needed ({purposes}), {free_bytes / 2**30:.2f} GiB are free"
    report.add_note(f"disk of {folder}: {text}")
    if needed_bytes > free_bytes:
        report.add(
            f"save_loc, data.store: on the disk of {folder} {text}; free some space, choose another folder, keep fewer "
            "checkpoints (trainer.keep_last), or write fewer fields (inference.variables, output_every)"
        )


def _compute_checkpoint_bytes(config: Config, dry_run: DryRunResult, num_steps: int, report: CheckReport) -> int:
    """Return an upper bound of the bytes that the run will still write as checkpoints.

    Args:
        config: config of the run.
        dry_run: result of the dry run, with the size of one checkpoint.
        num_steps: optimizer steps of the run, 0 if unknown.
        report: receives a note.
    """
    trainer = config.trainer
    milestones = 0
    if trainer.keep_every:
        milestones = num_steps // trainer.keep_every
    # A new checkpoint is written before the oldest one is removed, so one more checkpoint is needed for a short time. A
    # run writes at most one checkpoint per step.
    max_checkpoints = min(trainer.keep_last + trainer.keep_best + milestones + 1, max(num_steps, 1))
    report.add_note(
        f"checkpoints: at most {max_checkpoints}, each {dry_run.checkpoint_bytes / 2**20:.1f} MiB (trainer.keep_last, "
        "keep_best, keep_every)"
    )
    written_bytes = _compute_folder_bytes(Path(config.save_loc) / "checkpoints")
    return max(0, max_checkpoints * dry_run.checkpoint_bytes - written_bytes)


def _report_long_chunks(config: Config, data: DataSummary, report: CheckReport) -> None:
    """Report source files that have chunks of many times, because reading one time unpacks a whole chunk."""
    reader = data.reader
    if not isinstance(reader, SourceReader):
        return
    times_per_chunk = reader.times_per_chunk
    # Size in bytes of an unpacked float32 chunk. A chunk that fits into netCDF's cache is unpacked only once.
    chunk_bytes = times_per_chunk * 4 * math.prod(data.grid.shape)
    if chunk_bytes <= _NETCDF_CACHE_BYTES:
        return
    text = f"sources: chunks of files span up to {times_per_chunk} times"
    if config.data.store is None:
        report.add_note(
            f"{text}, and training unpacks a whole chunk for each time that it reads; set data.store and run credit "
            "preprocess"
        )
        return
    times_per_read = reader.count_times_at_once(config.preprocess.memory_limit_bytes)
    # If the memory is too small for a chunk, its times are read in several parts, and each part unpacks the whole
    # chunk.
    if times_per_read < times_per_chunk:
        num_reads = math.ceil(times_per_chunk / times_per_read)
        # The size is rounded up to a tenth of a GiB.
        sufficient_gib = math.ceil(10 * times_per_chunk * reader.bytes_per_time / 2**30) / 10
        report.add_note(
            f"{text}; credit preprocess reads {times_per_read} at once and unpacks each about {num_reads} times; "
            f"preprocess.memory_gib={sufficient_gib:g}, in each of {config.preprocess.workers} processes, unpacks each "
            "once or twice"
        )


def _compute_store_bytes(config: Config, data: DataSummary) -> int:
    """Return an upper bound of the bytes that will still be written to the training store.

    The result is 0 if the config has no store, if the store is valid, or if the sources cannot be read.
    """
    if config.data.store is None or not data.splits or not isinstance(data.reader, SourceReader):
        return 0
    stored_times = select_times_in_splits(data.reader, data.splits)
    _, stored_shape = config.preprocess.blocks.find_block_and_padded_shape(data.reader.grid.shape)
    complete_bytes = estimate_store_bytes(data.reader, len(stored_times), stored_shape)
    return max(0, complete_bytes - _compute_folder_bytes(Path(config.data.store)))


def _compute_climatology_bytes(config: Config, data: DataSummary, report: CheckReport) -> int:
    """Report the size of the climatology, and return the number of bytes that will still be written for it.

    The result is 0 if the climatology is read from a file, is already in the store, or is fitted by each verification.
    """
    climatology = config.verification.climatology
    if climatology.method == "file" or "train" not in data.samples:
        return 0
    # Nothing will be written if the store already contains this climatology.
    store = config.data.store
    train = data.splits["train"]
    num_channels = len(data.channels.time_varying_stored)
    if store is not None and describe_mismatch(Path(store), climatology, train) is None:
        return 0
    try:
        fit = plan_fit(data.times, data.calendar, train.first, train.last, climatology)
    except ConfigError:
        # The checks of the scores report the same error.
        return 0
    disk_bytes, memory_bytes = estimate_fit_bytes(fit, num_channels, data.grid.shape)
    if config.preprocess.climatology:
        report.add_note(
            f"climatology: credit preprocess will fit it, with at most {disk_bytes / 2**30:.2f} GiB in the store and "
            f"{memory_bytes / 2**30:.2f} GiB of memory in each process"
        )
        return disk_bytes
    # Verification keeps the sums (float64) and the fields (float32) of the output channels in memory at the same time.
    # Together they are three times as large as the fields on disk (float32).
    held_bytes = 3 * disk_bytes * len(data.channels.output) / num_channels
    report.add_note(
        f"climatology: each verification fits it, in {held_bytes / 2**30:.2f} GiB of memory (preprocess.climatology)"
    )
    return 0


def _find_nearest_existing(path: Path, is_folder: bool = True) -> Path:
    """Return the absolute path of the nearest existing folder: `path` itself or one of its parents.

    Args:
        path: path of a file or folder, which need not exist.
        is_folder: False to also accept a file, if `path` or one of its parents is a file.
    """
    path = path.absolute()
    exists = Path.is_dir if is_folder else Path.exists
    while not exists(path):
        path = path.parent
    return path


def _compute_folder_bytes(folder: Path) -> int:
    """Return the size in bytes of all files in a folder and in the folders below it; 0 if the folder does not exist."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            # A run in progress may remove files while the folder is listed.
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
