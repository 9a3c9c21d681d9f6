"""Functions that open the data of a run on rank 0 and send the reader to all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch.distributed as dist

from credit.config import Config
from credit.config.sections.data import DataConfig
from credit.config.sections.inference import InitialTimesConfig
from credit.data.analyses import open_analyses
from credit.data.part_reader import GridPartReader
from credit.data.reader import FieldReader, open_reader
from credit.data.samples.cached_reader import CachedReader
from credit.data.samples.frames import FrameReader
from credit.data.splits import Split, build_splits, describe_missing_times
from credit.data.store.integrity import require_undamaged
from credit.data.store.store_reader import StoreReader
from credit.parallel.domain.domain import Domain
from credit.parallel.object_collectives import run_on_all_ranks, run_on_rank0
from credit.train.build.assets import ModelAssets

logger = logging.getLogger(__name__)


def open_reader_on_rank0(conf: DataConfig) -> FieldReader:
    """Collective: open the training store or the source files of a run.

    Only rank 0 reads the metadata of the files and sends the reader to the other ranks, because thousands of ranks that
    open the same files would stall a shared file system.

    Args:
        conf: the data section of the config.

    Raises:
        DataError: on every rank, if the data are missing or lack a variable, level or time of the config.
    """
    reader = run_on_rank0(lambda: open_reader(conf))
    _use_local_store(reader, conf)
    return reader


def open_data_and_splits(config: Config) -> tuple[FieldReader, dict[str, Split]]:
    """Collective: open the data of a run and build its splits.

    Args:
        config: the config of the run.

    Returns:
        The reader, and the splits: "train", "valid" and "test" -> period.

    Raises:
        DataError: on every rank, if the data are missing or lack a variable, level or time of the config.
    """
    reader = open_reader_on_rank0(config.data)
    return reader, _build_splits(config, reader)


def open_training_fields(config: Config) -> tuple[FieldReader, dict[str, Split]]:
    """Collective: open the data of a run, build its splits, and check that the training store is complete.

    Without the check, training would fail at a missing chunk in the middle of an epoch.

    Returns:
        The reader, and the splits: "train", "valid" and "test" -> period.

    Raises:
        DataError: on every rank, if the data or chunks of the store are missing; the message explains how to write
            them.
    """
    reader, splits = open_data_and_splits(config)
    # Source files have no chunks and no manifest to compare them with.
    if isinstance(reader, StoreReader):
        run_on_rank0(lambda: require_undamaged(reader.path))
    return reader, splits


def open_forecast_fields(config: Config) -> tuple[FieldReader, dict[str, Split]]:
    """Collective: open the analyses that forecasts start from, and build the splits.

    Returns:
        The reader, and the splits: "train", "valid" and "test" -> period.

    Raises:
        DataError: on every rank, if the analyses are missing or lack a variable of the initial states.
    """
    initial_times = config.inference.initial_times
    # Without a configured end, the last initial time is the last time whose forecast can be verified. To find this
    # time, the times of all variables are needed.
    needs_truth = isinstance(initial_times, InitialTimesConfig) and initial_times.end is None
    reader = run_on_rank0(lambda: open_analyses(config.data, needs_truth))
    _use_local_store(reader, config.data)
    return reader, _build_splits(config, reader)


def _use_local_store(reader: FieldReader, conf: DataConfig) -> None:
    """Collective: set the store path of each rank to the path in its config, because paths may differ between hosts."""
    if isinstance(reader, StoreReader):
        run_on_all_ranks(lambda: reader.use_local_config(conf))


def _build_splits(config: Config, reader: FieldReader) -> dict[str, Split]:
    """Return the splits of a run, and log a warning for each split with missing times."""
    splits = build_splits(config.data, reader.calendar)
    step_minutes = config.data.step_minutes
    for split in splits.values():
        is_in_split = (reader.times >= split.first) & (reader.times <= split.last)
        split_times = reader.times[is_in_split]
        if (np.diff(split_times) > step_minutes).any():
            missing_times = describe_missing_times(split_times, reader.calendar, step_minutes)
            logger.warning("%s: %s; no sample includes a missing time", split.describe(reader.calendar), missing_times)
    return splits


def build_frame_reader(
    config: Config,
    reader: FieldReader,
    assets: ModelAssets,
    domain: Domain | None,
    hidden: Mapping[str, np.ndarray] | None = None,
) -> FrameReader:
    """Return the reader of initial states, forcing and targets, on this rank's part of the grid.

    Args:
        config: the config of the run.
        reader: the reader of complete fields.
        assets: the assets of the model, with the climatology of its forcing.
        domain: the group of ranks that divide the fields; None if this rank has complete fields.
        hidden: variable -> (H, W) bool on the complete grid, True in cells whose values are treated as missing.
    """
    climatology = assets.climatology
    if domain is not None:
        _warn_if_fields_read_completely(reader, domain)
        if isinstance(reader, CachedReader):
            # Only this rank's part of the fields is cached.
            reader = CachedReader(GridPartReader(reader.uncached, *domain.part.slices))
        else:
            reader = GridPartReader(reader, *domain.part.slices)
        if climatology is not None:
            climatology = climatology.select(*domain.part.slices)
        if hidden is not None:
            hidden = {variable: hidden_HW[domain.part.slices] for variable, hidden_HW in hidden.items()}
    return FrameReader(reader, config.data, climatology, hidden)


def _warn_if_fields_read_completely(reader: FieldReader, domain: Domain) -> None:
    """Log a warning on rank 0 if the ranks of a domain group read complete fields from a store."""
    store = reader.uncached if isinstance(reader, CachedReader) else reader
    if isinstance(store, StoreReader) and store.num_blocks == (1, 1) and dist.get_rank() == 0:
        rows, columns = len(domain.grid.rows.owned), len(domain.grid.columns.owned)
        logger.warning(
            "data.store: %s is not divided into blocks, so each of the %d ranks that divide the fields reads complete "
            "fields; to read only the part of each rank, write a store with preprocess.blocks={lat: %d, lon: %d}",
            store.path,
            domain.num_ranks,
            rows,
            columns,
        )
