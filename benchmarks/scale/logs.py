"""Part of the scale model: the files that ranks write during training, and when all ranks fail."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from benchmarks.scale.meter import measure_usage
from benchmarks.scale.rows import Row
from credit.errors import CheckpointError
from credit.parallel.watchdog import Watchdog
from credit.train.monitor.metrics_log import MetricsLog, rank_log, write_failure

_NUM_ROWS = 100
logger = logging.getLogger(__name__)


def measure(ranks: Sequence[int]) -> list[Row]:
    """Return rows with the number of log files, the time of rank 0's log rows, and the number of writers of STATUS."""
    rows = []
    for world in ranks:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            num_logs = _count_logs(path, world)
            with measure_usage() as usage:
                log = MetricsLog(path, start_step=0, enabled=True)
                for step in range(_NUM_ROWS):
                    log.write({"step": step, "loss": 1.0})
                    log.flush()
                log.close()
            num_writers = _count_writers_of_status(path, world)
        rows.append(Row("log files without warnings", "", world, num_logs))
        rows.append(Row(f"rank 0: {_NUM_ROWS} rows of metrics.jsonl", "s", world, usage.seconds))
        rows.append(Row("ranks that may write STATUS when all fail", "", world, num_writers))
    return rows


def _count_logs(folder: Path, world: int) -> int:
    """Return the number of log files of a run in which each rank logs a message below the level of a warning."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    try:
        for rank in range(world):
            with rank_log(folder, rank):
                logging.getLogger().handle(logger.makeRecord("run", logging.INFO, "", 0, "a message", (), None))
    finally:
        logging.disable(disabled_level)
    return len(list((folder / "logs").iterdir()))


def _count_writers_of_status(folder: Path, world: int) -> int:
    """Return the number of ranks that write STATUS when all ranks fail."""
    store = dist.HashStore()
    num_writers = 0
    for rank in range(world):
        if Watchdog(store, rank, world, patience=1.0).may_report_failure():
            num_writers += 1
            write_failure(folder, {}, CheckpointError("a rank is lost"), 0, "", every_rank=True)
    return num_writers
