"""The run's data, opened once for all ranks."""

from __future__ import annotations

import logging

import numpy as np

from credit.config import Config
from credit.config.schema_data import DataConfig
from credit.config.schema_inference import InitialTimesConfig
from credit.data.analyses import open_analyses
from credit.data.reader import FieldReader, open_reader
from credit.data.splits import Split, build_splits, describe_gaps
from credit.data.store.integrity import require_undamaged
from credit.data.store.store_reader import StoreReader
from credit.parallel.object_collectives import run_on_rank0, together

logger = logging.getLogger(__name__)


def open_reader_once(conf: DataConfig) -> FieldReader:
    """Open the data; collective. Rank 0 looks at the store or at source files for all, or each rank would open them."""
    reader = run_on_rank0(lambda: open_reader(conf))
    if isinstance(reader, StoreReader):  # a host may have a store of its own, by a path from its environment
        together(lambda: reader.use_local_config(conf))
    return reader


def open_fields(config: Config) -> tuple[FieldReader, dict[str, Split]]:
    """Open the run's data and its splits; collective."""
    reader = open_reader_once(config.data)
    return reader, _build_splits(config, reader)


def open_training_fields(config: Config) -> tuple[FieldReader, dict[str, Split]]:
    """Collective: open the run's data and its splits, and look whether the training store is whole.

    Training would meet a lost chunk in the middle of an epoch.

    Raises:
        DataError: naming what is lost and how it is written again.
    """
    reader, splits = open_fields(config)
    if isinstance(reader, StoreReader):
        run_on_rank0(lambda: require_undamaged(reader.path))
    return reader, splits


def open_for_forecasts(config: Config) -> tuple[FieldReader, dict[str, Split]]:
    """Open what the config's forecasts start from, and its splits; collective. See `credit.data.analyses`."""
    times = config.inference.initial_times
    needs_truth = isinstance(times, InitialTimesConfig) and times.end is None
    reader = run_on_rank0(lambda: open_analyses(config.data, needs_truth))
    if isinstance(reader, StoreReader):
        together(lambda: reader.use_local_config(config.data))
    return reader, _build_splits(config, reader)


def _build_splits(config: Config, reader: FieldReader) -> dict[str, Split]:
    """Return the splits; a warning names gaps of the data within them."""
    splits = build_splits(config.data, reader.calendar)
    for split in splits.values():
        inside = reader.times[(reader.times >= split.first) & (reader.times <= split.last)]
        if len(inside) and (np.diff(inside) > config.data.step_minutes).any():
            gaps = describe_gaps(inside, reader.calendar, config.data.step_minutes)
            logger.warning("%s: %s; no sample crosses them", split.describe(reader.calendar), gaps)
    return splits
